"""Fed3R, Fed3R-RF, FedNCM and what they are compared with: tables 3.5 to 3.11 of the thesis.

    fedjax-flat train --config configs/fed3r.py:cifar100,alpha=0,weights=FILE --run runs/a \\
        --data FOLDER
    fedjax-flat temperature runs/a --data FOLDER
    fedjax-flat train --config configs/fed3r.py:cifar100,method=fedavg,init,part=features,... \\
        --init runs/a --run runs/b --data FOLDER
    fedjax-flat probe runs/a runs/b --random 5000 --random 10000 --data FOLDER
    fedjax-flat train --config "configs/fed3r.py:cifar100,phases=fed3r+fedavg(features),..." \\
        --run runs/c --data FOLDER      # a and b in one run (docs/phases.md)

Options after the colon, with their defaults:

    cifar100               or landmarks, inaturalist
    alpha=0                heterogeneity of cifar100: 0, 0.1, 0.5, 1, 10, 1000
    split=users_120k       of inaturalist: or geo_100, geo_300, geo_1k, geo_3k
    method=fed3r           fed3r_rf, fedncm; or fedavg, fedavgm, scaffold
    model=mobilenetv2      or efficientnet_lite0
    weights=FILE           its pretrained weights (models/pretrained.py); without, it is random
    part=all               of the network that fedavg, fedavgm and scaffold train; or features, head
    init                   they start from Fed3R's classifier (table 3.8), with --init RUN
    tau=0.1                by which its logits are divided
    phases=none            methods one after the other, each from the model before, with the part
                           that is trained: fed3r+fedavg(features); instead of method, part, init
    D=5000                 random features of fed3r_rf: 5,000 and 10,000 in the tables
    cohort=10              clients per round
    again                  every round draws from all clients, not from those left (figure 3.9)
    sync, released         all columns are sent; the authors' bias and norm
    raw                    columns of the classifier are not normalised (table 3.11)
    imbalance=none         A, B, C, D: classes of cifar100 made uneven (table 3.11)
    delta=0                gain of another colour for each third of the clients (table 3.9, with
                           inaturalist,split=geo_100: 1.2, 1.5, 2); 0 is none
    rdn                    FedRDN
    side=0                 pixels of the network's inputs; 0 is 96 for cifar100, else 224
    rate=0                 of clients; 0 is 0.1, with init 0.01

Closed forms, and methods that train the head, run on features that are computed once and cached
(data.features); so the head is trained without augmentation. Not with delta or rdn, where the
network runs on every client. Fed3R is final after ceil(K / cohort)
rounds: 10 (cifar100), 127 (landmarks), 928, 361, 121, 37, 14 (inaturalist's splits).

Accuracy in the thesis (%), MobileNetV2 with GroupNorm:

                   Fed3R   RF(5k)   RF(10k)   FedNCM
    Landmarks      49.6    53.9     56.6      36.2
    iNaturalist    45.1    46.8     47.6      32.2
    Cifar100       63.2    66.2     67.5      51.0

                   users-120k   geo-1k   geo-3k   Landmarks
    FedAvg(head)   36.7         44.1     46.0     41.0
    FedAvgM(head)  37.6         43.9     46.9     40.8
    Scaffold(head) diverged     47.1     48.0     51.7
    FedAvg         39.5         51.0     47.8     57.7
    FedAvgM        39.3         51.1     50.8     58.7
    Scaffold       diverged     52.5     46.4     63.4

    init, part = features, head, all (table 3.8):
                   users-120k         geo-1k             geo-3k             Landmarks
    FedAvg         50.8 42.0 49.0     53.7 49.2 53.6     50.8 47.0 50.9     59.6 56.7 64.1
    FedAvgM        51.5 43.5 49.8     53.8 49.4 53.3     50.1 46.4 51.0     59.0 56.2 64.1
    Scaffold       diverged           53.7 49.3 55.7     49.3 47.0 54.1     63.4 58.0 67.4

    delta (table 3.9)     1.2    1.5    2.0
    FedAvg                25.3   24.9   17.6
    FedAvg, rdn           27.3   25.7   20.9
    Fed3R                 40.0   33.6   28.6
    FedAvg, init          44.4   44.2   40.2
    FedAvg, init, rdn     47.1   45.6   41.7

    probe (table 3.10)             classifier   Fed3R   RF(5k)   RF(10k)
    users-120k  FedAvg             39.5         53.1    55.3     56.7
                init, features     50.8         54.6    55.5     56.8
    Landmarks   Scaffold           63.4         57.0    66.5     68.6
                init, all          67.4         61.8    64.4     66.3

    Cifar100, imbalance   A      B      C      D
    normalised            56.0   53.5   55.0   49.5
    raw                   56.0   44.7   48.7   44.0

The thesis does not say at which size Cifar100 is read (its text has 32 pixels, its FLOPs 224).
Landmarks has 5 local epochs here: the text says 1, but its FLOPs are those of 5.
"""

from fedjax_flat import (
    UsageError,
    arguments,
    default_config,
    only_used,
    pipeline,
    read_phases,
)

# clients, rounds of training, local epochs
TABLES = {
    "cifar100": (100, 1500, 1),
    "landmarks": (1262, 3000, 5),
    "users_120k": (9275, 5000, 5),
    "geo_100": (3606, 1000, 5),
    "geo_300": (1208, 1000, 5),
    "geo_1k": (368, 1000, 5),
    "geo_3k": (135, 1000, 5),
}
ALPHAS = (0.0, 0.1, 0.5, 1.0, 10.0, 1000.0)
CLOSED, TRAINED = ("fed3r", "fed3r_rf", "fedncm"), ("fedavg", "fedavgm", "scaffold")
FROZEN = {"all": "none", "features": "head", "head": "features"}
# How the files of weights want their pixels, and what follows their convolutions.
MODELS = {
    "mobilenetv2": ((0.5, 0.5), "none"), "efficientnet_lite0": ((127 / 255, 128 / 255), "batch")
}


def get_config(text=""):
    o = arguments(
        text, data="cifar100", alpha=0.0, split="users_120k", method="fed3r", model="mobilenetv2",
        weights="", part="all", D=5000, cohort=10, again=False, sync=False, released=False,
        raw=False, imbalance="none", side=0, rate=0.0, init=False, tau=0.1,
        delta=0.0, rdn=False, phases="none",
    )
    for name, choices in (
        ("data", ("cifar100", "landmarks", "inaturalist")), ("method", CLOSED + TRAINED),
        ("split", tuple(TABLES)[2:]), ("model", MODELS), ("part", FROZEN),
        ("alpha", ALPHAS),
    ):
        if o[name] not in choices:
            raise UsageError(
                f"{name} = {o[name]!r}: expected one of {', '.join(map(str, choices))}."
            )
    if o.init and o.method in CLOSED:
        raise UsageError(f"init with method = {o.method}: expected one of {', '.join(TRAINED)}.")
    return one(o) if o.phases == "none" else in_phases(o)


def in_phases(o):
    """Each phase with the method and part of its name, from the classifier and network before."""
    if o.init or (o.method, o.part) != ("fed3r", "all"):
        raise UsageError(
            f"phases={o.phases} with method, part or init: expected these in phases, fed3r+"
            "fedavg(head)."
        )
    random = o.D if "fed3r_rf" in o.phases.split("+") else 0
    found, solved, running = {}, False, False
    for name, (method, part) in read_phases(o.phases, CLOSED + TRAINED, FROZEN).items():
        if part and method in CLOSED:
            raise UsageError(f"phases={o.phases}: {name}, but {method} is of the head alone.")
        o.method, o.part, o.init = method, part or "all", solved and method in TRAINED
        found[name] = one(o, random, running)
        solved, running = solved or method in CLOSED, not found[name].data.features
    return pipeline(found)


def one(o, random=0, running=False):
    """One method; `running`: on a network that was trained before, so not on cached features."""
    closed = o.method in CLOSED
    clients, rounds, epochs = TABLES[o.split if o.data == "inaturalist" else o.data]
    normal, norm = MODELS[o.model]

    c = default_config()
    c.data.name = o.data
    c.data.resized_crop = o.side or (96 if o.data == "cifar100" else 224)
    c.data.flip = True
    c.data.mean, c.data.std = ((value,) * 3 for value in normal)
    c.data.features = (closed or o.part == "head") and not (o.delta or o.rdn or running)
    c.data.imbalance = o.imbalance
    if o.delta:
        c.data.shift.name, c.data.shift.delta = "rgb", o.delta
    c.data.rdn, c.data.rdn_groups = o.rdn, 3
    if o.data == "cifar100":
        c.partition.clients, c.partition.alpha = clients, o.alpha
    else:
        c.partition.name = "natural"
    if o.data == "inaturalist":
        c.data.split = o.split
    if o.data == "inaturalist" and o.delta:  # the clients of Pers-Geo-100, each with its train part
        c.partition.min_size, c.data.local_test = 10, 0.45
    c.model.name, c.model.pretrained = o.model, o.weights
    c.model.norm = norm if o.weights else None
    c.cohort.size = o.cohort
    c.algorithm.name = o.method
    c.algorithm.fed3r.sync, c.algorithm.fed3r.normalised = o.sync, not o.raw
    c.algorithm.fed3r.variant = "released" if o.released else "paper"
    c.model.random.features = o.D if o.method == "fed3r_rf" else random
    c.client.learning_rate = o.rate or (0.01 if o.init else 0.1)
    c.client.weight_decay = 4e-5
    c.client.frozen = "none" if c.data.features else FROZEN[o.part]
    c.task.temperature = o.tau if o.init else 1.0
    c.client.batch_size, c.client.epochs = 50, epochs
    c.rounds, c.eval.every, c.eval.window, c.checkpoint.every = rounds, 100, 10, 100
    if closed:
        c.cohort.sampling = "uniform" if o.again else "once"
        c.rounds = -(-clients // o.cohort) * (3 if o.again else 1)
        c.client.batch_size = 500  # of sums, which do not depend on it
        c.eval.every, c.eval.window, c.checkpoint.every = max(1, c.rounds // 50), 1, c.rounds
    return only_used(c)
