"""Maximum Classifier Discrepancy (Saito et al. 2018) in plain NumPy, float64; and federated.

Written from the paper as recalled and from fani.md 3 (the row MCD: federated as in the paper of
FMTDA, source and target used jointly, third phase 4 times); apart from the package.

    d(x) = mean over examples and classes of |softmax(F1(G(x))) - softmax(F2(G(x)))|
    A:  min over G, F1, F2   CE(F1, source) + CE(F2, source)
    B:  min over F1, F2      CE(F1, source) + CE(F2, source) - d(target)
    C:  min over G           d(target), `repeats` times on the same batch

A network is {"W0", "b0", "W1", ...}, linear layers with ReLU between them; a model is {"generator",
"first", "second"}, G, F1 and F2. `source` is a batch (x, y) of the labelled data, `target` an array
of inputs. A client is {"x", "batches": index arrays}: no labels. Nothing is ever changed in place.

Choices where the spec leaves room:
 1. Features are ReLU of the generator's last layer.
 2. The two cross-entropies are means over the batch, summed; d has weight 1.
 3. Where the two softmaxes are equal, |.| has slope 0.
 4. SGD without momentum or decay; one learning rate for all three networks and steps.
 5. C is repeated on the batch that B had.
 6. Predictions: the sum of both logits; by="first" or "second": one classifier.
 7. The federated form is not written down in the spec. Three readings, all with weights N_k / N for
    all three networks (N_k: target examples); clients without examples are left out:
    - `split_round`, what is meant here by FL-UDA: source stays on the server, target on clients.
      The server takes step A on its batches; clients start from there and, for every batch, take
      step B without its source terms, then C; average. With no client, step A still counts. The
      package has clients first and then the server, so that what is tested has had step A; rounds
      in turn differ in nothing but where they begin and end.
    - `joint_round`: clients have source batches, one for every target batch, in "source", and train
      as a centralised MCD would; average. "Jointly" by the letter; source data travels.
    - `synchronous_round`: centralised MCD, whose terms are computed where their data is: in B the
      server adds the gradient of the source terms and the clients' mean of that of -d; C has an
      exchange per repetition. Clients have equally many batches, as many as the source has. It is
      centralised MCD on the union if clients' shares of a batch are N_k / N. With no client, step
      A still counts.
"""

import numpy as np
from reference_open import softmax
from reference_teachers import cross_entropy

ALL, CLASSIFIERS = ("generator", "first", "second"), ("first", "second")


# The model.


def depth(network):
    return sum(n.startswith("W") for n in network)


def run(network, x):
    """(What every layer reads, output)."""
    inputs, h = [], x
    for i in range(depth(network)):
        inputs.append(h)
        z = h @ network[f"W{i}"] + network[f"b{i}"]
        h = np.maximum(z, 0)
    return inputs, z


def back(network, inputs, signal):
    """(Gradient of the network, gradient of what it reads) from the gradient of its output."""
    grads = {}
    for i in reversed(range(depth(network))):
        grads |= {f"W{i}": inputs[i].T @ signal, f"b{i}": signal.sum(0)}
        signal = signal @ network[f"W{i}"].T
        if i:
            signal = signal * (inputs[i] > 0)
    return grads, signal


def forward(model, x):
    """(What the layers of the generator read, features, logits of F1, logits of F2)."""
    inputs, z = run(model["generator"], x)
    features = np.maximum(z, 0)
    return inputs, features, *(run(model[name], features)[1] for name in CLASSIFIERS)


def backward(model, x, signals):
    """Gradient of the model from the gradients of both classifiers' logits."""
    inputs, features, *_ = forward(model, x)
    grads, at_features = {}, 0
    for name, signal in zip(CLASSIFIERS, signals, strict=True):
        grads[name], pull = back(model[name], run(model[name], features)[0], signal)
        at_features = at_features + pull
    return grads | {"generator": back(model["generator"], inputs, at_features * (features > 0))[0]}


def discrepancy(z1, z2):
    """(d, its gradients in both logits)."""
    p, q = softmax(z1), softmax(z2)
    slope = np.sign(p - q) / p.size
    through = lambda s, u: s * (u - (s * u).sum(1, keepdims=True))
    return np.abs(p - q).mean(), through(p, slope), through(q, -slope)


def source_loss(model, source):
    """(CE(F1) + CE(F2), gradient of the model)."""
    x, y = source
    (first, signal1), (second, signal2) = (cross_entropy(z, y) for z in forward(model, x)[2:])
    return first + second, backward(model, x, (signal1, signal2))


def discrepancy_loss(model, target):
    """(d, gradient of the model)."""
    value, *signals = discrepancy(*forward(model, target)[2:])
    return value, backward(model, target, signals)


def predict(model, x, by="sum"):
    first, second = forward(model, x)[2:]
    return {"first": first, "second": second, "sum": first + second}[by]


# Steps.


def descend(model, grads, lr, names):
    """SGD for the networks in `names`."""
    new = {name: {n: v - lr * grads[name][n] for n, v in model[name].items()} for name in names}
    return model | new


def combine(*terms):
    """Sum of weight * gradient; terms: (weight, gradient of a model)."""
    one = terms[0][1]
    return {p: {n: sum(c * g[p][n] for c, g in terms) for n in one[p]} for p in one}


def step_a(model, source, lr):
    return descend(model, source_loss(model, source)[1], lr, ALL)


def step_b(model, source, target, lr):
    """source=None: without the terms of the source."""
    terms = [(-1, discrepancy_loss(model, target)[1])]
    if source is not None:
        terms.append((1, source_loss(model, source)[1]))
    return descend(model, combine(*terms), lr, CLASSIFIERS)


def step_c(model, target, lr, repeats=4):
    for _ in range(repeats):
        model = descend(model, discrepancy_loss(model, target)[1], lr, ("generator",))
    return model


def train(model, sources, targets, lr, repeats=4):
    """Centralised MCD: A, B, C for every pair of batches."""
    for source, target in zip(sources, targets, strict=True):
        model = step_a(model, source, lr)
        model = step_b(model, source, target, lr)
        model = step_c(model, target, lr, repeats)
    return model


# Rounds.


def present(clients):
    """[(client, N_k / N)] of those with examples."""
    clients = [c for c in clients if len(c["x"])]
    total = sum(len(c["x"]) for c in clients)
    return [(c, len(c["x"]) / total) for c in clients]


def targets_of(client):
    return [client["x"][batch] for batch in client["batches"]]


def local(model, client, lr, repeats=4):
    """A client without source data: B without its source terms, C."""
    for target in targets_of(client):
        model = step_c(step_b(model, None, target, lr), target, lr, repeats)
    return model


def split_round(model, sources, clients, lr, repeats=4, server_lr=None):
    """server_lr: learning rate of step A on the server, lr unless given."""
    for source in sources:
        model = step_a(model, source, lr if server_lr is None else server_lr)
    trained = [(share, local(model, c, lr, repeats)) for c, share in present(clients)]
    return combine(*trained) if trained else model


def joint_round(model, clients, lr, repeats=4):
    trained = [
        (share, train(model, c["source"], targets_of(c), lr, repeats))
        for c, share in present(clients)
    ]
    return combine(*trained) if trained else model


def synchronous_round(model, sources, clients, lr, repeats=4):
    clients = present(clients)
    if not clients:
        return split_round(model, sources, [], lr)
    shares = [share for _, share in clients]

    def mean_discrepancy(model, batches):
        grads = [discrepancy_loss(model, target)[1] for target in batches]
        return combine(*zip(shares, grads, strict=True))

    steps = zip(*(targets_of(c) for c, _ in clients), strict=True)
    for source, batches in zip(sources, steps, strict=True):
        model = step_a(model, source, lr)
        grads = (1, source_loss(model, source)[1]), (-1, mean_discrepancy(model, batches))
        model = descend(model, combine(*grads), lr, CLASSIFIERS)
        for _ in range(repeats):
            model = descend(model, mean_discrepancy(model, batches), lr, ("generator",))
    return model
