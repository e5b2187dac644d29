"""What one client's update of a run weighs by every codec: by the three rules, and as real bytes.

The update is what FedAvg would send, the global model less the one with which the client ends the
next round. Codecs have the settings of the run's config. `lost` is ||x - y|| / ||x||, y what is
decoded.
"""

from collections.abc import Iterable

import jax
import jax.numpy as jnp
import numpy as np

from fedjax_flat import errors, wire
from fedjax_flat.experiment import usage
from fedjax_flat.report import tables
from fedjax_flat.run.restore import TrainedRun, load_run
from fedjax_flat.wire.pack import pack, unpack


def weigh(
    run: str, client: int = 0, codecs: Iterable[str] = (), data_dir: str | None = None
) -> str:
    """A table of these codecs, or of all, and why some do not fit the run's model."""
    codecs = tuple(codecs) or tuple(wire.CODECS)
    for name in codecs:
        wire.CODECS.find(name)
    trained = load_run(run, data_dir)
    update = update_of(trained, client)
    whole, rows, left_out = wire.bits_of(update) / 8, [], []
    length = lambda tree: np.sqrt(sum(float(jnp.vdot(x, x)) for x in tree.values()))
    for name in codecs:
        try:
            packet, decoded = _through(trained, name, update)
        except errors.UsageError as e:
            left_out.append(f"{name}: {e}")
            continue
        sizes = [wire.weigh(packet, rule) / 8 for rule in ("index", "word")]
        packed = len(pack(packet))
        lost = length({n: x - decoded[n] for n, x in update.items()}) / max(length(update), 1e-30)
        rows.append([name, *map(tables.bytes_of, (*sizes, packed)), f"{whole / packed:.4g}x",
                     f"{lost:.3f}"])
    header = ["codec", "index", "word", "packed", "factor", "lost"]
    text = tables.table(header, rows)
    return "\n".join([f"as it is: {tables.bytes_of(whole)}", "", text, *left_out])


def update_of(trained: TrainedRun, client: int) -> wire.Model:
    """One client's next difference, by name."""
    built, state = trained.experiment, trained.state
    count = built.data.num_clients
    if not 0 <= client < count:
        raise errors.UsageError(f"client {client} of {count}: expected 0 to {count - 1}.")
    place = built.over.replicate(jax.device_put(np.array([client], np.int32)))
    ended = built.local_models(state, built.data_of([client]), place)
    difference = jax.tree.map(lambda w, x: w - x[0], trained.model(), ended)
    return wire.floating(wire.models_in(difference)[""])


def _through(trained: TrainedRun, name: str, update: wire.Model):
    """(packet, decoded) of the codec of this name; its bytes are read back, too."""
    config = trained.experiment.config.copy_and_resolve_references()
    with config.unlocked():
        config.wire.up = name
    codec = usage.codec_of(config, "up")
    assert codec
    codec.init(update)
    packet, _ = jax.jit(codec.encode)(update, (), jax.random.key(config.seed))
    again = unpack(pack(packet), jax.eval_shape(lambda p: p, packet))
    return packet, codec.decode(again)
