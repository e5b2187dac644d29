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
from methods import algorithm_of, clients, problem, run
from reference_open import ntd_gradient, softmax

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


@pytest.mark.slow
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


@pytest.mark.slow
def test_fedfa_keeps_the_contract():
    first = fedfa_run()
    testing.check_padding(first)
    testing.check_strategies(first)


def test_fedfa_sends_two_numbers_per_channel_each_way():
    first = fedfa_run()
    sent = traffic(first.algorithm, first.states[0], first.data)
    size = sum(w.size for w in jax.tree.leaves(images().params))
    assert (sent.down // 32 - size, sent.up // 32 - size) == (6, 6)
    assert first.model.stats == ()
    testing.check_resume(first)


# ---- FedDistill, FedDF, FedNova ----------------------------------------------------------------


def test_feddistill_exchanges_logits_alone():
    first = testing.Run(algorithm_of("feddistill", feddistill__gamma=2.0), problem())
    own = first.states[-1].clients.inner
    ours = np.stack([
        ref.Clients.flat(reference.unpack(jax.tree.map(lambda x, k=k: x[k], own.params)))
        for k in range(len(testing.SIZES))
    ])
    theirs = teachers.feddistill(clients(), 2.0, shared=False)
    np.testing.assert_allclose(ours, theirs, atol=2e-5 * np.abs(theirs).max())
    personal = first.algorithm.personal(
        first.states[-1].server, jax.tree.map(lambda x: x[3], first.states[-1].clients)
    )
    assert_same_bits(personal, jax.tree.map(lambda x: x[3], own))
    sent = traffic(first.algorithm, first.states[0], first.data)
    assert sent == (32 * 9 + 8 * 3,) * 2
    testing.check_resume(first)
    testing.check_members(first)


FEDDF = {"feddf__optimizer": "sgd", "feddf__learning_rate": 0.2, "feddf__batch_size": 6}


@functools.cache
def feddf_run(steps):
    p = Problem()
    p.data = p.data.replace(unlabelled=p.data.examples.inputs[5:20])
    algorithm = algorithm_of("feddf", data__unlabelled=0.1, feddf__steps=steps, **FEDDF)
    return testing.Run(algorithm, p, rounds=3)


def test_feddf_is_the_reference():
    first, c = feddf_run(4), clients()
    c = ref.Clients(c.layers(c.w0), c.x, c.y, c.members, c.rounds[:3], c.lr)
    place = lambda i: (6 * i + np.arange(6)) % 15
    batches = [[place(4 * t + i) for i in range(4)] for t in range(3)]
    theirs = teachers.feddf(c, c.x[5:20], batches, 0.2)
    ours = ref.Clients.flat(reference.unpack(first.model.params))
    assert np.abs(ours - theirs).max() / np.abs(theirs).max() < 2e-5
    assert float(first.infos[0].metrics["distillation"]) > 0
    testing.check_resume(first)
    sent = traffic(first.algorithm, first.states[0], first.data)
    size = 32 * sum(w.size for w in jax.tree.leaves(problem().params))
    assert sent == (size, size)


@pytest.mark.slow
def test_padding_of_methods_with_clients_or_examples_of_their_own():
    testing.check_padding(feddf_run(4))
    testing.check_padding(testing.Run(algorithm_of("feddistill"), problem(), rounds=2))
    assert_close(feddf_run(0).model, run("fedavg").states[3].server.model, 1e-6)


@pytest.mark.parametrize("placement", ["device", "host"])
def test_what_the_server_has_no_client_has(placement):
    options = {"algorithm__name": "feddf", "data__unlabelled": 0.2, "data__validation": 0.1}
    built = ff.build(small_config(data__placement=placement, **options))
    everything = ff.data.load("digits").train
    data = built.data_of([0])
    count = len(everything.labels)
    assert data.unlabelled.shape == (int(0.2 * count), *everything.inputs.shape[1:])
    sizes = built.data.sizes if placement == "device" else built.data.partition.sizes
    held_out = count - int(np.sum(sizes)) - len(data.unlabelled)
    assert 0.05 * count < held_out < 0.1 * count


@pytest.mark.slow
def test_fednova_of_equal_clients_is_fedavg():
    small = Problem((6, 6, 6))
    a, b = (small.run(algorithm_of(n, small.task), 2)[0].server.model.params
            for n in ("fednova", "fedavg"))
    assert_close(a, b, 1e-6)


# ---- together ----------------------------------------------------------------------------------


def test_two_terms_add_up():
    """The gradient of moon+fedntd is both methods', less one cross-entropy."""
    both = testing.Run(algorithm_of("moon+fedntd"), problem(), rounds=3)
    c = clients()
    w, own = c.w0, {}
    for t in range(3):
        received, ends = c.layers(w), {}
        for k, batches in c.cohort(t).items():
            previous = c.layers(own.get(k, w))

            def pull(v, b, received=received, previous=previous):
                here, x, y = c.layers(v), c.x[b], c.y[b]
                contrast = teachers.moon_loss(here, received, previous, x, y, 1.0, 0.5)[1]
                taught = ntd_gradient(here, received, x, y, 1.0, 1.0)
                return c.flat(contrast) + c.flat(taught) - c.grad(v, b)

            ends[k] = c.train(w, batches, pull)
        own |= ends
        w = w - c.mean({k: w - v for k, v in ends.items()})
    ours = ref.Clients.flat(reference.unpack(both.model.params))
    assert np.abs(ours - w).max() / np.abs(w).max() < 2e-5


@pytest.mark.slow
@pytest.mark.parametrize("name", ["feddyn+moon+fedfa+fedmlb", "fedadam+fedfa+moon+fedntd"])
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
        ({"algorithm__name": "feddf"}, "expected a share of the train examples"),
        ({"data__unlabelled": 0.1}, "fedavg does not learn from it"),
        ({"algorithm__name": "feddf", "data__unlabelled": 1e-6}, "data.unlabelled = 1e-06 holds"),
        ({"algorithm__name": "fednova", "client__momentum": 0.9, "client__nesterov": True},
         "norms are of plain SGD"),
        ({"algorithm__name": "fednova", "client__optimizer": "adam"}, "on the steps of SGD"),
        ({"algorithm__name": "moon", "algorithm__moon__tau": 0.0}, "more than 0"),
        ({"algorithm__name": "fedfa", "algorithm__fedfa__probability": 2.0}, "at most 1"),
        ({"model__name": "mobilenetv2", "model__projection": 3}, "mobilenetv2 has no projection"),
    ],
)
def test_refused(options, message):
    with pytest.raises(ff.UsageError, match=message):
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


@pytest.mark.parametrize(
    ("addition", "message"),
    [
        (ff.algorithms.fedmlb, "a network that is one block: expected .*EndOfBlock"),
        (ff.algorithms.fedmax, "fedmax with a network that has no module 'classifier'"),
    ],
)
def test_networks_without_blocks_or_features(addition, message):
    found = []
    take = lambda variables, data, key, *, terms=(), **rest: found.extend(terms)
    client = addition().client(problem().client()._replace(train=take))
    client.train(problem().variables, problem().data.client(0), jax.random.key(0), round=0)
    batch = ff.data.Batch(jnp.zeros((4, 2)), jnp.zeros(4, jnp.int32), jnp.ones(4, bool))
    with pytest.raises(ff.UsageError, match=message):
        found[0].loss(ff.models.Outputs(jnp.zeros((4, 3))), batch, ())
