"""How a model does on each client's examples along the rounds: forgetting, norms, fairness.

Of runs with `eval.clients`: heat maps of every client's score and output norm by round (Caldarola
2024, figures 4.2 and 4.3), and the spread of scores over clients by round.
"""

import pathlib

import numpy as np

from fedjax_flat import errors
from fedjax_flat.report import pictures, tables
from fedjax_flat.run import metrics
from fedjax_flat.run.run_folder import RunFolder


def clients(run: str, split: str = "own", model: str = "global") -> str:
    """A table of the last evaluation's spread, and the figure."""
    folder = RunFolder(run)
    folder.check_is_one()
    records = metrics.read(folder.clients_file)
    found = [r for r in records if (r["split"], r["model"]) == (split, model)]
    if not found:
        has = sorted({f"--split {r['split']} --model {r['model']}" for r in records})
        raise errors.UsageError(
            f"{run} has no scores of {model} models on clients' {split} examples: "
            + (f"it has {', '.join(has)}." if has else "train it with --config.eval.clients=True.")
        )
    values: dict[str, np.ndarray] = {
        name: np.array([r[name] for r in found], float)
        for name in ("score", "loss", "output_norm") if name in found[0]
    }
    rounds = [r["round"] for r in found]
    path = draw(rounds, values, folder.figures / f"clients_{split}_{model}.png")
    rows = [
        [str(rounds[i]), *(f"{100 * q:.2f}" for q in _quantiles(values["score"][i])),
         f"{np.nanmean(values['loss'][i]):.4f}"]
        for i in np.unique(np.linspace(0, len(rounds) - 1, 8).astype(int))
    ]
    header = ["round", "worst", "10 %", "median", "90 %", "mean loss"]
    return f"{tables.table(header, rows, left=())}\n{tables.named('figure', path)}"


def draw(rounds: list[int], values: dict[str, np.ndarray], path: pathlib.Path) -> pathlib.Path:
    """Heat maps, clients down and rounds across, and the quantiles of the score."""
    maps = [name for name in ("score", "output_norm") if name in values]
    figure, axes = pictures.new_figure(1, len(maps) + 1, (4.2 * (len(maps) + 1), 3.6))
    titles = {"score": "score of each client (%)", "output_norm": "norm of the outputs"}
    edges = np.append(rounds, rounds[-1] + (rounds[-1] - rounds[-2] if len(rounds) > 1 else 1))
    for ax, name in zip(axes, maps, strict=False):
        shown = values[name].T * (100 if name == "score" else 1)
        mesh = ax.pcolormesh(edges, np.arange(shown.shape[0] + 1), shown, rasterized=True)
        figure.colorbar(mesh, ax=ax)
        ax.set(xlabel="round", ylabel="client")
        ax.set_title(titles[name], fontsize=10)
    spread = 100 * np.array([_quantiles(row) for row in values["score"]])
    last = axes[-1]
    last.fill_between(rounds, spread[:, 1], spread[:, 3], alpha=0.25, label="10 to 90 %")
    last.plot(rounds, spread[:, 2], label="median")
    last.plot(rounds, spread[:, 0], ":", label="worst")
    last.set(xlabel="round", ylabel="score (%)")
    last.grid(alpha=0.25)
    last.legend(frameon=False)
    return pictures.save(figure, path)


def _quantiles(scores: np.ndarray) -> np.ndarray:
    return np.nanquantile(scores, [0, 0.1, 0.5, 0.9])
