"""Distillation, contrast and feature augmentation: what tests/test_methods.py cannot see."""

import functools
import importlib

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import reference
import reference_methods as ref
import reference_teachers as teachers
from conftest import Problem, assert_close, assert_same_bits, small_config
from methods import algorithm_of, clients, run
from reference_open import softmax

import fedjax_flat as ff
from fedjax_flat import rng, testing
from fedjax_flat.client import terms
from fedjax_flat.engine.round import traffic
from fedjax_flat.models.layers import Dense, EndOfBlock

fa = importlib.import_module("fedjax_flat.algorithms.fedfa")  # the package has the factory


# ---- teachers ----------------------------------------------------------------------------------


def test_a_teacher_who_says_the_same_pulls_nowhere():
    z = jax.random.normal(jax.random.key(0), (6, 5))
    value, pull = jax.value_and_grad(lambda s: jnp.sum(terms.divergence(z, s)))(z)
    assert abs(float(value)) < 1e-6
    np.testing.assert_allclose(pull, 0, atol=1e-7)


def test_fedgkd_forgets_the_oldest():
    former = run("fedgkd").states[-1].server.kept
    kept = [run("fedgkd").algorithm.models(s.server)["global"] for s in run("fedgkd").states]
    assert int(former.pushed) == 5
    for row, model in ((0, kept[4]), (1, kept[3])):  # the current one, kept[5], is not among them
        assert_same_bits(jax.tree.map(lambda rows, r=row: rows[r], former.models), model)


# ---- FedMLB ------------------------------------------------------------------------------------


def deep_clients(deep):
    d = testing.drawn(deep, rounds=2)
    return ref.Clients(reference.unpack(d.params), d.x, d.y, d.members, d.rounds, d.rate)


def test_fedmlb_of_several_paths_with_sam():
    """Two hidden layers: gradients through one and two frozen blocks, in both passes of SAM."""
    deep = Problem(testing.SIZES, hidden=(6, 5))
    algorithm = algorithm_of("fedsam+fedmlb", deep.task, client__rho=0.2)
    ours = testing.Run(algorithm, deep, rounds=2).model.params
    c = deep_clients(deep)
    w = c.w0
    for t in range(2):
        loss = teachers.vector(c, teachers.mlb_local(c, 1.0, 1.0, False)(w, 0))
        ascend = lambda v, b, g=loss: g(v + 0.2 * ref.unit(g(v, b)), b)
        w = w - c.mean({k: w - c.train(w, b, ascend) for k, b in c.cohort(t).items()})
    gap = np.abs(ref.Clients.flat(reference.unpack(ours)) - w).max()
    assert gap / np.abs(w).max() < 2e-5


# ---- MOON --------------------------------------------------------------------------------------


def test_moon_keeps_where_a_client_ended():
    first = run("moon")
    t = 2
    members = [k for k, b in clients().cohort(t).items() if b]
    there = first.states[t + 1].clients.kept.there
    seen = {k for s in range(t + 1) for k in clients().cohort(s)}
    assert {k for k in range(len(there)) if bool(there[k])} == seen
    # The models of this round's cohort average to the global model after it.
    own = jax.tree.map(lambda x: x[jnp.asarray(members)], first.states[t + 1].clients.kept.model)
    sizes = np.asarray([len(clients().members[k]) for k in members], np.float32)
    mean = jax.tree.map(lambda x: np.tensordot(sizes / sizes.sum(), x, axes=1), own)
    assert_close(mean, first.algorithm.models(first.states[t + 1].server)["global"], 1e-6)


def test_a_projection_is_what_the_classifier_reads():
    for name, shape in (("cnn", (32, 32, 3)), ("lenet", (28, 28, 1)), ("femnist_cnn", (28, 28, 1)),
                        ("mlp", (4, 4, 1)), ("resnet18", (8, 8, 3)), ("resnet20", (8, 8, 3))):
        plain, model = (
            ff.models.build(name, num_classes=5, inputs=shape, **options)
            for options in ({}, {"projection": 7})
        )
        width = jax.eval_shape(plain.init, jax.random.key(0)).params["classifier"]["kernel"].shape
        v = jax.eval_shape(model.init, jax.random.key(0))
        head = v.params["Projection_0"]
        assert head["Dense_0"]["kernel"].shape == (width[0], width[0])
        assert head["Dense_1"]["kernel"].shape == (width[0], 7)
        out = jax.eval_shape(model.apply, v, jax.ShapeDtypeStruct((2, *shape), jnp.float32))
        assert out.features.shape == (2, 7)
        assert out.logits.shape == (2, 5)


# ---- FedFA -------------------------------------------------------------------------------------


class Pixels(nn.Module):
    """Each pixel becomes three channels, an image at the end of a block; then the classifier."""

    num_classes: int = 3

    @nn.compact
    def __call__(self, x, *, train=False):
        del train
        x = EndOfBlock()(Dense(3)(x))
        return Dense(self.num_classes, name="classifier")(x.reshape(x.shape[0], -1))


@functools.cache
def images() -> Problem:
    """The problem of test_methods.py with that network."""
    p = Problem()
    p.model = ff.models.from_linen(Pixels(), p.dataset.input_shape)
    p.task = ff.tasks.classification(p.model, ff.data.preprocess(p.dataset))
    p.variables = jax.jit(p.model.init)(jax.random.key(7))
    return p


@functools.cache
def fedfa_run(probability=0.7) -> testing.Run:
    options = {"fedfa__probability": probability, "fedfa__momentum": 0.8}
    return testing.Run(algorithm_of("fedfa", images().task, **options), images(), rounds=3)


@functools.partial(jax.jit, static_argnums=1)
def draws(layer, count):
    """The noise of a layer, for means and for deviations, and what decides whether there is any."""
    one = lambda purpose, i: jax.random.normal(rng.fold(layer, purpose, i), (1, 1, 3)).reshape(3)
    noise = [jnp.stack([one(p, i) for i in range(count)]) for p in ("mean", "deviation")]
    return noise, jax.random.uniform(rng.fold(layer, "whether"))


def test_fedfa_layer_is_the_references():
    x, mask = jax.random.normal(jax.random.key(0), (5, 4, 3, 3)), jnp.arange(5) < 4
    spread = fa.Spread(jnp.asarray([0.5, 1.0, 3.0]), jnp.asarray([2.0, 0.1, 0.3]))
    running = fa.Spread(jnp.asarray([0.1, -0.2, 0.3]), jnp.asarray([1.0, 2.0, 0.5]))
    key = jax.random.key(3)
    signal = jax.random.normal(jax.random.key(1), x.shape).at[4].set(0.0)

    @jax.jit
    def layer(x, mask, probability):
        out = lambda x: fa.augment(key, x, mask, running, spread, probability, 0.9)
        (y, moved), back = jax.vjp(out, x)
        return y, moved, back((signal, jax.tree.map(jnp.zeros_like, moved)))[0]

    noise = np.asarray(draws(key, 5)[0], float)
    values = (x, mask, signal, running, spread)
    images, real, pull, begin, wide = (np.asarray(v, float) for v in values)
    y, moved, back = layer(x, mask, 1.0)
    expected, then = teachers.ffa_forward(images, begin, wide, noise, mask=real, momentum=0.9)
    np.testing.assert_allclose(y[:4], expected[:4], atol=2e-5)
    np.testing.assert_allclose(moved, then, atol=1e-6)
    gradient = teachers.ffa_gradient(images, wide, noise, pull, real)
    np.testing.assert_allclose(back, gradient, atol=5e-5)
    y, moved, back = layer(x, mask, 0.0)
    assert_same_bits((y, moved, back), (x, running, signal))
    _, moved, _ = layer(x, jnp.zeros(5, bool), 1.0)
    assert_same_bits(moved, running)


@pytest.mark.parametrize("pooled", [False, True])
def test_fedfa_server_is_the_references(pooled):
    random = np.random.default_rng(0)
    mean, deviation = random.normal(size=(2, 4, 3)).astype(np.float32)
    present = jnp.asarray([True, False, True, True])
    found = fa.over_clients(fa.Spread(mean, deviation), present, pooled)
    rows = [(mean[k], deviation[k]) for k in (0, 2, 3)]
    np.testing.assert_allclose(found, teachers.ffa_server(rows, pooled), rtol=1e-5)
    assert not pooled or np.allclose(fa.weight(found.mean), 1)


def test_fedfa_rounds_are_the_references():
    d = testing.drawn(images(), rounds=3)
    x = d.x.reshape(-1, 4, 4, 1)
    (w1, b1), (w2, b2) = reference.unpack(d.params)
    spread = np.ones((2, 3))
    for t, cohort in enumerate(d.rounds):
        ends, uploads = {}, []
        for k, batches in cohort.items():
            if not batches:
                continue
            model, running = [w1, b1, w2, b2], (np.zeros(3), np.ones(3))
            client_key = rng.fold(jax.random.key(0), "client", t, k)
            for i, b in enumerate(batches):
                noise, now = draws(rng.fold(client_key, "step", i, "loss", "fedfa", 0), len(b))
                noise = np.asarray(noise, float)
                h = x[b] @ model[0] + model[1]
                y, running = teachers.ffa_forward(
                    h, running, spread, noise, apply=now < 0.7, momentum=0.8
                )
                flat = y.reshape(len(b), -1)
                out = (softmax(flat @ model[2] + model[3]) - np.eye(3)[d.y[b]]) / len(b)
                signal = (out @ model[2].T).reshape(h.shape)
                if now < 0.7:
                    signal = teachers.ffa_gradient(h, spread, noise, signal)
                grads = [np.tensordot(x[b], signal, axes=((0, 1, 2),) * 2), signal.sum((0, 1, 2)),
                         flat.T @ out, out.sum(0)]
                model = [w - d.rate * g for w, g in zip(model, grads, strict=True)]
            ends[k] = model
            uploads.append(running)
        total = sum(len(d.members[k]) for k in ends)
        w1, b1, w2, b2 = (
            sum(len(d.members[k]) / total * m[i] for k, m in ends.items()) for i in range(4)
        )
        spread = teachers.ffa_server(uploads)
    first = fedfa_run()
    ours = reference.unpack(first.model.params)
    largest = max(np.abs(w).max() for w in (w1, b1, w2, b2))
    for a, b in zip([w for pair in ours for w in pair], (w1, b1, w2, b2), strict=True):
        np.testing.assert_allclose(a / largest, b / largest, atol=2e-5)
    (kept,) = first.states[-1].server.kept
    np.testing.assert_allclose(kept, spread, rtol=1e-3, atol=1e-6)


def test_fedfa_without_augmentation_is_fedavg():
    fedavg = testing.Run(algorithm_of("fedavg", images().task), images(), rounds=3)
    assert_same_bits(fedfa_run(0.0).model, fedavg.model)


def test_fedfa_keeps_the_contract():
    first = fedfa_run()
    testing.check_resume(first)
    testing.check_padding(first)
    testing.check_strategies(first)


def test_fedfa_sends_two_numbers_per_channel_each_way():
    first = fedfa_run()
    sent = traffic(first.algorithm, first.states[0], first.data)
    size = sum(w.size for w in jax.tree.leaves(images().params))
    assert (sent.down // 32 - size, sent.up // 32 - size) == (6, 6)
    assert first.model.stats == ()


# ---- together ----------------------------------------------------------------------------------


@pytest.mark.parametrize("name", [
    "feddyn+moon+fedfa+fedmlb",
    pytest.param("fedadam+fedfa+moon+fedntd", marks=pytest.mark.slow),
])
def test_any_of_them_with_any_other(name):
    """Whatever the order, with SAM; nothing of FedFA's gets into models or what MOON keeps."""
    options = {"client__sharpness": "sam"}
    both = testing.Run(algorithm_of(name, images().task, **options), images(), rounds=3)
    testing.check_resume(both)
    assert all(bool(info.finite) for info in both.infos)
    assert jax.tree.structure(both.model) == jax.tree.structure(images().variables)


@pytest.mark.slow
def test_a_hybrid_resumes_with_swa(tmp_path):
    options = {
        "algorithm__name": "feddyn+fedmlb+moon+swa", "server__swa__cycle": 2,
        "server__swa__start": 2, "client__sharpness": "sam", "model__projection": 8,
    }
    whole = ff.train(small_config(rounds=4, **options), tmp_path / "a", progress=False)
    ff.train(small_config(rounds=2, **options), tmp_path / "b", progress=False)
    again = ff.train(small_config(rounds=4, **options), tmp_path / "b", progress=False)
    assert_same_bits(again.models, whole.models)


# ---- what is refused ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"algorithm__name": "fedgkd", "algorithm__fedgkd__models": 0}, "expected 1 or more"),
        ({"algorithm__name": "fedfa"}, "no images at the ends of its blocks"),
        ({"algorithm__name": "fedsgd+fedmlb"}, "fedsgd takes none"),
        ({"algorithm__name": "fedgkd", "algorithm__fedgkd_vote": 3}, "fedgkd_vote"),
        ({"algorithm__name": "moon", "algorithm__moon__tau": 0.0}, "more than 0"),
        ({"algorithm__name": "fedfa", "algorithm__fedfa__probability": 2.0}, "at most 1"),
        ({"model__name": "mobilenetv2", "model__projection": 3}, "mobilenetv2 has no projection"),
    ],
)
def test_refused(options, message):
    with pytest.raises((ff.UsageError, KeyError), match=message):
        ff.build(small_config(**options))


def test_labels_and_networks_that_a_term_cannot_use():
    batch = ff.data.Batch(jnp.zeros((4, 2)), jnp.zeros(4, jnp.int32), jnp.ones(4, bool))
    outputs = ff.models.Outputs(jnp.zeros((4, 3)), jnp.zeros((4, 2)))
    mixed = batch._replace(labels=jnp.zeros((4, 3)))
    terms.check_classes("it", outputs, batch)
    terms.check_classes("it", outputs, mixed, mixed=True)
    with pytest.raises(ff.UsageError, match=r"it with labels .* so no mixup"):
        terms.check_classes("it", outputs, mixed)
    for shape in ((4, 7, 3), (4, 1)):
        with pytest.raises(ff.UsageError, match=r"that is task\.name = 'classification'"):
            terms.check_classes("it", outputs._replace(logits=jnp.zeros(shape)), batch)
