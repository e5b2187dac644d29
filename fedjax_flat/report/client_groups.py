"""Groups of clients as tables and figures: Caldarola 2024, figures 5.6 and 5.8 to 5.11.

    similarity   D_ij = cos(w_i, w_j) of clients' estimates after e epochs; ||D|| against e (5.8)
    distances    between clients' estimates, clients ordered by their largest class (5.10), and
                 their silhouette by it
    embeddings   the estimates' first two principal components, coloured by class
    growth       how many groups there are by round (5.11)
    reach        rounds to 70 % and 90 % of the centralised score (5.6)
    by_messages  the score by the models that were sent: down, up and from client to client
"""

import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from fedjax_flat import data as data_lib
from fedjax_flat import errors
from fedjax_flat import groups as groups_lib
from fedjax_flat.experiment import usage
from fedjax_flat.report import pictures, tables
from fedjax_flat.report.groups import grouped, read
from fedjax_flat.run import metrics
from fedjax_flat.run.restore import load_run
from fedjax_flat.run.run_folder import RunFolder

SHARES = (0.7, 0.9)


def groups(run: str, data_dir: str | None = None) -> str:
    """Who trains with whom in a run: a table of its groups, and the figures."""
    built, folder = load_run(run, data_dir).experiment, RunFolder(run)
    if built.grouping is None:
        raise errors.UsageError(
            f"{run} was trained with {built.config.algorithm.name}, which has no groups: expected "
            "fedseq, fedseq2par, fedasyncseq or hierfavg."
        )
    made, first = built.grouping, built.grouping.at(0)
    labels = np.asarray(built.data.examples.labels)
    counts = data_lib.class_counts(built.partition, labels, int(labels.max()) + 1)
    drawn = groups_lib.build(
        "random", made.sizes, made.limits._replace(groups=first.num_clients), seed=1
    )
    header = ["groups", "number", "clients", "examples", "classes", "imbalance"]
    text = tables.table(header, [
        [name, *_facts(found, counts)] for name, found in (("here", first), ("random", drawn))
    ])
    if len(made.starts) > 1:
        stages = {pictures.label(run): (made.starts, made.counts, built.config.rounds)}
        text += "\n" + tables.named("figure", growth(stages, folder.figures / "growth.png"))
    if made.estimates is not None:
        metric = built.config.groups.metric if built.config.groups.name == "greedy" else "euclidean"
        path = folder.figures / "distances.png"
        classes = counts.argmax(axis=1)
        text += "\n" + tables.named("figure", distances(made.estimates, classes, metric, path))
        if len(set(classes)) > 1:
            apart = groups_lib.silhouette(groups_lib.distances(metric, made.estimates), classes)
            text += f"\nsilhouette by largest class: {apart:.3f} ({metric})"
        rows = {usage.estimator_of(built.config): made.estimates}
        path = folder.figures / "embeddings.png"
        text += "\n" + tables.named("figure", embeddings(rows, classes, path))
        ordered = made.estimates[np.argsort(classes, kind="stable")]
        matrices = {built.config.groups.epochs: similarities(ordered)}
        path = folder.figures / "similarity.png"
        text += "\n" + tables.named("figure", similarity(matrices, path))
    return text


def _facts(found: data_lib.Partition, counts: np.ndarray) -> list[str]:
    """How large groups are, and how far their classes are from those of all clients."""
    each = np.add.reduceat(counts[found.indices], found.offsets[:-1], axis=0)
    whole = counts.sum(axis=0) / counts.sum()
    shares = each / np.maximum(each.sum(axis=1, keepdims=True), 1)
    away = 0.5 * np.abs(shares - whole).sum(axis=1).mean()  # total variation
    between = lambda x: f"{x.min()} to {x.max()}"
    return [str(found.num_clients), between(found.sizes), between(each.sum(axis=1)),
            f"{(each > 0).sum(axis=1).mean():.2f}", f"{away:.3f}"]


def similarities(rows: np.ndarray) -> np.ndarray:
    """cos(w_i, w_j)."""
    lengths = np.linalg.norm(rows, axis=1, keepdims=True)
    units = rows / np.where(lengths > 0, lengths, 1)
    return units @ units.T


def similarity(matrices: Mapping[int, np.ndarray], path: Any) -> pathlib.Path:
    """Heat maps by epochs of clients ordered by class, and their norms if there are several."""
    panels = len(matrices) + (len(matrices) > 1)
    figure, axes = pictures.new_figure(1, panels, (3.6 * panels, 3.2))
    for ax, (epochs, matrix) in zip(axes, matrices.items(), strict=False):
        shown = ax.imshow(matrix, cmap="RdBu_r", vmin=-1, vmax=1)
        ax.set(xlabel="client, by its largest class", ylabel="client")
        ax.set_title(f"cosine after {epochs} epochs", fontsize=10)
        figure.colorbar(shown, ax=ax)
    if len(matrices) > 1:
        axes[-1].plot(list(matrices), [np.linalg.norm(m) for m in matrices.values()], "o-")
        axes[-1].set(xlabel="epochs", ylabel=r"$\|D\|$")
    return pictures.save(figure, path)


def distances(
    rows: np.ndarray, classes: np.ndarray, metric: str, path: Any
) -> pathlib.Path:
    """Between all clients, ordered by class; lines between classes if they are few."""
    order = np.argsort(classes, kind="stable")
    figure, (ax,) = pictures.new_figure(1, 1, (4.6, 4))
    found = groups_lib.distances(metric, rows[order])
    shown = ax.imshow(np.where(np.isfinite(found), found, np.nan), cmap="viridis")
    figure.colorbar(shown, ax=ax, label=f"{metric} distance")
    ends = np.flatnonzero(np.diff(classes[order])) + 0.5
    if len(ends) < 30:
        for end in ends:
            ax.axhline(end, color="white", linewidth=0.4)
            ax.axvline(end, color="white", linewidth=0.4)
    ax.set(xlabel="client, by its largest class", ylabel="client")
    return pictures.save(figure, path)


def embeddings(
    rows: Mapping[str, np.ndarray], classes: np.ndarray, path: Any, names: Sequence[str] = ()
) -> pathlib.Path:
    """Clients in the plane of two principal components, one panel per estimator."""
    figure, axes = pictures.new_figure(1, len(rows), (3.4 * len(rows), 3.4))
    for ax, (title, estimates) in zip(axes, rows.items(), strict=True):
        left, values, _ = np.linalg.svd(estimates - estimates.mean(axis=0), full_matrices=False)
        places = np.zeros((len(estimates), max(2, len(values))))
        places[:, : len(values)] = left * values
        shown = ax.scatter(*places[:, :2].T, c=classes, cmap="turbo", s=12)
        ax.set_title(title, fontsize=10)
        ax.set(xlabel="first component", ylabel="second component")
    if names:
        handles = shown.legend_elements()[0]
        figure.legend(handles, names, frameon=False, ncols=len(names), loc="outside lower center")
    return pictures.save(figure, path)


def growth(
    stages: Mapping[str, tuple[np.ndarray, np.ndarray, int]], path: Any
) -> pathlib.Path:
    """The number of groups by round; of each label, (starts, counts, rounds)."""
    figure, (ax,) = pictures.new_figure(1, 1, (5, 3.4))
    for label, (starts, counts, rounds) in stages.items():
        ax.step([*(starts + 1), rounds], [*counts, counts[-1]], where="post", label=label)
    ax.set(xlabel="round", ylabel="groups", ylim=(0, None))
    ax.legend(frameon=False)
    return pictures.save(figure, path)


def reach(
    runs: Sequence[str], centralised: float, figure: str | None = None, split: str = "test"
) -> str:
    """Rounds and messages to 70 % and 90 % of a centralised score, in percent.

    Of seeds, the mean over those that get there.
    """
    errors.positive("--centralised", centralised)
    rows: list[list[str]] = []
    found: dict[str, list[float | None]] = {}
    for group in grouped([read(run) for run in runs]):
        reached, rounds = [], []
        for share in SHARES:
            of_seeds = [(r.records, metrics.rounds_to(
                r.records, share * centralised / 100, split=split)) for r in group.runs]
            there = [(t, messages(records, t)) for records, t in of_seeds if t is not None]
            some = "" if len(there) == len(of_seeds) else f" ({len(there)} of {len(of_seeds)})"
            means = np.mean(there, axis=0).tolist() if there else None
            rounds.append(means[0] if means else None)
            reached.append([f"{m:.0f}{some}" for m in means] if means else ["-", "-"])
        found[group.label] = rounds
        rows.append([group.label, *(r for r, _ in reached), *(m for _, m in reached)])
    by = [f"{100 * share:.0f} %" for share in SHARES]
    header = ["run", *(f"rounds to {b}" for b in by), *(f"messages to {b}" for b in by)]
    text = tables.table(header, rows)
    return text if figure is None else f"{text}\n{tables.named('figure', bars(found, figure))}"


def bars(found: Mapping[str, Sequence[float | None]], path: Any) -> pathlib.Path:
    """Rounds to both shares, side by side; nothing where a run did not get there."""
    figure, (ax,) = pictures.new_figure(1, 1, (1.2 + 1.1 * len(found), 3.4))
    for i, share in enumerate(SHARES):
        heights = [r[i] or 0 for r in found.values()]
        places = np.arange(len(found)) + 0.4 * i
        ax.bar(places, heights, 0.38, label=f"{100 * share:.0f} %")
        for place, height in zip(places, heights, strict=True):
            if not height:
                ax.text(place, 0, "not yet", rotation=90, ha="center", va="bottom", fontsize=8)
    ax.set_xticks(np.arange(len(found)) + 0.2, list(found))
    ax.set(ylabel="rounds to a share of the centralised score")
    ax.legend(frameon=False)
    return pictures.save(figure, path)


def messages(records: list[dict], last_round: int | None = None) -> int:
    """Models sent, down, up and between clients, in all rounds or up to `last_round`."""
    return sum(
        2 * r["clients"] + r.get("links", 0)
        for r in records
        if r["split"] == "cohort" and (last_round is None or r["round"] <= last_round)
    )


def by_messages(runs: Mapping[str, list[dict]], path: Any, split: str = "test") -> pathlib.Path:
    """The score of every run by the models that were sent."""
    figure, (ax,) = pictures.new_figure(1, 1, (5.5, 3.6))
    for label, records in runs.items():
        rounds, values = metrics.curve(records, split=split)
        ax.plot([messages(records, t) for t in rounds], 100 * values, label=label, linewidth=1.5)
    ax.set(xlabel="messages (models sent)", ylabel=f"{split} score (%)")
    ax.grid(alpha=0.25)
    ax.legend(frameon=False)
    return pictures.save(figure, path)
