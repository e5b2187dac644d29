"""The systems side by side. Each builder returns (round, loss).

round() trains one round and returns how many images it visited; loss() is the model's.

Each runs in a process of its own (worker.py) and imports only what it needs.
"""

import itertools
import os

import numpy as np
from workloads import Workload, normalise


def held_out(workload: Workload):
    """The first ten clients' examples, on which all final losses are measured."""
    images, labels = workload.data(10)
    return images.reshape(-1, *workload.image)[:5000], labels.reshape(-1)[:5000]


def ours(
    workload: Workload, precision: str = "float32", *, kernels: str = "auto", rho: float = 0.0
):
    """This package; with `rho`, FedSAM."""
    os.environ.setdefault("FEDJAX_FLAT_KERNELS", kernels)
    import jax
    import optax

    import fedjax_flat as ff
    from fedjax_flat.data import Dataset, Examples, Partition

    images, labels = workload.data()
    examples = Examples(images.reshape(-1, *workload.image), labels.reshape(-1))
    channels = workload.image[2]
    dataset = Dataset("bench", examples, examples, workload.classes, 255.0, (0.5,) * channels,
                      (0.25,) * channels)
    rows = np.arange(labels.size).reshape(labels.shape)
    partition = Partition.of([row[:n] for row, n in zip(rows, workload.sizes, strict=True)])
    over = ff.cohort_map()
    data = over.replicate(ff.data.federate(examples, partition))
    if workload.network:
        model = ff.models.build(workload.network, num_classes=workload.classes,
                                inputs=workload.image, precision=precision)
    else:
        model = ff.models.from_linen(our_network(workload), workload.image, precision)
    task = ff.tasks.classification(model, ff.data.preprocess(dataset))
    local = ff.client.local_training(
        task, ff.client.sgd(workload.learning_rate), batch_size=workload.batch,
        sharpness=ff.client.sam(rho) if rho else None,
    )
    algorithm = ff.algorithms.fedavg(local, optax.sgd(1.0))
    sampler = ff.uniform(workload.clients, workload.cohort)
    step = jax.jit(ff.round_step(algorithm, sampler, over, task=task), donate_argnums=0)
    variables = jax.jit(task.init)(jax.random.key(0))
    box = [over.replicate(
        ff.init_state(algorithm, variables, workload.clients, jax.random.key(1))
    )]

    def round():
        box[0], info = jax.block_until_ready(step(box[0], data))
        return int(info.examples)

    def loss():
        evaluate = jax.jit(ff.evaluator(task, 500))
        sums = evaluate(box[0].server.model, Examples(*held_out(workload)))
        return float(task.means(sums)["loss"])

    return round, loss


def our_network(workload: Workload):
    """The workload's network in our layers."""
    import flax.linen as nn

    from fedjax_flat.models.layers import Conv, Dense

    class Network(nn.Module):
        @nn.compact
        def __call__(self, x, *, train=False):
            for c in workload.convs:
                x = nn.relu(Conv(c.features, (c.size, c.size), pool=c.pool)(x))
            x = x.reshape(x.shape[0], -1)
            for width in workload.hidden:
                x = nn.relu(Dense(width)(x))
            return Dense(workload.classes)(x)

    return Network()


def torch_network(workload: Workload):
    """The workload's network in torch."""
    from torch import nn

    height, width, channels = workload.image
    layers: list = []
    for c in workload.convs:
        layers += [nn.Conv2d(channels, c.features, c.size), nn.ReLU()]
        if c.pool > 1:
            layers.append(nn.MaxPool2d(c.pool))
        height, width = (height - c.size + 1) // c.pool, (width - c.size + 1) // c.pool
        channels = c.features
    sizes = [height * width * channels, *workload.hidden, workload.classes]
    layers.append(nn.Flatten())
    for a, b in itertools.pairwise(sizes):
        layers += [nn.Linear(a, b), nn.ReLU()]
    return nn.Sequential(*layers[:-1])


def torch_loop(
    workload: Workload, threads: int = 2, *, channels_last: bool = False, rho: float = 0.0
):
    """A plain torch loop over clients and batches; with `rho`, FedSAM."""
    import torch
    import torch_networks

    torch.set_num_threads(threads)
    torch.manual_seed(0)
    layout = torch.channels_last if channels_last else torch.contiguous_format
    images, labels = workload.data()
    x = torch.from_numpy(images).permute(0, 1, 4, 2, 3).contiguous()
    y = torch.from_numpy(labels).long()
    make = torch_networks.NETWORKS[workload.network] if workload.network else torch_network
    network, client = (make(workload) for _ in range(2))
    client = client.to(memory_format=layout)
    rng = np.random.default_rng(1)
    to_input = lambda a: ((a.float() / 255 - 0.5) / 0.25).contiguous(memory_format=layout)

    def gradient(optimizer, images, labels):
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(client(images), labels).backward()

    def ascend(optimizer, images, labels):
        """The gradient at w + rho g / ||g||, at w again."""
        parameters = list(client.parameters())
        with torch.no_grad():
            norm = torch.linalg.vector_norm(torch.stack(
                [torch.linalg.vector_norm(p.grad) for p in parameters]
            ))
            eps = [p.grad * (rho / (norm + 1e-16)) for p in parameters]
            torch._foreach_add_(parameters, eps)
        gradient(optimizer, images, labels)
        with torch.no_grad():
            torch._foreach_sub_(parameters, eps)

    def round():
        start = [p.detach().clone() for p in network.parameters()]
        total = [torch.zeros_like(p) for p in start]
        cohort = rng.choice(workload.clients, workload.cohort, replace=False)
        images = workload.sizes[cohort].sum()
        for k in cohort:
            with torch.no_grad():
                for p, s in zip(client.parameters(), start, strict=True):
                    p.copy_(s)
            optimizer = torch.optim.SGD(client.parameters(), workload.learning_rate)
            order = torch.from_numpy(rng.permutation(workload.sizes[k]))
            for i in range(0, len(order), workload.batch):
                index = order[i : i + workload.batch]
                batch = to_input(x[k][index]), y[k][index]
                gradient(optimizer, *batch)
                if rho:
                    ascend(optimizer, *batch)
                optimizer.step()
            with torch.no_grad():
                for t, p in zip(total, client.parameters(), strict=True):
                    t += p * (workload.sizes[k] / images)
        with torch.no_grad():
            for p, t in zip(network.parameters(), total, strict=True):
                p.copy_(t)
        return int(images)

    return round, lambda: torch_loss(workload, network)


def torch_loss(workload: Workload, network) -> float:
    """Loss of a torch network on the held-out examples."""
    import torch

    images, labels = held_out(workload)
    with torch.no_grad():
        logits = network(torch.from_numpy(normalise(images)).permute(0, 3, 1, 2))
        return float(torch.nn.functional.cross_entropy(logits, torch.from_numpy(labels).long()))


def plain_flax(workload: Workload):
    """(params, loss(params, images, labels), total loss) with nn.Conv and nn.max_pool."""
    import flax.linen as nn
    import jax
    import jax.numpy as jnp
    import optax

    class Network(nn.Module):
        @nn.compact
        def __call__(self, x):
            for c in workload.convs:
                x = nn.relu(nn.Conv(c.features, (c.size, c.size), padding="VALID")(x))
                if c.pool > 1:
                    x = nn.max_pool(x, (c.pool, c.pool), (c.pool, c.pool))
            x = x.reshape(x.shape[0], -1)
            for width in workload.hidden:
                x = nn.relu(nn.Dense(width)(x))
            return nn.Dense(workload.classes)(x)

    network = Network()
    params = jax.jit(network.init)(jax.random.key(0), jnp.zeros((1, *workload.image)))

    def loss(params, x, y):
        x = (x.astype(jnp.float32) / 255 - 0.5) / 0.25
        losses = optax.softmax_cross_entropy_with_integer_labels(network.apply(params, x), y)
        return losses.mean()

    return params, loss, lambda p: float(jax.jit(loss)(p, *held_out(workload)))


def jitted_step(workload: Workload):
    """A Python loop over clients and batches, each step jitted."""
    import jax
    import jax.numpy as jnp

    params, loss, final = plain_flax(workload)
    images, labels = workload.data()
    rng = np.random.default_rng(1)
    box = [params]

    @jax.jit
    def step(params, x, y):
        grads = jax.grad(loss)(params, x, y)
        return jax.tree.map(lambda p, g: p - workload.learning_rate * g, params, grads)

    add = jax.jit(lambda a, b: jax.tree.map(lambda x, y: x + y / workload.cohort, a, b))

    def round():
        total = jax.tree.map(jnp.zeros_like, box[0])
        for k in rng.choice(workload.clients, workload.cohort, replace=False):
            params, order = box[0], rng.permutation(workload.examples)
            for i in range(0, workload.examples, workload.batch):
                index = order[i : i + workload.batch]
                params = step(params, images[k][index], labels[k][index])
            total = add(total, params)
        box[0] = jax.block_until_ready(total)
        return workload.cohort * workload.examples

    return round, lambda: final(box[0])


def textbook(workload: Workload, cohort: int = 1):
    """jit(vmap(scan(step))) with XLA's own convolution and pooling; one client, being so slow."""
    import jax

    params, loss, final = plain_flax(workload)
    images, labels = workload.data()
    steps = workload.examples // workload.batch
    rng = np.random.default_rng(1)
    box = [params]

    def local(params, x, y):
        def step(params, batch):
            grads = jax.grad(loss)(params, *batch)
            return jax.tree.map(lambda p, g: p - workload.learning_rate * g, params, grads), None

        return jax.lax.scan(step, params, (x, y))[0]

    @jax.jit
    def run(params, x, y):
        trained = jax.vmap(local, (None, 0, 0))(params, x, y)
        return jax.tree.map(lambda p: p.mean(0), trained)

    def round():
        clients = rng.choice(workload.clients, cohort, replace=False)
        batched = lambda a: a[clients, : steps * workload.batch].reshape(
            cohort, steps, workload.batch, *a.shape[2:]
        )
        box[0] = jax.block_until_ready(run(box[0], batched(images), batched(labels)))
        return cohort * steps * workload.batch

    return round, lambda: final(box[0])


def fedjax(workload: Workload):
    """fedjax's federated averaging."""
    import fedjax as fj
    import jax
    from fedjax.algorithms import fed_avg

    jax.tree_map = jax.tree.map  # fedjax 0.0.17 calls a name that jax has dropped
    params, loss, final = plain_flax(workload)
    images, labels = workload.data()
    algorithm = fed_avg.federated_averaging(
        jax.grad(lambda p, batch, key: loss(p, batch["x"], batch["y"])),
        fj.optimizers.sgd(workload.learning_rate),
        fj.optimizers.sgd(1.0),
        fj.ShuffleRepeatBatchHParams(batch_size=workload.batch, num_epochs=1),
    )
    rng = np.random.default_rng(1)
    box = [algorithm.init(params)]

    def round():
        cohort = rng.choice(workload.clients, workload.cohort, replace=False)
        clients = [
            (int(k), fj.ClientDataset({"x": images[k], "y": labels[k]}), jax.random.PRNGKey(k))
            for k in cohort
        ]
        box[0] = jax.block_until_ready(algorithm.apply(box[0], clients)[0])
        return workload.cohort * workload.examples

    return round, lambda: final(box[0].params)


def pfl(workload: Workload):
    """pfl-research's federated averaging with torch, two threads."""
    import torch
    from pfl.aggregate.simulate import SimulatedBackend
    from pfl.algorithm.base import NNAlgorithmParams
    from pfl.algorithm.federated_averaging import FederatedAveraging
    from pfl.data.dataset import Dataset
    from pfl.data.federated_dataset import FederatedDataset
    from pfl.data.sampling import get_user_sampler
    from pfl.hyperparam import NNTrainHyperParams
    from pfl.metrics import Weighted
    from pfl.model.pytorch import PyTorchModel

    torch.set_num_threads(2)
    torch.manual_seed(0)
    network = torch_network(workload)

    class Wrapped(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.network = network

        def loss(self, x, y, eval=False):
            self.eval() if eval else self.train()
            logits = self.network((x.float() / 255 - 0.5) / 0.25)
            return torch.nn.functional.cross_entropy(logits, y)

        @torch.no_grad()
        def metrics(self, x, y, eval=True):
            return {"loss": Weighted(float(self.loss(x, y, eval)) * len(y), len(y))}

    images, labels = workload.data()
    x = torch.from_numpy(images).permute(0, 1, 4, 2, 3).contiguous()
    y = torch.from_numpy(labels).long()
    sampler = get_user_sampler("random", list(range(workload.clients)))
    users = FederatedDataset(lambda k: Dataset([x[k], y[k]], user_id=str(k)), sampler)
    wrapped = Wrapped()
    model = PyTorchModel(
        wrapped, torch.optim.SGD, torch.optim.SGD(wrapped.parameters(), lr=1.0)
    )
    backend = SimulatedBackend(training_data=users, val_data=None)
    training = NNTrainHyperParams(
        local_batch_size=workload.batch, local_num_epochs=1,
        local_learning_rate=workload.learning_rate,
    )
    algorithm, done = FederatedAveraging(), itertools.count(1)

    def round():
        # From iteration t to t + 1; pfl would evaluate every user in iteration 0.
        algorithm._current_central_iteration = t = next(done)
        settings = NNAlgorithmParams(
            central_num_iterations=t + 1, evaluation_frequency=10**9,
            train_cohort_size=workload.cohort, val_cohort_size=0,
        )
        algorithm.run(
            algorithm_params=settings, backend=backend, model=model, model_train_params=training,
            model_eval_params=None, callbacks=[], send_metrics_to_platform=False,
        )
        return workload.cohort * workload.examples

    return round, lambda: torch_loss(workload, network)


SYSTEMS = {
    "ours": ours,
    "ours, pure JAX": lambda w: ours(w, kernels="jax"),
    "ours bfloat16": lambda w: ours(w, "bfloat16"),
    "torch 2 threads": torch_loop,
    "torch channels-last": lambda w: torch_loop(w, channels_last=True),
    "ours SAM": lambda w: ours(w, rho=0.1),
    "torch SAM": lambda w: torch_loop(w, rho=0.1),
    "torch SAM channels-last": lambda w: torch_loop(w, channels_last=True, rho=0.1),
    "torch 1 thread": lambda w: torch_loop(w, 1),
    "jitted step": jitted_step,
    "fedjax": fedjax,
    "pfl": pfl,
    "textbook": textbook,
}
# What goes with clients of any size and any network; the rest has W1 and W2 only.
GENERAL = ("ours", "ours, pure JAX", "ours bfloat16", "torch 2 threads", "torch channels-last")
