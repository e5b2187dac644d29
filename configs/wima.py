"""WIMA on CIFAR, CIFAR-100-PAM, FEMNIST, Landmarks and Shakespeare: tables 4.22 to 4.24.

    fedjax-flat train --config configs/wima.py:shakespeare --run runs/a --data FOLDER

Options after the colon, with their defaults:

    cifar10                or cifar100, pam, femnist, landmarks, shakespeare
    alpha=0                heterogeneity of cifar10 (0, 0.05) and cifar100 (0, 0.5)
    method=fedavg          fedavgm, mime, mimelite, fedcm, fedacg, fedprox, scaffold, feddyn or
                           adabest
    window=100             W; Landmarks has 370, the ablation 5, 10, 50, 100, 200

Accuracy in the thesis (%), without and with WIMA:

              C10 alpha 0   C10 0.05      C100 alpha 0  C100 0.5      PAM           FEMNIST
    FedAvg    64.37 69.95   68.50 72.69   23.00 27.91   31.21 34.45   47.41 48.53   83.59 85.06
    FedAvgM   73.32 75.72   73.10 75.30   24.27 28.77   31.78 33.97   55.96 61.63   85.00 85.26
    FedCM     78.83 81.73   73.94 80.28   19.62 25.29   36.12 40.10   53.16 54.12   83.88 84.90
    SCAFFOLD  81.45 83.96   83.24 85.17   45.65 49.77   50.93 53.75   56.09 57.64   85.87 86.61
    AdaBest   66.05 73.95   71.54 77.42   24.92 31.41   37.45 43.81   54.98 57.57   84.95 86.02

Landmarks: FedAvg 58.17 63.05, SCAFFOLD 62.32 68.30. Shakespeare is a recipe without a result. What
the thesis leaves open: the groups of ResNet-20's GroupNorm (2 here), momentum and epochs of PAM (0
and 1). PAM's network is ResNet-20 here; its cohort, 20 % of 500 clients.
"""

from fedjax_flat import UsageError, arguments, default_config, only_used

METHODS = ("fedavg", "fedavgm", "mime", "mimelite", "fedcm", "fedacg", "fedprox", "scaffold",
           "feddyn", "adabest")
# data, model, rounds, cohort, rate, weight decay, batch, epochs
RECIPES = {
    "cifar10": ("cifar10", "resnet20", 10_000, 10, 0.1, 0.0, 100, 1),
    "cifar100": ("cifar100", "resnet20", 10_000, 10, 0.1, 0.0, 100, 1),
    "pam": ("cifar100", "resnet20", 10_000, 100, 0.05, 4e-4, 20, 1),
    "femnist": ("femnist", "femnist_cnn", 1_500, 10, 0.1, 0.0, 10, 1),
    "landmarks": ("landmarks", "mobilenetv2", 3_000, 10, 0.1, 4e-5, 50, 5),
    "shakespeare": ("shakespeare", "shakespeare_lstm", 1_500, 10, 1.0, 0.0, 4, 1),
}


def get_config(text=""):
    o = arguments(text, data="cifar10", alpha=0.0, method="fedavg", window=100)
    for name, choices in (("data", RECIPES), ("method", METHODS)):
        if o[name] not in choices:
            raise UsageError(f"{name} = {o[name]!r}: expected one of {', '.join(choices)}.")
    c = default_config()
    recipe = RECIPES[o.data]
    c.data.name, c.model.name, c.rounds, c.cohort.size = recipe[:4]
    c.client.learning_rate, c.client.weight_decay, c.client.batch_size, c.client.epochs = recipe[4:]
    c.algorithm.name = o.method
    c.server.average, c.server.wima.window = "wima", o.window
    if o.data in ("cifar10", "cifar100"):
        c.partition.clients, c.partition.alpha = 100, o.alpha
    elif o.data == "pam":
        c.partition.name, c.partition.clients = "pachinko", 500
        c.server.momentum = 0.9
    else:
        c.partition.name = "natural"
    if c.data.name.startswith("cifar"):
        c.data.crop_padding, c.data.flip = 4, True
    if o.data == "femnist":
        c.model.variant = "mcmahan"
    if o.data == "shakespeare":
        c.data.min_characters, c.partition.min_size = 2000, 2
    if o.data == "landmarks":
        c.data.resized_crop, c.data.flip = 224, True
        c.server.wima.window = 370 if o.window == 100 else o.window
    c.eval.every, c.eval.window, c.checkpoint.every = 100, 100, 100
    return only_used(c)
