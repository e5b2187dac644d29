"""What codecs cost, and where survivors are: the quantities of Mora's chapter 4 from a short run.

    python benchmarks/wire.py costs [CODEC ...] [--turns 9]
    python benchmarks/wire.py survivors --data FOLDER [--rounds 20] [--out runs/compression]

`costs` runs rounds of W1 (workloads.py) with uploads encoded, in turns with a plain one.
`survivors` trains the FEMNIST CNN on MNIST and looks at client 0's update along the way: survivors
of STC per layer (Fig. 4.5), the update of the second convolution by kernel, as it is, after STC and
after SSTC (Fig. 4.3), and what SSTC's convolutions weigh beside STC's as more kernels are kept
(Fig. 4.6).
"""

import argparse
import pathlib
import statistics
import time

import jax
import jax.numpy as jnp
import methods
import numpy as np

import fedjax_flat as ff
from fedjax_flat import experiment, wire
from fedjax_flat.report import pictures, tables

RATE, KFRAC = 0.01, 0.125
COSTS: dict[str, dict[str, object]] = {
    "plain": {},
    "plain again": {},  # how much of a ratio is noise
    **{name: {"wire.up": name} for name in wire.CODECS if name != "layer_stc"},
    "layer_stc": {"wire.up": "layer_stc", "wire.rates": "-,-,.01,.01,-"},
    "stc with feedback": {"wire.up": "stc", "wire.feedback": True},
    "stc both ways": {"wire.up": "stc", "wire.down": "stc", "wire.feedback": True},
}


def costs(names: list[str], turns: int) -> None:
    """Prints the time of a round with each codec, as ratios to a plain one."""
    chosen = {n: COSTS[n] for n in dict.fromkeys(["plain", *(names or COSTS)])}
    rounds = {name: a_round(settings) for name, settings in chosen.items()}
    wall: dict[str, list[float]] = {name: [] for name in rounds}
    cpu: dict[str, list[float]] = {name: [] for name in rounds}
    for _ in range(turns):
        for name, run in rounds.items():
            start, used = time.perf_counter(), time.process_time()
            run()
            wall[name].append(time.perf_counter() - start)
            cpu[name].append(time.process_time() - used)
    rows = []
    for name, seconds in wall.items():
        ratios = [s / f for s, f in zip(seconds, wall["plain"], strict=True)]
        busy = [s / f for s, f in zip(cpu[name], cpu["plain"], strict=True)]
        rows.append([
            name, f"{statistics.median(seconds):.2f}", f"{statistics.median(ratios):.3f}",
            f"{min(seconds) / min(wall['plain']):.3f}", f"{statistics.median(busy):.3f}",
        ])
    print(tables.table(["codec", "seconds a round", "x plain", "least", "CPU time"], rows))


def a_round(settings: dict[str, object]):
    """A function that runs one round of W1 and waits for it."""
    config = methods.config_of("FedAvg")
    config.update_from_flattened_dict(settings)
    built = experiment.build(config)
    step = jax.jit(built.step, donate_argnums=0)
    states = [built.init()]

    def run():
        states[0], _ = step(states[0], built.data)
        jax.block_until_ready(states[0])

    run()
    return run


def survivors(data: str, rounds: int, out: pathlib.Path) -> None:
    """Trains, and prints and draws what becomes of client 0's updates."""
    config = ff.default_config()
    config.data.name, config.model.name = "mnist", "femnist_cnn"
    config.partition.clients, config.partition.alpha = 100, 1.0
    config.client.learning_rate, config.client.batch_size = 0.1, 16
    built = ff.build(config, data)
    step, state = jax.jit(built.step, donate_argnums=0), built.init()
    shown = {1: None, (rounds + 1) // 2: None, rounds: None}
    rows = []
    for t in range(1, rounds + 1):
        update = update_of(built, state)
        sent = {name: encoded(codec, update) for name, codec in codecs().items()}
        layers = [n for n in update if n.endswith("kernel")]
        kept = [np.count_nonzero(sent["STC 1 %"][n]) for n in layers]
        rows.append([str(t), *map(str, kept), f"{sum(kept[:2])}"])
        if t in shown:
            shown[t] = {"raw": update, **sent}
        state, _ = step(state, built.data)
    short = [n.split("/")[1] for n in layers]
    print(tables.table(["round", *short, "convolutions"], rows))
    print(tables.table(["kernels kept", "STC / SSTC, bits of convolutions"], sweep(rows)))
    print(f"figure: {heat_maps(shown, out / 'updates.png')}")


def codecs() -> dict[str, wire.Codec]:
    """Those of the figures."""
    return {"STC 1 %": wire.stc(RATE), "SSTC 12.5 %": wire.sstc(RATE, KFRAC)}


def update_of(built, state) -> dict[str, jax.Array]:
    """Client 0's difference in the next round, by name."""
    model = built.algorithm.models(state.server)["global"]
    local = built.local_models(state, built.data, jnp.array([0]))
    delta = jax.tree.map(lambda w, x: w[0] - x, local.params, model.params)
    return wire.models_in(ff.models.Variables(delta))[""]


def encoded(codec: wire.Codec, update: dict[str, jax.Array]) -> dict[str, np.ndarray]:
    """What a server would have of it."""
    both = lambda tree: codec.decode(codec.encode(tree, (), jax.random.key(0))[0])
    return jax.device_get(jax.jit(both)(update))


def sweep(rows: list[list[str]]) -> list[list[str]]:
    """Mean ratio of what convolutions weigh, as Mora counts (4.1), for shares of 2080 kernels."""
    mean = statistics.mean(int(row[-1]) for row in rows)
    position, number = (52_000).bit_length(), (2080).bit_length()
    weight = lambda share: round(share * 2080) * (number + 2 * 25)
    shares = (0.05, 0.125, 0.2, 0.3, 0.4, 0.6)
    return [[f"{100 * s:g} %", f"{mean * position / weight(s):.2f}"] for s in shares]


def heat_maps(shown, path: pathlib.Path) -> pathlib.Path:
    """|update| of the second convolution: 25 positions by the first 200 of 2048 kernels."""
    names = list(next(iter(shown.values())))
    figure, axes = pictures.new_figure(len(names), len(shown), (4 * len(shown), 1.3 * len(names)))
    axes = np.asarray(axes).reshape(len(names), len(shown))
    for j, (t, found) in enumerate(shown.items()):
        for i, name in enumerate(names):
            kernel = np.abs(np.asarray(found[name]["params/Conv_1/kernel"])).reshape(25, -1)
            axes[i, j].imshow(kernel[:, :200], aspect="auto", cmap="magma", interpolation="none")
            axes[i, j].set_xticks([])
            axes[i, j].set_yticks([])
            if j == 0:
                axes[i, j].set_ylabel(name, fontsize=8)
            if i == 0:
                axes[i, j].set_title(f"round {t}", fontsize=9)
    return pictures.save(figure, path)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    commands = parser.add_subparsers(dest="command", required=True)
    times = commands.add_parser("costs")
    times.add_argument("names", nargs="*", metavar="CODEC", choices=[[], *COSTS])
    times.add_argument("--turns", type=int, default=9)
    looks = commands.add_parser("survivors")
    looks.add_argument("--data", help="folder of MNIST (default: $FEDJAX_FLAT_DATA)")
    looks.add_argument("--rounds", type=int, default=20)
    looks.add_argument("--out", type=pathlib.Path, default=pathlib.Path("runs/compression"))
    args = parser.parse_args()
    if args.command == "costs":
        costs(args.names, args.turns)
    else:
        survivors(args.data, args.rounds, args.out)
