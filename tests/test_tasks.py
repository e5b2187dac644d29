"""Tasks, and data of any kind: what is counted, and what is refused."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from conftest import Problem, assert_close, small_config

import fedjax_flat as ff
from fedjax_flat.data import Batch, Examples
from fedjax_flat.engine.sampling import Cohort
from fedjax_flat.models import Outputs
from fedjax_flat.tasks import Task

IGNORED, CLASSES = 255, 4


class Pixels(nn.Module):
    """Logits of every pixel by one 3x3 convolution."""

    num_classes: int

    @nn.compact
    def __call__(self, x, *, train=False):
        del train
        with jax.numpy_rank_promotion("allow"):
            return nn.Conv(self.num_classes, (3, 3), name="classifier")(x)


def scenes(count, seed=0):
    """8x8 images with a label per pixel, some ignored; class 3 never occurs."""
    random = np.random.default_rng(seed)
    labels = random.integers(0, 3, (count, 8, 8)).astype(np.uint8)
    images = (labels[..., None] / 2 + random.normal(0, 0.1, (count, 8, 8, 1))).astype(np.float32)
    labels[random.random(labels.shape) < 0.1] = IGNORED
    return ff.data.from_arrays(images, labels, num_classes=CLASSES, task="segmentation")


@pytest.fixture(scope="module")
def segmentation():
    dataset = scenes(20)
    model = ff.models.from_linen(Pixels(CLASSES), dataset.inputs)
    preprocess = ff.data.preprocess(dataset)
    return dataset, ff.tasks.segmentation(model, preprocess, dataset, classes="union")


def test_segmentation_against_numpy(segmentation):
    dataset, task = segmentation
    variables = task.init(jax.random.key(0))
    examples = Examples(*(x[:13] for x in dataset.train))
    sums = ff.evaluator(task, 5)(variables, examples)
    labels = examples.labels
    logits = np.asarray(task.forward(
        variables, Batch(jnp.asarray(examples.inputs), jnp.asarray(labels), None), None
    ).logits, float)
    real = labels != IGNORED
    guess = logits.argmax(-1)
    confusion = np.zeros((CLASSES, CLASSES))
    np.add.at(confusion, (labels[real], guess[real]), 1)
    np.testing.assert_array_equal(sums["confusion"], confusion)
    assert float(sums["units"]) == real.sum() == confusion.sum()
    assert float(sums["examples"]) == 13
    classes = np.where(real, labels, 0)[..., None].astype(int)
    picked = np.take_along_axis(logits, classes, -1)[..., 0]
    losses = np.log(np.exp(logits).sum(-1)) - picked
    means = task.means(sums)
    assert float(means["loss"]) == pytest.approx(losses[real].mean(), rel=1e-5)
    union = confusion.sum(0) + confusion.sum(1) - np.diag(confusion)
    present = union > 0
    iou = (np.diag(confusion)[present] / union[present]).mean()
    assert float(means["miou"]) == pytest.approx(iou, rel=1e-6)
    assert float(means["accuracy"]) == pytest.approx((guess[real] == labels[real]).mean(), rel=1e-6)


def test_segmentation_learns_across_clients(segmentation):
    dataset, task = segmentation
    sizes = (3, 9, 8)
    partition = ff.testing.partition_of(sizes)
    data = ff.data.federate(dataset.train, partition)
    client = ff.client.local_training(task, ff.client.sgd(0.5), batch_size=4, epochs=2)
    algorithm = ff.algorithms.fedavg(client, optax.sgd(1.0))
    step = jax.jit(ff.round_step(algorithm, ff.uniform(3, 2), ff.cohort_map("map"), task=task))
    state = ff.init_state(algorithm, task.init(jax.random.key(0)), 3, jax.random.key(1))
    for _ in range(25):
        state, info = step(state, data)
    means = task.means(ff.evaluator(task, 6)(state.server.model, dataset.test))
    assert float(means["miou"]) > 0.8
    assert np.isfinite(info.report["miou"])


def test_features_are_what_the_classifier_reads():
    p = Problem((4,), hidden=(6,))
    outputs = p.model.apply(p.variables, jnp.ones((2, 4, 4, 1)))
    last = p.params["classifier"]
    expected = outputs.features @ last["kernel"] + last["bias"][None]
    assert outputs.features.shape == (2, 6)
    np.testing.assert_allclose(outputs.logits, expected, rtol=1e-5, atol=1e-6)


def test_regression_of_a_table(tmp_path):
    random = np.random.default_rng(0)
    x = random.normal(size=(300, 5))
    y = x @ np.array([1.0, -2.0, 0.5, 0.0, 3.0]) + 0.1 * random.normal(size=300)
    table = ff.data.from_arrays(x[:250], y[:250], test=(x[250:], y[250:]), name="table")
    assert (table.task, table.num_classes, table.input_shape) == ("regression", 0, (5,))
    ff.register.source("a_table", lambda: table)
    try:
        config = small_config(data__name="a_table", partition__name="iid", partition__clients=5,
                              cohort__size=5, rounds=30, client__learning_rate=0.02,
                              eval__window=2)
        result = ff.train(config, tmp_path, progress=False)
    finally:
        ff.data.SOURCES.remove("a_table")
    score = result.score(2)[0]
    assert score > 0.9
    last = [r for r in result.records if r["split"] == "test"][-1]
    assert list(last)[3:] == ["loss", "r2", "rmse"]
    assert last["rmse"] == pytest.approx(np.sqrt(last["loss"]), rel=1e-4)
    assert last["r2"] == pytest.approx(1 - last["loss"] / y[250:].var(), abs=1e-3)


def test_inputs_keep_their_type_and_values():
    tokens = np.array([[1, 70_000], [2, 3]], np.int64)
    images = np.random.default_rng(0).normal(size=(2, 3)).astype(np.float64)
    tree = {"words": tokens, "image": images, "flags": np.array([True, False])}
    on_device = ff.data.on_device(Examples(tree, np.array([0, 1])))
    assert int(on_device.inputs["words"][0, 1]) == 70_000
    assert on_device.inputs["words"].dtype == jnp.int32
    np.testing.assert_allclose(on_device.inputs["image"], images, rtol=1e-7)
    assert on_device.inputs["flags"].dtype == bool
    partition = ff.data.Partition.of([[1], [0]])
    data = ff.data.federate(Examples(tree, np.array([0, 1])), partition)
    sums = ff.data.over(
        lambda batch: jnp.sum(jnp.where(batch.mask[:, None], batch.inputs["words"], 0)),
        data.client(jnp.int32(1)), 2,
    )
    assert int(sums) == 70_001


def test_float_images_are_not_rounded():
    """Values in [0, 1] would all be 0 as bytes."""
    random = np.random.default_rng(0)
    labels = random.integers(0, 3, 60)
    images = random.uniform(0, 0.2, (60, 4, 4, 1)) + labels[:, None, None, None] / 4
    dataset = ff.data.from_arrays(images, labels)
    assert dataset.num_classes == 3
    model = ff.models.build("mlp", num_classes=3, inputs=dataset.inputs)
    task = ff.tasks.classification(model, ff.data.preprocess(dataset))
    data = ff.data.federate(dataset.train, ff.testing.partition_of((60,)))
    client = ff.client.local_training(task, ff.client.sgd(0.3), batch_size=20, epochs=60)
    trained = jax.jit(client.train)(
        task.init(jax.random.key(0)), data.client(jnp.int32(0)), jax.random.key(1),
        round=jnp.int32(0),
    ).variables
    means = task.means(ff.evaluator(task, 60)(trained, dataset.test))
    assert float(means["accuracy"]) > 0.95


def test_whole_numbers_reach_a_network_as_floats():
    """Weights of their type would all be 0."""
    table = ff.data.from_arrays(np.arange(12).reshape(4, 3), np.array([0.0, 1.0, 2.0, 3.0]))
    model = ff.models.build("mlp", num_classes=1, inputs=table.inputs)
    logits = model.apply(model.init(jax.random.key(0)), jnp.arange(6).reshape(2, 3)).logits
    assert logits.dtype == jnp.float32
    assert float(jnp.abs(logits[0] - logits[1]).max()) > 1e-3


def test_tokens_stay_whole_under_bfloat16():
    class Words(nn.Module):
        @nn.compact
        def __call__(self, x, *, train=False):
            del train
            assert jnp.issubdtype(x["words"].dtype, jnp.integer)
            return nn.Embed(80_000, 2)(x["words"])[:, 0] + x["weight"].astype(jnp.float32)

    spec = {"words": jax.ShapeDtypeStruct((1, 3), jnp.int32),
            "weight": jax.ShapeDtypeStruct((1, 2), jnp.float32)}
    model = ff.models.from_linen(Words(), spec, "bfloat16")
    variables = model.init(jax.random.key(0))
    inputs = {"words": jnp.full((1, 3), 70_001), "weight": jnp.ones((1, 2))}
    assert model.apply(variables, inputs).logits.shape == (1, 2)
    with pytest.raises(ff.UsageError, match="bfloat16 would change nothing"):
        ff.models.from_linen(Words(), spec["words"], "bfloat16")


def test_bytes_of_images_are_normalised_by_their_own_channels():
    images = np.random.default_rng(0).integers(0, 256, (50, 4, 4, 2), np.uint8)
    dataset = ff.data.from_arrays(images, np.zeros(50, int))
    batch = Batch(jnp.asarray(images), jnp.zeros(50, jnp.int32), jnp.ones(50, bool))
    out = np.asarray(ff.data.preprocess(dataset).evaluate(batch).inputs)
    np.testing.assert_allclose(out.mean((0, 1, 2)), 0, atol=1e-4)
    np.testing.assert_allclose(out.std((0, 1, 2)), 1, atol=1e-3)


def test_terms_and_frozen_parts():
    """A pull on the logits moves the classifier; frozen layers keep their bits."""
    p = Problem((8,))
    pull = ff.client.Term(
        lambda outputs, batch, target: ff.client.terms.batch_mean(
            jnp.sum(jnp.square(outputs.logits - target), axis=-1), batch),
        context=lambda batch: jnp.full((batch.mask.shape[0], 3), 2.0),
    )
    client = p.client(lr=0.05, client=ff.client.sgd(0.05, weight_decay=0.1), epochs=4)
    frozen = lambda name: "Dense_0" in name
    train = jax.jit(lambda terms_on: client.train(
        p.variables, p.data.client(jnp.int32(0)), jax.random.key(0), round=jnp.int32(0),
        terms=(pull,) if terms_on else (), frozen=frozen,
    ).variables, static_argnums=0)
    with_term, without = train(True), train(False)
    ff.testing.assert_same_bits(with_term.params["Dense_0"], p.params["Dense_0"])
    images = jnp.asarray(p.dataset.train.inputs[:4], jnp.float32) / 255
    mean = lambda v: float(p.model.apply(v, images).logits.mean())
    assert mean(with_term) > mean(without) + 0.3


@pytest.mark.parametrize(
    ("labels", "message"),
    [
        (np.array([0, 1, 3, 2]), r"label 3 of train example 2 is no class: expected 0 to 2 \("),
        (np.array([0, -1, 1, 2]), "label -1 of train example 1"),
    ],
)
def test_labels_out_of_range(labels, message):
    dataset = ff.data.from_arrays(np.zeros((4, 2)), labels, num_classes=3)
    with pytest.raises(ff.UsageError, match=message):
        ff.data.check_labels(dataset)


def test_pixel_labels_out_of_range():
    dataset = scenes(2)
    dataset.train.labels[1, 2, 3] = 9
    with pytest.raises(ff.UsageError, match=r"label 9 of train example \(1, 2, 3\)"):
        ff.data.check_labels(dataset, IGNORED)


def test_a_label_map_is_no_class():
    p = Problem((3,))
    dense = Batch(jnp.zeros((3, 4, 4, 1)), jnp.zeros((3, 4, 4), jnp.int32), jnp.ones(3, bool))
    with pytest.raises(ff.UsageError, match=r"A label per pixel is task\.name"):
        p.task.evaluate(p.variables, dense)


def test_losses_that_do_not_fit_their_mask():
    broken = Task(
        init=None, prepare=lambda b, key: b, forward=lambda v, b, key: Outputs(b.inputs),
        losses=lambda o, b: (o.logits, b.mask), sums=lambda o, b: {}, report=lambda s: {}, score="",
    )
    batch = Batch(jnp.zeros((3, 2)), jnp.zeros(3), jnp.ones(3, bool))
    with pytest.raises(ff.UsageError, match=r"losses have shape \(3, 2\), its mask \(3,\)"):
        broken.evaluate(None, batch)


def test_a_score_that_is_not_reported():
    p = Problem((3,))
    wrong = p.task._replace(score="acuracy")
    with pytest.raises(ff.UsageError, match=r"score 'acuracy' is not in its report.*'accuracy'"):
        wrong.means(ff.evaluator(wrong, 3)(p.variables, p.data.examples))


@pytest.mark.parametrize("kind", ["source", "partition"])
def test_registered_things_of_the_wrong_kind(kind):
    if kind == "source":
        ff.register.source("wrong_kind", lambda: (1, 2))
        config, message = small_config(data__name="wrong_kind"), "is a tuple: expected"
    else:
        ff.register.partition("wrong_kind", lambda dataset: [[0], [1]])
        config, message = small_config(partition__name="wrong_kind"), "returns list: expected"
    try:
        with pytest.raises(ff.UsageError, match=message):
            ff.build(config)
    finally:
        (ff.data.SOURCES if kind == "source" else ff.data.PARTITIONS).remove("wrong_kind")


def test_a_module_without_train():
    class Deaf(nn.Module):
        @nn.compact
        def __call__(self, x):
            return x

    with pytest.raises(ff.UsageError, match=r"Deaf.__call__ takes x, but no train="):
        ff.models.from_linen(Deaf(), (3,))


def test_a_table_into_an_image_model():
    with pytest.raises(ff.UsageError, match=r"model 'cnn' cannot read inputs of shape \(5,\)"):
        ff.models.build("cnn", num_classes=2, inputs=(5,))
    table = ff.data.from_arrays(np.zeros((4, 5)), np.zeros(4, int))
    with pytest.raises(ff.UsageError, match=r"crop_padding of inputs of shape \(5,\): expected im"):
        ff.data.preprocess(table, crop_padding=2)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: ff.data.from_arrays(np.zeros((3, 2)), np.zeros(4)), "as many labels as inputs"),
        (lambda: ff.data.from_arrays(np.zeros((0, 2)), np.zeros(0)), "has no examples"),
        (lambda: ff.data.from_arrays(np.zeros((3, 2)), np.zeros(3), mean=(1.0,)), "give both"),
        (lambda: ff.data.from_arrays(np.zeros((3, 2)), np.zeros((3, 2), int)), "say num_classes"),
        (lambda: ff.data.Partition.of([[2**32 + 1]]), "expected positions"),
        (lambda: ff.data.Partition.of([[0.5]]), "expected positions"),
        (lambda: ff.data.Partition.of([[-1]]), "owns -1"),
        (lambda: ff.data.on_device(Examples(np.array(["a"]), np.zeros(1))), "expected numbers"),
        (lambda: ff.data.on_device(Examples(np.array([2**40]), np.zeros(1))), "more than int32"),
    ],
)
def test_wrong_arrays(make, message):
    with pytest.raises(ff.UsageError, match=message):
        make()


def test_a_client_of_weight_zero_keeps_its_state():
    """Present but without weight: it trains, its state moves on, the mean does not see it."""
    p = Problem((4, 6))
    base = ff.testing.algorithm_of("scaffold", p.task)
    (part,) = base.exchanges

    def local(message, state, data, round, key):
        reply = part.local(message, state, data, round, key)
        return reply._replace(weight=jnp.where(data.client == 0, 0.0, reply.weight))

    algorithm = base._replace(exchanges=(part._replace(local=local),))
    state, info = p.run(algorithm, 1)
    moved = [float(jnp.abs(x).max()) for x in jax.tree.leaves(
        jax.tree.map(lambda x: x[0], state.clients))]
    assert min(moved) > 0
    assert float(info.clients) == 2
    only, _ = p.run(base, 1, sampler=lambda key: Cohort(jnp.array([1]), None))
    assert_close(state.server.base.model, only.server.base.model, 1e-6)


def test_address_gives_a_client_its_part():
    """Two models on the server, clients of even and odd numbers."""
    p = Problem((4, 4, 4, 4))
    base = p.fedavg()
    (part,) = base.exchanges

    def broadcast(server, round):
        return jax.tree.map(lambda w: jnp.stack([w, 2 * w]), part.broadcast(server, round))

    def address(common, state, client):
        del state
        return jax.tree.map(lambda w: w[client % 2], common)

    def local(message, state, data, round, key):
        reply = part.local(message, state, data, round, key)
        first = jax.tree.leaves(message)[0].ravel()[0]
        return reply._replace(sum=(first, jnp.where(data.client % 2 == 1, 2.0, 1.0)))

    seen = {}

    def update(server, uploads, round):
        seen["sum"] = True
        return part.update(server, uploads, round)[0], {"first": uploads.sum[0]}

    algorithm = base._replace(exchanges=(
        part._replace(broadcast=broadcast, address=address, local=local, update=update),))
    _, info = p.run(algorithm, 1)
    first = float(jax.tree.leaves(p.params)[0].ravel()[0])
    assert seen["sum"]
    assert float(info.metrics["first"]) == pytest.approx(2 * first + 2 * 2 * first, rel=1e-5)
