"""What a curious client can make of what it receives, as an evaluation."""

from fedjax_flat.attacks.frechet import frechet
from fedjax_flat.attacks.gan import Generator, Recovery, recover

__all__ = ["Generator", "Recovery", "frechet", "recover"]
