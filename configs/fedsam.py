"""FedAvg, FedSAM and FedASAM, with and without SWA: tables 4.2 to 4.8 and 4.11 of the thesis.

    fedjax-flat train --config configs/fedsam.py:cifar100,alpha=0,cohort=5,method=fedasam,swa \\
        --run runs/a --data FOLDER

Options after the colon, with their defaults:

    cifar10 | cifar100     the data (cifar10)
    alpha=0                heterogeneity: 0, 0.05, 100 (CIFAR-10) or 0, 0.5, 1000 (CIFAR-100)
    cohort=5               clients per round, of 100: 5, 10, 20 in the tables
    method=fedavg          fedavg | fedsam | fedasam
    algorithm=fedavg       or fedavgm, fedprox, scaffold, feddyn, adabest (tables 4.6, 4.8), with
                           method= adding SAM or ASAM to it
    server=sgd             or adam, adagrad (table 4.2), with
    server_rate=1          their learning rate: 1, 0.1, 0.01, 0.001 in the table
    centralised            all data in one place, a round is an epoch (table 4.5, 52.20 %)
    epochs=1               local epochs; the tables have FedAvg with 2 as well
    swa                    server-side SWA from 75 % of the rounds on
    mixup, cutout          augmentation (table 4.7)
    released               the authors' split, from fedsam-splits.npz in the data folder, instead
                           of one drawn by the same law

The thesis does not give mu, alpha, beta and clipping of FedProx, FedDyn and AdaBest for table 4.8,
nor the epochs of centralised training: these are our defaults.

Reported is the mean over the last 100 rounds. Accuracy in the papers (%), 5 / 10 / 20 clients:

    CIFAR-10, 10,000 rounds   alpha 0               alpha 0.05            alpha 100
    FedAvg                    65.00 65.54 68.52     69.24 72.50 73.07     84.46 84.50 84.59
    FedAvg, 2 epochs          61.49 62.22 66.36     69.23 69.77 73.48     83.93 84.10 84.21
    FedSAM                    70.16 71.09 72.90     73.52 74.81 76.04     84.58 84.67 84.82
    FedASAM                   73.66 74.10 76.09     75.61 76.22 76.98     84.77 84.72 84.75
    FedAvg + SWA              69.71 69.54 70.19     73.48 72.80 73.81     84.35 84.32 84.47
    FedSAM + SWA              74.97 73.73 73.06     76.61 75.84 76.22     84.23 84.37 84.63
    FedASAM + SWA             76.44 75.51 76.36     76.12 76.16 76.86     84.88 84.80 84.79

    CIFAR-100, 20,000 rounds  alpha 0               alpha 0.5             alpha 1000
    FedAvg                    30.25 36.74 38.59     40.43 41.27 42.17     49.92 50.25 50.66
    FedAvg, 2 epochs          24.94 31.81 35.18     38.21 39.59 40.94     48.72 48.64 48.45
    FedSAM                    31.04 36.93 38.56     44.73 44.84 46.05     54.01 53.39 53.97
    FedASAM                   36.04 39.76 40.81     45.61 46.58 47.78     54.81 54.97 54.50
    FedAvg + SWA              39.34 39.74 39.85     43.90 44.02 42.09     50.98 50.87 50.92
    FedSAM + SWA              39.30 39.51 39.24     47.96 46.76 46.47     53.90 53.67 54.36
    FedASAM + SWA             42.01 42.64 41.62     49.17 48.72 48.27     53.86 54.79 54.10

Time, estimated: on two CPU cores 10 clients take 4 s per round with FedAvg and 8 s with FedSAM and
FedASAM (measured), so 10,000 rounds take 11 and 22 hours. On one GPU, not measured: a client's
round is 0.04 TFLOP (FedSAM: 0.08), counted from the layers, so speed there depends on latency.
"""

from fedjax_flat import UsageError, arguments, default_config, only_used

# (alpha: rho of SAM, rho of ASAM), cycle of SWA, rounds, cutout in pixels: tables A.1, A.2, A.3.
TABLES = {
    "cifar10": ({0.0: (0.1, 0.7), 0.05: (0.1, 0.7), 100.0: (0.02, 0.05)}, 10, 10_000, 16),
    "cifar100": ({0.0: (0.02, 0.5), 0.5: (0.05, 0.5), 1000.0: (0.05, 0.5)}, 20, 20_000, 8),
}
SHARPNESS = {"fedavg": "none", "fedsam": "sam", "fedasam": "asam"}
ALGORITHMS = ("fedavg", "fedavgm", "fedprox", "scaffold", "feddyn", "adabest")
# Of table 4.2: the document's betas; epsilons, bias correction and v_0 of the released code, which
# takes PyTorch's optimisers.
SERVERS = {
    "sgd": {},
    "adam": {"beta1": 0.9, "beta2": 0.99, "tau": 0.1, "bias_correction": True},
    "adagrad": {"beta1": 0.0, "tau": 0.01, "initial": "zero"},
}


def get_config(text=""):
    o = arguments(
        text, data="cifar10", alpha=0.0, cohort=5, method="fedavg", epochs=1, swa=False,
        mixup=False, cutout=False, released=False, algorithm="fedavg", server="sgd",
        server_rate=1.0, centralised=False,
    )
    for name, choices in (("data", TABLES), ("method", SHARPNESS), ("server", SERVERS),
                          ("algorithm", ALGORITHMS)):
        if o[name] not in choices:
            raise UsageError(f"{name} = {o[name]!r}: expected one of {', '.join(choices)}.")
    radii, cycle, rounds, hole = TABLES[o.data]
    if o.alpha not in radii:
        raise UsageError(
            f"alpha = {o.alpha:g}: the tables have {', '.join(f'{a:g}' for a in radii)} for "
            f"{o.data}. For another, choose the nearest and add --config.partition.alpha."
        )

    c = default_config()
    c.rounds = rounds
    c.data.name = o.data
    c.data.crop_padding, c.data.flip = 4, True
    c.data.mixup, c.data.cutout = float(o.mixup), hole * o.cutout
    c.partition.clients, c.partition.alpha = 100, o.alpha
    if o.released:
        c.partition.name, c.partition.split = "released", f"{o.data}_alpha_{o.alpha:.2f}"
    c.model.name = "cnn"
    c.client.learning_rate, c.client.weight_decay, c.client.batch_size = 0.01, 4e-4, 64
    c.client.epochs = o.epochs
    c.client.sharpness = SHARPNESS[o.method]
    c.client.rho = radii[o.alpha][o.method == "fedasam"]
    c.client.eta = 0.2
    c.algorithm.name = o.algorithm
    c.server.optimizer, c.server.learning_rate = o.server, o.server_rate
    if SERVERS[o.server]:
        c.server.learning_rate, c.server.adaptive.learning_rate = 1.0, o.server_rate
        c.server.adaptive.update(SERVERS[o.server])
    c.cohort.size = o.cohort
    if o.centralised:
        c.partition.name, c.partition.clients, c.cohort.size, c.rounds = "iid", 1, 1, 200
    c.server.average = "swa" if o.swa else "none"
    c.server.swa.cycle = cycle
    c.eval.every, c.eval.window = 100, 100
    c.checkpoint.every = 100
    return only_used(c)  # rho, eta and SWA's cycle stand for all cells; some have none
