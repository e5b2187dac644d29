"""FedCG: parts of the classifier for domains that are found, and its baseline.

    fedjax-flat train --config configs/fedcg.py:mnist --run runs/fedcg --data FOLDER
    fedjax-flat train --config configs/fedcg.py:mnist,method=fedavg --run runs/fedavg --data FOLDER

Caldarola et al., "Cluster-driven graph federated learning over multiple domains" (CVPR workshops
2021); Caldarola, PhD thesis (2024), section 5.4. Options after the colon, with their defaults:

    mnist               the data: mnist, digits (in the package), cifar10, femnist, celeba
    method=fedcg        or fedavg, or any other, e.g. fedavgm
    shift=auto          the clients' domains. auto: of mnist, digits and cifar10 rotation, by 0, 90,
                        180, 270 degrees; or noise, rgb (of cifar10), none
    domains=4           D
    classifier=linear   the network of teacher and student; mlp, lenet
    every=10            rounds after which the student becomes the teacher; 0: never
    start=identity      the graph before the first average; or uniform
    soft=true           probabilities of domains in tests; false: the most probable one
    rounds=100
    rate=0              of clients; 0: 0.05, of cifar10 0.01

The document prints no recipe and no networks. Ours: 10 clients per round, one local epoch, batches
of 32, SGD. mnist and digits are split among 40 clients, cifar10 among 100, by Dirichlet 0.5;
femnist and celeba have their own. LeNet of mnist, an MLP of digits, the papers' CNN of cifar10,
FEMNIST's of femnist, ResNet-20 with GroupNorm of celeba, whose W is whole (q = 130).

Accuracy (%) in the document:

    Table 5.11              CelebA    FEMNIST
    FedAvg                  86.88     77.81
    FedCG                   89.18     83.41

    Table 5.10, CelebA, FedCG at the last layer, identity, soft:   D = 2 88.31, 3 88.13, 4 89.18,
    32 88.40; at all layers, identity, soft: 87.88, 88.74, 88.67 of D = 2, 3, 4 (not here)
    Table 5.9, CelebA, 32 domains that are given (not here): 87.97 (uniform), 89.57 (Hamming)

100 rounds of mnist take 4 minutes on two busy cores (FedAvg: 3). docs/fedcg.md has what it reaches.
"""

from fedjax_flat import UsageError, arguments, default_config, only_used

# network, clients, learning rate
DATA = {
    "mnist": ("lenet", 40, 0.05),
    "digits": ("mlp", 40, 0.05),
    "cifar10": ("cnn", 100, 0.01),
    "femnist": ("femnist_cnn", 0, 0.05),
    "celeba": ("resnet20", 0, 0.05),
}
SHIFTS = ("auto", "rotation", "noise", "rgb", "none")


def get_config(text=""):
    o = arguments(
        text, data="mnist", method="fedcg", shift="auto", domains=4,
        classifier="linear", every=10, start="identity", soft=True, rounds=100, rate=0.0,
    )
    for name, choices in (("data", DATA), ("shift", SHIFTS)):
        if o[name] not in choices:
            raise UsageError(f"{name} = {o[name]!r}: expected one of {', '.join(choices)}.")
    network, clients, rate = DATA[o.data]
    if not clients and o.shift not in ("auto", "none"):
        raise UsageError(
            f"shift = {o.shift!r}: clients of {o.data} are as they are, expected auto or none."
        )

    c = default_config()
    c.rounds, c.data.name, c.model.name = o.rounds, o.data, network
    c.algorithm.name = o.method
    own = c.algorithm.fedcg
    own.domains, own.every, own.start, own.soft = o.domains, o.every, o.start, o.soft
    own.classifier = o.classifier
    if o.data == "celeba":
        own.mixing = "full"
    if clients:
        c.data.shift.name = "rotation" if o.shift == "auto" else o.shift
        c.partition.name, c.partition.clients, c.partition.alpha = "dirichlet", clients, 0.5
    else:
        c.partition.name = "natural"
    c.cohort.size = 10
    c.client.learning_rate, c.client.batch_size = o.rate or rate, 32
    c.client.epochs = 1
    c.eval.every, c.eval.window = 10, 5
    c.checkpoint.every = 20
    return only_used(c)
