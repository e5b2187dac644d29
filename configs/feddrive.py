"""Federated segmentation of streets: FedDrive's settings, on CamVid or on its own data.

    fedjax-flat train --config configs/feddrive.py:camvid,clients=drive,method=silobn \
        --run runs/silobn --data FOLDER
    fedjax-flat masks runs/silobn --data FOLDER

Fantauzzo et al., "FedDrive" (IROS 2022); Fani, PhD thesis (2025), section 5.2; Caldarola, PhD
thesis (2024), section 6.2. Options after the colon, with their defaults:

    camvid                 the data
    clients=drive          drive: each sees one drive (city, domain); uniform: all of them alike;
                           class: the first ones have the rarest classes (Algorithm 8)
    number=12              how many
    method=fedavg          fedavg, fedbn, silobn, or any other, e.g. fedasam+swa
    norm=averaged          statistics of any method: averaged, own (SiloBN), layers (FedBN)
    inference=auto         statistics in tests: model, split (AdaBN, `standard` in the thesis),
                           batch; auto: split where they stay with the clients. `by domain` is
                           model personal on split local_test, where clients see one drive
    width=1                of BiSeNetV2
    server=sgd             or momentum (FedAvgM), adam, adagrad
    rounds=1600

BiSeNetV2 with BatchNorm and four auxiliary heads, cross-entropy of the hardest 25 % of the pixels,
SGD of rate 0.05 (IDDA 0.1), momentum 0.9 and weight decay 5e-4 (0), batches of 16, 2 local epochs,
5 clients per round; random scale, crop and flip, and colours. A last batch that is not full is
left out. The rate is constant: the released program's decay is by local steps and starts anew in
every round. The thesis has clients with fewer images than a batch see them flipped, too; here
every image is flipped half of the time. CamVid is not in the documents: its crop is 3/4 of the
image, its rate, scales and colours are those of Cityscapes.

mIoU (%) in Fani's thesis, mean of 20 evaluations in the last 100 rounds:

    Cityscapes (unseen cities)    uniform   heterogeneous   class imbalance
    FedAvg                        45.6      43.3            44.5
    SiloBN                                  52.9            51.8

    IDDA heterogeneous            country unseen, seen    rainy          bus
    FedAvg                        40.0  42.4              26.8  38.2     38.1  45.7
    SiloBN, standard              45.3  54.5              50.0  54.4     47.4  57.8
    SiloBN, by domain                   58.8                    62.5           61.6
"""

from fedjax_flat import UsageError, arguments, default_config, only_used

# partition of `clients`, crop, scale, learning rate, weight decay
DATA = {"camvid": ((136, 176), (0.5, 1.5), 0.05, 5e-4)}
SERVERS = {"sgd": ("sgd", 0.0), "momentum": ("sgd", 0.9), "adam": ("adam", 0.0),
           "adagrad": ("adagrad", 0.0)}
STAYS = ("fedbn", "silobn")


def get_config(text=""):
    o = arguments(
        text, data="camvid", clients="drive", number=12, method="fedavg", norm="averaged",
        inference="auto", width=1.0, server="sgd", rounds=1600,
    )
    for name, choices in (("data", DATA), ("clients", ("drive", "uniform", "class")),
                          ("server", SERVERS), ("norm", ("averaged", "own", "layers")),
                          ("inference", ("auto", "model", "split", "batch"))):
        if o[name] not in choices:
            raise UsageError(f"{name} = {o[name]!r}: expected one of {', '.join(choices)}.")
    crop, scale, rate, decay = DATA[o.data]

    c = default_config()
    c.rounds = o.rounds
    c.data.name = o.data
    c.data.crop, c.data.scale, c.data.flip, c.data.jitter = crop, scale, True, (0.5, 0.5, 0.5)
    if o.clients == "drive":
        c.partition.name, c.partition.resize_to = "natural", o.number
    else:
        c.partition.name = {"uniform": "stratified", "class": "rare_classes"}[o.clients]
        c.partition.clients = o.number
        c.partition.natural_sizes = o.clients == "class"
    c.model.name, c.model.width = "bisenetv2", o.width
    c.task.hard = 0.25
    c.client.learning_rate, c.client.momentum, c.client.weight_decay = rate, 0.9, decay
    c.client.batch_size, c.client.epochs, c.client.drop_last = 16, 2, True
    c.algorithm.name, c.model.statistics = o.method, o.norm
    kind, momentum = SERVERS[o.server]
    c.server.optimizer, c.server.momentum = kind, momentum
    stays = o.norm != "averaged" or any(m in STAYS for m in o.method.split("+"))
    c.eval.statistics = ("split" if stays else "model") if o.inference == "auto" else o.inference
    c.cohort.size = min(5, o.number)
    c.cohort.strategy = "map"
    c.eval.splits, c.eval.batch_size = ("seen", "unseen", "test"), 16
    c.eval.every, c.eval.window = 5, 1
    c.checkpoint.every = 20
    return only_used(c)
