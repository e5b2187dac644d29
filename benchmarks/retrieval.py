"""Images per second of mined triplet steps beside a plain torch loop; seconds of an exact search.

    python benchmarks/retrieval.py            both; `search` or `steps` as a word: only that

Steps are those of one client with 640 images of 28x28x1 in 160 places of 4, the CNN of the FedSAM
paper with 64 outputs, batches of 56 images (8 anchors, each with its positive and 5 negatives),
embeddings of all images made anew every 20 steps, which count in the time but not as images. A turn
is 20 steps; each system has a process of its own, and they take turns. Torch's loop mines by the
same law, on two threads. Without torch there is only our column.

The search is 1,000 queries in 100,000 rows of 256 numbers, the 10 nearest of each.
"""

import statistics
import sys
import time

from lstm import ask, serve, start

IMAGES, PLACES, BATCH, NEGATIVES, STEPS, TURNS = 640, 160, 56, 5, 20, 12
RATE, MARGIN, ANCHORS = 0.1, 0.1, 8


def pictures():
    """(images, labels) for both."""
    import numpy as np

    random = np.random.default_rng(0)
    labels = np.arange(IMAGES) % PLACES
    centres = random.normal(size=(PLACES, 28, 28, 1))
    images = centres[labels] + random.normal(size=(IMAGES, 28, 28, 1))
    return images.astype(np.float32), labels.astype(np.int32)


def ours():
    """A turn of this package."""
    import jax
    import numpy as np

    import fedjax_flat as ff

    images, labels = pictures()
    dataset = ff.data.from_arrays(images, labels, task="retrieval")
    model = ff.models.build("cnn", num_classes=64, inputs=dataset.inputs)
    task = ff.tasks.retrieval(
        model, ff.data.preprocess(dataset), dataset, mine_every=STEPS, negatives=NEGATIVES,
        margin=MARGIN,
    )
    client = ff.client.local_training(task, ff.client.sgd(RATE), batch_size=BATCH, steps=STEPS)
    data = ff.data.federate(dataset.train, ff.data.Partition.of([np.arange(IMAGES)]))
    variables = jax.jit(task.init)(jax.random.key(0))
    train = jax.jit(lambda v, data, key: client.train(v, data.client(0), key, round=0).info.sums)

    def turn():
        sums = jax.device_get(train(variables, data, jax.random.key(1)))
        return float(sums["loss"] / sums["units"]), float(sums["examples"])

    return turn


def torch():
    """A turn of a plain torch loop."""
    import torch
    from torch import nn
    from torch.nn import functional

    torch.set_num_threads(2)
    torch.manual_seed(0)
    network = nn.Sequential(
        nn.Conv2d(1, 64, 5), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(64, 64, 5), nn.ReLU(),
        nn.MaxPool2d(2), nn.Flatten(), nn.Linear(1024, 384), nn.ReLU(), nn.Linear(384, 192),
        nn.ReLU(), nn.Linear(192, 64),
    )
    begin = {n: p.clone() for n, p in network.state_dict().items()}
    optimizer = torch.optim.SGD(network.parameters(), RATE)
    images, labels = (torch.tensor(x) for x in pictures())
    images = images.permute(0, 3, 1, 2).contiguous()
    embed = lambda x: functional.normalize(network(x))
    same = labels[:, None] == labels[None]
    positive, negative = same & ~torch.eye(IMAGES, dtype=torch.bool), ~same

    def mined(f, positive, negative):
        s = f.detach() @ f.detach().T
        near = s.masked_fill(~positive, -9).argmax(1)
        return near, s.masked_fill(~negative, -9).topk(NEGATIVES, dim=1).indices

    def turn():
        network.load_state_dict(begin)
        order, seen, losses = torch.randperm(IMAGES), 0, []
        with torch.no_grad():
            near, hard = mined(torch.cat([embed(x) for x in images.split(BATCH)]), positive,
                               negative)
        for i in range(STEPS):
            anchors = order[ANCHORS * i : ANCHORS * (i + 1)]
            rows = torch.cat([anchors, near[anchors], hard[anchors].reshape(-1)]).unique()
            f, seen = embed(images[rows]), seen + len(rows)
            there, other = positive[rows][:, rows], negative[rows][:, rows]
            p, n = mined(f, there, other)
            apart = (f[:, None] - f[n]).norm(dim=2)
            each = functional.relu((f - f[p]).norm(dim=1)[:, None] - apart + MARGIN)
            mask = there.any(1)[:, None] & other.gather(1, n)
            loss = each[mask].mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        return statistics.mean(losses), float(seen)

    return turn


def steps():
    """One line."""
    systems = ["ours"]
    try:
        import torch as _  # noqa: F401
        systems.append("torch")
    except ImportError:
        print("torch is not here: only our own figures")
    workers = {s: start(__file__, s) for s in systems}
    for worker in workers.values():
        ask(worker)
    turns = [{s: ask(w) for s, w in workers.items()} for _ in range(TURNS)]
    line = []
    for s, worker in workers.items():
        rates = [count / seconds for seconds, (_, count) in (t[s] for t in turns)]
        line.append(f"{s} {max(rates):,.0f} images/s best, {statistics.median(rates):,.0f} median "
                    f"(loss {turns[0][s][1][0]:.3f})")
        worker.stdin.close()
        worker.wait()
    if len(systems) > 1:
        rate = lambda turn, s: turn[s][1][1] / turn[s][0]
        ratios = [rate(t, "ours") / rate(t, "torch") for t in turns]
        line.append(f"ours / torch {statistics.median(ratios):.2f}")
    print("; ".join(line), flush=True)


def search():
    """One line."""
    import jax
    import jax.numpy as jnp
    import numpy as np

    from fedjax_flat.tasks import nearest

    draw = lambda i, n: jax.random.normal(jax.random.key(i), (n, 256), jnp.float32)
    queries, database = (x / jnp.linalg.norm(x, axis=1, keepdims=True)
                         for x in (draw(0, 1000), draw(1, 100_000)))
    places, _ = nearest(queries, database, 10)
    times = []
    for _ in range(5):
        begin = time.perf_counter()
        nearest(queries, database, 10)
        times.append(time.perf_counter() - begin)
    best = np.asarray(queries[:20]) @ np.asarray(database).T
    right = (places[:20, 0] == best.argmax(1)).all()
    print(f"search: {min(times):.2f} s best, {statistics.median(times):.2f} s median of 5; nearest "
          f"of 20 queries as NumPy finds them: {right}")


if __name__ == "__main__":
    asked = sys.argv[1:]
    if asked and asked[0] in ("ours", "torch"):
        serve({"ours": ours, "torch": torch}[asked[0]]())
    else:
        for name, run in (("search", search), ("steps", steps)):
            if not asked or name in asked:
                run()
