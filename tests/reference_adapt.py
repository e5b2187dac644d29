"""Self-training and LADD with one cluster on the clients of `reference_methods`, NumPy, float64.

The losses are those of `reference_styles`, differentiated by differences in the logits; an example
stands for an image of one pixel.
"""

import numpy as np
import reference_styles as sty
from reference_open import backward, forward
from reference_teachers import run


def gradient(layers, x, teacher, begin, threshold, kd):
    """(None, gradient of the layers) of `local_loss` as printed, pseudo-labels by a threshold."""
    activations, z = forward(layers, x)
    pixels = lambda z: z[:, None, None, :]
    taught, first = (pixels(forward(model, x)[1]) for model in (teacher, begin))
    labels = sty.pseudo_labels(pixels(z), "threshold", threshold)

    def loss(z):
        total = sty.entropy(z) + sty.self_training(z, labels) + sty.kl(z, taught)
        return total + kd * sty.kl(z, first)

    return None, backward(layers, activations, sty.slope(loss, pixels(z))[:, 0, 0, :])


def ladd(c, threshold, kd=0.0, start=0, every=1):
    """One cluster: u and v are one; the teacher is a mean from round `start` on, unless it is 0."""
    taught, t = [c.w0], [0]

    def local(w, k):
        teacher, begin = c.layers(taught[0]), c.layers(c.w0)
        return lambda layers, x, y: gradient(layers, x, teacher, begin, threshold, kd)

    def after(w, trained):
        t[0] += 1
        new = sty.next_teacher({"w": taught[0]}, {"w": w}, t[0], every, start or None)
        taught[0] = np.asarray(new["w"])

    return run(c, local, after=after)


def self_training(c, threshold):
    """FedAvg taught by the model that clients received."""
    return ladd(c, threshold)
