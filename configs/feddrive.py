"""Federated segmentation of streets: FedDrive's settings, on CamVid or on its own data.

    fedjax-flat train --config configs/feddrive.py:camvid,clients=drive,method=silobn \
        --run runs/silobn --data FOLDER
    fedjax-flat masks runs/silobn --data FOLDER

Fantauzzo et al., "FedDrive" (IROS 2022); Fani, PhD thesis (2025), section 5.2; Caldarola, PhD
thesis (2024), section 6.2. Options after the colon, with their defaults:

    camvid                 the data: camvid, cityscapes, idda
    unseen=country         of IDDA: country, rainy, bus
    lists=none             of Cityscapes and IDDA, with clients=drive: FedDrive's own clients,
                           uniform, heterogeneous or class_imbalance
    clients=drive          drive: each sees one drive (city, domain); uniform: all of them alike;
                           class: the first ones have the rarest classes (Algorithm 8)
    number=0               how many; 0: 12 of CamVid, else as the data have them, or 144 and 90
    method=fedavg          fedavg, fedbn, silobn, or any other, e.g. fedasam+swa
    norm=averaged          statistics of any method: averaged, own (SiloBN), layers (FedBN)
    inference=auto         statistics in tests: model, split (AdaBN, `standard` in the thesis),
                           batch; auto: split where they stay with the clients. `by domain` is
                           model personal on split local_test, where clients see one drive
    style=none             fda, cfsi or lab: images in the style of other clients' (docs)
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

# crop, scale, learning rate, weight decay, clients
DATA = {
    "camvid": ((136, 176), (0.5, 1.5), 0.05, 5e-4, 12),
    "cityscapes": ((512, 1024), (0.5, 1.5), 0.05, 5e-4, 144),
    "idda": ((512, 928), (0.5, 2.0), 0.1, 0.0, 90),
}
SERVERS = {"sgd": ("sgd", 0.0), "momentum": ("sgd", 0.9), "adam": ("adam", 0.0),
           "adagrad": ("adagrad", 0.0)}
STAYS = ("fedbn", "silobn")


def get_config(text=""):
    o = arguments(
        text, data="camvid", clients="drive", number=0, method="fedavg", norm="averaged",
        inference="auto", style="none", width=1.0, server="sgd", rounds=1600, unseen="country",
        lists="none",
    )
    for name, choices in (("data", DATA), ("clients", ("drive", "uniform", "class")),
                          ("style", ("none", "fda", "cfsi", "lab")),
                          ("server", SERVERS), ("norm", ("averaged", "own", "layers")),
                          ("inference", ("auto", "model", "split", "batch"))):
        if o[name] not in choices:
            raise UsageError(f"{name} = {o[name]!r}: expected one of {', '.join(choices)}.")
    crop, scale, rate, decay, usual = DATA[o.data]
    if o.lists != "none" and (o.data == "camvid" or o.clients != "drive" or o.number):
        raise UsageError(
            f"lists = {o.lists!r} are FedDrive's clients of Cityscapes and IDDA: expected one of "
            "these, clients=drive and no number."
        )

    c = default_config()
    c.rounds = o.rounds
    c.data.name = o.data
    c.data.crop, c.data.scale, c.data.flip = crop, scale, True
    c.data.jitter = () if o.data == "idda" else (0.5, 0.5, 0.5)
    c.data.style.name = o.style
    if o.data != "camvid":
        c.data.lists = o.lists
        c.data.size = (1024, 1856) if o.data == "idda" else (1024, 2048)
    if o.data == "idda":
        c.data.setting = o.unseen
    if o.clients == "drive":
        as_they_are = o.lists != "none" or o.data == "idda"
        c.partition.name = "natural"
        c.partition.resize_to = o.number or (0 if as_they_are else usual)
    else:
        c.partition.name = {"uniform": "stratified", "class": "rare_classes"}[o.clients]
        c.partition.clients = o.number or usual
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
    c.cohort.size = min(5, o.number or usual)
    c.cohort.strategy = "map"
    c.eval.splits = ("unseen",) if o.data == "cityscapes" else ("seen", "unseen", "test")
    c.eval.batch_size = 16
    c.eval.every, c.eval.window = 5, 1
    c.checkpoint.every = 20
    return only_used(c)
