"""Clients that see the world differently: what each sees, where, and that off means off."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import Problem, assert_close, assert_same_bits, small_config

import fedjax_flat as ff
from fedjax_flat.client.local import full_gradient
from fedjax_flat.data import shift as shift_lib
from fedjax_flat.data.federated import client_batch
from fedjax_flat.testing import partition_of

SIZES = (4, 3, 0, 5, 2)


def coloured(count=14, side=6, dtype=np.uint8, seed=0):
    """Images of noise in three channels, ten classes."""
    random = np.random.default_rng(seed)
    images = random.integers(0, 256, (count, side, side, 3))
    images = images.astype(dtype) if dtype == np.uint8 else (images / 255).astype(dtype)
    labels = random.integers(0, 10, count).astype(np.int32)
    largest = 255.0 if dtype == np.uint8 else 1.0
    examples = ff.data.Examples(images, labels)
    return ff.data.Dataset("coloured", examples, examples, 10, largest, (0.5,) * 3, (0.25,) * 3)


def make(name, dataset, clients=5, **settings):
    entry = ff.data.SHIFTS[name]
    return entry.make(dataset, clients, **{n: s.default for n, s in entry.settings.items()}
                      | settings)


def seen_by(shift, dataset, client, sizes=SIZES):
    """(images, labels) of one client, as its steps gather them."""
    data = ff.data.federate(dataset.train, partition_of(sizes), shift=shift)
    view = jax.jit(lambda k: client_batch(data.client(k), jnp.arange(max(sizes))))
    batch = view(jnp.int32(client))
    real = np.asarray(batch.mask)
    return np.asarray(batch.inputs)[real], np.asarray(batch.labels)[real]


def own(dataset, client, sizes=SIZES):
    start = sum(sizes[:client])
    return jax.tree.map(lambda x: x[start : start + sizes[client]], dataset.train)


def test_rgb_is_a_gain_of_one_channel():
    dataset = coloured()
    shift = make("rgb", dataset, delta=1.5)
    for client in (0, 1, 3, 4):
        gains = np.full(3, 1 / 1.5)
        gains[client % 3] = 1.5
        expected = np.clip(np.round(own(dataset, client).inputs * gains), 0, 255)
        images, labels = seen_by(shift, dataset, client)
        assert images.dtype == np.uint8
        assert np.abs(images.astype(int) - expected).max() <= 1, "one grey level of rounding"
        np.testing.assert_array_equal(labels, own(dataset, client).labels)


def test_floats_are_neither_rounded_nor_clipped():
    dataset = coloured(dtype=np.float32)
    images, _ = seen_by(make("rgb", dataset, delta=2.0), dataset, 0)
    np.testing.assert_allclose(images, own(dataset, 0).inputs * np.float32([2, 0.5, 0.5]))
    assert images.max() > 1


def test_noise_grows_with_the_clients_number():
    dataset = coloured(64, side=16, dtype=np.float32)
    sizes = (16, 16, 16, 16)
    shift = make("noise", dataset, 4, sigma=0.4)
    for client in range(4):
        images, _ = seen_by(shift, dataset, client, sizes)
        drawn = (images - own(dataset, client, sizes).inputs).ravel()
        sigma = 0.4 * (client + 1) / 4
        standard_error = sigma / np.sqrt(2 * drawn.size)
        assert abs(drawn.std() - sigma) < 5 * standard_error
        assert abs(drawn.mean()) < 5 * sigma / np.sqrt(drawn.size)
        rows = drawn.reshape(16, -1)
        assert np.abs(np.corrcoef(rows) - np.eye(16)).max() < 0.25, "each example its own"


def test_noise_on_bytes_is_clipped_to_them():
    dataset = coloured()
    images, _ = seen_by(make("noise", dataset, sigma=3.0), dataset, 4)
    assert images.dtype == np.uint8
    assert {0, 255} <= set(images.ravel().tolist())
    assert ((images == 0) | (images == 255)).mean() < 0.95


def test_an_example_always_looks_the_same():
    """In any batch and order, with its neighbours or alone, on the device or as a split."""
    dataset = coloured()
    shift = make("noise", dataset, seed=3)
    data = ff.data.federate(dataset.train, partition_of(SIZES), shift=shift)
    view = jax.jit(lambda k, at: client_batch(data.client(k), at).inputs)
    whole = np.asarray(view(jnp.int32(3), jnp.arange(5)))
    np.testing.assert_array_equal(view(jnp.int32(3), jnp.array([4, 1])), whole[[4, 1]])
    stacked = client_batch(data.client(jnp.int32(3)), jnp.arange(6).reshape(2, 3)).inputs
    np.testing.assert_array_equal(stacked.reshape(6, 6, 6, 3)[:5], whole)
    split = shift_lib.seen(shift, dataset, partition_of(SIZES)).train
    np.testing.assert_array_equal(split.inputs[7:12], whole)
    other = make("noise", dataset, seed=4)
    assert (seen_by(other, dataset, 3)[0] != whole).any()


@pytest.mark.parametrize("side", [5, 6])
def test_rotation_by_quarters_is_exact(side):
    dataset = coloured(side=side)
    shift = make("rotation", dataset)
    for client in (0, 1, 3, 4):
        expected = np.rot90(own(dataset, client).inputs, client % 4, axes=(1, 2))
        np.testing.assert_array_equal(seen_by(shift, dataset, client)[0], expected)
    back = seen_by(make("rotation", dataset, degrees=-90.0), dataset, 1)[0]
    np.testing.assert_array_equal(back, np.rot90(own(dataset, 1).inputs, -1, axes=(1, 2)))


def test_rotation_by_any_angle_is_that_of_scipy():
    from scipy import ndimage

    dataset = coloured(dtype=np.float32, side=9)
    shift = make("rotation", dataset, degrees=25.0, groups=5)
    images, _ = seen_by(shift, dataset, 3)
    assert len(images) == 5
    for image, plain in zip(images, own(dataset, 3).inputs, strict=True):
        expected = ndimage.rotate(  # whose border fades as ours does
            plain, 75.0, reshape=False, order=1, mode="grid-constant"
        )
        np.testing.assert_allclose(image, expected, atol=1e-5)


def test_flipped_labels():
    dataset = coloured()
    shift = make("flip_labels", dataset, share=0.4, seed=1)
    chosen = shift_lib.flipping(5, 0.4, 1)
    assert len(chosen) == 2
    for client in (0, 1, 3, 4):
        images, labels = seen_by(shift, dataset, client)
        right = own(dataset, client)
        np.testing.assert_array_equal(images, right.inputs)
        expected = 9 - right.labels if client in chosen else right.labels
        np.testing.assert_array_equal(labels, expected)
    many = coloured(900, side=2)
    sizes = (900,)
    _, labels = seen_by(make("flip_labels", many, 1, share=1.0, to="random"), many, 0, sizes)
    moved = (labels - many.train.labels) % 10
    counts = np.bincount(moved, minlength=10)
    assert counts[0] == 0, "never the right class"
    assert counts[1:].min() > 60, "every other class, about as often (100 expected)"
    assert shift_lib.seen(shift, dataset, partition_of(SIZES)) is dataset, "splits stay right"


def test_flips_are_drawn_by_the_seed():
    drawn = {tuple(shift_lib.flipping(20, 0.3, seed)) for seed in range(5)}
    assert len(drawn) == 5
    assert {len(d) for d in drawn} == {6}
    assert len(shift_lib.flipping(20, 0.0, 0)) == 0
    assert len(shift_lib.flipping(20, 1.0, 0)) == 20


def test_a_test_set_is_seen_in_equal_parts():
    dataset = coloured(12)
    seen = shift_lib.seen(make("rgb", dataset, 6), dataset, partition_of((2,) * 6))
    for k in range(12):
        gains = np.where(np.arange(3) == k % 6 % 3, 1.5, 1 / 1.5)
        expected = np.clip(dataset.test.inputs[k] * gains, 0, 255)
        np.testing.assert_allclose(seen.test.inputs[k], expected, atol=0.51)
    noisy = shift_lib.seen(make("noise", dataset, 6), dataset, partition_of((2,) * 6))
    assert (noisy.test.inputs[0] != noisy.train.inputs[0]).any(), "not the train example's noise"


def shifted_problem(name="rgb", **settings):
    """The small problem in colour, and the same with its images changed beforehand."""
    problem, dataset = Problem(SIZES), coloured(side=4)
    model = ff.models.from_linen(ff.models.MLP(10, hidden=(5,)), dataset.input_shape)
    problem.task = ff.tasks.classification(model, ff.data.preprocess(dataset))
    problem.variables = jax.jit(model.init)(jax.random.key(1))
    shift = make(name, dataset, **settings)
    problem.data = ff.data.federate(dataset.train, problem.partition, shift=shift)
    before = shift_lib.seen(shift._replace(evaluated=True), dataset, problem.partition)
    return problem, ff.data.federate(before.train, problem.partition)


@pytest.mark.parametrize("name", ["noise", "flip_labels"])
def test_training_gradients_and_evaluation_see_it(name):
    """As if every client's stored examples had been changed, bit for bit."""
    settings = {"share": 0.5} if name == "flip_labels" else {}
    problem, changed = shifted_problem(name, **settings)
    algorithm = problem.fedavg()
    runs, sums, gradients = [], [], []
    for data in (problem.data, changed):
        problem.data = data
        runs.append(problem.run(algorithm, 2, cohort=4)[0])
        evaluate = jax.jit(ff.client_evaluator(problem.task, 3))
        sums.append(evaluate(problem.variables, data))
        gradient = jax.jit(lambda d: full_gradient(problem.client(), problem.variables, d)[0])
        gradients.append(gradient(data.client(jnp.int32(3))))
    assert_same_bits(runs[0], runs[1])
    assert_same_bits(sums[0], sums[1])
    assert_same_bits(gradients[0], gradients[1])


@pytest.mark.slow
def test_groups_and_every_strategy_see_it():
    problem, changed = shifted_problem()
    groups = ff.data.Partition.of([np.array([3, 0]), np.array([1, 2, 4])])
    algorithm, ends = problem.fedavg(), []
    for data, strategy in ((problem.data, "map"), (changed, "map"), (problem.data, "vmap")):
        problem.data = ff.data.grouped(data, groups)
        ends.append(problem.run(algorithm, 1, strategy=strategy)[0])
    assert_same_bits(ends[0], ends[1])
    assert_close(ends[0].server, ends[2].server)


def test_without_a_shift_nothing_is_compiled_for_it():
    problem = Problem(SIZES)
    algorithm = problem.fedavg()
    step = ff.round_step(algorithm, ff.uniform(5, 5), ff.cohort_map("map"), task=problem.task)
    state = ff.init_state(algorithm, problem.variables, 5, jax.random.key(0))
    program = lambda data: str(jax.make_jaxpr(step)(state, data))
    identity = ff.data.Shift(lambda batch, client, index: batch)
    assert program(problem.data) == program(problem.data.replace(shift=identity))
    built = ff.build(small_config())
    assert built.data.shift is None
    assert built.train_examples is built.data.examples


def test_from_a_config(tmp_path):
    config = small_config(data__shift__name="rotation", data__validation=0.2,
                          eval__splits=("test", "train", "validation"))
    built, plain = ff.build(config), ff.build(small_config(data__validation=0.2))
    held = np.setdiff1d(built.partition.indices, plain.data.indices)
    images = ff.data.load("digits").train.inputs
    for row, index in enumerate(held[:40]):
        (client,) = (k for k in range(20) if index in built.partition.client(k))
        turned = np.rot90(images[index], client % 4)
        np.testing.assert_array_equal(built.split("validation").inputs[row], turned)
    test = ff.data.load("digits").test.inputs
    np.testing.assert_array_equal(built.split("test").inputs[25], np.rot90(test[25], 5 % 4))
    assert ff.train(config, tmp_path / "run", progress=False).records


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"data__shift__sigma": 0.3}, "data.shift none has no sigma"),
        ({"data__shift__name": "rgb", "data__shift__degrees": 3.0}, "data.shift rgb has no degre"),
        ({"data__shift__name": "noises"}, "unknown data.shift 'noises'.*Did you mean 'noise'"),
        ({"data__shift__name": "noise", "data__shift__sigma": -1.0}, "0 or more"),
        ({"data__shift__name": "flip_labels", "data__shift__to": "b"}, "mirrored, random"),
        ({"data__shift__name": "rgb"}, r"rgb of images of shape \(8, 8, 1\).*three channels"),
    ],
)
def test_wrong_settings(settings, message):
    with pytest.raises(ff.UsageError, match=message):
        ff.build(small_config(**settings))


def test_wrong_data():
    rows = ff.data.from_arrays(np.zeros((4, 3), np.int32), np.zeros(4, np.int32))
    for name in ("noise", "rgb", "rotation"):
        with pytest.raises(ff.UsageError, match=rf"shift {name} of inputs of shape \(3,\)"):
            make(name, rows)
    table = ff.data.from_arrays(np.zeros((4, 3), np.float32), np.zeros(4, np.float32))
    assert make("noise", table), "floats of any shape can be noisy"
    with pytest.raises(ff.UsageError, match="flip_labels of arrays, of task regression"):
        make("flip_labels", table)
    pixels = ff.data.from_arrays(np.zeros((2, 4, 4, 3), np.uint8), np.zeros((2, 4, 4), np.int32),
                                 num_classes=3, task="segmentation")
    with pytest.raises(ff.UsageError, match="labels are of pixels"):
        make("rotation", pixels)


def test_a_users_own_shift():
    dark = lambda dataset, clients, gain: ff.data.Shift(
        lambda batch, client, index: batch._replace(inputs=batch.inputs // gain)
    )
    ff.register.shift("dusk", dark, gain=2)
    ff.register.shift("nothing", lambda dataset, clients: "dark")
    try:
        built = ff.build(small_config(data__shift__name="dusk"))
        np.testing.assert_array_equal(
            built.split("test").inputs, ff.data.load("digits").test.inputs // 2
        )
        with pytest.raises(ff.UsageError, match=r"data\.shift nothing returns str: expected"):
            ff.build(small_config(data__shift__name="nothing"))
    finally:
        for name in ("dusk", "nothing"):
            ff.data.SHIFTS.remove(name)
