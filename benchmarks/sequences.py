"""FedAvg, FedSeq with three groupings and FedSeq2Par at equal messages, on CIFAR.

    python benchmarks/sequences.py --data FOLDER --out FOLDER [--rounds 100] [--clients 500]
    python benchmarks/sequences.py --cost       # a group of 11 beside 11 clients: a minute

All send as many models as FedSeq does in so many rounds, down, up and from client to client: a
round of FedAvg 2 C K, of FedSeq C (N + K), with C = 0.2; clients have one class each (--alpha 0).
FedSeq2Par grows from 5 groups to one per client in its last round. --config.NAME=VALUE changes any
setting of all runs, such as --config.model.name=mlp. Stop and repeat the command as you like: it
goes on. Prints the table, and draws the scores by messages and by rounds. 100 rounds
of FedSeq see 1,000,000 images, and all five runs four and a half times that: about an hour on two
cores that have nothing else to do.
"""

import argparse
import itertools
import pathlib
import time

import jax
import numpy as np
import optax

import fedjax_flat as ff
from fedjax_flat.config_files import load_config
from fedjax_flat.report import client_groups as groups
from fedjax_flat.report import figures, tables
from fedjax_flat.run import metrics

CONFIGS = pathlib.Path(__file__).parents[1] / "configs"
LABELS = {
    "fedavg": "FedAvg", "random": "FedSeq, random", "greedy": "FedSeq, greedy (clf)",
    "oracle": "FedSeq, oracle", "fedseq2par": "FedSeq2Par",
}
BETA = 5


def main():
    """Trains what is missing and reports."""
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("--cost", action="store_true")
    parser.add_argument("--data")
    parser.add_argument("--out", default="runs/sequences")
    parser.add_argument("--dataset", default="cifar10", choices=["cifar10", "cifar100"])
    parser.add_argument("--alpha", type=float, default=0.0)
    parser.add_argument("--clients", type=int, default=500)
    parser.add_argument("--rounds", type=int, default=100, help="of FedSeq")
    parser.add_argument("--epochs", type=int, default=5, help="that clients train to be estimated")
    parser.add_argument("--share", type=float, default=0.2)
    parser.add_argument("--evaluations", type=int, default=20, help="of each run")
    parser.add_argument("--window", type=int, default=5, help="evaluations that are averaged")
    args, args.overrides = parser.parse_known_args()
    if args.cost:
        cost()
        return
    out = pathlib.Path(args.out)
    found = {}
    for name in LABELS:
        config = config_of(name, args)
        print(f"{LABELS[name]}: {config.rounds} rounds", flush=True)
        result = ff.train(config, out / name, data_dir=args.data)
        if result.stopped_by:
            print("stopped; the same command goes on")
            return
        found[LABELS[name]] = result.records
    report(found, out, args.window)


def cost(times: int = 15) -> None:
    """CPU seconds of a round, and of compiling it, as medians of rounds taken in turns."""
    random, clients, each = np.random.default_rng(0), 22, 64
    images = random.integers(0, 255, (clients * each, 28, 28, 1)).astype(np.uint8)
    examples = ff.data.Examples(images, random.integers(0, 10, len(images)).astype(np.int32))
    dataset = ff.data.Dataset("noise", examples, examples, 10, 255.0, (0.5,), (0.25,))
    own = np.split(np.arange(len(images)), clients)
    data = ff.data.federate(examples, ff.data.Partition.of(own))
    model = ff.models.build("lenet", num_classes=10, inputs=dataset.inputs)
    task = ff.tasks.classification(model, ff.data.preprocess(dataset))
    client = ff.client.local_training(task, ff.client.sgd(0.01), batch_size=16)
    fedavg = ff.algorithms.fedavg(client, optax.sgd(1.0))

    def compiled(data, cohort):
        members = data.num_clients
        step = ff.round_step(
            fedavg, ff.uniform(members, cohort), ff.cohort_map("map"), task=task
        )
        state = ff.init_state(fedavg, task.init(jax.random.key(0)), members, jax.random.key(1))
        began = time.process_time()
        made = jax.jit(step).lower(state, data).compile()
        return lambda: jax.block_until_ready(made(state, data)), time.process_time() - began

    grouped = lambda size: ff.data.grouped(
        data, ff.data.Partition.of(np.split(np.arange(clients), clients // size))
    )
    cases = {"11 clients": compiled(data, 11), "a group of 11": compiled(grouped(11), 1),
             "a group of 2": compiled(grouped(2), 1)}
    seconds: dict[str, list[float]] = {name: [] for name in cases}
    for _ in range(times):
        for name, (run, _) in cases.items():
            began = time.process_time()
            run()
            seconds[name].append(time.process_time() - began)
    rows = [[name, f"{np.median(seconds[name]):.4f}", f"{cases[name][1]:.2f}"] for name in cases]
    print(tables.table(["round of", "CPU seconds", "to compile"], rows))


def config_of(name: str, args):
    """The config of one row, of as many rounds as the messages allow."""
    method = name if name in ("fedavg", "fedseq2par") else "fedseq"
    grouping = {"fedseq2par": "icg", "fedavg": "random"}.get(name, name)
    text = f"{args.dataset},alpha={args.alpha:g},method={method},grouping={grouping}"
    text += f",estimator=clf,epochs={args.epochs},share={args.share},clients={args.clients}"
    in_group = max(1, 1000 * args.clients // 50_000)
    number = args.clients // in_group
    budget = args.rounds * args.share * (number + args.clients)
    rounds, alpha = args.rounds, 0.0
    if name == "fedavg":
        rounds = int(budget / (2 * args.share * args.clients))
    if name == "fedseq2par":
        rounds, alpha = growing(budget, args)
    config = load_config(f"{CONFIGS / 'fedseq.py'}:{text},rounds={rounds}", args.overrides, None)
    if alpha:
        config.algorithm.fedseq2par.alpha = alpha
    every = max(1, rounds // args.evaluations)
    config.eval.every, config.eval.window, config.checkpoint.every = every, 1, every
    config.rounds_per_dispatch = 1
    return config


def growing(budget: float, args) -> tuple[int, float]:
    """(rounds, alpha) with which groups become as many as clients when the messages are used up."""
    found = None
    for rounds in itertools.count(2):
        alpha = float(f"{(args.clients / BETA) ** (1 / (rounds - 1)) - 1:.9g}")
        counts = np.minimum(np.floor(BETA * (1 + alpha) ** np.arange(rounds)), args.clients)
        drawn = np.maximum(1, np.floor(args.share * counts + 1e-9))
        if np.sum(drawn * (1 + args.clients / counts)) > budget:
            break
        found = rounds, alpha
    if found is None:
        raise ff.UsageError(f"--rounds {args.rounds}: expected more, for FedSeq2Par to grow.")
    return found


def report(found: dict[str, list[dict]], out: pathlib.Path, window: int) -> None:
    """The table and the figures."""
    rows = []
    for label, records in found.items():
        rounds, values = metrics.curve(records)
        last = 100 * values[-window:]
        rows.append([label, str(rounds[-1]), str(groups.messages(records)),
                     f"{last.mean():.2f} ± {last.std():.2f}", f"{100 * values.max():.2f}"])
    header = ["method", "rounds", "messages", f"last {window} evaluations (%)", "highest"]
    print(tables.table(header, rows))
    print(tables.named("figure", groups.by_messages(found, out / "sequences.png")))
    curves = {label: [records] for label, records in found.items()}
    print(tables.named("figure", figures.score_curves(curves, out / "curves.png")))


if __name__ == "__main__":
    main()
