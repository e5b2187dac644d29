"""FedAvg with compressed uploads: Tables 4.1 and 5.2 of Mora's thesis (Bologna 2023).

    fedjax-flat train --config configs/compression.py:femnist,table=5.2,method=stc --run runs/a \\
        --data FOLDER

Options after the colon, with their defaults:

    femnist                the data: its 3,400 writers, 50 of them per round; or mnist or
                           fashion_mnist (100 clients, Dirichlet with alpha = 1, 10 per round), or
                           omniglot (its 128 writers, 10 per round)
    table=5.2              or 4.1: other steps of the clients, below
    method=fedavg          stc, layer_stc, sstc (Table 4.1); or any other codec of `wire.up`
    rates=4                of layer_stc, by the number of the row; or as wire.rates
    rate=0.01              the share that survives
    kfrac=0.125            of sstc: the share of kernels

The network is the FEMNIST CNN (1,690,046 parameters), E = 5 local epochs. Table 4.1: SGD with rate
0.1, batch 16, 1000 rounds; Table 5.2: Nesterov's momentum 0.9 and rate 0.004, batch 10, 200 rounds.
Compression in the thesis, and its best accuracy (%) over the rounds, with the round:

    Table 4.1   compression of convolutions, by index bits     FEMNIST
    STC         41x                                            84.33
    SSTC        104x  (k = 12.5 %)                             83.94

    Table 5.2   l1    l2    l3      l4      compression        FEMNIST
    FedAvg                                                     85.36 (168)
    STC         .01 over all                100x (96.2x)       83.84 (166)
    p.l. (1)    .01   .01   .01     .01     100x (96.2x)       82.09 (194)
    p.l. (2)    -     .05   .0075   .05     100x (99.1x)       82.71 (195)
    p.l. (3)    -     .1    .005    .1      100x (98.3x)       81.98 (193)
    p.l. (4)    -     -     .01     -       44.9x              84.55 (191)

In brackets what 32 bits per survivor give when biases are counted (wire.accounting = word), which
is how metrics of Table 5.2 count here; those of Table 4.1 count whole messages by index. Reported
here is the mean over the last 10 rounds, never a maximum.
"""

from fedjax_flat import UsageError, arguments, default_config, only_used

# clients (natural if None) and cohort
DATA = {"femnist": (None, 50), "mnist": (100, 10), "fashion_mnist": (100, 10),
        "omniglot": (None, 10)}
# rounds, batch, learning rate, momentum, accounting
TABLES = {"4.1": (1000, 16, 0.1, 0.0, "index"), "5.2": (200, 10, 0.004, 0.9, "word")}


def get_config(text=""):
    o = arguments(
        text, data="femnist", table="5.2", method="fedavg", rates="4", rate=0.01, kfrac=0.125
    )
    for name, choices in (("data", DATA), ("table", TABLES)):
        if o[name] not in choices:
            raise UsageError(f"{name} = {o[name]!r}: expected one of {', '.join(choices)}.")
    clients, cohort = DATA[o.data]
    rounds, batch, rate, momentum, accounting = TABLES[o.table]

    c = default_config()
    c.rounds = rounds
    c.data.name, c.model.name = o.data, "femnist_cnn"
    if clients is None:
        c.partition.name = "natural"
    else:
        c.partition.clients, c.partition.alpha = clients, 1.0
    c.cohort.size = cohort
    c.client.learning_rate, c.client.batch_size, c.client.epochs = rate, batch, 5
    c.client.momentum, c.client.nesterov = momentum, momentum > 0
    c.wire.up = "none" if o.method == "fedavg" else o.method
    c.wire.rate, c.wire.rates, c.wire.kfrac = o.rate, o.rates, o.kfrac
    c.wire.accounting = accounting
    c.eval.every, c.eval.window = 10, 10
    return only_used(c)
