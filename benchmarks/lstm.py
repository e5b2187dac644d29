"""Tokens per second of the Shakespeare LSTM: SGD steps in our compiled loop and in plain torch.

    python benchmarks/lstm.py

Each system has a process of its own, and they take turns. A turn is 5 steps of SGD on one batch of
80 characters each; ours are one `lax.scan`, torch's a Python loop on two threads. Without torch
there is only our column. Ratios are of turns that follow each other.
"""

import json
import os
import statistics
import subprocess
import sys
import time

from workloads import KEEPS_MEMORY

VOCABULARY, TIME, STEPS, TURNS = 90, 80, 5, 30
RATE = 0.1


def batch(size):
    """The same tokens and next tokens for both."""
    import numpy as np

    tokens = np.random.default_rng(0).integers(0, VOCABULARY, (size, TIME + 1))
    return tokens[:, :-1], tokens[:, 1:]


def ours(size):
    """A turn of this package."""
    import jax
    import jax.numpy as jnp
    import optax

    from fedjax_flat import models

    inputs = jax.ShapeDtypeStruct((1, TIME), jnp.int32)
    model = models.build("shakespeare_lstm", num_classes=VOCABULARY, inputs=inputs)
    variables = jax.jit(model.init)(jax.random.key(0))
    tokens, labels = (jnp.asarray(a, jnp.int32) for a in batch(size))

    @jax.jit
    def turn(params, tokens, labels):
        def loss(params):
            logits = model.apply(models.Variables(params), tokens).logits
            return jnp.mean(optax.softmax_cross_entropy_with_integer_labels(logits, labels))

        def step(params, _):
            value, grad = jax.value_and_grad(loss)(params)
            return jax.tree.map(lambda p, g: p - RATE * g, params, grad), value

        return jax.lax.scan(step, params, None, length=STEPS)

    return lambda: float(turn(variables.params, tokens, labels)[1][-1])


def torch(size):
    """A turn of a plain torch loop."""
    import torch
    from torch import nn

    torch.set_num_threads(2)

    class Network(nn.Module):
        def __init__(self):
            super().__init__()
            self.embedding = nn.Embedding(VOCABULARY, 8)
            self.lstm = nn.LSTM(8, 100, 2, batch_first=True)
            self.classifier = nn.Linear(100, VOCABULARY)

        def forward(self, x):
            return self.classifier(self.lstm(self.embedding(x))[0])

    network = Network()
    start = {n: p.clone() for n, p in network.state_dict().items()}
    optimizer = torch.optim.SGD(network.parameters(), RATE)
    tokens, labels = (torch.tensor(a) for a in batch(size))

    def turn():
        network.load_state_dict(start)
        for _ in range(STEPS):
            optimizer.zero_grad()
            logits = network(tokens).reshape(-1, VOCABULARY)
            loss = nn.functional.cross_entropy(logits, labels.reshape(-1))
            loss.backward()
            optimizer.step()
        return loss.item()

    return turn


def serve(turn):
    """Answers every line with the seconds of a turn and what it returns."""
    turn()
    for _ in sys.stdin:
        start = time.perf_counter()
        loss = turn()
        print(json.dumps([time.perf_counter() - start, loss]), flush=True)


def main():
    """Prints one line per batch size."""
    systems = ["ours"]
    try:
        import torch as _  # noqa: F401
        systems.append("torch")
    except ImportError:
        print("torch is not here: only our own figures")
    for size in (10, 64):
        workers = {s: start(__file__, s, size) for s in systems}
        for worker in workers.values():
            ask(worker)
        turns = [{s: ask(w) for s, w in workers.items()} for _ in range(TURNS)]
        count = size * TIME * STEPS
        line = [f"batch {size:2d}"]
        for s, worker in workers.items():
            times = [t[s][0] for t in turns]
            best, middle = count / min(times), count / statistics.median(times)
            line.append(f"{s} {best:,.0f} best, {middle:,.0f} median (loss {turns[0][s][1]:.3f})")
            worker.stdin.close()
            worker.wait()
        if "torch" in systems:
            ratio = statistics.median(t["torch"][0] / t["ours"][0] for t in turns)
            line.append(f"ours / torch {ratio:.2f}")
        print("; ".join(line), flush=True)


def start(file, *words):
    """A process that waits to be asked."""
    command = [sys.executable, os.path.abspath(file), *map(str, words)]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
                            env=os.environ | KEEPS_MEMORY)


def ask(worker):
    """One turn of it."""
    worker.stdin.write("\n")
    worker.stdin.flush()
    return json.loads(worker.stdout.readline())


if __name__ == "__main__":
    if len(sys.argv) > 1:
        serve({"ours": ours, "torch": torch}[sys.argv[1]](int(sys.argv[2])))
    else:
        main()
