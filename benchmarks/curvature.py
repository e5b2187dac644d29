"""Hessian eigenvalues and a loss surface: ours beside hessian-eigenthings, PyHessian and matfree.

    make bench-curvature          (peers: make bench-peers; a peer that is missing is left out)
    python benchmarks/curvature.py [--examples 5000] [--data FOLDER] [--full]

The paper's CNN with the same weights in jax and torch, two threads; torch's tools once with images
as torch has them and once channels-last. Every solver makes the same few
products with the Hessian of all examples, in turns, with batches of 100 and of 500. At its faster
one, the time of the top 5 (25 products) and the top 50 (100) follows from its seconds per product;
with --full they are made. PyHessian has power iteration only: 20 products per eigenvalue. Before
that all solvers find the top of 500 examples, whose values must agree. A product's floor is its
arithmetic at the rate of a large matrix product in the same run. Rows go to
benchmarks/out/curvature.json.
"""

import argparse
import json
import os
import pathlib
import statistics
import sys
import time

import jax
import numpy as np
from jax.flatten_util import ravel_pytree
from systems import torch_network
from worker import matmul_rate
from workloads import KEEPS_MEMORY, W1, normalise

import fedjax_flat as ff
from fedjax_flat import curvature, landscape
from fedjax_flat.data import Examples

BATCHES, KEY = (100, 500), jax.random.key(0)
DEPTH = {5: 25, 50: 100}


def main() -> None:
    """Prints and writes the rows."""
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("--examples", type=int, default=5000)
    parser.add_argument("--products", type=int, default=2, help="per turn (default 2)")
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--data", help="folder of CIFAR-10; without it, noise of its shape")
    parser.add_argument("--full", action="store_true", help="make all products of the top 5 and 50")
    args = parser.parse_args()
    if args.examples < 500 or args.examples % 500:
        parser.error(f"--examples {args.examples}: expected a multiple of 500")
    task, params, images, labels = problem(args)
    agree(task, params, images[:500], labels[:500])
    systems = {
        (name, batch): solve
        for batch in BATCHES
        for name, solve in solvers(task, params, images, labels, batch).items()
    }
    rows, best = time_products(systems, args)
    if args.full:
        rows += [run(systems[name, batch], name, top) for top in DEPTH for name, batch in best]
    rows += [floor(args), *compare_products(task, params, images, labels, args)]
    path = pathlib.Path(__file__).parent / "out" / "curvature.json"
    path.parent.mkdir(exist_ok=True)
    partial = path.with_suffix(".partial")
    partial.write_text(json.dumps(rows, indent=2) + "\n")
    os.replace(partial, path)
    print(f"rows: {path}")


def problem(args):
    """(task, briefly trained weights, images, labels)."""
    if args.data:
        dataset = ff.data.load("cifar10", args.data)
        images, labels = dataset.train.inputs, dataset.train.labels
    else:
        images, labels = (x.reshape(-1, *x.shape[2:]) for x in W1.data(args.examples // 500 + 1))
    images, labels = images[: args.examples], labels[: args.examples].astype(np.int32)
    examples = Examples(images, labels)
    dataset = ff.data.Dataset("b", examples, examples, 10, 255.0, (0.5,) * 3, (0.25,) * 3)
    model = ff.models.build("cnn", num_classes=10, inputs=(32, 32, 3))
    task = ff.tasks.classification(model, ff.data.preprocess(dataset))
    start = jax.jit(task.init)(KEY)
    client = ff.client.local_training(task, ff.client.sgd(0.05, momentum=0.9), batch_size=50)
    data = ff.data.federate(examples, ff.data.Partition.of([np.arange(min(1500, args.examples))]))
    train = jax.jit(lambda v: client.train(v, data.client(0), KEY, round=0).variables)
    return task, train(start).params, images, labels


def solvers(task, params, images, labels, batch):
    """name: solve(top, products), which returns eigenvalues, largest first."""
    loss = curvature.of_examples(task, Examples(images, labels), batch_size=batch)
    operator = curvature.flat_hessian(loss, params)

    def ours(top, products):
        return curvature.lanczos(operator, top, key=KEY, depth=products, tolerance=0.0).values

    found = {"ours": ours}
    try:
        found["matfree"] = with_matfree(task, params, images, labels, batch)
        for channels_last in (False, True):
            found |= with_torch(params, images, labels, batch, channels_last)
    except ModuleNotFoundError as e:
        print(f"left out: {e.name} is not installed (make bench-peers)", file=sys.stderr)
    return found


def with_matfree(task, params, images, labels, batch):
    """Lanczos of matfree on products as one would write them, compiled as a whole."""
    from matfree import decomp, eig

    batches = ff.data.Batch(
        images.reshape(-1, batch, *images.shape[1:]), labels.reshape(-1, batch),
        np.ones((len(labels) // batch, batch), bool),
    )
    flat, unravel = ravel_pytree(params)

    def product(vector, params, batches):
        def add(total, batch):
            model = ff.models.Variables
            loss = lambda p: task.evaluate(model(p), batch)["loss"] / len(labels)
            part = jax.jvp(jax.grad(loss), (params,), (unravel(vector),))[1]
            return total + ravel_pytree(part)[0], None

        return jax.lax.scan(add, jax.numpy.zeros_like(vector), batches)[0]

    start, compiled = jax.random.normal(KEY, flat.shape), {}

    def solve(top, products):
        if products not in compiled:
            solver = eig.eigh_partial(decomp.tridiag_sym(products))
            compiled[products] = jax.jit(lambda v, p, b: solver(product, v, p, b)[0])
        return np.sort(compiled[products](start, params, batches))[::-1][:top]

    return solve


def with_torch(params, images, labels, batch, channels_last):
    """hessian-eigenthings and PyHessian on the same network."""
    import torch
    from hessian_eigenthings import HessianOperator
    from hessian_eigenthings.algorithms import lanczos
    from hessian_eigenthings.loss_fns.standard import supervised_loss
    from pyhessian import hessian

    torch.set_num_threads(2)
    torch.manual_seed(0)
    layout = torch.channels_last if channels_last else torch.contiguous_format
    network = in_torch(params).to(memory_format=layout)
    x = torch.from_numpy(normalise(images)).permute(0, 3, 1, 2).contiguous(memory_format=layout)
    y = torch.from_numpy(labels).long()
    batches = [(x[i : i + batch], y[i : i + batch]) for i in range(0, len(y), batch)]
    criterion = torch.nn.functional.cross_entropy
    operator = HessianOperator(network, batches, supervised_loss(criterion))

    def eigenthings(top, products):
        result = lanczos(
            operator, k=top, max_iter=products, reorthogonalize=True, which="LA", seed=0
        )
        return result.eigenvalues.numpy()

    def pyhessian(top, products):
        solver = hessian(network, criterion, dataloader=batches, cuda=False)
        return np.array(solver.eigenvalues(maxIter=products // top, tol=0.0, top_n=top)[0])

    suffix = ", channels-last" if channels_last else ""
    return {f"hessian-eigenthings{suffix}": eigenthings, f"PyHessian{suffix}": pyhessian}


def in_torch(params):
    """The same weights: kernels HWIO -> OIHW, features in the order (C, H, W)."""
    import torch

    network = torch_network(W1)
    layers = [m for m in network if hasattr(m, "weight")]
    names = ["Conv_0", "Conv_1", "Dense_0", "Dense_1", "classifier"]
    with torch.no_grad():
        for layer, name in zip(layers, names, strict=True):
            kernel = np.asarray(params[name]["kernel"])
            if name == "Dense_0":
                kernel = kernel.reshape(5, 5, 64, -1).transpose(2, 0, 1, 3).reshape(1600, -1)
            kernel = kernel.transpose(3, 2, 0, 1) if kernel.ndim == 4 else kernel.T
            layer.weight.copy_(torch.from_numpy(kernel.copy()))
            layer.bias.copy_(torch.from_numpy(np.array(params[name]["bias"])))
    return network


def agree(task, params, images, labels) -> None:
    """All solvers on a few examples: the eigenvalues side by side, or an error."""
    found = {}
    for name, solve in solvers(task, params, images, labels, 500).items():
        found[name] = solve(2, 40) if name.startswith("PyHessian") else solve(5, DEPTH[5])
        print(f"top of 500 examples, {name:<34}", " ".join(f"{v:9.4f}" for v in found[name]))
    for name, values in found.items():
        worst = np.abs(values[:2] / found["ours"][:2] - 1).max()
        if worst > (0.1 if name.startswith("PyHessian") else 0.01):
            raise SystemExit(f"{name} differs from ours by {worst:.1%}: these times mean nothing.")


def time_products(systems, args) -> tuple[list[dict], list[tuple[str, int]]]:
    """Rows: seconds per product, and of the top 5 and 50 that follow; the faster batches."""
    times: dict[tuple[str, int], list[float]] = {system: [] for system in systems}
    for turn in range(args.turns + 1):  # the first one compiles
        for system, solve in systems.items():
            start = time.perf_counter()
            solve(1, args.products)
            if turn:
                times[system].append((time.perf_counter() - start) / args.products)
    median = {system: statistics.median(seconds) for system, seconds in times.items()}
    names = dict.fromkeys(name for name, _ in systems)
    best = [min((median[name, batch], (name, batch)) for batch in BATCHES)[1] for name in names]
    rows = []
    for system, seconds in times.items():
        name, batch = system
        ratio = statistics.median(s / o for s, o in zip(seconds, times[best[0]], strict=True))
        print(f"{name:<34} {median[system]:6.2f} s per product in batches of {batch}, "
              f"{ratio:.2f} x ours" + " (its faster)" * (system in best))
        rows.append({
            "what": "product", "system": name, "batch": batch, "examples": args.examples,
            "seconds": median[system], "least": min(seconds), "ratio_to_ours": ratio,
        })
    for name, batch in best:
        for top, depth in DEPTH.items():
            products = 20 * top if name.startswith("PyHessian") else depth
            seconds = products * median[name, batch]
            print(f"{name:<34} {seconds:6.0f} s for the top {top} ({products} products)")
            rows.append({
                "what": f"top {top}", "system": name, "examples": args.examples,
                "products": products, "seconds": seconds, "measured": False,
            })
    return rows, best


def floor(args) -> dict:
    """A product's multiplications and additions at the rate of a large float32 matrix product.

    Of the first layer the convolution with its direction and one filter gradient; of the second
    and of each dense one, twice output, input gradient and filter gradient.
    """
    first, second, dense = 28 * 28 * 64 * 75, 10 * 10 * 64 * 1600, 1600 * 384 + 384 * 192 + 1920
    flops = 2 * (2 * first + 6 * second + 6 * dense) * args.examples
    rate = matmul_rate()
    seconds = flops / 1e9 / rate
    print(f"floor: {seconds:.2f} s per product at {rate:.0f} GFLOP/s")
    return {
        "what": "floor", "seconds": seconds, "matmul_gflops": rate, "examples": args.examples,
    }


def run(solve, name: str, top: int) -> dict:
    """One whole solve."""
    products = 20 * top if name.startswith("PyHessian") else DEPTH[top]
    start = time.perf_counter()
    values = solve(top, products)
    seconds = time.perf_counter() - start
    print(f"{name:<34} {seconds:6.0f} s for the top {top}, lambda_1 {values[0]:.4f}")
    return {
        "what": f"top {top}", "system": name, "products": products, "seconds": seconds,
        "measured": True, "lambda_1": float(values[0]),
    }


def compare_products(task, params, images, labels, args) -> list[dict]:
    """A product beside a gradient; a row of a surface beside a loop over jitted evaluations."""
    examples = Examples(images, labels)
    loss = curvature.of_examples(task, examples)
    direction = landscape.filter_normalised(KEY, params)
    axis = landscape.symmetric(1.0, 21)
    evaluate = jax.jit(ff.evaluator(task, 100))
    on_device = ff.data.on_device(examples)

    def plain_loop():
        for a in axis:
            moved = jax.tree.map(lambda w, d, a=a: w + np.float32(a) * d, params, direction)
            sums = evaluate(ff.models.Variables(moved), on_device)
            float(task.means(sums)["loss"])

    points = jax.numpy.stack([jax.numpy.asarray(axis, "float32"), jax.numpy.zeros(21)], axis=1)
    parts = {
        "gradient": lambda: loss.gradient(params),
        "product": lambda: loss.product(params, direction),
        "surface row": lambda: loss.along(params, (direction, direction), points),
        "surface row, plain loop": plain_loop,
    }
    times: dict[str, list[float]] = {name: [] for name in parts}
    for turn in range(args.turns + 1):
        for name, part in parts.items():
            start = time.perf_counter()
            jax.block_until_ready(part())
            if turn:
                times[name].append(time.perf_counter() - start)
    rows = []
    for a, b in (("product", "gradient"), ("surface row", "surface row, plain loop")):
        ratio = statistics.median(x / y for x, y in zip(times[a], times[b], strict=True))
        print(f"{a}: {statistics.median(times[a]):.2f} s, {ratio:.2f} x {b}")
        rows.append({"what": a, "beside": b, "seconds": statistics.median(times[a]),
                     "ratio": ratio, "examples": args.examples})
    return rows


if __name__ == "__main__":
    if not KEEPS_MEMORY.keys() <= os.environ.keys():  # read when a process starts
        os.execve(sys.executable, [sys.executable, *sys.argv], os.environ | KEEPS_MEMORY)
    main()
