"""Federated Dropout, HFD and CE-HFD with the FEMNIST CNN: tables 5.1 and 5.3 of Mora's thesis.

    fedjax-flat train --config configs/hfd.py:femnist,method=cehfd --run runs/a --data FOLDER

Options after the colon, with their defaults:

    femnist                or mnist, fashion_mnist, omniglot
    method=hfd             fedavg   all units
                           dropout  one tier for all clients: Federated Dropout
                           hfd      a tier of 0.8, 0.75, 0.7 drawn for each client and round
                           cehfd    HFD with 8 bits down, and
    up=8bit                the codec of its uploads
    tier=0.75              of dropout
    units=random           or ordered (with coverage: FjORD's sub-models), adaptive
    coverage               means over the clients that have a weight
    alpha=1                heterogeneity of mnist and fashion_mnist, over 100 clients; the others'
                           clients are their writers

50 clients per round (omniglot: 25 of 128), 200 rounds, 5 local epochs of SGD with Nesterov momentum
0.9, rate 0.004, batches of 10. The tables have the best accuracy of 200 rounds; ours report the
mean over the last 10, and metrics.jsonl has every round.

    table 5.1        parameters   share of units   fewer by
    global model     1,690,046    1
    sub-model 1      1,084,359    0.8              36 %
    sub-model 2        956,894    0.75             43 %
    sub-model 3        837,373    0.7              50 %

    table 5.3, FEMNIST          upload smaller by    accuracy % (round)
    FedAvg                      1                    85.36 (168)
    HFD                         1.6 1.8 2            84.89 (191)
    CE-HFD, 8 bits up           6 7 8                85.29 (170)
    CE-HFD, STC 0.01            148 168 191          83.73 (194)
    CE-HFD, per-layer STC (1)   148 168 191          81.97 (198)
    CE-HFD, per-layer STC (4)   66 74 83             84.25 (162)
"""

from fedjax_flat import UsageError, arguments, default_config, only_used

TIERS = (0.8, 0.75, 0.7)
METHODS = ("fedavg", "dropout", "hfd", "cehfd")
DATA = ("femnist", "mnist", "fashion_mnist", "omniglot")


def get_config(text=""):
    o = arguments(
        text, data="femnist", method="hfd", up="8bit", tier=0.75, units="random", coverage=False,
        alpha=1.0,
    )
    for name, choices in (("data", DATA), ("method", METHODS)):
        if o[name] not in choices:
            raise UsageError(f"{name} = {o[name]!r}: expected one of {', '.join(choices)}.")
    c = default_config()
    c.rounds = 200
    c.data.name, c.model.name = o.data, "femnist_cnn"
    if o.data in ("femnist", "omniglot"):
        c.partition.name = "natural"
    else:
        c.partition.clients, c.partition.alpha = 100, o.alpha
    c.cohort.size = 25 if o.data == "omniglot" else 50
    c.client.learning_rate, c.client.momentum, c.client.nesterov = 0.004, 0.9, True
    c.client.batch_size, c.client.epochs = 10, 5
    c.submodel.tiers = {"fedavg": (), "dropout": (o.tier,)}.get(o.method, TIERS)
    c.submodel.units, c.submodel.coverage = o.units, o.coverage
    if o.units == "adaptive":
        c.submodel.assignment = "fixed"
    if o.method == "cehfd":
        c.wire.down, c.wire.up = "8bit", o.up
    c.eval.every, c.eval.window, c.checkpoint.every = 10, 10, 10
    return only_used(c)  # FedAvg has no units to choose, dropout one tier
