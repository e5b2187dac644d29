"""What happens on a client."""

from fedjax_flat.client.local import LocalInfo, local_training
from fedjax_flat.client.optimizer import sgd
from fedjax_flat.client.sharpness import asam, sam, warm_up

__all__ = ["LocalInfo", "asam", "local_training", "sam", "sgd", "warm_up"]
