"""Images per second of BiSeNetV2: SGD steps in our compiled loop and in plain torch; memory.

    python benchmarks/segmentation.py [WIDTH [TURNS]]

Each system has a process of its own, and they take turns: one step of SGD on a batch of 8 crops of
136x176 pixels, 11 classes, cross-entropy of the hardest quarter of each image's pixels, four
auxiliary heads, dropout off. Torch has our weights and the same layers, written apart: the losses
of the first step have to agree. Ours is inside a `fori_loop`, as training is. Ratios are of turns
that follow each other; memory is what the compiled step asks for beside its arguments, per image
(torch's is the growth of the process).
"""

import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time

from workloads import KEEPS_MEMORY

BATCH, SIZE, CLASSES, RATE, HARD = 8, (136, 176), 11, 0.05, 0.25
WEIGHTS = os.path.join(tempfile.gettempdir(), "fedjax_flat_bisenetv2_{}.npz")


def batch():
    """The same images and labels for both."""
    import numpy as np

    random = np.random.default_rng(0)
    images = random.normal(size=(BATCH, *SIZE, 3)).astype(np.float32)
    return images, random.integers(0, CLASSES, (BATCH, *SIZE))


def ours(width):
    """A turn of this package; its weights go to a file for torch."""
    import jax
    import jax.numpy as jnp
    import numpy as np

    import fedjax_flat as ff
    from fedjax_flat import models, parts

    model = models.build("bisenetv2", num_classes=CLASSES, inputs=(*SIZE, 3), width=width,
                         dropout=0.0)
    images, labels = batch()
    data = ff.data.from_arrays(images, labels.astype(np.uint8), num_classes=CLASSES,
                               task="segmentation", name="crops")
    task = ff.tasks.segmentation(model, ff.data.preprocess(data), data, hard=HARD)
    variables = jax.jit(model.init)(jax.random.key(0))
    np.savez(WEIGHTS.format(width), **parts.take(variables.params, lambda name: True))
    stored = ff.data.Batch(jnp.asarray(images), jnp.asarray(labels, jnp.int32),
                           jnp.ones(BATCH, bool))

    def turn(variables, batch, steps):
        def loss(params, stats):
            outputs = task.forward(models.Variables(params, stats), batch, jax.random.key(0))
            sums = task.measure(outputs, batch)
            return sums["loss"] / sums["units"], outputs.stats

        def step(_, carry):
            params, stats, _ = carry
            (value, stats), grads = jax.value_and_grad(loss, has_aux=True)(params, stats)
            return jax.tree.map(lambda p, g: p - RATE * g, params, grads), stats, value

        return jax.lax.fori_loop(0, steps, step, (*variables, jnp.float32(0)))[2]

    began = time.perf_counter()
    compiled = jax.jit(turn).lower(variables, stored, 1).compile()
    seconds = time.perf_counter() - began
    needed = compiled.memory_analysis().temp_size_in_bytes / BATCH / 2**20
    facts = {"compiled in (s)": round(seconds, 1), "MiB per image": round(needed, 1)}
    return lambda: float(compiled(variables, stored, 1)), lambda: facts


def torch(width):
    """A turn of a plain torch loop on two threads, in channels-last order."""
    import numpy as np
    import torch
    from torch import nn
    from torch.nn import functional as F

    torch.set_num_threads(2)
    scaled = lambda n: max(4, 2 * round(width * n / 2))

    class ConvNorm(nn.Module):
        def __init__(self, inputs, features, kernel=3, stride=1, depthwise=False, active=True):
            super().__init__()
            self.Conv_0 = nn.Conv2d(inputs, features, kernel, stride, kernel // 2, bias=False,
                                    groups=inputs if depthwise else 1)
            self.BatchNorm_0 = nn.BatchNorm2d(features)
            self.active = active

        def forward(self, x):
            x = self.BatchNorm_0(self.Conv_0(x))
            return F.relu(x) if self.active else x

    def several(module, *layers):
        for i, layer in enumerate(layers):
            module.add_module(f"ConvNorm_{i}", layer)

    class Stem(nn.Module):
        def __init__(self, n):
            super().__init__()
            several(self, ConvNorm(3, n, stride=2), ConvNorm(n, n // 2, 1),
                    ConvNorm(n // 2, n, stride=2), ConvNorm(2 * n, n))

        def forward(self, x):
            x = self.ConvNorm_0(x)
            left = self.ConvNorm_2(self.ConvNorm_1(x))
            return self.ConvNorm_3(torch.cat([left, F.max_pool2d(x, 3, 2, 1)], 1))

    class Gather(nn.Module):
        def __init__(self, own, n):
            super().__init__()
            self.wider = n != own
            if self.wider:
                several(self, ConvNorm(own, own), ConvNorm(own, 6 * own, 3, 2, True, False),
                        ConvNorm(6 * own, 6 * own, depthwise=True),
                        ConvNorm(own, own, 3, 2, True, False), ConvNorm(own, n, 1, active=False),
                        ConvNorm(6 * own, n, 1, active=False))
            else:
                several(self, ConvNorm(own, own), ConvNorm(own, 6 * own, depthwise=True),
                        ConvNorm(6 * own, n, 1, active=False))

        def forward(self, x):
            y = self.ConvNorm_1(self.ConvNorm_0(x))
            if not self.wider:
                return F.relu(x + self.ConvNorm_2(y))
            return F.relu(self.ConvNorm_4(self.ConvNorm_3(x)) + self.ConvNorm_5(self.ConvNorm_2(y)))

    class Context(nn.Module):
        def __init__(self, n):
            super().__init__()
            self.BatchNorm_0 = nn.BatchNorm2d(n)
            several(self, ConvNorm(n, n, 1), ConvNorm(n, n))

        def forward(self, x):
            mean = self.ConvNorm_0(self.BatchNorm_0(x.mean((2, 3), keepdim=True)))
            return self.ConvNorm_1(x + mean)

    up = lambda x, like: F.interpolate(x, like.shape[2:], mode="bilinear", align_corners=False)

    class Aggregate(nn.Module):
        def __init__(self, n):
            super().__init__()
            own = lambda: ConvNorm(n, n, depthwise=True, active=False)
            several(self, own(), ConvNorm(n, n, stride=2, active=False),
                    ConvNorm(n, n, active=False), own(), ConvNorm(n, n))
            self.Conv_0, self.Conv_1 = (nn.Conv2d(n, n, 1, bias=False) for _ in range(2))

        def forward(self, detail, semantic):
            fine = self.Conv_0(self.ConvNorm_0(detail))
            coarse = F.avg_pool2d(self.ConvNorm_1(detail), 3, 2, 1)
            fine = fine * torch.sigmoid(up(self.ConvNorm_2(semantic), fine))
            coarse = coarse * torch.sigmoid(self.Conv_1(self.ConvNorm_3(semantic)))
            return self.ConvNorm_4(fine + up(coarse, fine))

    class Head(nn.Module):
        def __init__(self, inputs, factor):
            super().__init__()
            several(self, ConvNorm(inputs, scaled(128)), ConvNorm(scaled(128), scaled(factor**2)))
            self.logits = nn.Conv2d(scaled(factor**2), CLASSES, 1)

        def forward(self, x, image):
            x = F.interpolate(self.ConvNorm_0(x), scale_factor=2)
            return up(self.logits(self.ConvNorm_1(x)), image)

    class Network(nn.Module):
        def __init__(self):
            super().__init__()
            before, self.details = 3, []
            for stage, (n, count) in enumerate(((64, 2), (64, 3), (128, 3))):
                for i in range(count):
                    self.details.append(f"detail_{stage}_{i}")
                    self.add_module(self.details[-1],
                                    ConvNorm(before, scaled(n), stride=1 if i else 2))
                    before = scaled(n)
            self.stem = Stem(scaled(16))
            before = scaled(16)
            for n, count in ((32, 2), (64, 2), (128, 4)):
                for i in range(count):
                    self.add_module(f"gather_{n}_{i}", Gather(before, scaled(n)))
                    before = scaled(n)
            self.context, self.aggregate = Context(before), Aggregate(before)
            self.head = ConvNorm(before, scaled(1024))
            for factor, n in ((4, 16), (8, 32), (16, 64), (32, 128)):
                self.add_module(f"auxiliary_{factor}", Head(scaled(n), factor))
            self.classifier = nn.Conv2d(scaled(1024), CLASSES, 1)

        def forward(self, image):
            detail = image
            for name in self.details:
                detail = getattr(self, name)(detail)
            x = self.stem(image)
            levels = [x]
            for n, count in ((32, 2), (64, 2), (128, 4)):
                for i in range(count):
                    x = getattr(self, f"gather_{n}_{i}")(x)
                levels.append(x)
            x = self.head(self.aggregate(detail, self.context(x)))
            heads = [getattr(self, f"auxiliary_{f}")(level, image)
                     for f, level in zip((4, 8, 16, 32), levels, strict=True)]
            return [up(self.classifier(x), image), *heads]

    network = Network().to(memory_format=torch.channels_last)
    names = {"kernel": "weight", "scale": "weight", "bias": "bias"}
    found = {}
    for path, array in np.load(WEIGHTS.format(width)).items():
        *modules, leaf = path.split("/")
        value = array.transpose(3, 2, 0, 1) if array.ndim == 4 else array
        found[".".join([*modules, names[leaf]])] = torch.tensor(value)
    learned = {name for name, _ in network.named_parameters()}
    assert learned == set(found), sorted(learned ^ set(found))[:4]
    images, labels = (torch.tensor(a) for a in batch())
    images = images.permute(0, 3, 1, 2).contiguous(memory_format=torch.channels_last)
    optimizer = torch.optim.SGD(network.parameters(), RATE)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    count = sum(p.numel() for p in network.parameters())

    def turn():
        network.load_state_dict(found, strict=False)
        optimizer.zero_grad()
        loss = 0
        for logits in network(images):
            each = F.cross_entropy(logits, labels, reduction="none").reshape(BATCH, -1)
            loss = loss + each.topk(int(HARD * each.shape[1]), dim=1)[0].mean()
        loss.backward()
        optimizer.step()
        return loss.item()

    def facts():
        grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
        return {"parameters": count, "MiB per image": round(grown / 1024 / BATCH, 1)}

    return turn, facts


def work(system, width):
    """Answers every line with the seconds and the loss of a turn, and facts."""
    turn, facts = {"ours": ours, "torch": torch}[system](width)
    turn()
    for _ in sys.stdin:
        start = time.perf_counter()
        loss = turn()
        print(json.dumps([time.perf_counter() - start, loss, facts()]), flush=True)


def main(width, turns):
    """Prints a line for each system, and the ratio."""
    systems = ["ours"]
    try:
        import torch as _  # noqa: F401
        systems.append("torch")
    except ImportError:
        print("torch is not here: only our own figures")
    workers = {}
    for s in systems:
        workers[s] = start(s, width)
        ask(workers[s])  # ours first: torch reads its weights
    found = [{s: ask(w) for s, w in workers.items()} for _ in range(turns)]
    for s, worker in workers.items():
        times = [t[s][0] for t in found]
        print(f"{s}: {BATCH / min(times):.2f} images/s best, "
              f"{BATCH / statistics.median(times):.2f} median; loss {found[0][s][1]:.5f}; "
              f"{found[-1][s][2]}", flush=True)
        worker.stdin.close()
        worker.wait()
    if "torch" in systems:
        ratio = statistics.median(t["torch"][0] / t["ours"][0] for t in found)
        print(f"ours / torch {ratio:.2f}")


def start(system, width):
    """A process that waits to be asked."""
    command = [sys.executable, os.path.abspath(__file__), system, str(width)]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
                            env=os.environ | KEEPS_MEMORY)


def ask(worker):
    """One turn of it."""
    worker.stdin.write("\n")
    worker.stdin.flush()
    return json.loads(worker.stdout.readline())


if __name__ == "__main__":
    if sys.argv[1:2] in (["ours"], ["torch"]):
        work(sys.argv[1], float(sys.argv[2]))
    else:
        main(float(sys.argv[1]) if sys.argv[1:] else 1.0, int(sys.argv[2]) if sys.argv[2:] else 9)
