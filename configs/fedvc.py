"""FedAvg and FedVC at a fixed number of local iterations: the study of FedVPR, on CIFAR.

    fedjax-flat train --config configs/fedvc.py:method=fedvc,iterations=8 --run runs/a --data FOLDER

Hsu, Qi, Brown, "Federated visual classification with real-world data distribution" (ECCV 2020):
virtual clients all have the same number N_VC of examples, large clients being cut and small ones
repeated, so that larger clients take part more often. With N_VC = I_loc x 64 they train for one
epoch (partition.virtual). method=fedvc_drawn does it as the paper's program, without cutting: a
client is drawn with a chance as its examples (cohort.sampling = sizes), takes I_loc steps over as
many reshuffled epochs as it needs, and weighs as much as any other.

    I_loc T |C| = I_tot        with |C| = 5, and I_tot = 2,000,000 in the thesis

Options after the colon, with their defaults:

    cifar10                or cifar100, landmarks
    method=fedavg          or fedvc, fedvc_drawn
    iterations=10          I_loc: local steps; 125 to 4,000 in the thesis
    total=20000            I_tot
    cohort=5
    alpha=1                heterogeneity of cifar
    skew=1                 deviation of the logarithm of clients' sizes, of cifar
"""

from fedjax_flat import UsageError, arguments, default_config, only_used

METHODS = ("fedavg", "fedvc", "fedvc_drawn")


def get_config(text=""):
    o = arguments(
        text, data="cifar10", method="fedavg", iterations=10, total=20_000, cohort=5, alpha=1.0,
        skew=1.0,
    )
    if o.method not in METHODS:
        raise UsageError(f"method = {o.method!r}: expected one of {', '.join(METHODS)}.")
    rounds, rest = divmod(o.total, o.iterations * o.cohort)
    if rest or not rounds:
        raise UsageError(
            f"total = {o.total} is no multiple of iterations x cohort = "
            f"{o.iterations * o.cohort}: expected I_loc T |C| = I_tot with a whole T."
        )
    c = default_config()
    c.data.name, c.data.flip = o.data, True
    if o.data == "landmarks":
        c.partition.name, c.model.name, c.data.resized_crop = "natural", "mobilenetv2", 224
    else:
        c.partition.clients, c.partition.alpha, c.model.name = 100, o.alpha, "cnn"
        c.data.crop_padding = 4
        c.partition.size_sigma = o.skew
    c.client.learning_rate, c.client.batch_size = 0.01, 64
    if o.method == "fedvc":
        c.partition.virtual = o.iterations * c.client.batch_size
    else:
        c.client.steps = o.iterations
    c.cohort.size, c.rounds = o.cohort, rounds
    if o.method == "fedvc_drawn":
        c.cohort.sampling, c.algorithm.weighting = "sizes", "uniform"
    c.eval.every, c.eval.window, c.checkpoint.every = max(1, rounds // 20), 1, max(1, rounds // 20)
    return only_used(c)
