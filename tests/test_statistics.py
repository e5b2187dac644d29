"""Whose statistics normalise: SiloBN's two inferences, AdaBN, FixBN, settings of any method."""

import functools

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import reference_segmentation as ref
from conftest import Problem, assert_close, assert_same_bits, small_config

import fedjax_flat as ff
from fedjax_flat import testing
from fedjax_flat.client import fixed_after
from fedjax_flat.engine.evaluate import adapter, personal_evaluator
from fedjax_flat.engine.round import traffic
from fedjax_flat.models.layers import BatchNorm, Conv

DOMAINS, EACH, SIDE, CLASSES = 3, 4, 4, 3


class Small(nn.Module):
    """1x1 convolution, BatchNorm, ReLU, BatchNorm, classifier: a layer after a measured one."""

    num_classes: int

    @nn.compact
    def __call__(self, x, *, train=False, mask=None):
        x = nn.relu(BatchNorm()(Conv(6, (1, 1))(x), train=train, mask=mask))
        x = BatchNorm()(x, train=train, mask=mask)
        x = nn.Dropout(0.5, deterministic=not train)(x)
        return Conv(self.num_classes, (1, 1), name="classifier")(x)


def layers_of(variables):
    """What `ref.adabn` reads."""
    p = jax.tree.map(lambda x: np.asarray(x, float), variables.params)
    conv = lambda c: lambda x: x @ c["kernel"][0, 0] + c["bias"]
    norm = lambda n: (n["scale"], n["bias"])
    return [conv(p["Conv_0"]), norm(p["BatchNorm_0"]), lambda x: np.maximum(x, 0),
            norm(p["BatchNorm_1"]), conv(p["classifier"])]


@functools.cache
def scenes():
    """Three domains of other brightness and contrast; the same domains in train and test."""
    random = np.random.default_rng(0)
    labels = random.integers(0, CLASSES, (2, DOMAINS * EACH, SIDE, SIDE)).astype(np.uint8)
    domain = np.repeat(np.arange(DOMAINS), EACH)
    base = labels[..., None] + random.normal(0, 0.3, (*labels.shape, 2))
    images = base * (1 + domain)[None, :, None, None, None] + 3 * domain[None, :, None, None, None]
    labels[random.random(labels.shape) < 0.1] = 255
    images = images.astype(np.float32)
    data = ff.data.from_arrays(images[0], labels[0], test=(images[1], labels[1]),
                               num_classes=CLASSES, task="segmentation", owners=domain)
    return data, domain


@functools.cache
def tasks():
    data, _ = scenes()
    preprocess = ff.data.preprocess(data)
    make = lambda **o: ff.tasks.segmentation(
        ff.models.from_linen(Small(CLASSES), data.inputs, **o), preprocess, data
    )
    return make(), make(by_batch=True), make(frozen_stats=True)


@functools.cache
def trained():
    """SiloBN after three rounds, one client per domain."""
    data, domain = scenes()
    task = tasks()[0]
    clients = ff.data.federate(data.train, ff.data.Partition.from_owners(domain))
    algorithm = testing.algorithm_of("silobn", task)
    step = jax.jit(ff.round_step(algorithm, ff.uniform(3, 3), ff.cohort_map("map"), task=task))
    state = ff.init_state(algorithm, jax.jit(task.init)(jax.random.key(0)), 3, jax.random.key(1))
    for _ in range(3):
        state, _ = step(state, clients)
    return algorithm, state, state.server.model


@pytest.mark.parametrize("batch_size", [4, 5])
def test_standard_by_batch_against_numpy(batch_size):
    """Each test batch by its own statistics, padding in none, dropout off."""
    data, _ = scenes()
    model = trained()[2]
    sums = jax.jit(ff.evaluator(tasks()[1], batch_size))(model, data.test)
    images, labels = data.test
    cuts = range(0, len(labels), batch_size)
    batches = [(images[i : i + batch_size], labels[i : i + batch_size]) for i in cuts]
    expected = ref.standard_confusion(layers_of(model), batches, CLASSES)
    np.testing.assert_array_equal(sums["confusion"], expected)


def test_by_domain_against_numpy():
    data, domain = scenes()
    algorithm, state, model = trained()
    tested = ff.data.federate(data.test, ff.data.Partition.from_owners(domain))
    evaluate = jax.jit(personal_evaluator(tasks()[0], algorithm, 3))
    sums = evaluate(state.server, state.clients, tested, jnp.arange(3, dtype=jnp.int32))
    kept = {name: np.asarray(x, float) for name, x in state.clients.own.items()}
    of = lambda k: [
        tuple(kept[f"stats/batch_stats/BatchNorm_{i}/{s}"][k] for s in ("mean", "var"))
        for i in range(2)
    ]
    tests = {k: (data.test.inputs[domain == k], data.test.labels[domain == k]) for k in range(3)}
    expected = ref.by_domain_confusion(
        layers_of(model), tests, {k: of(k) for k in range(3)}, CLASSES
    )
    np.testing.assert_array_equal(sums["confusion"].sum(0), expected)


def test_adabn_of_one_batch_against_numpy():
    data, domain = scenes()
    model = trained()[2]
    own = ff.data.Examples(*(x[domain == 1] for x in data.test))
    adapted = jax.jit(adapter(tasks()[1], EACH))(model, own)
    assert_same_bits(adapted.params, model.params)
    output, statistics = ref.adabn(layers_of(model), own.inputs)
    n = EACH * SIDE * SIDE
    for i, (mean, var) in enumerate(statistics):
        found = adapted.stats["batch_stats"][f"BatchNorm_{i}"]
        np.testing.assert_allclose(found["mean"], mean, rtol=1e-4, atol=1e-5)
        np.testing.assert_allclose(found["var"], var * n / (n - 1), rtol=1e-4)  # as PyTorch keeps
    logits = tasks()[0].forward(adapted, ff.data.Batch(jnp.asarray(own.inputs), (), None), None)
    np.testing.assert_allclose(logits.logits, output, atol=0.05)


def test_adabn_of_several_batches_is_exact_in_the_first_layer():
    """12 examples in batches of 5, 5 and 2: pooled mean and variance, whatever the batches."""
    data, _ = scenes()
    model = trained()[2]
    found = jax.jit(adapter(tasks()[1], 5))(model, data.test).stats["batch_stats"]["BatchNorm_0"]
    x = layers_of(model)[0](data.test.inputs.astype(float))
    parts = [x[i : i + 5].reshape(-1, 6) for i in (0, 5, 10)]
    mean = x.reshape(-1, 6).mean(0)
    square = sum(len(p) * (p.var(0, ddof=1) + p.mean(0) ** 2) for p in parts) / (12 * SIDE**2)
    np.testing.assert_allclose(found["mean"], mean, rtol=1e-5)
    np.testing.assert_allclose(found["var"], square - mean**2, rtol=1e-4)


def test_what_leaves_a_client_with_labels_of_pixels():
    """Bits by hand, leaves by name; what stays is each domain's own, and the server has none."""
    data, domain = scenes()
    task = tasks()[0]
    clients = ff.data.federate(data.train, ff.data.Partition.from_owners(domain))
    weights, affine, measured = (2 * 6 + 6) + (6 * 3 + 3), 2 * (6 + 6), 2 * (6 + 6)
    sent = {"fedavg": weights + affine + measured, "silobn": weights + affine, "fedbn": weights}
    first = jax.jit(task.init)(jax.random.key(0))
    for name, numbers in sent.items():
        algorithm = testing.algorithm_of(name, task)
        state = ff.init_state(algorithm, first, 3, jax.random.key(1))
        assert traffic(algorithm, state, clients) == (32 * numbers, 32 * numbers)
    _, state, model = trained()
    assert all(name.startswith("stats/") for name in state.clients.own)
    assert_same_bits(model.stats, first.stats)  # the server never sees any
    mean = np.asarray(state.clients.own["stats/batch_stats/BatchNorm_0/mean"])
    assert np.abs(mean[0] - mean[2]).max() > 1  # three brightnesses
    shift = lambda m: np.asarray(m.params["BatchNorm_0"]["bias"])
    assert np.abs(shift(model) - shift(first)).max() > 1e-3  # affine parameters are averaged


def problem():
    return Problem((6, 5, 7), norm="batch")


@pytest.mark.slow
def test_fixed_after_two_rounds():
    """Bit for bit FedAvg before, statistics that stay after, where clients train as if frozen."""
    p = problem()
    fixed = ff.tasks.classification(
        ff.models.from_linen(ff.models.MLP(num_classes=3, hidden=(5,), norm="batch"),
                             p.dataset.input_shape, frozen_stats=True),
        ff.data.preprocess(p.dataset),
    )
    plain, frozen = p.client(), p.client().on(fixed)
    client = fixed_after(plain, fixed, 2)
    data = p.data.client(jnp.int32(0))
    key = jax.random.key(3)
    run = lambda c: jax.jit(lambda t: c.train(p.variables, data, key, round=t).variables)
    before, after = run(client)(jnp.int32(1)), run(client)(jnp.int32(2))
    assert_same_bits(before, run(plain)(jnp.int32(1)))
    assert_same_bits(after, run(frozen)(jnp.int32(2)))
    assert_same_bits(after.stats, p.variables.stats)
    assert not np.allclose(before.stats["batch_stats"]["BatchNorm_0"]["mean"], 0)
    moved = [np.abs(a - b).max() for a, b in zip(*map(jax.tree.leaves, (
        after.params, p.variables.params)), strict=True)]
    assert min(moved) > 0
    other = p.task._replace(forward=lambda *a: p.task.forward(*a))
    with pytest.raises(ff.UsageError, match="in a way of its own"):
        client.on(other)


@pytest.mark.parametrize(("method", "setting"), [("silobn", "own"), ("fedbn", "layers")])
def test_statistics_are_settings_of_any_method(method, setting):
    p = problem()
    by_name = testing.algorithm_of(method, p.task)
    by_setting = testing.algorithm_of("fedavg", p.task, {"model.statistics": setting})
    states = [ff.init_state(a, p.variables, 3, jax.random.key(0)) for a in (by_name, by_setting)]
    assert_same_bits(states[0].clients.own, states[1].clients.own)
    assert traffic(by_name, states[0], p.data) == traffic(by_setting, states[1], p.data)
    scaffold = testing.algorithm_of("scaffold", p.task, {"model.statistics": setting})
    kept = ff.init_state(scaffold, p.variables, 3, jax.random.key(0)).clients.own
    assert kept.keys() == states[0].clients.own.keys()


def test_silobn_of_equal_clients_is_fedavg():
    """The same examples everywhere, in one batch: what is kept is what would be averaged."""
    p = problem()
    one = jax.tree.map(lambda x: np.concatenate([np.asarray(x[:4])] * 3), p.dataset.train)
    data = ff.data.federate(one, testing.partition_of((4, 4, 4)))
    ends = {}
    for name in ("fedavg", "silobn", "fedbn"):
        algorithm = testing.algorithm_of(name, p.task, {"client.batch_size": 8})
        step = jax.jit(ff.round_step(algorithm, ff.uniform(3, 3), ff.cohort_map("map"),
                                     task=p.task))
        state = ff.init_state(algorithm, p.variables, 3, jax.random.key(0))
        for _ in range(2):
            state, _ = step(state, data)
        row = jax.tree.map(lambda x: x[1], state.clients)
        ends[name] = algorithm.personal(state.server, row) if algorithm.personal else (
            algorithm.models(state.server)["global"])
    assert_close(ends["silobn"], ends["fedavg"], 1e-5)
    assert_close(ends["fedbn"], ends["fedavg"], 1e-5)


@pytest.mark.parametrize(("sizes", "steps"), [((9,), 2), ((8,), 2), ((3,), 1), ((9, 3, 0), None)])
def test_a_last_batch_that_is_not_full_is_left_out(sizes, steps):
    p = Problem(sizes)
    client = p.client(epochs=1, drop_last=True)  # batches of 4
    taken = [int(client.steps(p.data.client(jnp.int32(k)))) for k in range(len(sizes))]
    assert taken == ([steps] if steps else [2, 1, 0])
    if len(sizes) == 1:
        train = jax.jit(functools.partial(client.train, round=jnp.int32(0)))
        result = train(p.variables, p.data.client(jnp.int32(0)), jax.random.key(0))
        assert float(result.info.sums["examples"]) == min(4 * steps, sizes[0])


SIZE = ff.data.count_of(ff.data.load("digits").train) // 20  # of a client of the default config


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        ({"client__batch_size": 1}, "client 0 has .* examples, and client.batch_size = 1 leaves a "
         "batch of one"),
        ({"client__batch_size": SIZE - 1}, "a batch of one, .*drop_last"),
        ({"model__norm": "none", "eval__statistics": "split"}, "model mlp has no statistics"),
        ({"model__norm": "none", "model__fix_after": 2}, "model mlp has no statistics"),
        ({"model__statistics": "frozen", "model__fix_after": 2}, "would change nothing"),
    ],
)
def test_settings_that_cannot_work(settings, text):
    config = small_config(**{"model__norm": "batch", "partition__name": "iid", **settings})
    with pytest.raises(ff.UsageError, match=text):
        ff.build(config)
