"""What happens on a client."""

from fedjax_flat.client.local import LocalInfo, local_training
from fedjax_flat.client.optimizer import sgd

__all__ = ["LocalInfo", "local_training", "sgd"]
