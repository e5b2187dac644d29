"""FedCG beside FedAvg on turned images: accuracy, and whether domains that are found are the turns.

    python benchmarks/fedcg.py --data FOLDER --out FOLDER [--options mnist] [--rounds 100]
        [--seeds 1]

Both methods have the cohorts, batches and network of configs/fedcg.py. Accuracy is the mean of the
last 5 rounds, and nothing is chosen by it. The turns are the clients', and nobody is told them:
`agreement` is the share of test images whose turn is the most frequent one of their domain, by the
student, and `information` the mutual information of both over the turns' entropy; 0.25 and 0 are
what chance has. Stop and repeat the command as you like: it goes on.
"""

import argparse
import pathlib
import runpy
import time

import jax
import jax.numpy as jnp
import numpy as np

import fedjax_flat as ff
from fedjax_flat.report import tables

CONFIG = pathlib.Path(__file__).parents[1] / "configs" / "fedcg.py"
TURNS = 4


def found_domains(run) -> np.ndarray:
    """The student's domain of every test image."""
    task, test = run.experiment.task, run.experiment.split("test")
    domains = []
    for start in range(0, len(test.labels), 500):
        x, y = (a[start : start + 500] for a in test)
        batch = task.prepare(ff.data.Batch(x, y, jnp.ones(len(y), bool)), None)
        # In training mode a network says what its classifiers of domains do.
        outputs = task.forward(run.model(), batch, jax.random.key(0))
        domains.append(np.asarray(outputs.auxiliary[-1].student.argmax(-1)))
    return np.concatenate(domains)


def compare(found: np.ndarray, true: np.ndarray) -> tuple[np.ndarray, float, float]:
    """(counts by turn and domain, agreement, information)."""
    counts = np.zeros((TURNS, found.max() + 1))
    np.add.at(counts, (true, found), 1)
    p = counts / counts.sum()
    rows, columns = p.sum(1, keepdims=True), p.sum(0, keepdims=True)
    there = p > 0
    mutual = (p[there] * np.log(p[there] / (rows * columns)[there])).sum()
    entropy = -(rows[rows > 0] * np.log(rows[rows > 0])).sum()
    return counts.astype(int), p.max(0).sum(), mutual / entropy


def main() -> None:
    """Trains both and prints the tables."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--data")
    parser.add_argument("--out", required=True)
    parser.add_argument("--options", default="mnist", help="of the config: digits,every=1")
    parser.add_argument("--rounds", type=int, default=100)
    parser.add_argument("--seeds", type=int, default=1)
    o = parser.parse_args()
    get_config, rows, shown = runpy.run_path(str(CONFIG))["get_config"], [], []
    for seed in range(o.seeds):
        for method in ("fedavg", "fedcg"):
            options = o.options if method == "fedcg" else o.options.split(",")[0]
            config = get_config(f"{options},method={method},rounds={o.rounds}")
            with config.unlocked():
                config.seed = seed
            folder, began = pathlib.Path(o.out) / f"{method}_{seed}", time.time()
            result = ff.train(config, folder, data_dir=o.data)
            if result.stopped_by or result.asked_to_stop:
                raise SystemExit("stopped; the same command goes on")
            last = [r["accuracy"] for r in result.records if r["split"] == "test"][-5:]
            seconds = f"{time.time() - began:.0f}"
            row = [method, str(seed), f"{100 * np.mean(last):.2f}", "", "", seconds]
            if method == "fedcg":
                run = ff.load_run(folder, o.data)
                found = found_domains(run)
                true = np.arange(len(found)) % run.experiment.data.num_clients % TURNS
                counts, agreement, information = compare(found, true)
                row[3:5] = f"{agreement:.2f}", f"{information:.2f}"
                shown.append((seed, counts, run.model()))
            rows.append(row)
            print(row, flush=True)
    print(tables.table(["method", "seed", "accuracy %", "agreement", "information", "s"], rows))
    for seed, counts, model in shown:
        rows_of = np.asarray(model.stats["domains"]["graph"])
        graph = "; ".join(" ".join(f"{x:.2f}" for x in row) for row in rows_of)
        scale = float(model.params["domains"]["classifier"]["scale"][0])
        print(f"seed {seed}: images by turn (rows) and domain {counts.tolist()}")
        print(f"seed {seed}: graph {graph}, lambda {scale:.2f}")


if __name__ == "__main__":
    main()
