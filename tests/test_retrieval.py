"""Retrieval: mining, losses, search, recall and GeM against NumPy; what is refused."""

import dataclasses
import logging

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import reference_retrieval as ref
from conftest import assert_same_bits, small_config

import fedjax_flat as ff
from fedjax_flat.client.mining import miner
from fedjax_flat.data import Batch, Dataset, Examples
from fedjax_flat.models import GeM, Outputs
from fedjax_flat.models.layers import Conv
from fedjax_flat.models.pretrained import start_from
from fedjax_flat.report import retrieval as report
from fedjax_flat.tasks import Relation, nearest
from fedjax_flat.tasks.pairs import triplets, within

RANDOM = np.random.default_rng(0)
RADIUS, BEYOND = 2.0, 3.5


def toy(labels="identities", classes=6, each=8):
    """Noisy 4x4 pictures of a few things, in four clients of two cities."""
    random = np.random.default_rng(1)
    centres = random.normal(size=(classes, 4, 4, 1))

    def made(each):
        which = np.repeat(np.arange(classes), each).astype(np.int32)
        images = centres[which] + 0.7 * random.normal(size=(len(which), 4, 4, 1))
        place = np.stack([10.0 * which + random.uniform(0, 2, len(which)), 0 * which], 1)
        return Examples(images.astype(np.float32),
                        which if labels == "identities" else place.astype(np.float32))

    train, test = made(each), made(4)
    count = 4 * classes
    return Dataset(
        "toy", train, test, classes, task="retrieval",
        owners=(np.arange(classes * each) % 4).astype(np.int32),
        clients=("ada/1", "ada/2", "bob/1", "bob/2"),
        parts={"database": np.arange(0, count, 2), "queries": np.arange(1, count, 2)},
    )


@pytest.fixture
def source():
    """Registers a data set as `toy` for the length of a test."""
    def register(dataset):
        ff.register.source("toy", lambda: dataset)

    yield register
    ff.data.SOURCES.remove("toy")


def task_of(dataset, **options):
    model = ff.models.build("mlp", num_classes=5, inputs=dataset.inputs, hidden=(7,))
    return ff.tasks.retrieval(model, ff.data.preprocess(dataset), dataset, **options)


def embedded(count, seed=0):
    """Embeddings of length 1, of which some are the same."""
    f = ref.l2_normalised(np.random.default_rng(seed).normal(size=(count, 4)))
    f[3] = f[7]
    return f.astype(np.float32)


def relations(count, kind, seed=0):
    """(labels, positive, negative) by the reference, an image no pair with itself."""
    random = np.random.default_rng(seed)
    if kind == "identities":
        labels = random.integers(0, 5, count).astype(np.int32)
        positive, negative = ref.pairs_by_identity(labels, labels)
    else:
        labels = random.uniform(0, 9, (count, 2)).astype(np.float32)
        labels[:2] = (0, 0), (RADIUS, 0)  # exactly at the radius
        labels[2] = (BEYOND, 0)  # exactly where negatives begin
        positive, negative = ref.pairs_by_radius(labels, labels, RADIUS, BEYOND)
    return labels, ref.not_itself(positive), negative


@pytest.mark.parametrize("kind", ["identities", "positions"])
@pytest.mark.parametrize("negatives", [1, 4])
def test_mining_against_brute_force(kind, negatives):
    f, (labels, positive, negative) = embedded(20), relations(20, kind)
    mask = np.arange(20) < 17
    relation = Relation(RADIUS, BEYOND)
    ours = within(relation, jnp.asarray(labels), jnp.asarray(mask))
    real = mask[:, None] & mask[None]
    np.testing.assert_array_equal(ours[0], positive & real)
    np.testing.assert_array_equal(ours[1], negative & real)
    found = triplets(jnp.asarray(f) @ jnp.asarray(f).T, *ours, negatives=negatives)
    mined = {
        (i, int(found.positive[i]), int(n))
        for i in range(20) if found.has_positive[i]
        for n, there in zip(found.negative[i], found.has_negative[i], strict=True) if there
    }
    # By similarity and by distance the same ones; rounding may swap what is equally far.
    expected = ref.mined_triplets(np.float64(f), positive & real, negative & real,
                                  negatives=negatives)
    assert mined == set(expected)
    assert not any(positive[i, n] or i == n or not negative[i, n] for i, _, n in mined)


def batch_of(labels, mask):
    return Batch((), jnp.asarray(labels), jnp.asarray(mask))


@pytest.mark.parametrize("kind", ["identities", "positions"])
@pytest.mark.parametrize("loss", ["triplet", "contrastive", "multi_similarity"])
def test_losses_against_numpy(kind, loss):
    dataset = toy(kind)
    count, margin, k = 12, 0.4, 2
    task = task_of(dataset, loss=loss, margin=margin, negatives=k, radius=RADIUS,
                   negative_radius=BEYOND)
    f, (labels, positive, negative) = np.float64(embedded(count)), relations(count, kind)
    mask = np.arange(count) < 10
    real = mask[:, None] & mask[None]
    positive, negative = positive & real, negative & real
    batch = batch_of(labels, mask)
    mean = lambda f: task.means(task.measure(Outputs(f), batch))["loss"]
    ours, gradient = jax.value_and_grad(mean)(jnp.asarray(f, jnp.float32))
    if loss == "triplet":
        q, p, n = np.array(ref.mined_triplets(f, positive, negative, negatives=k)).T
        expected = ref.triplet_loss(f[q], f[p], f[n], margin)
        by_numpy = np.zeros_like(f)
        for rows, d in zip((q, p, n), ref.triplet_gradients(f[q], f[p], f[n], margin),
                           strict=True):
            np.add.at(by_numpy, rows, d / len(q))
    elif loss == "contrastive":
        a, b = np.array([(i, j) for i in range(10) for j in range(i + 1, 10)
                         if positive[i, j] or negative[i, j]]).T
        expected = ref.contrastive_losses(f[a], f[b], positive[a, b], margin).mean()
        by_numpy = None  # of similarities: the same along the sphere only
    else:
        expected = ref.multi_similarity_losses(f, positive, negative)[:10].mean()
        by_numpy = None
    assert float(ours) == pytest.approx(expected, rel=2e-4, abs=1e-6)
    assert np.isfinite(gradient).all()
    if by_numpy is not None:
        np.testing.assert_allclose(gradient, by_numpy, atol=2e-5)
        return

    def at(x):
        g = ref.l2_normalised(x)
        if loss == "contrastive":
            return ref.contrastive_losses(g[a], g[b], positive[a, b], margin).mean()
        return ref.multi_similarity_losses(g, positive, negative)[:10].mean()

    along = RANDOM.normal(size=f.shape)
    slope = (at(f + 1e-6 * along) - at(f - 1e-6 * along)) / 2e-6
    tangent = along - f * np.sum(f * along, axis=1, keepdims=True)
    assert np.sum(np.float64(gradient) * tangent) == pytest.approx(slope, rel=2e-3, abs=1e-5)


def test_recall_of_a_batch_and_of_a_search():
    dataset = toy()
    task = task_of(dataset)
    variables = jax.jit(task.init)(jax.random.key(0))
    searched = ff.tasks.searched(dataset)
    evaluate = ff.searcher(task, 5, 2)
    means = task.means(evaluate(variables, searched.test))
    stored = Batch(jnp.asarray(dataset.test.inputs), jnp.asarray(dataset.test.labels),
                   jnp.ones(len(dataset.test.labels), bool))
    f = np.asarray(task.forward(variables, stored, None).logits)
    np.testing.assert_allclose(np.linalg.norm(f, axis=1), 1, rtol=1e-5)
    where, labels = dataset.parts, dataset.test.labels
    q, d = where["queries"], where["database"]
    expected = ref.recall_at(f[q], f[d], ref.pairs_by_identity(labels[q], labels[d])[0])
    assert 0 < expected[1] < 1
    for n, value in expected.items():
        assert float(means[f"recall@{n}"]) == pytest.approx(value)
    batch = task.means(task.evaluate(variables, stored))
    same = ref.not_itself(ref.pairs_by_identity(labels, labels)[0])
    alone = [ref.recall_at(f[i : i + 1], np.delete(f, i, 0), [np.delete(same[i], i)])
             for i in range(len(f))]
    whole = task.means(evaluate(variables, dataset.test))  # every image among all others
    for n in (1, 5, 10):
        mean = np.mean([one[n] for one in alone])
        assert float(batch[f"recall@{n}"]) == pytest.approx(mean, rel=1e-5)
        assert float(whole[f"recall@{n}"]) == pytest.approx(mean, rel=1e-5)


def test_search_in_blocks_is_exact_and_takes_the_first_of_equals(monkeypatch):
    monkeypatch.setattr("fedjax_flat.tasks.search.ROWS", 8)
    monkeypatch.setattr("fedjax_flat.tasks.search.QUERIES", 4)
    base = RANDOM.integers(-2, 3, (9, 3)).astype(np.float32)
    database = np.tile(base, (3, 1))  # all three times, in other blocks
    queries = RANDOM.integers(-2, 3, (11, 3)).astype(np.float32)
    own = np.full(11, -1)
    own[5] = 4
    places, scores = nearest(jnp.asarray(queries), jnp.asarray(database), 6, own)
    exact = queries @ database.T
    exact[5, 4] = -np.inf
    expected = np.argsort(-exact, axis=1, kind="stable")[:, :6]
    np.testing.assert_array_equal(places, expected)
    np.testing.assert_array_equal(scores, np.take_along_axis(exact, expected, 1))
    few, _ = nearest(jnp.asarray(queries[:1]), jnp.asarray(database[:2]), 6, [0])
    assert few.tolist() == [[1, -1]]


def test_gem():
    x = RANDOM.uniform(0.1, 2, (2, 3, 4, 5)).astype(np.float32)
    pool = lambda p, x: GeM().apply({"params": {"p": jnp.float32(p)}}, x)
    np.testing.assert_allclose(pool(1, x), x.mean((1, 2)), rtol=1e-5)
    np.testing.assert_allclose(pool(1e4, 100 * x), 100 * x.max((1, 2)), rtol=1e-3)
    np.testing.assert_allclose(pool(3, x), ref.gem(np.float64(x), 3), rtol=1e-5)
    u = RANDOM.normal(size=5)
    loss = lambda p, x: jnp.sum(jnp.asarray(u, jnp.float32) * pool(p, x)[0])
    ours = jax.grad(loss, (0, 1))(jnp.float32(2.5), jnp.asarray(x[:1]))
    dx, dp = ref.gem_gradients(np.float64(x[0]), 2.5, u)
    np.testing.assert_allclose(ours[1][0], dx, atol=1e-5)
    assert float(ours[0]) == pytest.approx(dp, rel=1e-3)
    assert np.asarray(GeM(p=4.0).init(jax.random.key(0), x)["params"]["p"]) == 4


def test_gem_after_pretrained_maps_is_fresh(tmp_path):
    class Pooled(nn.Module):
        @nn.compact
        def __call__(self, x, *, train=False):
            del train
            return GeM(name="gem")(Conv(3, (2, 2))(x))

    kernel = RANDOM.normal(size=(2, 2, 1, 3)).astype(np.float32)
    np.savez(tmp_path / "maps.npz", **{
        "params/Conv_0/kernel": kernel, "params/Conv_0/bias": np.zeros(3, np.float32),
        "params/classifier/kernel": np.zeros((3, 9), np.float32),
    })
    model = start_from(ff.models.from_linen(Pooled(), (4, 4, 1)), tmp_path / "maps.npz")
    params = model.init(jax.random.key(0)).params
    np.testing.assert_array_equal(params["Conv_0"]["kernel"], kernel)
    assert (float(params["gem"]["p"]), set(params)) == (3.0, {"Conv_0", "gem"})


@pytest.mark.parametrize("kind", ["identities", "positions"])
def test_a_client_mines_its_own_images(kind):
    """The batch of a step has its anchors' mined triplets, and nobody else's images."""
    dataset = toy(kind)
    task = task_of(dataset, mine_every=3, negatives=2, radius=RADIUS, negative_radius=BEYOND)
    data = ff.data.federate(dataset.train, ff.testing.partition_of((3, 21, 24)))
    own = data.client(jnp.int32(1))
    variables, other = (jax.jit(task.init)(jax.random.key(i)) for i in range(2))
    m = miner(task, own, variables, 10)
    rows = np.asarray(data.indices[3:24])
    images, labels = dataset.train.inputs[rows], dataset.train.labels[rows]
    f = lambda v: np.asarray(task.forward(
        v, Batch(jnp.asarray(images), (), jnp.ones(21, bool)), None).logits)
    refreshed, batch = jax.jit(m.refreshed), jax.jit(m.batch)
    cache = refreshed(m.empty(), variables, 0)
    np.testing.assert_allclose(cache[:21], f(variables), rtol=1e-5)
    np.testing.assert_array_equal(refreshed(cache, other, 2), cache)
    np.testing.assert_allclose(refreshed(cache, other, 3)[:21], f(other), rtol=1e-5)
    if kind == "identities":
        positive, negative = ref.pairs_by_identity(labels, labels)
    else:
        positive, negative = ref.pairs_by_radius(labels, labels, RADIUS, BEYOND)
    positive = ref.not_itself(positive)
    can = positive.any(1) & negative.any(1)
    order = RANDOM.permutation(21)
    positions = jnp.asarray(np.concatenate([order, np.arange(21, 30)]), jnp.int32)
    anchors = m.anchors(positions)
    assert int(anchors[1]) == can.sum()
    first = np.asarray(anchors[0])[: can.sum()]
    np.testing.assert_array_equal(first, order[can[order]])
    for i in range(12):
        chosen = np.asarray(batch(cache, anchors, i))
        here = chosen[chosen < 21]
        assert len(set(here)) == len(here)
        expected = set()
        for a in (first[(2 * i + j) % len(first)] for j in range(2)):
            expected |= {a, ref.best_positive(f(variables), positive, a)}
            expected |= set(ref.hardest_negatives(f(variables), negative, a, 2))
        assert set(here) == expected


def trained(tmp_path, **settings):
    config = small_config(data__name="toy", partition__name="natural", cohort__size=4,
                          client__batch_size=12, **settings)
    return ff.train(config, tmp_path / "run", progress=False)


def test_training_across_clients_with_mining(source, tmp_path, capsys):
    """It learns, and the pictures of what is found are made."""
    dataset = toy(each=16)
    source(dataset)
    result = trained(tmp_path, task__mine_every=2, task__negatives=2, rounds=8,
                     client__learning_rate=0.3, server__average="swa", server__swa__cycle=1,
                     client__sharpness="asam")
    tests = [r for r in result.records if r["split"] == "test" and r["model"] == "global"]
    first, last = tests[0], tests[-1]
    assert last["recall@1"] > 0.8
    assert list(last)[3:] == ["loss", "recall@1", "recall@5", "recall@10"]
    assert last["loss"] < first["loss"]
    found = report.retrieve([str(tmp_path / "run")], queries=3)
    assert [f.rsplit("/", 1)[1] for f in found["figures"]] == [
        "global_nearest.png", "global_recall.png"]
    (curve,) = found["recall"].values()
    assert curve[0] == pytest.approx(last["recall@1"], abs=1e-6)
    assert curve == sorted(curve)
    assert "recall@10" in report.table(found)


@pytest.mark.slow
def test_mining_of_padded_and_mapped_clients():
    """vmap and map of clients of unequal sizes agree; a client without examples is a no-op."""
    dataset = toy()
    task = task_of(dataset, mine_every=2, negatives=2)
    data = ff.data.federate(dataset.train, ff.testing.partition_of((20, 0, 28)))
    client = ff.client.local_training(task, ff.client.sgd(0.2), batch_size=8, steps=4)
    algorithm = ff.algorithms.fedavg(client, optax.sgd(1.0))
    models = []
    for how in ("map", "vmap"):
        step = jax.jit(ff.round_step(algorithm, ff.uniform(3, 3), ff.cohort_map(how), task=task))
        state = ff.init_state(algorithm, task.init(jax.random.key(0)), 3, jax.random.key(1))
        state, info = step(state, data)
        assert float(info.clients) == 2
        models.append(state.server.model.params)
    for a, b in zip(*map(jax.tree.leaves, models), strict=True):
        np.testing.assert_allclose(a, b, atol=1e-5)


@pytest.mark.slow
def test_without_mining_batches_are_the_plain_ones():
    dataset = toy()
    own = ff.data.federate(dataset.train, ff.testing.partition_of((48,))).client(jnp.int32(0))
    mined = task_of(dataset, mine_every=2)

    def end(task):
        client = ff.client.local_training(task, ff.client.sgd(0.2), batch_size=8)
        run = jax.jit(lambda v, key: client.train(v, own, key, round=0))
        return run(task.init(jax.random.key(0)), jax.random.key(1)).variables

    plain = end(task_of(dataset))
    assert_same_bits(plain, end(mined._replace(mining=None)))
    pairs = zip(jax.tree.leaves(plain), jax.tree.leaves(end(mined)), strict=True)
    assert any((a != b).any() for a, b in pairs)


@pytest.mark.slow
def test_the_loss_has_a_curvature():
    from fedjax_flat.curvature.data_loss import of_examples

    dataset = toy()
    task = task_of(dataset, margin=0.5)
    loss = of_examples(task, dataset.train, batch_size=24)
    params = task.init(jax.random.key(0)).params
    random = np.random.default_rng(3)
    v = jax.tree.map(lambda x: jnp.asarray(random.normal(size=x.shape), x.dtype), params)
    gradient = loss.gradient(params)
    step = 1e-3
    moved = jax.tree.map(lambda w, d: w + step * d, params, v)
    slope = float(loss.value(moved) - loss.value(params)) / step
    expected = sum(float(jnp.vdot(a, b)) for a, b in
                   zip(jax.tree.leaves(gradient), jax.tree.leaves(v), strict=True))
    assert slope == pytest.approx(expected, rel=0.1)
    assert all(np.isfinite(x).all() for x in jax.tree.leaves(loss.product(params, v)))


def test_clients_without_a_pair_are_named_and_left_out(source, caplog):
    dataset = toy()
    owners = dataset.owners.copy()
    owners[:] = 2
    owners[[0, 8, 16]] = 0, 0, 0  # three things, each once
    owners[[1, 2]] = 1, 1
    names = dataclasses.replace(dataset, owners=owners)
    source(names)
    config = small_config(data__name="toy", partition__name="natural", cohort__size=2)
    with caplog.at_level(logging.WARNING, "fedjax_flat"):
        built = ff.build(config)
    assert built.data.num_clients == 2
    assert "1 of 3 clients have no two images of one place and are left out: ada/1" in caplog.text
    ff.data.SOURCES.remove("toy")
    owners[:] = np.arange(48)
    source(dataclasses.replace(dataset, owners=owners, clients=tuple(map(str, range(48)))))
    with pytest.raises(ff.UsageError, match="no client has two images of one place"):
        ff.build(config)


def test_clusters_by_the_names_of_clients(source):
    source(toy())
    options = {"data__name": "toy", "partition__name": "natural", "cohort__size": 4,
               "algorithm__name": "hierfavg", "groups__name": "names"}
    built = ff.build(small_config(groups__count=2, **options))
    assert np.asarray(built.data_at(0).clusters).tolist() == [0, 0, 1, 1]
    with pytest.raises(ff.UsageError, match=r"expected groups.count = 2"):
        ff.build(small_config(groups__count=3, **options))


def with_labels(dataset, change):
    labels = np.array(dataset.train.labels)
    change(labels)
    return dataclasses.replace(dataset, train=dataset.train._replace(labels=labels))


@pytest.mark.parametrize(
    ("dataset", "settings", "message"),
    [
        (toy(), {"task__margin": -0.1}, "task.margin = -0.1"),
        (toy("positions"), {"task__radius": 0.0}, "task.radius = 0.0"),
        (toy("positions"), {"task__negative_radius": 5.0}, "below task.radius"),
        (toy(), {"task__loss": "triplets"}, "Did you mean 'triplet'"),
        (toy(), {"data__mixup": 0.2}, "mixup"),
        (toy(), {"task__mine_every": 1, "client__batch_size": 2}, "at least 3 images"),
        (toy(), {"task__loss": "multi_similarity", "task__margin": 0.2}, "would change nothing"),
        (toy(), {"task__alpha": 1.0}, "would change nothing"),
        (toy(), {"task__radius": 3.0}, "would change nothing"),
        (dataclasses.replace(toy(), parts={"database": [], "queries": [1]}), {}, "database"),
        (with_labels(toy("positions"), lambda x: x.__setitem__(3, np.nan)), {}, "finite"),
        (dataclasses.replace(toy(), train=Examples(
            toy().train.inputs, np.zeros((48, 3), np.float32))), {}, r"shape \(48, 3\)"),
    ],
)
def test_what_is_refused(source, dataset, settings, message):
    source(dataset)
    config = small_config(data__name="toy", partition__name="natural", cohort__size=4, **settings)
    with pytest.raises(ff.UsageError, match=message):
        ff.build(config)
