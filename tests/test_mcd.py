"""MCD: the discrepancy, steps A, B and C, and rounds against NumPy; limits, padding, settings."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import reference_mcd as ref
from conftest import Problem, assert_close, assert_same_bits, small_config
from jax import export

import fedjax_flat as ff
from fedjax_flat import parts, rng, testing
from fedjax_flat.algorithms.mcd import mcd, paired
from fedjax_flat.client import discrepancy as two
from fedjax_flat.data import Batch, Examples
from fedjax_flat.data.federated import client_batch
from fedjax_flat.engine.round import traffic
from fedjax_flat.models import Variables

RATE = 0.3
KEY = jax.random.key(5)
head = lambda name: parts.head(name)
body = lambda name: not parts.head(name)


# ---- The discrepancy -----------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [(6, 4), (3, 5, 4, 3)])
def test_discrepancy_and_its_gradient(shape):
    random = np.random.default_rng(0)
    a, b = 2 * random.normal(size=(2, *shape))
    real = random.random(shape[:-1]) < 0.7
    expected, *slopes = ref.discrepancy(a[real], b[real])
    single = lambda x: jnp.asarray(x, jnp.float32)
    broken = np.where(real[..., None], b, np.nan)
    for there in (b, broken):
        found = two.discrepancy(single(a), single(there), jnp.asarray(real))
        assert float(found) == pytest.approx(expected, rel=1e-6)
    grads = jax.jit(jax.grad(two.discrepancy, (0, 1)))(single(a), single(b), jnp.asarray(real))
    for grad, slope in zip(grads, slopes, strict=True):
        near(np.asarray(grad)[real], slope)
        assert not np.asarray(grad)[~real].any()
    assert float(two.discrepancy(single(a), single(a), jnp.asarray(real))) == 0
    assert float(two.discrepancy(single(a), single(b), jnp.zeros(real.shape, bool))) == 0
    sure = jnp.array([[50.0, -50.0]])
    assert float(two.discrepancy(sure, -sure, jnp.ones(1, bool))) == 1


# ---- Steps against NumPy -------------------------------------------------------------------------


def model_of(pair):
    """A pair in the reference's form: one layer of features and two classifiers, in float64."""
    flat = {n: np.asarray(x, float) for n, x in parts.take(pair.params, lambda n: True).items()}
    (features,) = {n.split("/")[1] for n in flat if not head(n)}
    names = {
        "generator": f"model/{features}", "first": "model/classifier",
        "second": "second/classifier",
    }
    return {
        n: {"W0": flat[f"{path}/kernel"], "b0": flat[f"{path}/bias"]} for n, path in names.items()
    }


def flat_of(batch):
    """(inputs, labels) of real examples, as the reference reads them."""
    real = np.asarray(batch.mask)
    x, y = np.asarray(batch.inputs, float)[real], np.asarray(batch.labels)[real]
    return x.reshape(len(x), -1), y


def near(found, expected, tolerance=2e-6):
    """Relative to the largest number that is expected."""
    np.testing.assert_allclose(found, expected, rtol=0, atol=tolerance * np.abs(expected).max())


def agrees(pair, model, tolerance=2e-6):
    """Every array of the pair, by itself."""
    for name, network in model_of(pair).items():
        for leaf in network:
            near(network[leaf], model[name][leaf], tolerance)


@functools.cache
def problem(norm="none"):
    p = Problem(norm=norm)
    p.data = p.data.replace(labelled=jax.tree.map(lambda x: x[5:20], p.data.examples))
    return p


def pair_of(p):
    return paired(p.variables, jax.jit(p.model.init)(jax.random.key(7)))


def batches(p, padding=0):
    """(source, target), prepared; the target's last rows are padding."""
    whole = ff.data.whole(p.data.examples)
    size = 6 + padding
    place = jnp.where(jnp.arange(size) < 6, jnp.arange(size) + 8, whole.size)
    source = client_batch(whole, jnp.arange(8))
    return p.task.prepare(source, None), p.task.prepare(client_batch(whole, place), None)


def steps(p, optimizer=None):
    optimizer = optimizer or ff.client.sgd(RATE)
    return two.Steps(p.task, optimizer), pair_of(p)


def test_gradients_are_those_of_numpy():
    p = problem()
    pair = pair_of(p)
    source, target = batches(p)
    model = model_of(pair)

    def discrepancy(pair):
        outputs = two.both(p.task, pair, target, None)
        return two.discrepancy(*outputs.logits, target.mask)

    def source_loss(pair):
        return two.total_loss(p.task, two.both(p.task, pair, source, None), source)

    for loss, expected in (
        (discrepancy, ref.discrepancy_loss(model, flat_of(target)[0])),
        (source_loss, ref.source_loss(model, flat_of(source))),
    ):
        value, grads = jax.jit(jax.value_and_grad(loss))(pair)
        assert float(value) == pytest.approx(expected[0], rel=1e-6)
        agrees(grads, expected[1])


@pytest.mark.parametrize("with_source", [True, False])
def test_steps_are_those_of_numpy(with_source):
    p = problem()
    step, pair = steps(p)
    source, target = batches(p, padding=2)
    expected, states = model_of(pair), step.init(pair.params)
    a, b, c = map(jax.jit, (step.a, step.b, step.c))
    labelled, (x, _) = flat_of(source), flat_of(target)
    for _ in range(3):
        pair, states, _ = a(pair, states, source, KEY)
        expected = ref.step_a(expected, labelled, RATE)
        agrees(pair, expected)
        pair, states, _ = b(pair, states, source if with_source else None, target, KEY)
        expected = ref.step_b(expected, labelled if with_source else None, x, RATE)
        agrees(pair, expected)
        for _ in range(4):
            pair, states, _ = c(pair, states, target, KEY)
        expected = ref.step_c(expected, x, RATE)
        agrees(pair, expected)


@pytest.mark.parametrize("optimizer", [
    ff.client.sgd(RATE, momentum=0.9, weight_decay=0.1), optax.adam(0.1)
])
def test_each_step_leaves_the_other_part_alone(optimizer):
    """Also with momentum, decay and statistics."""
    p = problem("batch")
    step, pair = steps(p, optimizer)
    source, target = batches(p)
    states = step.init(pair.params)
    a, b, c = map(jax.jit, (step.a, step.b, step.c))
    with jax.numpy_dtype_promotion("standard"):  # optax's Adam
        begin, states, _ = a(pair, states, source, KEY)
        after_b, states_b, _ = b(begin, states, source, target, KEY)
        after_c, states_c, _ = c(after_b, states_b, target, KEY)
    same = lambda a, b, part: assert_same_bits(parts.take(a, part), parts.take(b, part))
    same(begin.params, after_b.params, body)
    same(begin.stats, after_b.stats, lambda name: True)
    same(after_b.params, after_c.params, head)
    assert_same_bits(states[two.GENERATOR], states_b[two.GENERATOR])
    assert_same_bits(states_b[two.CLASSIFIERS], states_c[two.CLASSIFIERS])
    moved = lambda a, b, part: any(
        float(jnp.abs(x - y).max()) > 0 for x, y in zip(
            parts.take(a, part).values(), parts.take(b, part).values(), strict=True)
    )
    assert moved(begin.params, after_b.params, head)
    assert moved(after_b.params, after_c.params, body)
    assert moved(after_b.stats, after_c.stats, lambda name: True)


def test_b_raises_and_c_lowers_the_discrepancy():
    p = problem()
    step, pair = steps(p, ff.client.sgd(0.05))
    _, target = batches(p)
    states, b, c = step.init(pair.params), jax.jit(step.b), jax.jit(step.c)
    of = lambda pair: float(c(pair, states, target, KEY)[2])
    up, _, (before, units, _) = b(pair, states, None, target, KEY)
    assert float(units) == 6
    assert float(before) == of(pair) < of(up)
    assert of(c(pair, states, target, KEY)[0]) < of(pair)


# ---- Limits and padding --------------------------------------------------------------------------


def whole_step(p, stored, *, n=2, source=True, optimizer=None):
    step, pair = steps(p, optimizer)
    labelled = two.in_turn(p.data.labelled, 4, KEY) if source else None
    whole = step.stepper(repeats=n, source=labelled)
    return jax.jit(whole.take)(pair, whole.init(pair.params), stored, KEY)


def test_without_target_it_is_supervised_training_of_two_classifiers():
    p = problem()
    stored = client_batch(ff.data.whole(p.data.examples), jnp.full(4, 10**6))
    found, _, sums = whole_step(p, stored, n=0)
    assert float(sums["units"]) == 0
    source = p.task.prepare(two.in_turn(p.data.labelled, 4, KEY)(0), None)
    pair = pair_of(p)
    agrees(found, ref.step_a(model_of(pair), flat_of(source), RATE))

    def loss(pair):  # of the two networks, one by one
        networks = pair["model"], parts.put(pair["model"], pair["second"])
        means = [p.task.measure(p.task.forward(Variables(w), source, KEY), source)
                 for w in networks]
        return sum(m["loss"] / m["units"] for m in means)

    grads = jax.jit(jax.grad(loss))(pair.params)
    expected = jax.tree.map(lambda w, g: w - RATE * g, pair.params, grads)
    assert_close(found.params, expected, 1e-6)


@pytest.mark.parametrize("norm", [pytest.param("none", marks=pytest.mark.slow), "batch"])
def test_padded_examples_are_no_ops(norm):
    p = problem(norm)
    everything = ff.data.whole(p.data.examples)
    positions = lambda extra: jnp.concatenate([jnp.arange(6), jnp.full(extra, 10**6)])
    plain, states, sums = whole_step(p, client_batch(everything, positions(0)))
    padded, padded_states, padded_sums = whole_step(p, client_batch(everything, positions(3)))
    assert_close((plain, states), (padded, padded_states), 2e-6)
    assert_close(sums, padded_sums, 1e-6)


def dense():
    """Pixels of 4x5 images in three classes, by a network with a classifier of 1x1."""
    import flax.linen as nn

    from fedjax_flat.models.layers import Conv

    class Net(nn.Module):
        @nn.compact
        def __call__(self, x, *, train=False):
            x = nn.relu(Conv(6, (3, 3), padding="SAME")(x))
            return Conv(3, (1, 1), name="classifier")(x)

    random = np.random.default_rng(3)
    images = random.normal(size=(9, 4, 5, 2)).astype(np.float32)
    labels = random.integers(0, 3, (9, 4, 5)).astype(np.uint8)
    labels[random.random(labels.shape) < 0.3] = 255
    dataset = ff.data.from_arrays(images, labels, num_classes=3, task="segmentation")
    model = ff.models.from_linen(Net(), (4, 5, 2))
    task = ff.tasks.segmentation(model, ff.data.preprocess(dataset), dataset)
    pair = paired(*(jax.jit(model.init)(jax.random.key(i)) for i in (0, 1)))
    return task, pair, Examples(jnp.asarray(images), jnp.asarray(labels))


def test_pixels_that_are_ignored_are_no_ops():
    task, pair, (images, labels) = dense()
    step = two.Steps(task, ff.client.sgd(RATE))
    states = step.init(pair.params)
    mask = jnp.array([True, True, False])

    @jax.jit
    def run(source_labels, target_labels, target_images):
        source = Batch(images[:3], source_labels, jnp.ones(3, bool))
        target = Batch(target_images, target_labels, mask)
        after, _, _ = step.a(pair, states, source, KEY)
        after, _, (apart, units, _) = step.b(after, states, source, target, KEY)
        return step.c(after, states, target, KEY)[0], apart, units

    plain, apart, units = run(labels[:3], labels[3:6], images[3:6])
    assert float(units) == int((labels[3:5] != 255).sum())
    # What target pixels are labelled does not matter, nor what is in a padded image.
    others = jnp.where(labels[3:6] == 255, 255, (labels[3:6] + 1) % 3).astype(jnp.uint8)
    noise = images[3:6].at[2].set(100.0)
    found, again, _ = run(labels[:3], others, noise)
    assert_close(found, plain, 1e-6)
    assert float(again) == pytest.approx(float(apart), abs=1e-7)
    seen = Batch(images[3:6], labels[3:6], mask)
    outputs = jax.jit(lambda pair: two.both(task, pair, seen, None))(pair)
    real = np.asarray(labels[3:6] != 255) & np.asarray(mask).reshape(3, 1, 1)
    found = two.discrepancy(*outputs.logits, jnp.asarray(real))
    expected = ref.discrepancy(*np.asarray(outputs.logits, float)[:, real])[0]
    assert float(found) == pytest.approx(expected, rel=1e-6)
    nothing = jnp.full((3, 4, 5), 255, jnp.uint8)
    batch = Batch(images[3:6], nothing, jnp.ones(3, bool))
    still, _, _ = jax.jit(step.stepper(repeats=2).take)(pair, states, batch, KEY)
    assert_same_bits(still, pair)


def test_global_has_the_mean_of_both_classifiers_logits():
    task, pair, (images, labels) = dense()
    batch = Batch(images, labels, jnp.ones(9, bool))
    each = two.both(task, pair, batch, None).logits
    assert_close(task.forward(two.merged(pair), batch, None).logits, each.mean(0), 1e-5)
    first = task.forward(Variables(pair.params["model"]), batch, None).logits
    assert_close(each[0], first, 1e-6)


def test_the_source_comes_in_turn():
    examples = Examples(jnp.arange(10), jnp.arange(10) % 3)
    batch = two.in_turn(examples, 4, KEY)
    pass_of = lambda t: np.concatenate([batch(2 * t).inputs, batch(2 * t + 1).inputs])
    assert len({*pass_of(0).tolist()}) == len({*pass_of(1).tolist()}) == 8
    assert pass_of(0).tolist() != pass_of(1).tolist()
    assert_same_bits(two.in_turn(examples, 4, KEY, first=3)(2), batch(5))
    few = two.in_turn(examples, 16, KEY)(7)
    assert sorted(few.inputs[few.mask].tolist()) == list(range(10))
    assert few.mask.shape == (16,)


# ---- Rounds --------------------------------------------------------------------------------------


@functools.cache
def run(form, norm="none", momentum=0.0):
    p = Problem((20,) if form == "central" else testing.SIZES, norm=norm)
    p.data = p.data.replace(labelled=jax.tree.map(lambda x: x[5:20], problem().data.examples))
    client = p.client(lr=RATE, client=ff.client.sgd(RATE, momentum=momentum))
    return testing.Run(mcd(client, optax.sgd(1.0), form=form, n=2, steps=3, seed=3), p, rounds=3)


def source_of(first):
    """The stored batch of labelled examples of a step, of all rounds."""
    key = rng.fold(jax.random.key(3), "mcd", "source")
    batch = two.in_turn(first.data.labelled, 4, key)
    return lambda i: flat_of(first.problem.task.prepare(batch(i), None))


def is_that_of_numpy(first, expected, x):
    """The model of two, and the logits of `global`: the mean, where the reference has the sum."""
    agrees(first.states[-1].server.model, expected)
    images, _ = first.problem.dataset.train
    whole = ff.data.whole(first.data.examples)
    batch = first.problem.task.prepare(client_batch(whole, jnp.arange(len(images))), None)
    logits = first.problem.task.forward(first.model, batch, None).logits
    near(logits, ref.predict(expected, x) / 2)


def test_federated_rounds_are_those_of_numpy():
    """The reference's `split_round`, but that clients come before the server."""
    first = run("federated")
    drawn = testing.drawn(first.problem, rounds=3, epochs=1)
    expected, source = model_of(first.states[0].server.model), source_of(first)
    for t, members in enumerate(drawn.rounds):
        clients = [
            {"x": drawn.x[own], "batches": [np.searchsorted(own, b) for b in members[k]]}
            for k, own in enumerate(drawn.members) if k in members
        ]
        expected = ref.split_round(expected, [], clients, RATE, repeats=2)
        expected = ref.split_round(expected, [source(3 * t + i) for i in range(3)], [], RATE)
    is_that_of_numpy(first, expected, drawn.x)
    assert float(first.infos[-1].metrics["source_loss"]) > 0


def test_rounds_in_one_place_are_those_of_numpy():
    first = run("central")
    drawn = testing.drawn(first.problem, rounds=3, epochs=1, cohort=1)
    targets = [drawn.x[batch] for members in drawn.rounds for batch in members[0]]
    sources = map(source_of(first), range(len(targets)))
    start = model_of(first.states[0].server.model)
    is_that_of_numpy(first, ref.train(start, sources, targets, RATE, repeats=2), drawn.x)


def test_the_contract():
    first = run("federated")
    testing.check_resume(first)
    testing.check_padding(first)
    testing.check_strategies(first)


def test_a_step_lowers_for_cuda_and_tpu():
    first = run("federated")
    step = ff.round_step(first.algorithm, ff.uniform(7, 4), ff.cohort_map("vmap"),
                         task=first.problem.task)
    state = jax.eval_shape(lambda: first.states[0])
    made = export.export(jax.jit(step), platforms=("cuda", "tpu"))(state, first.data)
    assert "callback" not in made.mlir_module()


@pytest.mark.slow
@pytest.mark.parametrize("form", ["federated", "central"])
def test_the_contract_with_statistics_and_momentum(form):
    first = run(form, "batch", 0.5)
    testing.check_resume(first)
    testing.check_padding(first)
    assert bool(first.infos[-1].finite)


@pytest.mark.parametrize("form", ["federated", "central"])
def test_a_model_and_a_classifier_travel_and_nothing_in_one_place(form):
    first = run(form)
    sent = traffic(first.algorithm, first.states[0], first.data)
    size = lambda tree: sum(x.size for x in jax.tree.leaves(tree))
    params = first.problem.params
    pair = 32 * (size(params) + size(params["classifier"]))
    assert sent == ((0, 0) if form == "central" else (pair, pair))


def test_labels_of_the_target_are_not_trained_on():
    first = run("federated")
    examples = first.data.examples
    other = first.data.replace(examples=examples._replace(labels=(examples.labels + 1) % 3))
    state, info = first.step(first.states[0], other)
    assert_same_bits(state.server, first.states[1].server)
    assert info.report["loss"] != first.infos[0].report["loss"]


# ---- From settings, and what cannot work ---------------------------------------------------------


def config_of(**more):
    return small_config(**{"algorithm__name": "mcd", "data__labelled": "0.2", "rounds": 2, **more})


@pytest.mark.parametrize("placement", ["device", "host"])
def test_who_has_what(placement):
    built = ff.build(config_of(data__placement=placement))
    train = ff.data.load("digits").train
    count = len(train.labels)
    data = built.data_of([0])
    assert len(data.labelled.labels) == int(0.2 * count)
    assert built.partition.indices.size == count - int(0.2 * count)
    everything = np.concatenate([
        np.asarray(data.labelled.inputs), np.asarray(train.inputs)[built.partition.indices]
    ])
    rows = lambda x: sorted(map(bytes, np.ascontiguousarray(x).reshape(count, -1)))
    assert rows(everything) == rows(np.asarray(train.inputs))
    state, info = built.step(built.init(), built.data_of(range(built.data.num_clients)))
    assert bool(info.finite)
    assert int(state.round) == 1


@pytest.mark.slow
def test_in_one_place(tmp_path):
    config = config_of(
        algorithm__mcd__form="central", partition__name="iid", partition__clients=1,
        cohort__size=1, client__learning_rate=0.05, rounds=6,
    )
    result = ff.train(config, tmp_path, progress=False)
    last = [r for r in result.records if r["split"] == "test"][-1]
    assert last["accuracy"] > 0.8
    cohort = next(r for r in result.records if r["split"] == "cohort")
    assert (cohort["bytes_down"], cohort["bytes_up"]) == (0, 0)


@pytest.mark.parametrize(("settings", "message"), [
    ({"data__labelled": "none"}, r"mcd with data.labelled = none: expected labelled examples for "
                                 r"the server, .* e\.g\. 0\.1\."),
    ({"data__labelled": "2"}, r"data.labelled = '2': no natural client of digits, nor a share"),
    ({"data__labelled": "b"}, r"digits has no natural clients with names\. .* or a share"),
    ({"data__trains": "server"}, "data.trains = server does not go with mcd"),
    ({"algorithm__mcd__n": -1}, r"config.algorithm.mcd.n = -1: expected .*0"),
    ({"algorithm__mcd__form": "central"}, r"mcd in one place with \d+ clients: expected one that "
                                          "has all the target's examples, e.g. partition.name"),
    ({"algorithm__mcd__form": "central", "algorithm__mcd__steps": 3}, "would change nothing"),
    ({"algorithm__name": "mcd+moon"}, "mcd[+]moon does not go with mcd: .* Leave it out"),
    ({"client__frozen": "features"}, "client.frozen = features does not go with mcd"),
    ({"client__sharpness": "sam"}, "client.sharpness = sam does not go with mcd"),
    ({"model__name": "linear"}, "mcd of a model with the parameters .*: expected features, and"),
])
def test_wrong_settings(settings, message):
    with pytest.raises(ff.UsageError, match=message):
        ff.build(config_of(**settings)).init()


def test_wrong_inputs():
    p = Problem()
    make = lambda **more: mcd(p.client(), optax.sgd(1.0), **more)
    with pytest.raises(ff.UsageError, match=r"n = -1: expected 0 or more"):
        make(n=-1)
    with pytest.raises(ff.UsageError, match=r"mcd without labelled examples: .* data.labelled"):
        testing.Run(make(), p, rounds=1)
    with pytest.raises(ff.UsageError, match="parameters Dense_0/kernel: expected features"):
        paired(Variables({"Dense_0": {"kernel": jnp.ones((2, 3))}}), p.variables)
    with pytest.raises(ff.UsageError, match="two classifiers with the same weights"):
        paired(p.variables, p.variables)
    p.data = problem().data
    for ignored in ({"frozen": parts.head}, {"sharpness": ff.client.sam(0.1)}):
        with pytest.raises(ff.UsageError, match=r"local steps of its own, and .*frozen parts"):
            testing.Run(mcd(p.client(**ignored), optax.sgd(1.0)), p, rounds=1)
    with pytest.raises(ff.UsageError, match="mcd with clients that learn to search: expected"):
        mcd(p.client().on(p.task._replace(search=lambda *outputs: {})), optax.sgd(1.0))
    with pytest.raises(ff.UsageError, match=r"mcd with outputs of shape \(2, 4, 3\) and labels of"):
        two.real_units(jnp.zeros((2, 4, 3)), Batch((), jnp.zeros((2, 4)), jnp.ones(2, bool)), 255)
