"""FedDrive's and FedSAM's methods on CamVid by drive: mIoU on drives that are trained on, and not.

    python benchmarks/camvid.py --data FOLDER --out runs/camvid
    python benchmarks/camvid.py --data FOLDER --out runs/camvid --keep docs/results/camvid

configs/feddrive.py in the small: BiSeNetV2 a quarter as wide, without auxiliary heads, crops of
96x128 pixels, batches of 4, 6 local steps, 4 of 12 clients a round. SAM's rho is 0.01, ASAM's 0.1
and eta 0.2; SWA starts at 75 % of the rounds and has cycles of 5, as FedSAM has it on Cityscapes.
Those with SWA branch off those without, at 5/8 of the rounds. Stopped, the same command goes on.
--full is the config as it is.

Prints mIoU, mean and deviation over the last twenty rounds; --keep copies config.json and, of
metrics.jsonl, what is of evaluations.
"""

import argparse
import json
import pathlib
import runpy
import shutil
import statistics
import time

import fedjax_flat as ff
from fedjax_flat.report import tables
from fedjax_flat.run import metrics

CONFIG = pathlib.Path(__file__).parents[1] / "configs" / "feddrive.py"
METHODS = {  # options of the config, sharpness
    "fedavg": ("method=fedavg", "none"),
    "silobn": ("method=silobn", "none"),
    "fedbn": ("method=fedbn", "none"),
    "silobn+cfsi": ("method=silobn,style=cfsi", "none"),
    "silobn+lab": ("method=silobn,style=lab", "none"),
    "fedsam": ("method=fedavg", "sam"),
    "fedasam": ("method=fedavg", "asam"),
    "silobn+asam": ("method=silobn", "asam"),
    "fedavg+swa": ("method=fedavg", "none"),
    "fedasam+swa": ("method=fedavg", "asam"),
    "silobn+asam+swa": ("method=silobn", "asam"),
}
RADII = {"sam": 0.01, "asam": 0.1}
SPLITS = ("seen", "unseen")
LAST = 20  # rounds


def main():
    """Trains what is missing, then prints the table."""
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("--data", required=True)
    parser.add_argument("--out", required=True)
    parser.add_argument("--rounds", type=int, default=200)
    parser.add_argument("--minutes", type=float, default=float("inf"),
                        help="begin no run after so many")
    parser.add_argument("--full", action="store_true")
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=METHODS)
    parser.add_argument("--keep", help="copy configs and evaluations there; train nothing")
    args = parser.parse_args()
    began, found = time.monotonic(), {}
    for method in args.methods:
        folder = pathlib.Path(args.out) / method.replace("+", "_")
        if args.keep:
            if folder.is_dir():
                keep(folder, pathlib.Path(args.keep) / folder.name)
                found[method] = metrics.read(folder / "metrics.jsonl")
            continue
        if time.monotonic() - began > 60 * args.minutes:
            break
        config, begin = config_of(method, args), None
        if "swa" in method:
            begin = f"{str(folder).removesuffix('_swa')}@{5 * config.eval.every}"
        result = ff.train(config, folder, start_from=begin, data_dir=args.data, progress=False)
        found[method] = result.records
        print(table({method: result.records}), flush=True)
        if result.stopped_by:
            return
    print(table(found), flush=True)


def config_of(method: str, args):
    """One run's config: the method's own part, and the size of all."""
    options, sharpness = METHODS[method]
    small = "" if args.full else ",width=0.25"
    config = runpy.run_path(str(CONFIG))["get_config"](
        f"camvid,clients=drive,rounds={args.rounds},{options}{small}"
    )
    config.client.sharpness = sharpness
    if sharpness != "none":
        config.client.rho, config.client.eta = RADII[sharpness], 0.2
    if "swa" in method:
        config.server.average = "swa"
        config.server.swa.start, config.server.swa.cycle = 3 * args.rounds // 4, 5
    if not args.full:
        config.model.auxiliary = False
        config.data.crop = (96, 128)
        config.client.batch_size, config.client.steps, config.client.epochs = 4, 6, 1
        config.cohort.size = 4
        config.eval.batch_size = 4
    config.eval.splits, config.eval.every = SPLITS, max(1, args.rounds // 8)
    config.eval.window, config.checkpoint.every = LAST, config.eval.every
    config.checkpoint.keep = 8
    return ff.only_used(config)


def table(found) -> str:
    """mIoU by method, model and split, over the last rounds."""
    rows = []
    for method, records in found.items():
        for model in dict.fromkeys(r["model"] for r in records):
            last = {s: [100 * r["miou"] for r in records if (r["model"], r["split"]) == (model, s)]
                    for s in SPLITS}
            if all(last.values()):
                done = max(r["round"] for r in records)
                cell = lambda m: f"{statistics.mean(m):.2f} ± {statistics.pstdev(m):.2f}"
                rows.append([method, model, str(done), *(cell(m[-LAST:]) for m in last.values())])
    return tables.table(["method", "model", "round", *(f"{s} (%)" for s in SPLITS)], rows,
                        left=(0, 1))


def keep(folder: pathlib.Path, kept: pathlib.Path) -> None:
    """Copies what a reader of the table may want to check."""
    kept.mkdir(parents=True, exist_ok=True)
    shutil.copyfile(folder / "config.json", kept / "config.json")
    lines = (folder / "metrics.jsonl").read_text().splitlines(keepends=True)
    wanted = [line for line in lines if json.loads(line)["split"] in (*SPLITS, "local_test")]
    (kept / "metrics.jsonl").write_text("".join(wanted))


if __name__ == "__main__":
    main()
