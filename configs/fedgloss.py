"""FedGloSS and what it is compared with: tables 4.15-4.17, 4.19, 4.20, 4.21.

    fedjax-flat train --config configs/fedgloss.py:cifar10,alpha=0.05,method=fedgloss_sam \\
        --run runs/g --data FOLDER
    fedjax-flat compare runs/fedavg runs/g       # rounds and communication to FedAvg's accuracy

Options after the colon, with their defaults:

    cifar10 | cifar100     the data (cifar10)
    alpha=0                0, 0.05, 100 (CIFAR-10) or 0, 0.5, 1000 (CIFAR-100)
    model=cnn              or resnet18 (table 4.16: alpha 0.05 for CIFAR-10, 0.5 for CIFAR-100)
    cohort=0               clients per round, of 100; 0 is the tables': 5, with resnet18 10
    method=fedgloss_sam    fedavg fedprox feddyn scaffold fedgloss, and with SAM on clients: fedsam
                           feddyn_sam fedspeed fedgamma fedsmoo fedgloss_sam naivefedgloss
    no_duals               FedGloSS without the terms of ADMM (table 4.17)
    variant=paper          released: the released code's dual and radii while they warm up
    released               the authors' split, from fedsam-splits.npz in the data folder

Accuracy in the papers (%), mean over the last 100 of 10,000 (CIFAR-10) and 20,000 rounds, 3 seeds:

                   C10 alpha 0   C10 0.05     C100 alpha 0  C100 0.5
    fedavg         59.9          65.7         28.6          38.5
    fedprox        59.8          65.6         28.8          38.7
    feddyn         65.5          70.1         diverges      diverges
    scaffold       25.1          54.0         diverges      30.0
    fedgloss       69.5          75.5         42.5          47.9
    fedsam         70.2          71.5         28.7          39.6
    feddyn_sam     79.3          81.5         diverges      diverges
    fedspeed       70.9          72.3         28.9          39.7
    fedgamma       58.9          61.9         diverges      29.4
    fedsmoo        81.3          82.8         47.8          51.7
    fedgloss_sam   83.9          84.4         50.6          53.4
    naivefedgloss  83.9          84.4         50.8          53.7

ResNet-18 with GroupNorm, 10,000 rounds (CIFAR-10 alpha 0.05, CIFAR-100 alpha 0.5): fedavg 72.6,
37.4; fedprox 72.2, 37.6; feddyn 70.2, 38.8; scaffold 70.8, 38.6; fedgloss 79.1, 46.7; fedsam 72.8,
38.5; feddyn_sam 72.6, 39.6; fedspeed 72.6, 38.7; fedgamma 72.2, 38.8; fedsmoo 75.3, 44.8;
fedgloss_sam 80.0, 47.2.

Time, estimated: on two CPU cores 5 clients take 2 s per round, 4 s with SAM (measured), so 10,000
rounds take 6 and 11 hours; 10 clients with ResNet-18 about 150 s, not for a CPU. On one GPU: not
measured. Table 4.18 needs Landmarks, which is not here.
"""

from fedjax_flat import UsageError, arguments, default_config, only_used

# Tables A.4 and A.5. `rho` is that of the clients' SAM, by method where it is not the default.
TABLES = {
    ("cifar10", "cnn"): {
        "alphas": (0.0, 0.05, 100.0), "rounds": 10_000, "default_rho": 0.15, "rho": {},
        "fedprox": 0.1, "prox": 100.0, "smoo_beta": 10.0,
        "server_rho": 0.15, "beta": 10.0, "warmup": 2000,
    },
    ("cifar100", "cnn"): {
        "alphas": (0.0, 0.5, 1000.0), "rounds": 20_000, "default_rho": 0.01,
        "rho": {"feddyn_sam": 0.02, "fedsmoo": 0.1, "fedgloss_sam": 0.2, "naivefedgloss": 0.2},
        "fedprox": 0.1, "prox": 1000.0, "smoo_beta": 100.0,
        "server_rho": 0.01, "beta": 100.0, "warmup": 15_000,
    },
    ("cifar10", "resnet18"): {
        "alphas": (0.05,), "rounds": 10_000, "default_rho": 0.01, "rho": {},
        "fedprox": 0.01, "prox": 1000.0, "smoo_beta": 10.0,
        "server_rho": 0.01, "beta": 10.0, "warmup": 0,
    },
    ("cifar100", "resnet18"): {
        "alphas": (0.5,), "rounds": 10_000, "default_rho": 0.01, "rho": {},
        "fedprox": 0.1, "prox": 1000.0, "smoo_beta": 10.0,
        "server_rho": 0.01, "beta": 100.0, "warmup": 0,
    },
}
# Mean and deviation of the channels as in FedGloSS's release; the sources have those of FedSAM's.
CHANNELS = {
    "cifar10": ((0.4914, 0.4822, 0.4465), (0.2470, 0.2434, 0.2616)),
    "cifar100": ((0.5071, 0.4865, 0.4409), (0.2673, 0.2564, 0.2762)),
}
# (weight decay, momentum, clients per round)
MODELS = {"cnn": (4e-4, 0.0, 5), "resnet18": (1e-5, 0.7, 10)}
# method: (algorithm, sharpness)
METHODS = {
    "fedavg": ("fedavg", "none"), "fedprox": ("fedprox", "none"), "feddyn": ("feddyn", "none"),
    "scaffold": ("scaffold", "none"), "fedgloss": ("fedgloss", "none"),
    "fedsam": ("fedavg", "sam"), "feddyn_sam": ("feddyn", "sam"), "fedspeed": ("fedspeed", "none"),
    "fedgamma": ("fedgamma", "sam"), "fedsmoo": ("fedsmoo", "none"),
    "fedgloss_sam": ("fedgloss", "sam"), "naivefedgloss": ("naivefedgloss", "sam"),
}


def get_config(text=""):
    o = arguments(
        text, data="cifar10", alpha=0.0, model="cnn", cohort=0, method="fedgloss_sam",
        no_duals=False, variant="paper", released=False,
    )
    datasets = list(dict.fromkeys(data for data, _ in TABLES))
    for name, choices in (("data", datasets), ("model", MODELS), ("method", METHODS)):
        if o[name] not in choices:
            raise UsageError(f"{name} = {o[name]!r}: expected one of {', '.join(choices)}.")
    table = TABLES[o.data, o.model]
    weight_decay, momentum, cohort = MODELS[o.model]
    if o.alpha not in table["alphas"]:
        raise UsageError(
            f"alpha = {o.alpha:g}: the tables have {', '.join(f'{a:g}' for a in table['alphas'])}."
        )

    c = default_config()
    c.rounds = table["rounds"]
    c.data.name = o.data
    c.data.mean, c.data.std = CHANNELS[o.data]
    c.data.crop_padding, c.data.flip = 4, True
    c.partition.clients, c.partition.alpha = 100, o.alpha
    if o.released:
        c.partition.name, c.partition.split = "released", f"{o.data}_alpha_{o.alpha:.2f}"
    c.model.name = o.model
    c.client.learning_rate, c.client.batch_size = 0.01, 64
    c.client.weight_decay, c.client.momentum = weight_decay, momentum
    c.algorithm.name, c.client.sharpness = METHODS[o.method]
    c.client.rho = table["rho"].get(o.method, table["default_rho"])
    if o.method in ("fedgloss_sam", "naivefedgloss"):
        c.client.rho_warmup = table["warmup"]
    c.algorithm.fedprox.mu, c.algorithm.feddyn.alpha = table["fedprox"], 0.01
    c.algorithm.fedspeed.prox, c.algorithm.fedsmoo.beta = table["prox"], table["smoo_beta"]
    g = c.algorithm.fedgloss
    g.rho, g.beta, g.duals, g.variant = (
        table["server_rho"], table["beta"], not o.no_duals, o.variant
    )
    c.cohort.size = o.cohort or cohort
    c.eval.every, c.eval.window = 100, 100
    c.checkpoint.every = 100
    return only_used(c)  # each row of a table uses its own method's settings
