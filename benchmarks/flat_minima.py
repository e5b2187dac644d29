"""FedAvg, FedSAM and FedASAM, each with and without SWA, on CIFAR-10 with the same cohorts.

    python benchmarks/flat_minima.py --data FOLDER --out FOLDER [--rounds 160]

Every run has the hyper-parameters of configs/fedsam.py (alpha = 0.05, the released split, 10
clients per round). SWA changes nothing before it starts at 75 % of the rounds, so the runs with
it branch off the ones without it a cycle earlier. Stop and repeat the command as you like: it goes
on. Prints the table of the last rounds and draws the curves.
"""

import argparse
import json
import pathlib
import runpy
import shutil

import fedjax_flat as ff
from fedjax_flat.engine.checkpoint import Checkpoints
from fedjax_flat.engine.run_folder import RunFolder
from fedjax_flat.report import figures, tables

METHODS = {"FedAvg": "fedavg", "FedSAM": "fedsam", "FedASAM": "fedasam"}
CONFIGS = runpy.run_path(str(pathlib.Path(__file__).parents[1] / "configs" / "fedsam.py"))


def main():
    """Trains what is missing and reports."""
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("--data", required=True, help="folder of CIFAR-10 and fedsam-splits.npz")
    parser.add_argument("--out", required=True, help="folder for the runs")
    parser.add_argument("--rounds", type=int, default=160)
    parser.add_argument("--window", type=int, default=20)
    args = parser.parse_args()
    runs = {}
    for label, method in METHODS.items():
        for suffix, result in pair(args, method).items():
            runs[label + suffix] = result
    report(args, runs)


def pair(args, method):
    """The method alone and with SWA."""
    folder = pathlib.Path(args.out) / method
    with_swa = folder.with_name(f"{method}_swa")
    plain, averaged = config(args, method, ""), config(args, method, ",swa")
    branch_at = (ff.config.swa_start(averaged) - 1) // 10 * 10
    if not RunFolder(with_swa).config_file.exists():
        plain.rounds, plain.eval.window = branch_at, 1
        train(args, plain, folder)
        branch(args, plain, folder, averaged, with_swa)
    plain = config(args, method, "")
    return {"": train(args, plain, folder), " + SWA": train(args, averaged, with_swa)}


def config(args, method, swa):
    """configs/fedsam.py, shorter."""
    c = CONFIGS["get_config"](f"cifar10,alpha=0.05,cohort=10,method={method},released{swa}")
    c.rounds, c.eval.window, c.eval.every, c.checkpoint.every = args.rounds, args.window, 10, 10
    return c


def train(args, c, folder):
    """Trains, or goes on."""
    result = ff.train(c, folder, data_dir=args.data)
    if result.stopped_by:
        raise SystemExit(f"Stopped; the same command goes on. Runs: {args.out}")
    return result


def branch(args, old, old_folder, new, folder):
    """A run folder of config `new` whose newest checkpoint is that of `old_folder`."""
    before, after = ff.build(old, args.data), ff.build(new, args.data)
    checkpoints = Checkpoints(RunFolder(old_folder).checkpoints)
    done, state = checkpoints.restore(before.init())
    checkpoints.close()
    target = RunFolder(folder)
    target.open(new, after.partition)
    checkpoints = Checkpoints(target.checkpoints)
    checkpoints.save(done, state._replace(averages=after.init().averages))
    checkpoints.close()
    shutil.copy(RunFolder(old_folder).metrics_file, target.metrics_file)
    target.record(new, after.partition)


def report(args, runs):
    """Table and figure."""
    rows, found = [], {}
    for label, result in runs.items():
        model = "swa" if "SWA" in label else "global"
        accuracy = result.accuracy(args.window, model=model)
        loss = result.accuracy(args.window, model=model, name="loss")[0]
        rows.append([label, tables.percent(*accuracy[:2]), f"{loss:.3f}"])
        found[label] = {"mean": accuracy[0], "deviation": accuracy[1], "loss": loss}
    print(f"\nCIFAR-10, alpha = 0.05, 10 of 100 clients per round; mean ± deviation over the last "
          f"{args.window} of {args.rounds} rounds\n")
    print(tables.table(["method", "test accuracy (%)", "test loss"], rows))
    out = pathlib.Path(args.out)
    (out / "table.json").write_text(json.dumps(found, indent=2) + "\n")
    curves = {}
    for label, result in runs.items():
        model = "swa" if "SWA" in label else "global"
        curves[label] = [[r for r in result.records if r["model"] in (model, "local")]]
    print(f"figure: {figures.accuracy_curves(curves, out / 'accuracy.png')}")


if __name__ == "__main__":
    main()
