"""What happens on a client."""

from fedjax_flat.client import drift, terms
from fedjax_flat.client.fixed import fixed_after
from fedjax_flat.client.local import Client, LocalInfo, Stepper, full_gradient, local_training
from fedjax_flat.client.optimizer import sgd
from fedjax_flat.client.sharpness import asam, sam, warm_up
from fedjax_flat.client.terms import Term

__all__ = [
    "Client", "LocalInfo", "Stepper", "Term", "asam", "drift", "fixed_after", "full_gradient",
    "local_training", "sam", "sgd", "terms", "warm_up",
]
