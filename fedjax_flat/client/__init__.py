"""What happens on a client."""

from fedjax_flat.client import drift
from fedjax_flat.client.local import Client, LocalInfo, local_training
from fedjax_flat.client.optimizer import sgd
from fedjax_flat.client.sharpness import asam, sam, warm_up

__all__ = ["Client", "LocalInfo", "asam", "drift", "local_training", "sam", "sgd", "warm_up"]
