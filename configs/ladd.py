"""Source-free adaptation of segmentation to clients without labels: LADD and its baselines.

    fedjax-flat train --config configs/ladd.py:camvid,source=0016E5,own=all --run runs/ladd \
        --data FOLDER
    fedjax-flat masks runs/ladd/2_ladd --model clusters --split target --data FOLDER

Shenaj et al., "Learning across domains and devices" (WACV 2023); Fani, PhD thesis (2025), section
5.3; Caldarola, PhD thesis (2024), section 6.3. One drive's train images are the server's, with
labels; clients have those of the others, whose labels are not trained on. Options after the colon,
with their defaults:

    camvid            the data: any with natural clients
    source=0016E5     the natural client whose images the server has
    method=ladd       ladd; self_training (FedAvg, no clusters, distillation or mean teacher); fda
                      (the server alone, in clients' styles), source (without styles); ftda
                      (source, then FedAvg on clients' labels), oracle (FedAvg on them); mcd (source
                      on the server and targets on clients, together), mcd_central (in one place)
    own=cls           of clusters: cls, all, bn, backbone, none
    loss=printed      or released: pseudo-labels of the teacher alone
    kd=10             weight of the distillation from the pre-trained model
    number=16         clients before the server's images are taken out
    width=1           of BiSeNetV2
    pretrain=150      rounds of 100 steps on the server, batches of 16, rate 5e-3; 0: none, start
                      from a run of method fda or source with --init
    rounds=300        of 5 clients, one local epoch, rate `rate`
    rate=0.01
    n=4               of MCD: steps of the generator on a batch
    steps=10          of MCD on clients: steps on the server's images in a round; it needs no
                      pre-training, and mcd_central has one epoch over all targets as a round

The documents have GTA5 as source, Cityscapes, CrossCity and Mapillary as targets, and DeepLabV3
with MobileNetV2; CamVid and BiSeNetV2 are not in them. Momentum starts anew in every round, also of
the server's, and the server's rate decays by 0.985 per round instead of by a polynomial.
"""

from fedjax_flat import UsageError, arguments, default_config, only_used, pipeline

METHODS = ("ladd", "self_training", "fda", "source", "ftda", "oracle", "mcd", "mcd_central")


def get_config(text=""):
    o = arguments(
        text, data="camvid", source="0016E5", method="ladd", own="cls", loss="printed", kd=10.0,
        number=16, width=1.0, pretrain=150, rounds=300, rate=0.01, n=4, steps=10,
    )
    for name, choices in (("method", METHODS), ("loss", ("printed", "released"))):
        if o[name] not in choices:
            raise UsageError(f"{name} = {o[name]!r}: expected one of {', '.join(choices)}.")
    server, clients = _common(o), _common(o)
    server.data.trains, server.rounds, server.cohort.size = "server", max(o.pretrain, 1), 1
    server.client.steps, server.client.learning_rate = 100, 5e-3
    server.client.learning_rate_decay = 0.985
    if o.method not in ("source", "ftda"):
        server.data.style.name = "fda"
        server.data.style.images = server.data.style.donors = "all"
    clients.rounds, clients.cohort.size, clients.client.learning_rate = o.rounds, 5, o.rate
    if o.method in ("ladd", "self_training"):
        clients.algorithm.name = o.method
        own = clients.algorithm[o.method]
        if o.loss == "released":
            own.entropy, own.teacher, own.labels, own.rule = 0.0, 0.0, "teacher", "released"
    if o.method == "ladd":
        own.own, own.kd, own.least = o.own, o.kd, 2
        own.start = max(2 * o.rounds // 3, 1)
        if o.loss == "released":
            own.distilled, own.restyle, own.kept = "released", False, "inertia"
    if o.method in ("mcd", "mcd_central"):
        clients.algorithm.name, clients.algorithm.mcd.n = "mcd", o.n
        clients.algorithm.mcd.steps = o.steps
        if o.method == "mcd_central":
            clients.algorithm.mcd.form = "central"
            clients.partition.name, clients.partition.clients, clients.cohort.size = "iid", 1, 1
        return only_used(clients)
    if o.method in ("source", "fda"):
        return only_used(server)
    if o.method == "oracle" or not o.pretrain:
        return only_used(clients)
    return pipeline({"source": only_used(server), o.method: only_used(clients)})


def _common(o):
    c = default_config()
    c.data.name, c.data.labelled = o.data, o.source
    c.data.crop, c.data.scale, c.data.flip = (136, 176), (0.7, 1.5), True
    c.data.jitter = (0.5, 0.5, 0.5)
    if o.data == "camvid":
        c.data.unseen = ()
    c.partition.name, c.partition.resize_to = "natural", o.number
    c.model.name, c.model.width, c.model.auxiliary = "bisenetv2", o.width, False
    c.client.momentum, c.client.batch_size, c.client.drop_last = 0.9, 16, True
    c.cohort.strategy = "map"
    c.eval.splits, c.eval.batch_size = ("target",), 16
    c.eval.every, c.eval.window, c.checkpoint.every = 10, 1, 50
    return c
