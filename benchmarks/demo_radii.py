"""How the demo's radii were chosen: accuracy on a validation part, never on the test set.

    python benchmarks/demo_radii.py        (four minutes on two cores)
"""

import pathlib
import tempfile

import numpy as np

import fedjax_flat as ff
from fedjax_flat import demo

RADII = {"sam": (0.05, 0.1, 0.2, 0.5), "asam": (0.25, 0.5, 1.0, 2.0)}


def validation_accuracy(sharpness: str, rho: float, seed: int, folder: pathlib.Path) -> float:
    """Mean over the last rounds of a run of the demo that trains without a fifth of its data."""
    config = demo.demo_config(sharpness, rho, "none", rounds=300, seed=seed)
    config.data.validation, config.eval.splits = 0.2, ("validation",)
    result = ff.train(config, folder / f"{sharpness}_{rho}_{seed}", progress=False)
    return result.score(demo.WINDOW, split="validation")[0]


def main() -> None:
    """Prints mean and deviation over three seeds for every radius."""
    with tempfile.TemporaryDirectory() as folder:
        for sharpness, radii in RADII.items():
            for rho in radii:
                found = 100 * np.array([
                    validation_accuracy(sharpness, rho, seed, pathlib.Path(folder))
                    for seed in range(3)
                ])
                print(f"{sharpness} {rho:g}: {found.mean():.2f} ± {found.std():.2f} %", flush=True)


if __name__ == "__main__":
    main()
