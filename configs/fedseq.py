"""FedSeq, FedAsyncSeq, FedSeq2Par, FedCyclic and what they are compared with: tables 5.1 to 5.5.

    fedjax-flat train --config configs/fedseq.py:cifar100,alpha=0,estimator=clf,grouping=greedy \\
        --run runs/a --data FOLDER

Options after the colon, with their defaults:

    cifar10 | cifar100     the data, 500 clients of 100 images (cifar10)
    alpha=0                heterogeneity: 0, 0.2, 0.5; 100 for attacks
    method=fedseq          fedasyncseq, fedseq2par, fedcyclic; or fedavg, fedprox, scaffold, feddyn
    grouping=greedy        random, kmeans, icg, oracle
    estimator=clf          conf, task2vec, labels
    metric=auto            of greedy: cosine for clf, kl for conf, norm_cosine for task2vec
    start=random           of greedy; or released
    epochs=10              that clients train to be estimated: 1, 5, 10, 20, 30, 40
    probe=, weights=       of task2vec: another network, resnet18, and its pretrained weights
    share=0.2              C: of the groups, or clients, in a round (open in the document; 0.2 is
                           the released configuration)
    growth=exp             of fedseq2par; linear, log
    clients=500            fewer for a shorter run
    rounds=0               0 is 10,000 (cifar10) and 20,000 (cifar100)
    swaps=                 label flipping (table 5.5): 0-2, 3-5, both; intra, extra (cifar100)
    choice=fixed           or random
    LS=0.1, L=0.1          shares of groups, and of their clients, that attack
    hierarchy=0            clusters with a server each (method hierfavg), merged every T=10 rounds
    T=10

D_min = 1000, at most 11 clients in a group: 50 groups. FedSeq2Par grows from 5 groups by 4.6e-4 a
round. Split: the per-class Dirichlet law of the released code, for which alpha = 0 is one class
per client.

Accuracy in the thesis (%):

                  C10 alpha 0   0.2     0.5     C100 alpha 0   0.2     0.5
    centralised   85.64                         54.97
    FedAvg        71.27         76.32   77.39   42.68          48.79   49.51
    FedProx       71.52         76.21   77.38   42.83          48.84   49.44
    SCAFFOLD      78.82         78.02   78.51   42.17          51.06   51.02
    FedDyn        83.31         82.31   82.97   50.35          53.50   54.32
    FedCyclic     82.45         82.61   83.49   47.46          49.93   50.47
    FedSeq        81.89         82.19   82.77   45.87          49.26   49.63
    FedAsyncSeq   83.03         83.17   83.57   50.23          51.39   51.27
    FedSeq2Par    83.68         84.21   84.26   51.46          51.44   51.72

    FedSeq by groups
    random            81.90     82.09   82.12   46.39          48.62   49.44
    clf, greedy       79.95     82.06   83.32   45.22          48.92   49.62
    clf, kmeans       82.30     81.78   82.48   44.91          48.74   49.60
    conf, greedy, kl  82.21     82.20   82.22   45.97          49.56   49.82
    task2vec, greedy  82.28     82.48   82.86   46.51          50.06   50.31
"""

from fedjax_flat import UsageError, arguments, default_config, only_used

ROUNDS = {"cifar10": 10_000, "cifar100": 20_000}
GROUPED = ("fedseq", "fedasyncseq", "fedseq2par")
METHODS = (*GROUPED, "fedcyclic", "hierfavg", "fedavg", "fedprox", "scaffold", "feddyn")
METRICS = {"clf": "cosine", "conf": "kl", "task2vec": "norm_cosine", "labels": "euclidean"}


def get_config(text=""):
    o = arguments(
        text, data="cifar10", alpha=0.0, method="fedseq", grouping="greedy", estimator="clf",
        metric="auto", start="random", epochs=10, probe="", weights="", share=0.2, growth="exp",
        clients=500, rounds=0, swaps="", choice="fixed", LS=0.1, L=0.1, hierarchy=0, T=10,
    )
    for name, choices in (("data", ROUNDS), ("method", METHODS), ("estimator", METRICS)):
        if o[name] not in choices:
            raise UsageError(f"{name} = {o[name]!r}: expected one of {', '.join(choices)}.")
    c = default_config()
    c.rounds = o.rounds or ROUNDS[o.data]
    c.data.name, c.data.crop_padding, c.data.flip = o.data, 4, True
    c.partition.clients, c.partition.alpha = o.clients, o.alpha
    if o.alpha:
        c.partition.name, c.partition.cap, c.partition.draws = "per_class", True, 100
    c.model.name = "cnn"
    c.client.learning_rate, c.client.weight_decay, c.client.batch_size = 0.01, 4e-4, 64
    c.algorithm.name = "hierfavg" if o.hierarchy else o.method
    c.cohort.share = o.share
    if o.method == "fedasyncseq":
        groups = max(1, o.clients // max(1, 1000 * o.clients // 50_000))
        c.cohort.share, c.cohort.size = 0.0, max(1, int(o.share * groups))
        c.cohort.sampling = "apart"
    c.algorithm.fedseq2par.growth = o.growth
    if o.hierarchy:
        c.groups.count, c.algorithm.hierfavg.every = o.hierarchy, o.T
        each = max(1, int(o.share * o.clients) // o.hierarchy)
        c.cohort.share, c.cohort.size = 0.0, each * o.hierarchy
    c.groups.name, c.groups.estimator, c.groups.start = o.grouping, o.estimator, o.start
    c.groups.metric = METRICS[o.estimator] if o.metric == "auto" else o.metric
    c.groups.epochs, c.groups.probe, c.groups.weights = o.epochs, o.probe, o.weights
    c.groups.examples, c.groups.clients = 1000, 11
    if o.swaps:
        c.data.shift.name = "swap_labels"
        c.data.shift.swaps = "0-2,3-5" if o.swaps == "both" else o.swaps
        c.data.shift.choice = o.choice
        c.data.shift.share, c.data.shift.of_groups = o.L, o.LS
    c.eval.every, c.eval.window, c.checkpoint.every = 100, 100, 100
    return only_used(c)
