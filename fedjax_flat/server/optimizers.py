"""Server optimisers by name: optax optimisers applied to the pseudo-gradient.

SGD with learning rate 1 is FedAvg. From Python, any `optax.GradientTransformation` will do.
"""

import optax

OPTIMIZERS = {
    "sgd": optax.sgd,
    "adam": optax.adam,
    "adagrad": optax.adagrad,
    "yogi": optax.yogi,
}
