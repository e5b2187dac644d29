"""Four phases of personalisation, and OLL: tables 4.4 to 4.18 of Fani's thesis.

    C=configs/personal.py:cifar100,weights=FILE
    fedjax-flat train --config "$C,phases=fed3r+fedavg+fedsim(head)+fp(features)" --run runs/a \\
        --data FOLDER
    fedjax-flat train --config "$C,phases=fed3r+fedavg+fp(head),oll" --run runs/b --data FOLDER
    fedjax-flat train --config configs/personal.py:phases=fed3r --run runs/c --data FOLDER
    fedjax-flat costs runs/a --split local_test --model personal --target 70

Options after the colon, with their defaults:

    cifar100               or landmarks, inaturalist: Pers-Users-160k, Pers-Geo-100
    phases=fed3r+fedavg+fedsim(head)+fp(features)      what is trained, one after the other:
        fed3r                                   1: the head in closed form
        fedavg, fedavg(head), fedavg(features)  2: fine-tuning, of all or of a part
        fedsim, fedalt, pfedme (head, features) 3: in brackets what stays with clients
        fp(head), fp(features), fp(all)         4: in brackets what each client trains by itself
    oll                    fp has heads with the client's own labels only (table 4.18)
    alpha=0.5              heterogeneity of cifar100
    model=mobilenetv2      or efficientnet_lite0
    weights=FILE           its pretrained weights (models/pretrained.py); without, it is random
    ditto=0                lambda of fp's pull to where it began; 0.1 in the thesis's program
    ft=3000, pp=1000       rounds of phases 2 and 3 (FedAvg-1k is ft=1000)
    epochs=25              of fp
    curve                  fp epoch by epoch, with classes that clients have and lack (figure 4.7)
    init                   the first phase starts from Fed3R's classifier, with --init RUN
    tau=0.1                by which logits are divided from Fed3R on
    cohort=10              clients per round
    side=0                 pixels of the network's inputs; 0 is 96 for cifar100, else 224
    rate=0                 of clients, in all phases; 0 is the thesis's rule: 0.1, a tenth of that
                           from Fed3R on, and a tenth again under oll

45 % of each client's examples are its test, of classes that it trains on (data.closed). As long as
heads alone are trained, phases run on features that are computed once (data.features). The weighted
mean accuracy is that of split local_test: of model personal, or global where clients have none.

Weighted mean accuracy in the thesis (%), FedAvg and FedSim(features) and FP:

                                     iNaturalist                  Landmarks
    Fed3R  FedAvg  FedSim(features)  none  head  features  all    none  head  features  all
    x                                58.0  77.4  78.6      77.1   49.9  68.4  68.9      69.7
           x                         46.3  75.2  75.5      78.1   61.2  78.3  78.3      80.0
    x      x                         67.3  83.8  84.1      83.3   68.1  80.0  79.5      80.0
    x              x                 72.9  83.4  84.8      82.8   74.1  73.1  74.5      73.0
           x       x                 67.4  82.1  79.3      82.4   79.7  80.2  80.0      80.3
    x      x       x                 76.9  86.8  87.4      86.4   80.4  80.3  80.7      80.2
    oll: x                           75.4  88.6  88.3      87.9   73.0  75.7  75.4      75.5
    oll:   x                         76.9  89.5  88.5      88.6   82.6  84.7  84.0      84.2
    oll: x x                         80.5  92.5  92.3      91.1   83.9  85.5  85.4      85.2

    Fed3R, FedAvg, then              FedSim FedAlt pFedMe of the head   of the features
    iNaturalist                      78.5   77.9   68.8                 76.9   78.0   68.3
    Landmarks                        79.9   79.4   69.7                 80.4   80.3   69.7
"""

from fedjax_flat import UsageError, arguments, default_config, only_used, pipeline, read_phases

# clients, local epochs, examples below which a client is dropped, most that one keeps
DATA = {
    "cifar100": (100, 1, 0, 0), "landmarks": (823, 5, 50, 1000), "inaturalist": (2714, 5, 10, 1000)
}
PARTIAL, METHODS = ("fedsim", "fedalt", "pfedme"), ("fed3r", "fedavg", "fedsim", "fedalt", "pfedme")
# How the files of weights want their pixels, and what follows their convolutions.
MODELS = {
    "mobilenetv2": ((0.5, 0.5), "none"), "efficientnet_lite0": ((127 / 255, 128 / 255), "batch")
}


def get_config(text=""):
    o = arguments(
        text, data="cifar100", phases="fed3r+fedavg+fedsim(head)+fp(features)", oll=False,
        alpha=0.5, model="mobilenetv2", weights="", ditto=0.0, ft=3000, pp=1000, epochs=25,
        curve=False, init=False, tau=0.1, cohort=10, side=0, rate=0.0,
    )
    for name, choices in (("data", DATA), ("model", MODELS)):
        if o[name] not in choices:
            raise UsageError(f"{name} = {o[name]!r}: expected one of {', '.join(choices)}.")
    phases = read_phases(o.phases, (*METHODS, "fp"), ("head", "features", "all"))
    if o.oll and not any(method == "fp" for method, _ in phases.values()):
        raise UsageError(f"oll with phases = {o.phases}: expected fp among them, whose heads it "
                         "prunes; the evaluation before its first round is oll alone.")
    configs, started, cached, kept = {}, o.init, True, "none"
    for name, (method, part) in phases.items():
        if method in PARTIAL and part not in ("head", "features"):
            raise UsageError(f"phase {name}: expected what stays with clients, {method}(head) or "
                             f"{method}(features).")
        cached = cached and (method == "fed3r" or (method in ("fedavg", "fp") and part == "head"))
        configs[name] = _phase(o, method, part, started, cached, kept)
        started = started or method == "fed3r"
        kept = part if method in PARTIAL else kept
    return next(iter(configs.values())) if len(configs) == 1 else pipeline(configs)


def _phase(o, method, part, started, cached, kept):
    """One phase: whether Fed3R came before it, it runs on features, and what clients own by now."""
    clients, epochs, least, most = DATA[o.data]
    turns = -(-clients // o.cohort)  # rounds in which all have been there
    normal, norm = MODELS[o.model]
    c = default_config()
    c.data.name = o.data
    c.data.resized_crop = o.side or (96 if o.data == "cifar100" else 224)
    c.data.flip = True
    c.data.mean, c.data.std = ((value,) * 3 for value in normal)
    c.data.features = cached
    c.data.local_test, c.data.closed = 0.45, True
    if o.data == "cifar100":
        c.partition.clients, c.partition.alpha = clients, o.alpha
    else:
        c.partition.name, c.partition.min_size, c.partition.max_size = "natural", least, most
    if o.data == "inaturalist":
        c.data.split = "geo_100"
    c.model.name, c.model.pretrained = o.model, o.weights
    c.model.norm = norm if o.weights else None
    c.cohort.size = o.cohort
    c.algorithm.name = method
    c.client.batch_size, c.client.epochs, c.client.weight_decay = 64, epochs, 4e-5
    c.client.learning_rate = o.rate or (0.01 if started else 0.1)
    c.task.temperature = o.tau if started else 1.0
    c.eval.clients, c.eval.every, c.eval.window, c.checkpoint.every = True, 100, 1, 100
    if method == "fed3r":
        c.cohort.sampling, c.rounds = "once", turns
        c.client.batch_size = 500  # of sums, which do not depend on it
        c.eval.every = c.checkpoint.every = turns
    elif method == "fedavg":
        c.rounds = o.ft
        if not cached:
            frozen = {"head": "features", "features": "head"}
            c.client.frozen = frozen.get(part, "none")
    elif method in PARTIAL:
        c.rounds = o.pp
        c.algorithm[method].own = part
    else:
        c.algorithm.name = "fp+oll" if o.oll else "fp"
        c.algorithm.fp.part, c.algorithm.fp.keep = part or "all", kept
        c.algorithm.fp.ditto = o.ditto
        if o.oll and not o.rate:
            c.client.learning_rate /= 10
        c.cohort.sampling = "once"
        c.rounds, c.client.epochs = (turns * o.epochs, 1) if o.curve else (turns, o.epochs)
        c.eval.absent = 4 if o.curve else 0
        c.eval.every = c.checkpoint.every = turns
    return only_used(c)
