"""What attacks cost FedAvg and FedSeq, with and without a trimmed mean: as table 5.5.

    python benchmarks/flips.py --out FOLDER                          # digits: minutes
    python benchmarks/flips.py --out FOLDER --dataset cifar10 --data FOLDER --rounds 1000

Labels: 0 and 2, 3 and 5 are swapped by a share L of the clients in a share L_S of the groups.
Models: a share of the members sends the opposite of what it has learned. A trimmed mean leaves out
--trim of a round's members at each end, rounded down and at least one. Goes on where it stopped;
--config.NAME=VALUE changes any setting of all runs.
"""

import argparse
import math
import pathlib

import fedjax_flat as ff
from fedjax_flat.config_files import load_config
from fedjax_flat.report import tables

CONFIGS = pathlib.Path(__file__).parents[1] / "configs"
ATTACKS = {
    "none": {},
    "labels .5 .5": {
        "data.shift.name": "swap_labels", "data.shift.swaps": "0-2,3-5", "data.shift.share": 0.5,
        "data.shift.of_groups": 0.5,
    },
    "labels 1 .5": {
        "data.shift.name": "swap_labels", "data.shift.swaps": "0-2,3-5", "data.shift.share": 0.5,
    },
    "sign .2": {"attack.share": 0.2},
}
MEMBERS = {"fedavg": 500, "fedseq": 50}  # clients, or groups, of CIFAR-10
RULES = {"mean": {}, "trimmed": {"server.aggregate": "trimmed_mean"}}


def main():
    """Trains what is missing and prints the table."""
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("--out", required=True)
    parser.add_argument("--dataset", default="digits", choices=["digits", "cifar10"])
    parser.add_argument("--data")
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--share", type=float, default=0.2, help="C, of cifar10")
    parser.add_argument("--trim", type=float, default=0.2)
    parser.add_argument("--attacks", nargs="+", default=[*ATTACKS], choices=[*ATTACKS])
    args, args.overrides = parser.parse_known_args()
    attacks = {n: w for n, w in ATTACKS.items() if n == "none" or n in args.attacks}
    rows = []
    for method in ("fedavg", "fedseq"):
        for rule, how in RULES.items():
            scores = [score(method, f"{rule} {attack}", how | what, args)
                      for attack, what in attacks.items()]
            drops = [f"{100 * s:.2f} ({100 * (s - scores[0]):+.2f})" for s in scores[1:]]
            rows.append([method, rule, f"{100 * scores[0]:.2f}", *drops])
    print(tables.table(["method", "mean", *attacks], rows, left=(0, 1)))


def score(method: str, name: str, settings: dict, args) -> float:
    """Test accuracy over the last rounds of one run."""
    config = start(method, args)
    config.update_from_flattened_dict(settings)
    if "trimmed" in name:
        members = math.floor(args.share * MEMBERS[method]) if args.dataset == "cifar10" else 10
        config.server.trim = max(1, math.floor(args.trim * members + 1e-9))
    config.rounds, config.eval.window = args.rounds, 5
    folder = pathlib.Path(args.out) / f"{args.dataset} {method} {name}".replace(" ", "_")
    result = ff.train(config, folder, data_dir=args.data, progress=False)
    if result.stopped_by:
        raise SystemExit("stopped; the same command goes on")
    return result.score(5)[0]


def start(method: str, args):
    """Clients that have all classes, in groups of four or, on CIFAR, of ten."""
    if args.dataset == "cifar10":
        text = f"cifar10,alpha=100,method={method},grouping=random,share={args.share}"
        return load_config(f"{CONFIGS / 'fedseq.py'}:{text}", args.overrides, None)
    config = load_config(None, args.overrides, None)
    config.algorithm.name, config.partition.name, config.partition.clients = method, "iid", 40
    config.client.learning_rate, config.eval.every, config.checkpoint.every = 0.05, 100, 100
    if method == "fedseq":
        config.groups.clients = 4
    return config


if __name__ == "__main__":
    main()
