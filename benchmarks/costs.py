"""What things cost beside a plain round: Hessian products, compilation.

command: python benchmarks/costs.py [hvp] [compile]      (default: both)

Ratios are medians over turns (A B A B ...) in one process.
"""

import statistics
import sys
import time

import numpy as np


def paper_cnn(examples: int = 640):
    """(loss(params, batch), params, batches of 64) for the paper's CNN on noise."""
    import jax
    import jax.numpy as jnp

    import fedjax_flat as ff
    from fedjax_flat.data import Batch

    model = ff.models.build("cnn", num_classes=10, inputs=(32, 32, 3))
    raw = ff.data.Preprocess(lambda batch, key: batch, lambda batch: batch, mixes_labels=False)
    task = ff.tasks.classification(model, raw)
    keys = jax.random.split(jax.random.key(0), 3)
    batches = Batch(
        jax.random.normal(keys[0], (examples // 64, 64, 32, 32, 3)),
        jax.random.randint(keys[1], (examples // 64, 64), 0, 10),
        jnp.ones((examples // 64, 64), bool),
    )
    variables = jax.jit(task.init)(keys[2])

    def loss(params, batch):
        outputs = task.forward(variables._replace(params=params), batch, None)
        return task.means(task.measure(outputs, batch))["loss"]

    return loss, variables.params, batches


def turns(functions: dict, repeat: int = 7) -> dict[str, list[float]]:
    """Seconds of each function, called in turn."""
    times: dict[str, list[float]] = {name: [] for name in functions}
    for f in functions.values():
        f()
    for _ in range(repeat):
        for name, f in functions.items():
            start = time.perf_counter()
            f()
            times[name].append(time.perf_counter() - start)
    return times


def hvp() -> None:
    """One Hessian-vector product against one gradient, both inside a compiled loop."""
    import jax
    import jax.numpy as jnp

    loss, params, batches = paper_cnn()
    vector = jax.tree.map(jnp.ones_like, params)
    gradient = lambda p, b: jax.grad(loss)(p, b)
    product = lambda p, b: jax.jvp(lambda q: gradient(q, b), (p,), (vector,))[1]

    def total(f):
        add = lambda a, x: jax.tree.map(jnp.add, a, x)
        run = jax.jit(lambda p, bs: jax.lax.scan(
            lambda a, b: (add(a, f(p, b)), None), jax.tree.map(jnp.zeros_like, p), bs)[0])
        return lambda: jax.block_until_ready(run(params, batches))

    times = turns({"gradient": total(gradient), "product": total(product)})
    ratios = [p / g for p, g in zip(times["product"], times["gradient"], strict=True)]
    print(f"Hessian-vector product / gradient: {statistics.median(ratios):.2f} "
          f"(from {min(ratios):.2f} to {max(ratios):.2f})")


def compilation() -> None:
    """Seconds to compile the W1 round, and the same with SAM."""
    import jax
    import optax
    from systems import our_network
    from workloads import W1

    import fedjax_flat as ff
    from fedjax_flat.data import Dataset, Examples, Partition

    images, labels = W1.data(10)
    examples = Examples(images.reshape(-1, *W1.image), labels.reshape(-1))
    dataset = Dataset("bench", examples, examples, 10, 255.0, (0.5,) * 3, (0.25,) * 3)
    data = ff.data.federate(examples, Partition.of(np.arange(5000).reshape(10, 500)))
    model = ff.models.from_linen(our_network(W1), W1.image)
    task = ff.tasks.classification(model, ff.data.preprocess(dataset))

    for name, sharpness in (("plain", None), ("SAM", ff.client.sam(0.1))):
        client = ff.client.local_training(
            task, ff.client.sgd(0.01), sharpness=sharpness, batch_size=64
        )
        algorithm = ff.algorithms.fedavg(client, optax.sgd(1.0))
        step = ff.round_step(algorithm, ff.uniform(10, 5), ff.cohort_map("map"), task=task)
        variables = jax.jit(task.init)(jax.random.key(0))
        state = ff.init_state(algorithm, variables, 10, jax.random.key(1))
        start = time.perf_counter()
        jax.jit(step).lower(state, data).compile()
        print(f"compiling the W1 round, {name}: {time.perf_counter() - start:.1f} s")


PARTS = {"hvp": hvp, "compile": compilation}

if __name__ == "__main__":
    import fedjax_flat  # noqa: F401 (its XLA flags, before a backend starts)

    for part in sys.argv[1:] or PARTS:
        PARTS[part]()
