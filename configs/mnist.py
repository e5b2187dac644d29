"""FedSGD, FedAvg, SCAFFOLD, FedGH and FedSAM on MNIST: the six tasks of "Federated Learning &
Optimization" (Saeed, Haroon, Khan).

    fedjax-flat train --config configs/mnist.py:fedavg,alpha=0.5 --run runs/a --data FOLDER

Options after the colon, with their defaults:

    fedavg                 method: fedsgd (task 1), fedavg (2), scaffold (3), fedgh (4), fedsam (5)
    alpha=2                heterogeneity: 2, 0.5, 0.1; 0 is one class per client, with 10 clients
    rho=0.001              radius of FedSAM; the sweep at alpha = 0.1 has 0.0025, 0.005, 0.0075
    rate=0                 another learning rate of SCAFFOLD's clients than 0.05

All 5 clients take part in each of 3 rounds of 20 local epochs, Adam 1e-3, batch 128, fresh in every
round; 80 % of the 70,000 images train; clients count alike. Accuracy in the document (%), after 1,
2, 3 rounds:

                alpha 2                 alpha 0.5               alpha 0.1
    FedAvg      37.81 56.25 59.13        9.56 20.08 60.23       15.43 29.68 38.77
    SCAFFOLD    54.09 77.18 85.38       32.48 64.88 81.55       39.10 62.51 64.87
    FedGH       31.61 59.80 69.53       22.53 44.84 67.47       18.34 32.26 43.25
    FedSAM      35.70 56.64 66.38       17.22 54.90 65.35       31.55 52.38 60.99

One class per client, FedAvg: 12.97 11.43 11.07.

The document does not print its network ("SimpleCNN"; here a LeNet), nor how SCAFFOLD's control
variates go with Adam: they are defined by the steps of SGD, which its clients take here. FedSGD
(alpha = 0.8 and rate 1e-4 in the document, many rounds) weighs clients by their examples, with
which it is gradient descent on all data; uniform weights are --config.algorithm.weighting=uniform.
`benchmarks/mnist_study.py` runs all of them and prints the tables.
"""

from fedjax_flat import UsageError, arguments, default_config, only_used

ALPHAS = (2.0, 0.8, 0.5, 0.1, 0.0)
METHODS = ("fedsgd", "fedavg", "scaffold", "fedgh", "fedsam")


def get_config(text=""):
    o = arguments(text, method="fedavg", alpha=2.0, rho=0.001, rate=0.0)
    if o.method not in METHODS:
        raise UsageError(f"method = {o.method!r}: expected one of {', '.join(METHODS)}.")
    if o.alpha not in ALPHAS:
        raise UsageError(
            f"alpha = {o.alpha:g}: the document has {', '.join(f'{a:g}' for a in ALPHAS)}. For "
            "another, choose the nearest and add --config.partition.alpha."
        )
    c = default_config()
    c.rounds = 3
    c.data.name, c.data.test_share = "mnist", 0.2
    c.partition.name, c.partition.clients, c.partition.alpha = "per_class", 5, o.alpha
    if o.alpha == 0:
        c.partition.name, c.partition.clients = "dirichlet", 10
    c.cohort.size = c.partition.clients
    c.model.name = "lenet"
    c.algorithm.name = o.method
    c.algorithm.weighting = "uniform"
    c.client.optimizer, c.client.learning_rate = "adam", 0.001
    c.client.batch_size, c.client.epochs = 128, 20
    c.client.rho = o.rho
    if o.method == "scaffold":
        c.client.optimizer, c.client.learning_rate = "sgd", o.rate or 0.05
    if o.method == "fedsgd":
        c.algorithm.weighting, c.server.learning_rate, c.rounds = "examples", o.rate or 1e-4, 100
    c.eval.every, c.eval.window, c.eval.clients = 1, 1, True
    c.checkpoint.every = 1
    return only_used(c)
