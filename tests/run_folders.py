"""Run folders without training, for the tests of what is made of them."""

import json
import pathlib

import numpy as np
from conftest import small_config

from fedjax_flat.data import Partition
from fedjax_flat.experiment import config as config_lib
from fedjax_flat.report import results

CLIENTS, CLASSES = 20, 10


def write(
    folder, *, rounds=12, every=3, level=0.8, score="accuracy", settings=None, clients=True,
    clock=0, more=(),
):
    """A run whose score climbs to `level`; `settings` with `__` for the dot."""
    folder = pathlib.Path(folder)
    folder.mkdir(parents=True)
    config = small_config(rounds=max(rounds, 1), eval__every=every, **(settings or {}))
    (folder / "config.json").write_text(config_lib.to_json(config))
    draws = np.random.default_rng(config.seed)
    lines, each = [], []
    for t in range(rounds + 1):
        if t:
            lines.append({
                "round": t, "split": "cohort", "model": "local", "loss": 1 / t, score: 0.5,
                "drift": 1 + draws.normal() / 9, "norm": 5 + t / rounds, "clients": 2,
                "examples": 100, "examples_per_s": 50.0, "bytes_down": 1000, "bytes_up": 1000,
                "flops": 1e6, **({"seconds": clock} if clock else {}),
            })
        if t % every == 0 or t > rounds - config.eval.window:
            value = level * (1 - np.exp(-4 * t / max(rounds, 1))) + draws.normal() / 200
            lines.append({"round": t, "split": "test", "model": "global", "loss": 2 - value,
                          score: float(value), **{name: 0.5 for name in more}})
            if clients:
                scores = np.clip(value + draws.normal(size=CLIENTS) / 9, 0, 1).tolist()
                lines.append({"round": t, "split": "own", "model": "global", "loss": 2 - value,
                              score: float(value), "fairness.worst": min(scores),
                              "fairness.deviation": float(np.std(scores))})
                each.append({"round": t, "split": "own", "model": "global", "score": scores,
                             "loss": scores})
    dump = lambda records: "".join(json.dumps(r) + "\n" for r in records)
    (folder / "metrics.jsonl").write_text(dump(lines))
    if clients:
        (folder / "clients.jsonl").write_text(dump(each))
    Partition.of(np.arange(1437)[k::CLIENTS] for k in range(CLIENTS)).save(folder / "partition.npz")
    (folder / "environment.json").write_text(json.dumps({
        "versions": {"jax": "0.10.2"}, "git": "abc", "devices": ["cpu:cpu"],
        "commands": [{"time": "2026-11-18", "command": "fedjax-flat train --run X"}],
    }))
    return str(folder)


def write_analyses(folder, others=()):
    """A spectrum with its density, a surface and a plane, as the commands leave them."""
    folder = pathlib.Path(folder)
    x = np.linspace(-1, 1, 7)
    bowl = np.exp(3 * (x[:, None] ** 2 + x**2))
    (folder / "curvature").mkdir()
    (folder / "landscape").mkdir()
    common = {"run": str(folder), "model": "global", "split": "train", "examples": 50, "round": 12}
    results.save(folder / "curvature" / "global_train50_lanczos5", {
        "eigenvalues": np.array([5.0, 3, 2, 1, 0.5]), "residuals": np.zeros(5),
        "estimates": np.zeros(5), "converged": np.array([True] * 4 + [False]),
        "nodes": np.tile(np.linspace(-1, 5, 8), (2, 1)), "weights": np.full((2, 8), 1 / 8),
    }, common | {"loss": 0.5, "lambda_1": 5.0, "lambda_1/lambda_5": 10.0, "converged": 4, "top": 5})
    grid = {"x": x, "y": x, "loss": bowl, "error": np.minimum(bowl, 1)}
    results.save(folder / "landscape" / "surface_global_train50_7x7_r1_s0", grid,
                 common | {"radius": 1.0, "points": 7, "seed": 0})
    if others:
        runs = [str(folder), *map(str, others)]
        results.save(folder / "landscape" / "plane_a_b_c_train50", grid, common | {
            "runs": runs, "coordinates": [[0, 0], [0.5, 0], [0.2, 0.7]], "points": 7})
