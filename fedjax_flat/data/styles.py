"""Train images in the style of other clients' images: FDA, CFSI, LAB.

    fda     every client's mean amplitudes in a small window (data/spectra.py), which take the place
            of an image's own: LADD's styles (Fani's thesis, section 5.3), 27 numbers per client
    cfsi    continuous frequency space interpolation (Liu et al., "FedDG", CVPR 2021): the
            amplitudes of single images, mixed with an image's own by a strength ~ U(0, 1)
    lab     mean and deviation of single images in L*a*b* (data/colour.py), 6 numbers per image

As FedDrive has them (Fani's thesis, section 5.2): once, before training, all clients send the
styles of their train images, as they see them, and receive those of all. In a step, `images` =
even changes every second one of a client's images, each time by a style that is drawn anew: of
`others`, or of `all` clients. The thesis has CFSI draw from other clients, LAB from all; in its
program both are `others`, which is the default. Its text may also mean that only half of the images
are sent: `sent` = even. The width of CFSI's window is not printed; 0.05 to each side is that of the
program, which casts what it computes to bytes without clipping, so that what is too bright starts
at black again. Here it is clipped.

Whose images they are is known where a batch is gathered (`federated.marked`), and is handed on
beside them with the bank, which is an argument of the step.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from fedjax_flat import errors, rng
from fedjax_flat.data import colour, geometry, spectra
from fedjax_flat.data.partition import Partition
from fedjax_flat.data.shift import Shift, looks
from fedjax_flat.data.sources import Dataset
from fedjax_flat.registry import Entry, Registry, entry
from fedjax_flat.settings import Setting


class Style(NamedTuple):
    """`of(image)` is an image's style, `put(key, image, style)` the image in another's."""

    of: Callable[[jax.Array], Any]
    put: Callable[[jax.Array, jax.Array, Any], jax.Array]
    images: str = "even"  # of a client, that are changed: even, all
    donors: str = "others"
    sent: str = "all"  # images whose styles are sent; mean: one style, the mean of all


class Bank(NamedTuple):
    """Styles by client: client k sent those from `first[k]` on, `counts[k]` of them."""

    styles: Any
    first: jax.Array
    counts: jax.Array

    @property
    def size(self) -> int:
        """How many there are."""
        return int(jax.tree.leaves(self.styles)[0].shape[0])

    @property
    def bytes(self) -> int:
        """Of all styles."""
        return sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(self.styles))


class Traffic(NamedTuple):
    """Bytes that travel once, before training: of all clients together."""

    down: int
    up: int


def traffic(bank: Bank, style: Style) -> Traffic:
    """Everybody sends its own styles and receives those that it may draw."""
    own = np.asarray(bank.counts, np.int64)
    received = len(own) * bank.size - (own.sum() if style.donors == "others" else 0)
    each = bank.bytes // bank.size
    return Traffic(int(received) * each, bank.bytes)


def bank(
    style: Style, dataset: Dataset, partition: Partition, shift: Shift | None = None
) -> Bank:
    """The styles that clients send of their train images, as they see them."""
    as_stored = Shift(lambda batch, client, index: batch)
    seen = looks(
        shift or as_stored, dataset.train, partition.client_of, partition.indices, size=50
    )
    of = jax.jit(jax.vmap(style.of))
    found = jax.tree.map(
        lambda *parts: np.concatenate(parts), *(jax.device_get(of(x.inputs)) for x in seen)
    )
    sizes, first = partition.sizes, partition.offsets[:-1]
    if style.sent == "mean":
        there = sizes > 0
        sums = jax.tree.map(lambda x: np.add.reduceat(x.astype(np.float64), first[there]), found)
        mean = lambda x: (x / sizes[there].reshape(-1, *(1,) * (x.ndim - 1))).astype(np.float32)
        found, count = jax.tree.map(mean, sums), there.astype(int)
    elif style.sent == "even":
        place = np.arange(partition.indices.size) - np.repeat(first, sizes)
        found = jax.tree.map(lambda x: x[place % 2 == 0], found)
        count = (sizes + 1) // 2
    else:
        count = sizes
    if style.donors == "others" and np.count_nonzero(count) < 2:
        raise errors.UsageError(
            "data.style.donors = 'others' with one client that has images: there is nobody whose "
            "styles could be drawn. Expected two clients or more, or data.style.donors = 'all'."
        )
    starts = np.concatenate([[0], np.cumsum(count)[:-1]])
    return Bank(jax.tree.map(jnp.asarray, found), *(
        jnp.asarray(x, jnp.int32) for x in (starts, count)
    ))


def images_of(inputs: Any) -> Any:
    """The images of a batch, without whose they are."""
    return inputs["image"] if isinstance(inputs, dict) and "bank" in inputs else inputs


def drawn(key: jax.Array, own: Bank, client: jax.Array, donors: str) -> jax.Array:
    """The number of a style, each with the same chance."""
    first, count = own.first[client], own.counts[client]
    if donors == "all":
        return jax.random.randint(key, (), 0, own.size)
    i = jax.random.randint(key, (), 0, own.size - count)
    return jnp.where(i >= first, i + count, i)


def apply(style: Style, key: jax.Array, inputs: Any) -> Any:
    """The images, some of them restyled; all as they are, where nobody says whose they are."""
    images = images_of(inputs)
    if images is inputs:
        return images
    own, client = inputs["bank"], inputs["client"]

    def one(key, image, position):
        which = drawn(rng.fold(key, "donor"), own, client, style.donors)
        other = jax.tree.map(lambda x: x[which], own.styles)
        new = style.put(rng.fold(key, "strength"), image, other)
        return new if style.images == "all" else jnp.where(position % 2 == 0, new, image)

    keys = rng.fold_each(key, images.shape[0])
    return jax.vmap(one)(keys, images, inputs["position"])


def none(dataset: Dataset) -> None:
    """Images as they are."""
    del dataset


def fda(
    dataset: Dataset, *, window: int, strength: tuple[float, ...], images: str, donors: str
) -> Style:
    """The mean amplitudes of a client's images take the place of an image's own."""
    height, width = _image_shape("fda", dataset)[:2]
    made = _spectral(dataset, spectra.square(height, width, window), strength)
    return made._replace(images=images, donors=donors, sent="mean")


def cfsi(
    dataset: Dataset, *, band: float, rule: str, strength: tuple[float, ...], images: str,
    donors: str, sent: str,
) -> Style:
    """Amplitudes mixed with those of another client's image."""
    height, width = _image_shape("cfsi", dataset)[:2]
    made = _spectral(dataset, spectra.window(height, width, band, rule), strength)
    return made._replace(images=images, donors=donors, sent=sent)


def lab(dataset: Dataset, *, images: str, donors: str, sent: str) -> Style:
    """Mean and deviation of colours are another client's image's."""
    shape, largest = _image_shape("lab", dataset), dataset.max_value
    if shape[-1] != 3:
        raise errors.UsageError(
            f"data.style lab of images of shape {shape} ({dataset.name}): expected three channels."
        )
    unit = lambda image: image.astype(jnp.float32) / largest

    def put(key, image, style):
        del key
        return geometry.stored_as(largest * colour.moved(unit(image), style), image, largest)

    return Style(lambda image: colour.spread(unit(image)), put, images, donors, sent)


def _spectral(dataset: Dataset, low: spectra.Window, strength: tuple[float, ...]) -> Style:
    if len(strength) != 2 or not 0 <= strength[0] <= strength[1] <= 1:
        raise errors.UsageError(
            f"data.style.strength = {strength}: expected (low, high), 0 <= low <= high <= 1, "
            "e.g. (0.0, 1.0)."
        )

    def put(key, image, style):
        factor = jax.random.uniform(key, (), jnp.float32, *strength)
        new = spectra.restyled(image, style, low, factor)
        return geometry.stored_as(new, image, dataset.max_value)

    return Style(lambda image: spectra.amplitudes(image, low), put)


def _image_shape(name: str, dataset: Dataset) -> tuple[int, ...]:
    shape = dataset.input_shape
    if not isinstance(shape, tuple) or len(shape) != 3:
        raise errors.UsageError(
            f"data.style {name} of inputs of shape {shape} ({dataset.name}): expected images, "
            "(height, width, channels)."
        )
    return shape


# make(dataset, **settings) -> Style
STYLES: Registry[Entry] = Registry("data.style")
_IMAGES = Setting("even", "of a client, that are restyled", choices=("even", "all"))
_DONORS = Setting("others", "clients whose styles are drawn", choices=("others", "all"))
_SENT = Setting("all", "images whose styles are sent", choices=("all", "even"))
_STRENGTH = "of another's amplitudes, uniform in this range"
STYLES.add("none", entry(none))
STYLES.add("fda", entry(fda, {
    "window": Setting(3, "side of the window of low frequencies, odd", at_least=1),
    "strength": Setting((1.0, 1.0), _STRENGTH), "images": _IMAGES, "donors": _DONORS,
}))
STYLES.add("cfsi", entry(cfsi, {
    "band": Setting(0.05, "share of the image's sides that is low frequencies", above=0, at_most=1),
    "rule": Setting("half", "how band is meant: to each side of the constant, in all, or of the "
                    "smaller side", choices=spectra.RULES),
    "strength": Setting((0.0, 1.0), _STRENGTH), "images": _IMAGES, "donors": _DONORS,
    "sent": _SENT,
}))
STYLES.add("lab", entry(lab, {"images": _IMAGES, "donors": _DONORS, "sent": _SENT}))
