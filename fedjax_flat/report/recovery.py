"""What a client could recover of the others' images from a run's model, by a GAN (attacks/gan.py).

Fig. 5.12 of Caldarola's thesis: the Frechet distance of the recovered images, the higher the safer.

The distance is between the recovered images and train images of all other clients, in the features
that the classifier of a named network reads: of another run (`by`), best one trained on all data,
since a distance in the features of the attacked model itself would flatter it. The thesis has
InceptionV3's; distances by different networks cannot be compared, so the network is in the result.
"""

import json
import pathlib
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from fedjax_flat import data as data_lib
from fedjax_flat import errors, rng
from fedjax_flat.attacks import frechet, recover
from fedjax_flat.disk import write_atomically
from fedjax_flat.experiment import config as config_lib
from fedjax_flat.report import pictures
from fedjax_flat.run.restore import TrainedRun, load_run


def recovery(
    run: str,
    *,
    by: str,
    client: int = 0,
    steps: int = 2000,
    count: int = 1000,
    guided: float = 1.0,
    train: str = "layer",
    model: str = "global",
    round: int | None = None,
    data_dir: str | None = None,
) -> dict[str, Any]:
    """Attacks a run's model; a JSON file and a picture go into the run's folder."""
    errors.at_least("--count", count, 2)
    trained, judge = load_run(run, data_dir, round=round), load_run(by, data_dir)
    built, variables = trained.experiment, trained.model(model)
    dataset = _images(trained, data_dir)
    owners = built.partition
    if not 0 <= client < owners.num_clients:
        raise errors.UsageError(
            f"--client {client} of {owners.num_clients}: expected 0 to {owners.num_clients - 1}."
        )
    mine = owners.client(client)
    if not len(mine):
        raise errors.UsageError(f"--client {client} has no examples: choose another attacker.")
    inputs = np.asarray(dataset.train.inputs)
    others = np.setdiff1d(np.arange(len(inputs)), mine)
    if len(others) < 2:
        raise errors.UsageError("nobody else has images to recover: expected two clients or more.")
    key = rng.fold(jax.random.key(built.config.seed), "recovery", client)
    found = recover(
        _look(trained), variables, inputs[mine], steps=steps, key=key, guided=guided, train=train,
        largest=dataset.max_value,
    )
    made = found.images(count)
    chosen = np.asarray(jax.random.permutation(rng.fold(key, "others"), len(others)))[:count]
    real = inputs[others[chosen]].astype(np.float32)
    half = len(real) // 2
    look, watching = _look(judge), judge.model("global")
    features = jax.jit(lambda x: look(watching, x).features)
    of = lambda x: np.concatenate([np.asarray(features(jnp.asarray(part)))
                                   for part in np.array_split(x, max(1, len(x) // 250))])
    seen = of(real)
    result = {
        "run": str(run), "model": model, "round": int(trained.state.round), "client": client,
        "steps": steps, "guided": guided, "train": train, "images": count,
        "network": f"{judge.experiment.config.model.name} of {by}",
        "frechet": frechet(of(made), seen),
        "frechet_of_others": frechet(seen[:half], seen[half:]),
        "discriminator_loss": float(found.discriminator[-100:].mean()),
        "generator_loss": float(found.generator[-100:].mean()),
    }
    name = f"{model}_round{result['round']}_client{client}"
    base = trained.folder.path / "recovery" / name
    base.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(base.with_suffix(".json"), json.dumps(result, indent=2) + "\n")
    figure = draw(made, real, dataset.max_value, base.with_suffix(".png"))
    return result | {"figure": str(figure)}


def draw(made: np.ndarray, real: np.ndarray, largest: float, path: pathlib.Path) -> pathlib.Path:
    """Recovered images above, the others' below."""
    columns, rows = 12, 3
    figure, axes = pictures.new_figure(2, 1, (columns * 0.75, 2 * rows * 0.85))
    titles = "recovered", "the other clients'"
    for ax, images, title in zip(axes, (made, real), titles, strict=True):
        shown = np.zeros((rows * columns, *images.shape[1:]), np.float32)
        part = images[: rows * columns]
        shown[: len(part)] = part
        edge = ((0, 0), (1, 1), (1, 1), (0, 0))
        shown = np.pad(shown, edge, constant_values=largest)  # digits would run into each other
        height, width, channels = shown.shape[1:]
        grid = shown.reshape(rows, columns, height, width, channels).swapaxes(1, 2)
        grid = np.clip(grid.reshape(rows * height, columns * width, channels) / largest, 0, 1)
        ax.imshow(grid if channels == 3 else grid[..., 0], cmap=None if channels == 3 else "gray")
        ax.set_title(title, fontsize=10)
        ax.axis("off")
    return pictures.save(figure, path)


def _look(trained: TrainedRun):
    """What the run's network says of stored images."""
    preprocess, network = trained.experiment.network.preprocess, trained.experiment.network.model

    def look(variables, images):
        mask = jnp.ones(images.shape[0], bool)
        batch = preprocess.apply(data_lib.Batch(images, (), mask), None)
        return network.apply(variables, batch.inputs)

    return look


def _images(trained: TrainedRun, data_dir: str | None) -> data_lib.Dataset:
    config = trained.experiment.config
    source = data_lib.SOURCES.find(config.data.name)
    options = config_lib.options_of(config, "data", source)
    dataset = data_lib.load(config.data.name, data_dir, **options)
    if config.data.features or np.ndim(dataset.train.inputs) != 4:
        raise errors.UsageError(
            f"{trained.folder.path} was not trained on images: expected inputs of (height, width, "
            "channels), and a run without data.features."
        )
    return dataset
