"""Distances, groupings and estimates against plain NumPy (reference_groups.py)."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import reference_groups as ref
from conftest import Problem

import fedjax_flat as ff
from fedjax_flat import groups
from fedjax_flat.groups import Limits, estimators, laws, metrics
from fedjax_flat.report import client_groups as report

RANDOM = np.random.default_rng(3)
K = 23
SIZES = RANDOM.integers(20, 120, K)
SHARES = RANDOM.dirichlet(np.full(4, 0.3), K)
ROWS = RANDOM.normal(size=(K, 5))
TAUS = {
    "euclidean": ref.euclidean, "cosine": ref.cosine, "norm_cosine": ref.normalised_cosine,
    "kl": ref.kl, "kl_released": ref.kl_released, "gini": ref.gini,
}
LIMITS = Limits(300, 7)


def lists(partition):
    return [partition.client(g).tolist() for g in range(partition.num_clients)]


@pytest.mark.parametrize("name", metrics.METRICS)
def test_distances(name):
    rows = SHARES.copy()
    rows[0] = [1, 0, 0, 0]
    rows[1] = [0, 0, 0.5, 0.5]
    found = groups.distances(name, rows)
    expected = [[TAUS[name](a, c) for c in rows] for a in rows]
    np.testing.assert_allclose(found, expected, rtol=1e-9, atol=2e-8)


@pytest.mark.parametrize("name", metrics.METRICS)
@pytest.mark.parametrize("start", ["random", "released"])
def test_greedy(name, start):
    order = laws._order(SIZES, 5).tolist()
    if start == "random":
        expected = ref.greedy(SHARES, SIZES, 300, 7, TAUS[name],
                              first=lambda left: next(k for k in order if k in left))
    else:
        expected = ref.greedy_released(SHARES, SIZES, 300, 7, TAUS[name])
    found = groups.build("greedy", SIZES, LIMITS, estimates=SHARES, distance=name, start=start,
                         seed=5)
    assert lists(found) == expected


def test_random_and_round_robin():
    order = laws._order(SIZES, 5)
    found = groups.build("random", SIZES, LIMITS, seed=5)
    assert lists(found) == ref.in_order(order.tolist(), SIZES, 300, 7)
    labels = RANDOM.integers(0, 4, K)
    assert laws.round_robin(labels, order, SIZES, LIMITS) == ref.round_robin(
        labels, SIZES, 300, 7, order=order.tolist()
    )


def test_icg_takes_one_of_every_cluster():
    count = 4
    found = groups.build("icg", SIZES, Limits(groups=count), estimates=ROWS, seed=2)
    order = laws._order(SIZES, 2)
    length = K // count
    chosen, left = order[: length * count], order[length * count :]
    clusters = [chosen[part].tolist() for part in laws.alike(ROWS[chosen], count, 2)]
    assert {len(c) for c in clusters} == {count}
    assert len(clusters) == length
    assert lists(found) == ref.icg_from_clusters(clusters, left.tolist(), SIZES, length + 1)


@pytest.mark.parametrize("at_once", [laws.AT_ONCE, 200])
def test_clusters_that_are_there_are_found(monkeypatch, at_once):
    """Also where clients are halved first, if they lie on a line."""
    monkeypatch.setattr(laws, "AT_ONCE", at_once)
    labels = np.repeat(np.arange(8), 6)
    where = np.eye(8) if at_once > 200 else np.arange(8.0)[:, None]
    rows = where[labels] + 0.01 * RANDOM.normal(size=(48, where.shape[1]))
    found = [set(labels[part]) for part in laws.alike(rows, 6)]
    assert sorted(found, key=min) == [{c} for c in range(8)]


@pytest.mark.parametrize("name", groups.GROUPINGS)
@pytest.mark.parametrize("limits", [Limits(300, 12), Limits(0, 4), Limits(groups=6),
                                    Limits(groups=K), Limits(groups=1)])
def test_every_client_is_in_one_group(name, limits):
    found = lists(groups.build(name, SIZES, limits, estimates=SHARES, clusters=4, seed=1))
    most = -(-K // limits.groups) if limits.groups else limits.clients
    assert not ref.faults(found, SIZES, k_max=most)
    if limits.groups:
        assert len(found) == limits.groups
    if limits.examples and name != "icg":  # which counts with clients of the mean size
        assert not ref.faults(found, SIZES, d_min=300, k_max=12)


def test_greedy_and_oracle_are_as_balanced_as_can_be():
    """Two clients of each of three classes: brute force over all groupings finds no better."""
    sizes, x = np.full(6, 10), np.eye(3)[[0, 0, 1, 1, 2, 2]]
    best = ref.best_grouping(sizes, 30, 3, lambda g: ref.balance(g, x, sizes))
    for name, rows in (("greedy", x), ("oracle", 10 * x)):
        found = lists(groups.build(name, sizes, Limits(30, 3), estimates=rows))
        assert len(found) == len(best)
        assert ref.balance(found, x, sizes) == pytest.approx(ref.balance(best, x, sizes))


def test_one_class_per_client_becomes_all_classes_per_group():
    labels = np.arange(100) % 10
    sizes = np.full(100, 100)
    for name in ("greedy", "kmeans", "icg", "oracle"):
        rows = np.eye(10)[labels] * (100 if name == "oracle" else 1)
        found = groups.build(name, sizes, Limits(1000, 11), estimates=rows, clusters=10)
        assert [sorted(labels[g]) for g in lists(found)] == [list(range(10))] * 10, name


def test_forty_thousand_clients():
    labels = RANDOM.integers(0, 20, 40_000)
    sizes = RANDOM.integers(50, 150, 40_000)
    rows = np.eye(20)[labels] + 0.1 * RANDOM.normal(size=(40_000, 20))
    for name in ("random", "icg"):
        found = groups.build(name, sizes, Limits(groups=1900), estimates=rows)
        assert found.num_clients == 1900
        assert set(found.sizes) == {21, 22}


@pytest.mark.slow
def test_forty_thousand_clients_greedily():
    labels = RANDOM.integers(0, 20, 40_000)
    sizes = RANDOM.integers(50, 150, 40_000)
    rows = np.eye(20)[labels] + 0.1 * RANDOM.normal(size=(40_000, 20))
    found = groups.build("greedy", sizes, Limits(2000, 30), estimates=rows, distance="cosine")
    classes = [len(set(labels[found.client(g)])) for g in range(100)]
    assert np.mean(classes) > 15


@pytest.mark.parametrize(
    ("limits", "options", "message"),
    [
        (Limits(10**6, 11), {}, "expected at most .*, which all clients have together"),
        (Limits(1000, 3), {}, "the 3 largest clients have"),
        (Limits(0, 0), {}, "groups.clients = 0: expected 1 or more"),
        (Limits(groups=K + 1), {}, f"{K + 1} groups of {K} clients"),
        (LIMITS, {"name": "kmeans", "clusters": K + 1}, f"clusters = {K + 1} of {K} clients"),
        (LIMITS, {"name": "greedy", "distance": "kl"}, "is of shares"),
        (LIMITS, {"name": "greedy", "distance": "norm_cosine"}, "is of Fisher information"),
        (LIMITS, {"name": "greedily"}, "greedy"),
        (LIMITS, {"name": "icg", "estimates": ROWS[1:]}, "expected one row of finite"),
        (Limits(150, 2), {}, "clients are left over"),
    ],
)
def test_wrong_groups(limits, options, message):
    sizes = np.full(K, 50) if limits.examples == 150 else SIZES
    if limits.examples == 150:
        limits = Limits(100, 2)
    with pytest.raises(ff.UsageError, match=message):
        groups.build(**{"name": "random", "sizes": sizes, "limits": limits, "estimates": ROWS,
                        **options})


@pytest.mark.parametrize("name", metrics.METRICS)
def test_silhouettes(name):
    labels = SHARES.argmax(axis=1)
    labels[0] = 4  # alone
    found = groups.silhouette(groups.distances(name, SHARES), labels)
    assert found == pytest.approx(ref.silhouette(SHARES, labels, TAUS[name]), abs=1e-8)


def test_silhouettes_need_classes():
    with pytest.raises(ff.UsageError, match="clients of 1 class: expected two classes or more"):
        groups.silhouette(np.ones((4, 4)), np.zeros(4))


def test_figures_of_estimates(tmp_path):
    np.testing.assert_allclose(report.similarities(ROWS), ref.similarity_matrix(ROWS), atol=1e-12)
    matrices = {e: report.similarities(ROWS * e) for e in (1, 5)}
    assert report.similarity(matrices, tmp_path / "a.png").exists()
    assert report.distances(SHARES, SHARES.argmax(axis=1), "kl", tmp_path / "b.png").exists()
    places = {"a": ROWS, "one number": ROWS[:, :1]}
    assert report.embeddings(places, SHARES.argmax(axis=1), tmp_path / "c.png").exists()


def test_pca_is_that_of_numpy():
    found, expected = groups.reduced(ROWS, 0.9), ref.pca(ROWS, 0.9)
    np.testing.assert_allclose(np.abs(found), np.abs(expected), atol=1e-9)
    np.testing.assert_array_equal(groups.reduced(np.ones((4, 3)), 0.9), np.zeros((4, 1)))


class TestEstimators:
    """On clients of one class each, and one without examples."""

    problem = Problem((9, 0, 9, 9, 9, 9, 9))
    order = np.argsort(problem.dataset.train.labels, kind="stable")

    def probe(self, **local):
        client = self.problem.client(lr=0.2, epochs=3, **local)
        return groups.Probe(client, self.problem.variables, jax.random.key(1))

    def rows(self, estimate, clients=(0, 1, 2, 3, 4, 5, 6)):
        return np.asarray(estimate(self.problem.data, jnp.array(clients, jnp.int32)))

    def trained(self, k, probe):
        data = self.problem.data.client(jnp.int32(k))
        return jax.jit(probe.trained)(data)

    def test_classifiers(self):
        probe = self.probe()
        found = self.rows(groups.classifiers(probe))
        for k in (0, 1, 3):
            head = self.trained(k, probe).params["classifier"]
            own = np.concatenate([np.ravel(head[name]) for name in sorted(head)])
            np.testing.assert_allclose(found[k], own, atol=1e-6)
        start = self.problem.params["classifier"]
        np.testing.assert_allclose(
            found[1], np.concatenate([np.ravel(start[n]) for n in sorted(start)])
        )

    @pytest.mark.parametrize("reading", [
        "softmax", pytest.param("normalised", marks=pytest.mark.slow)
    ])
    def test_confidences(self, reading):
        probe, task = self.probe(), self.problem.task
        public = jax.tree.map(lambda x: x[:20], self.problem.dataset.train)
        found = self.rows(groups.confidences(probe, public, 3, reading))
        batch = ff.data.Batch(*jax.tree.map(jnp.asarray, public), jnp.ones(20, bool))
        for k in (0, 4):
            logits = task.forward(self.trained(k, probe), task.prepare(batch, None), None).logits
            p = np.asarray(jax.nn.softmax(logits), float)
            expected = ref.confidence(p, public.labels, 3, released=reading == "normalised")
            np.testing.assert_allclose(found[k], expected, rtol=1e-5)

    def test_fisher_information(self):
        """Against the gradients of log p(y | x), one example after the other."""
        probe = self.probe(frozen=lambda name: not ff.parts.head(name))
        found = self.rows(groups.task2vec(probe, batch_size=4))
        task, k = self.problem.task, 2
        model, own = self.trained(k, probe), self.problem.partition.client(k)
        names = [n for n in ff.parts.take(model, lambda n: not ff.parts.head(n)) if "kernel" in n]

        def log_p(params, x, y):
            batch = ff.data.Batch(x[None], y[None], jnp.ones(1, bool))
            outputs = task.forward(model._replace(params=params), task.prepare(batch, None), None)
            return jax.nn.log_softmax(outputs.logits[0])

        jacobian = jax.jit(jax.jacrev(log_p))
        inputs, labels = map(jnp.asarray, self.problem.dataset.train)
        gradients = []
        for i, index in enumerate(own):
            key = ff.rng.fold(probe.key, "fisher", k, i // 4)
            logits = log_p(model.params, inputs[index], labels[index])
            drawn = jax.random.categorical(ff.rng.fold_each(key, 4)[i % 4], logits)
            rows = jacobian(model.params, inputs[index], labels[index])
            leaves = ff.parts.take(model._replace(params=rows), lambda n: n in names)
            gradients.append(np.concatenate([np.ravel(leaves[n][drawn]) for n in names]))
        fisher = ref.diagonal_fisher(gradients)
        shape = ff.parts.take(model, lambda n: n in names)[names[0]].shape
        assert len(names) == 1
        np.testing.assert_allclose(found[k], fisher.reshape(shape).mean(0), rtol=1e-4, atol=1e-9)
        np.testing.assert_array_equal(found[1], 0)

    def test_a_public_set_that_clients_train_on(self):
        dataset = self.problem.dataset
        with pytest.raises(ff.UsageError, match=r"0 examples of class 0, and .* that overlap"):
            estimators.public_set(dataset, 2, self.problem.partition.indices, 0)
        chosen, _ = estimators.public_set(dataset, 1, self.problem.partition.indices[1:4], 0)
        taken = {dataset.train.inputs[i].tobytes() for i in self.problem.partition.indices[1:4]}
        assert not taken & {x.tobytes() for x in np.asarray(chosen.inputs)}
        _, left = estimators.public_set(dataset, 2, np.zeros(0, int), 0)
        assert len(left) == len(dataset.test.labels) - 6
        with pytest.raises(ff.UsageError, match="the test set has"):
            estimators.public_set(dataset, 40, np.zeros(0, int), 0)
        with pytest.raises(ff.UsageError, match="without an example of class"):
            groups.confidences(self.probe(), jax.tree.map(lambda x: x[:1], dataset.train), 3)
