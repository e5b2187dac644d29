"""What every system trains: the same shapes, the same data, the same number of images per round.

Nothing here imports fedjax_flat or jax, so that peers run with their own settings.
"""

import dataclasses
import itertools

import numpy as np

# For the processes of all systems: memory that was freed is used again. By default glibc returns
# large blocks, and torch, which asks anew in every step, spends a third of its time on page faults.
KEEPS_MEMORY = {
    "MALLOC_MMAP_THRESHOLD_": str(1 << 32), "MALLOC_TRIM_THRESHOLD_": str(1 << 33),
}


@dataclasses.dataclass(frozen=True)
class Conv:
    """A VALID convolution; `pool` is the side of the max pooling after it."""

    features: int
    size: int
    pool: int = 1


@dataclasses.dataclass(frozen=True)
class Workload:
    """A federated round: `cohort` clients of `examples` images on average, one epoch each.

    The network is the layers named here, or that of our package of the name `network`.
    """

    name: str
    image: tuple[int, int, int]
    convs: tuple[Conv, ...]
    hidden: tuple[int, ...]
    clients: int
    examples: int
    cohort: int
    batch: int
    learning_rate: float
    classes: int = 10
    unequal: bool = False
    network: str = ""

    @property
    def most(self) -> int:
        """Examples of the largest client."""
        return int(1.5 * self.examples) if self.unequal else self.examples

    @property
    def sizes(self) -> np.ndarray:
        """Examples of each client: all alike, or even between a half and one and a half."""
        if not self.unequal:
            return np.full(self.clients, self.examples)
        sizes = np.linspace(self.examples / 2, self.most, self.clients).astype(int)
        return np.random.default_rng(2).permutation(sizes)

    def flops_per_image(self) -> float:
        """Multiplications and additions of a training step; the first layer needs no input grad.

        0 for a network of the package.
        """
        if self.network:
            return 0.0
        height, width, channels = self.image
        total, passes = 0.0, 2
        for c in self.convs:
            height, width = height - c.size + 1, width - c.size + 1
            total += passes * 2 * height * width * c.size**2 * channels * c.features
            height, width, channels = height // c.pool, width // c.pool, c.features
            passes = 3
        sizes = [height * width * channels, *self.hidden, self.classes]
        return total + sum(3 * 2 * a * b for a, b in itertools.pairwise(sizes))

    def data(self, clients: int | None = None) -> tuple[np.ndarray, np.ndarray]:
        """uint8 images (clients, most, ...) and labels: noise around one picture per class."""
        clients = clients or self.clients
        # A generator of their own: the first clients are the same whatever their number.
        pictures = np.random.default_rng(1).integers(0, 256, (self.classes, *self.image))
        rng = np.random.default_rng(0)
        labels = rng.integers(0, self.classes, (clients, self.most)).astype(np.int32)
        images = np.empty((clients, self.most, *self.image), np.uint8)
        for k in range(clients):
            noise = rng.integers(0, 256, (self.most, *self.image)).astype(np.float32)
            images[k] = 0.5 * pictures[labels[k]] + 0.5 * noise
        return images, labels


def normalise(images: np.ndarray) -> np.ndarray:
    """What every system feeds its network."""
    return (images.astype(np.float32) / 255 - 0.5) / 0.25


W1 = Workload(
    "W1", (32, 32, 3), (Conv(64, 5, 2), Conv(64, 5, 2)), (384, 192),
    clients=100, examples=500, cohort=5, batch=64, learning_rate=0.01,
)
W2 = Workload(
    "W2", (28, 28, 1), (Conv(32, 3), Conv(64, 3, 2)), (128,),
    clients=1000, examples=50, cohort=50, batch=10, learning_rate=0.1,
)
# Deep networks: two clients of two batches.
deep = lambda name, network: Workload(
    name, (32, 32, 3), (), (), clients=10, examples=128, cohort=2, batch=64, learning_rate=0.01,
    network=network,
)
unequal = lambda w: dataclasses.replace(w, name=f"{w.name} unequal", unequal=True)
WORKLOADS = {
    w.name: w
    for w in (
        W1, W2, unequal(W1), unequal(W2), deep("ResNet-18", "resnet18"),
        deep("ResNet-20", "resnet20"), deep("MobileNetV2", "mobilenetv2"),
    )
}
