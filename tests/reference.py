"""Federated averaging in plain NumPy, float64, no JAX: the maths written a second time.

The randomness (cohorts, batches) is an input, as lists of indices.
"""

import numpy as np


def unpack(params):
    """Flax MLP parameters -> [(W1, b1), (W2, b2)] in float64."""
    names = [n for n in params if n != "classifier"] + ["classifier"]
    return [
        (np.array(params[n]["kernel"], float), np.array(params[n]["bias"], float)) for n in names
    ]


def mean_gradient(layers, x, y):
    """Gradient of the mean cross-entropy of a ReLU MLP, by hand."""
    activations = [x]
    for weight, bias in layers[:-1]:
        activations.append(np.maximum(activations[-1] @ weight + bias, 0))
    logits = activations[-1] @ layers[-1][0] + layers[-1][1]
    p = np.exp(logits - logits.max(1, keepdims=True))
    p /= p.sum(1, keepdims=True)
    signal = (p - np.eye(p.shape[1])[y]) / len(y)
    grads = []
    for i in reversed(range(len(layers))):
        grads.append((activations[i].T @ signal, signal.sum(0)))
        signal = (signal @ layers[i][0].T) * (activations[i] > 0)
    return grads[::-1]


def combine(f, *trees):
    return [tuple(f(*leaves) for leaves in zip(*pairs, strict=True)) for pairs in
            zip(*trees, strict=True)]


def norm(layers):
    return np.sqrt(sum((w**2).sum() for pair in layers for w in pair))


def sam_gradient(layers, x, y, *, rho):
    """Foret et al.: the gradient at w + rho g / ||g||."""
    g = mean_gradient(layers, x, y)
    length = norm(g)
    return mean_gradient(combine(lambda w, d: w + rho * d / length, layers, g), x, y)


def asam_gradient(layers, x, y, *, rho, eta, biases=False):
    """Kwon et al.: the gradient at w + rho T^2 g / ||T g||, T = |w| + eta, and 1 for biases."""
    g = mean_gradient(layers, x, y)
    scale = [
        (np.abs(w) + eta, np.abs(b) + eta if biases else np.ones_like(b)) for w, b in layers
    ]
    length = norm(combine(lambda t, d: t * d, scale, g))
    moved = combine(lambda w, t, d: w + rho * t**2 * d / length, layers, scale, g)
    return mean_gradient(moved, x, y)


def local_sgd(
    layers, x, y, batches, *, lr, momentum=0.0, weight_decay=0.0, gradient=mean_gradient
):
    velocity = combine(np.zeros_like, layers)
    for batch in batches:
        grad = gradient(layers, x[batch], y[batch])
        grad = combine(lambda g, w: g + weight_decay * w, grad, layers)
        velocity = combine(lambda v, g: momentum * v + g, velocity, grad)
        layers = combine(lambda w, v: w - lr * v, layers, velocity)
    return layers


def fedavg(layers, x, y, rounds, *, server_lr=1.0, server_momentum=0.0, **local):
    """`rounds`: per round, {client: list of batches (arrays of example indices)}."""
    velocity = combine(np.zeros_like, layers)
    for cohort in rounds:
        sizes = {k: len(np.unique(np.concatenate(b))) for k, b in cohort.items()}
        total = sum(sizes.values())
        delta = combine(np.zeros_like, layers)
        for k, batches in cohort.items():
            trained = local_sgd(layers, x, y, batches, **local)
            delta = combine(
                lambda d, w, v, share=sizes[k] / total: d + share * (w - v), delta, layers, trained
            )
        velocity = combine(lambda v, d: server_momentum * v + d, velocity, delta)
        layers = combine(lambda w, v: w - server_lr * v, layers, velocity)
    return layers
