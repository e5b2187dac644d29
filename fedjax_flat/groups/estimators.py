"""What a server learns of clients' distributions without their data: psi of FedSeq.

Caldarola et al. (ICPR 2022); Caldarola 2024, section 5.2. Every client trains the same first model
w_0 for e epochs, alone; then

    classifiers   the parameters of its classifier; `reduced` by PCA to 90 % of the variance
    confidences   on a public set that nobody trains on, the mean probability p_kc of the true class
                  c; p_k = softmax(p_k1 .. p_kC) (5.1), or, as in the released code, p_kc / sum_c
    task2vec      of a probe network whose classifier alone was trained on the client's examples,
                  the diagonal of the Fisher information of the features' parameters (5.2),

                      F = 1/n sum_x (d log p(y | x) / dw)^2,   y drawn from p(. | x)

                  averaged over each filter, the last axis of a kernel (Achille et al., "Task2Vec",
                  ICCV 2019), biases and scales left out

Estimates of clients without examples are those of w_0, and zero of task2vec.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from fedjax_flat import errors, parts, rng
from fedjax_flat.client import Client
from fedjax_flat.data import Batch, ClientData, Examples, FederatedData
from fedjax_flat.data.federated import client_batch, sum_over
from fedjax_flat.models import Variables

READINGS = ("softmax", "normalised")
Estimate = Callable[[FederatedData, jax.Array], jax.Array]  # of these clients, one row each


class Probe(NamedTuple):
    """A model and how it is trained on one client's examples."""

    client: Client
    variables: Variables
    key: jax.Array

    def trained(self, data: ClientData) -> Variables:
        """The model after the client's epochs."""
        key = rng.fold(self.key, "estimate", data.client)
        return self.client.train(self.variables, data, key, round=jnp.int32(0)).variables


def classifiers(probe: Probe) -> Estimate:
    """The classifier of every client, as one vector."""

    def one(probe: Probe, data: ClientData) -> jax.Array:
        head = parts.take(probe.trained(data), parts.head)
        if not head:
            raise errors.UsageError(
                "groups.estimator = clf: the model has no module named 'classifier'."
            )
        return jnp.concatenate([x.ravel() for x in head.values()])

    return _of_each(one, probe)


def confidences(probe: Probe, public: Examples, classes: int, reading: str = "softmax") -> Estimate:
    """How sure every client's model is of each class of the public set."""
    errors.lookup("groups.reading", reading, dict.fromkeys(READINGS))
    labels = np.asarray(public.labels)
    missing = sorted(set(range(classes)) - set(labels.tolist()))
    if missing:
        raise errors.UsageError(
            f"a public set without an example of class {missing[0]}: expected all {classes}."
        )
    task = probe.client.task
    inputs, known = jax.tree.map(jnp.asarray, public)

    def one(probe: Probe, data: ClientData, batch: Batch) -> jax.Array:
        outputs = task.forward(probe.trained(data), task.prepare(batch, None), None)
        own = batch.labels.astype(jnp.int32)
        sure = jax.nn.softmax(outputs.logits)[jnp.arange(len(labels)), own]
        counts = jnp.asarray(np.bincount(labels, minlength=classes), jnp.float32)
        p = jax.ops.segment_sum(sure, own, classes) / counts
        return jax.nn.softmax(p) if reading == "softmax" else p / jnp.sum(p)

    return _of_each(one, probe, Batch(inputs, known, jnp.ones(len(labels), bool)))


def task2vec(probe: Probe, *, batch_size: int = 8) -> Estimate:
    """The Fisher information of the probe's features; its client trains the classifier alone."""
    task = probe.client.task
    wanted = lambda name: not parts.head(name) and not parts.statistics(name)
    kernels = [name for name, x in parts.take(probe.variables, wanted).items() if x.ndim > 1]
    if not kernels:
        raise errors.UsageError("groups.estimator = task2vec: the probe has no features.")

    def one(probe: Probe, data: ClientData) -> jax.Array:
        variables = probe.trained(data)
        features = {n: x for n, x in parts.take(variables, wanted).items() if n in kernels}

        def log_probability(features, example, key):
            batch = jax.tree.map(lambda x: x[None], example)
            model = parts.put(variables, features)
            logits = task.forward(model, batch, None).logits[0]
            label = jax.random.categorical(key, jax.lax.stop_gradient(logits))
            return jax.nn.log_softmax(logits)[label]

        def of_batch(i):
            stored = client_batch(data, i * batch_size + jnp.arange(batch_size, dtype=jnp.int32))
            batch = task.prepare(stored, None)
            key = rng.fold(probe.key, "fisher", data.client, i)
            each = jax.vmap(jax.grad(log_probability), (None, 0, 0))(
                features, batch, rng.fold_each(key, batch_size)
            )
            real = lambda g: jnp.where(batch.mask.reshape(-1, *[1] * (g.ndim - 1)), g * g, 0)
            return jax.tree.map(lambda g: jnp.sum(real(g), axis=0), each)

        total = sum_over(of_batch, -(-jnp.asarray(data.size, jnp.int32) // batch_size))
        size = jnp.maximum(jnp.asarray(data.size, jnp.float32), 1)
        filters = lambda x: jnp.mean(x, axis=tuple(range(x.ndim - 1))) / size
        return jnp.concatenate([filters(total[name]) for name in kernels])

    return _of_each(one, probe)


def _of_each(one: Callable[..., jax.Array], probe: Probe, *arrays: Batch) -> Estimate:
    @jax.jit
    def estimates(variables, arrays, data, clients):
        started = probe._replace(variables=variables)
        return jax.lax.map(
            lambda k: one(started, data.client(jnp.maximum(k, 0), k >= 0), *arrays), clients
        )

    return lambda data, clients: estimates(probe.variables, arrays, data, clients)


def reduced(rows: np.ndarray, variance: float) -> np.ndarray:
    """The principal components that have `variance` of it together."""
    from sklearn.decomposition import PCA

    if not 0 < variance <= 1:
        raise errors.UsageError(
            f"groups.variance = {variance}: expected more than 0 and at most 1."
        )
    if np.ptp(rows, axis=0).max(initial=0) == 0:  # nothing tells clients apart
        return np.zeros((len(rows), 1))
    share = variance if variance < 1 else None
    return PCA(share, svd_solver="full").fit_transform(np.asarray(rows, float))


def public_set(
    dataset: Any, per_class: int, train_indices: np.ndarray, seed: int
) -> tuple[Examples, np.ndarray]:
    """(`per_class` test examples of each class, which of the test examples are left to evaluate).

    Test examples that a client has to train on are not taken: CIFAR-100 has a few.
    """
    labels = np.asarray(dataset.test.labels)
    overlaps = also_trained(dataset, train_indices)
    order = np.random.default_rng([seed, 18]).permutation(len(labels))
    order = order[~overlaps[order]]
    chosen = [order[labels[order] == c][:per_class] for c in range(dataset.num_classes)]
    for c, found in enumerate(chosen):
        if len(found) < per_class:
            shared = int(overlaps[labels == c].sum())
            also = f", and {shared} that overlap training" if shared else ""
            raise errors.UsageError(
                f"groups.public = {per_class}: the test set has {len(found)} examples of class "
                f"{c}{also}. Lower it, or choose another groups.estimator."
            )
    index = np.sort(np.concatenate(chosen))
    public = jax.tree.map(lambda x: np.asarray(x)[index], dataset.test)
    left = np.setdiff1d(np.arange(len(labels)), index)
    if not len(left):
        raise errors.UsageError(
            f"groups.public = {per_class} takes all {len(labels)} test examples: none is left to "
            "evaluate."
        )
    return public, left


def also_trained(dataset: Any, indices: np.ndarray) -> np.ndarray:
    """Of each test example, whether a client trains on one with the same inputs."""
    test, train = (jax.tree.map(np.asarray, x.inputs) for x in (dataset.test, dataset.train))
    trained = {hash(_content(train, i)) for i in indices}
    count = len(np.asarray(dataset.test.labels))
    return np.array([hash(_content(test, i)) in trained for i in range(count)])


def _content(inputs: Any, i: int) -> bytes:
    return b"".join(np.asarray(x[i]).tobytes() for x in jax.tree.leaves(inputs))
