"""FedVPR: an embedding for place recognition learned across clients; tables 6.5 to 6.7.

    fedjax-flat train --config configs/fedvpr.py:streets,method=hierfavg --run runs/a
    fedjax-flat retrieve runs/a

Dutto et al., "Collaborative visual place recognition through federated learning" (CVPRW 2024):
ResNet-18 up to its third stage, GeM, triplets mined inside the client's own images. Options after
the colon, with their defaults:

    omniglot               or streets (synthetic_streets), msls (mapillary_sls)
    method=fedavg          fedvc; hierfavg, a server for each city, merged every T_c rounds;
                           centralised; or any other of `fedjax-flat algorithms`
    split=auto             clients: natural (sequences; people of an alphabet), proximity,
                           clustering, random_places. auto: natural for omniglot, else proximity
    radius=0               of a client's place in metres, of proximity: 1000, 2000, 4000. 0: 2000
                           (msls), 100 (streets: one street)
    cohort=0               clients of a round, of each cluster if hierfavg; 0: 5 (3 per cluster of
                           streets, which has no more)
    rounds=0               T; 0: 300, or as total says
    iterations=0           I_loc: local steps. 0: one epoch
    total=0                I_tot = I_loc T |C|, which decides the rounds if given (2,000,000)
    T_c=10                 rounds between merges of hierfavg (open in the text)
    clusters=0             cities; 0: 6 (omniglot), 4 (streets), 20 (msls)
    loss=triplet           contrastive, multi_similarity
    every=20               steps between embeddings of a client's images; 0: nothing is mined
    sharpness=none         sam, asam
    swa                    an averaged model too
    model=resnet18_gem     mobilenetv2_gem; or any other network, whose outputs are the embedding:
                           cnn is quick
    channels=0             of its first stage; 0: 16 (omniglot, streets), 64 (msls)
    lr=0                   0: 0.1 (omniglot, streets), 0.01 (msls)

The margin, the T_c, batch and rates are open in the text. recall@1 in the thesis (%), on Mapillary
SLS: centralised 66.0; random 40.2, clustering 57.3, proximity 51.7 (1000 m), 61.0 (2000 m), 66.1
(4000 m); FedAvg 61.0, by continent 46.9, by city 33.3; with 500 local iterations FedAvg 66.4,
FedVC 67.7.
"""

from fedjax_flat import UsageError, arguments, default_config, only_used

DATA = {"omniglot": "omniglot_retrieval", "streets": "synthetic_streets", "msls": "mapillary_sls"}
CITIES = {"omniglot": 6, "streets": 4, "msls": 20}


def get_config(text=""):
    o = arguments(
        text, data="omniglot", method="fedavg", split="auto", radius=0.0, cohort=0, rounds=0,
        iterations=0, total=0, T_c=10, clusters=0, loss="triplet", every=20, sharpness="none",
        swa=False, model="resnet18_gem", channels=0, lr=0.0,
    )
    if o.data not in DATA:
        raise UsageError(f"data = {o.data!r}: expected one of {', '.join(DATA)}.")
    large = o.data == "msls"
    c = default_config()
    c.data.name = DATA[o.data]
    c.partition.name = o.split
    if o.split == "auto":
        c.partition.name = "natural" if o.data == "omniglot" else "proximity"
    if c.partition.name == "proximity":
        c.partition.radius = o.radius or (2000.0 if large else 100.0)
    c.model.name = o.model
    if o.model == "resnet18_gem":
        c.model.channels = o.channels or (64 if large else 16)
        c.model.stem = "large" if large else "small"
    c.task.loss, c.task.mine_every = o.loss, o.every
    c.client.learning_rate = o.lr or (0.01 if large else 0.1)
    c.client.batch_size, c.client.steps = 56, o.iterations
    c.client.sharpness = o.sharpness
    clusters = o.clusters or CITIES[o.data]
    by_city = o.method == "hierfavg"
    each = o.cohort or (3 if by_city and o.data == "streets" else 5)
    c.cohort.size = each * clusters if by_city else each
    c.algorithm.name = "fedavg" if o.method in ("fedvc", "centralised") else o.method
    if o.method == "fedvc":  # fedvc_drawn of configs/fedvc.py
        c.cohort.sampling, c.algorithm.weighting = "sizes", "uniform"
    if o.method == "hierfavg":
        c.groups.name, c.groups.count, c.algorithm.hierfavg.every = "names", clusters, o.T_c
        c.algorithm.hierfavg.evaluated = "bank"
    if o.method == "centralised":
        c.partition.name, c.partition.clients, c.cohort.size = "iid", 1, 1
    c.rounds = o.rounds or 300
    if o.total:
        if not o.iterations:
            raise UsageError("total without iterations: expected I_loc, e.g. iterations=500.")
        c.rounds, rest = divmod(o.total, o.iterations * c.cohort.size)
        if rest or not c.rounds:
            raise UsageError(
                f"total = {o.total} is no multiple of iterations x cohort = "
                f"{o.iterations * c.cohort.size}: expected I_loc T |C| = I_tot with a whole T."
            )
    if o.swa:
        c.server.average, c.server.swa.cycle = "swa", 1
    c.eval.every = c.checkpoint.every = max(1, c.rounds // 20)
    c.eval.window = 1
    return only_used(c)
