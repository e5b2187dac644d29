"""How time per client and memory grow: with the cohort, the number of clients, and devices.

command: python benchmarks/scaling.py    (some minutes; figure in benchmarks/out/scaling.png)

Clients have 5 examples of W2's shape and train its network for one epoch in batches of 5. Each
point is a process of its own, because peak memory and the number of devices belong to a process.
"""

import argparse
import json
import os
import pathlib
import resource
import subprocess
import sys
import time

OUT = pathlib.Path(__file__).parent / "out"
EXAMPLES, ROUNDS = 5, 3
COHORTS = [(1, "map"), (10, "map"), (100, "map"), (1000, "map"),
           (10, "chunked"), (100, "chunked"), (1000, "chunked")]
CLIENTS = [100, 1_000, 10_000, 100_000]
DEVICES = [1, 2, 4, 8]


def measure(clients: int, cohort: int, strategy: str) -> None:
    """Prints seconds per client and peak memory of one point as JSON."""
    import jax
    import numpy as np
    import optax
    from systems import our_network
    from workloads import W2

    import fedjax_flat as ff
    from fedjax_flat.data import Dataset, Examples, Partition

    rng = np.random.default_rng(0)
    count = clients * EXAMPLES
    examples = Examples(
        rng.integers(0, 256, (count, *W2.image), np.uint8),
        rng.integers(0, 10, count).astype(np.int32),
    )
    dataset = Dataset("random", examples, examples, 10, 255.0, (0.5,), (0.25,))
    over = ff.cohort_map(strategy, chunk=8)
    partition = Partition.of(np.arange(count).reshape(clients, EXAMPLES))
    data = over.replicate(ff.data.federate(examples, partition))
    model = ff.models.from_linen(our_network(W2), W2.image)
    task = ff.tasks.classification(model, ff.data.preprocess(dataset))
    local = ff.client.local_training(task, ff.client.sgd(0.1), batch_size=EXAMPLES)
    algorithm = ff.algorithms.fedavg(local, optax.sgd(1.0))
    step = ff.round_step(algorithm, ff.uniform(clients, cohort), over, task=task)
    step = jax.jit(step, donate_argnums=0)
    variables = jax.jit(task.init)(jax.random.key(0))
    state = over.replicate(ff.init_state(algorithm, variables, clients, jax.random.key(1)))
    state, _ = jax.block_until_ready(step(state, data))
    repeats = max(ROUNDS, 100 // cohort)
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        state, _ = jax.block_until_ready(step(state, data))
        times.append(time.perf_counter() - start)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    print(json.dumps({"ms_per_client": 1e3 * float(np.median(times)) / cohort, "peak_mb": peak}))


def point(clients: int, cohort: int, strategy: str, devices: int = 1) -> dict:
    """Measures one point in a process of its own."""
    label = {"clients": clients, "cohort": cohort, "strategy": strategy, "devices": devices}
    print(f"measuring {label}", file=sys.stderr, flush=True)
    flags = f"--xla_force_host_platform_device_count={devices}"
    out = subprocess.run(
        [sys.executable, __file__, "--point", str(clients), str(cohort), strategy],
        env={**os.environ, "XLA_FLAGS": flags}, check=True, stdout=subprocess.PIPE, text=True,
    )
    return label | json.loads(out.stdout)


def draw(curves: dict[str, list[dict]]) -> pathlib.Path:
    """Three panels: cohort, number of clients, devices."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 3.4), layout="constrained")
    FigureCanvasAgg(figure)
    for axes, (name, points) in zip(figure.subplots(1, 3), curves.items(), strict=True):
        memory = axes.twinx()
        for i, strategy in enumerate(dict.fromkeys(p["strategy"] for p in points)):
            chosen = [p for p in points if p["strategy"] == strategy]
            x = [p[name] for p in chosen]
            axes.plot(x, [p["ms_per_client"] for p in chosen], "o-", color=f"C{i}", label=strategy)
            memory.plot(x, [p["peak_mb"] for p in chosen], "x:", color=f"C{i}")
        axes.set(xscale="log", xlabel=name, ylim=(0, None))
        ticks = sorted({p[name] for p in points})
        axes.set_xticks(ticks, [f"{t:,}" for t in ticks])
        axes.minorticks_off()
        memory.set_ylim(0, None)
        axes.set_ylabel("ms per client (o, solid)")
        memory.set_ylabel("peak MB (x, dotted)")
        axes.grid(alpha=0.25)
        axes.legend(frameon=False, loc="lower left")
    path = OUT / "scaling.png"
    figure.savefig(path, dpi=130)
    return path


def main():
    """Measures all curves, prints them and draws them."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--point", nargs=3, metavar=("CLIENTS", "COHORT", "STRATEGY"))
    args = parser.parse_args()
    if args.point:
        measure(int(args.point[0]), int(args.point[1]), args.point[2])
        return
    from fedjax_flat.report import tables

    curves = {
        "cohort": [point(1000, n, strategy) for n, strategy in COHORTS],
        "clients": [point(n, 50, "map") for n in CLIENTS],
        "devices": [point(1000, 48, "sharded", d) for d in DEVICES],
    }
    OUT.mkdir(exist_ok=True)
    (OUT / "scaling.json").write_text(json.dumps(curves, indent=2) + "\n")
    for name, points in curves.items():
        rows = [[f"{p[name]:,} ({p['strategy']})", f"{p['ms_per_client']:.2f}",
                 f"{p['peak_mb']:.0f}"] for p in points]
        print(tables.table([name, "ms per client", "peak MB"], rows), "\n")
    print(f"figure: {draw(curves)}")


if __name__ == "__main__":
    main()
