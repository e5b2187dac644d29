"""Segmentation against NumPy: scores, hard mining, heads, and what moves images and labels."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import reference_segmentation as ref

import fedjax_flat as ff
from fedjax_flat.data import Batch, scenes
from fedjax_flat.models import Outputs
from fedjax_flat.models.layers import AuxiliaryHead
from fedjax_flat.tasks.segmentation import hardest

CLASSES, IMAGES, HEIGHT, WIDTH = 5, 6, 7, 9
REAL = np.array([True, True, False, True, True, False])


def scene(seed=0):
    """(logits, labels): class 4 is only predicted; one image has few labelled pixels, one none."""
    random = np.random.default_rng(seed)
    logits = random.normal(0, 2, (IMAGES, HEIGHT, WIDTH, CLASSES)).astype(np.float32)
    labels = random.integers(0, 4, (IMAGES, HEIGHT, WIDTH)).astype(np.uint8)
    labels[random.random(labels.shape) < 0.2] = 255
    labels[1, 1:] = 255
    labels[3] = 255
    return logits, labels


def task_of(**options):
    labels = np.zeros((2, HEIGHT, WIDTH), np.uint8)
    images = np.zeros((2, HEIGHT, WIDTH, 3), np.float32)
    dataset = ff.data.from_arrays(images, labels, num_classes=CLASSES, task="segmentation")
    model = ff.models.Model(init=lambda key: (), apply=lambda *a: ())
    return ff.tasks.segmentation(model, ff.data.preprocess(dataset), dataset, **options)


def batch_of(labels, real=REAL):
    return Batch((), jnp.asarray(labels), jnp.asarray(real))


@pytest.mark.parametrize("variant", ["set", "image"])
@pytest.mark.parametrize("classes", ["truth", "union", "all"])
def test_scores(variant, classes):
    logits, labels = scene()
    task = task_of(variant=variant, classes=classes)
    halves = [slice(0, 3), slice(3, None)]
    measure = jax.jit(lambda logits, batch: task.measure(Outputs(logits), batch))
    sums = [measure(logits[i], batch_of(labels[i], REAL[i])) for i in halves]
    found = jax.jit(task.means)(jax.tree.map(lambda a, b: a + b, *sums))
    guess, truth = logits.argmax(-1)[REAL], labels[REAL]
    matrix = ref.confusion(truth, guess, CLASSES)
    np.testing.assert_array_equal(sums[0]["confusion"] + sums[1]["confusion"], matrix)
    score = ref.set_miou if variant == "set" else ref.image_miou
    assert float(found["miou"]) == pytest.approx(score(truth, guess, CLASSES, over=classes), 1e-6)
    assert float(found["accuracy"]) == pytest.approx(ref.pixel_accuracy(matrix), 1e-6)
    counted = matrix.sum(1) > 0 if classes == "truth" else np.ones(CLASSES, bool)
    expected = np.where(counted, np.nan_to_num(ref.class_iou(matrix)), 0)
    np.testing.assert_allclose([found[f"iou.{c}"] for c in range(CLASSES)], expected, rtol=1e-6)


MINING = {
    "image": {"count": "valid", "scope": "image", "weigh": "pixels"},
    "batch": {"count": "valid", "scope": "batch"},
    "released": {"count": "all", "scope": "image"},
}


def loss_of(task, heads, batch):
    outputs = Outputs(heads[0], auxiliary=tuple(heads[1:]))
    sums = task.measure(outputs, batch)
    return sums["loss"] / jnp.maximum(sums["units"], 1)


@pytest.mark.parametrize("of", MINING)
def test_hard_mining_and_its_gradient_with_ignored_and_padded_pixels(of):
    logits, labels = scene(1)
    task = task_of(hard=0.25, hard_of=of)
    batch = batch_of(labels)
    loss, gradient = jax.jit(jax.value_and_grad(lambda z: loss_of(task, [z], batch)))(
        jnp.asarray(logits)
    )
    expected, expected_gradient = ref.mined(logits, labels, real=REAL, **MINING[of])
    assert float(loss) == pytest.approx(expected, 1e-5)
    np.testing.assert_allclose(gradient, expected_gradient, rtol=1e-4, atol=1e-7)


def test_padding_changes_no_bit():
    logits, labels = scene(2)
    task = task_of(hard=0.25)
    other = np.where(REAL[:, None, None, None], logits, 1e9)
    of = jax.jit(jax.value_and_grad(lambda z, batch: loss_of(task, [z], batch)))
    loss, gradient = of(logits, batch_of(labels))
    again, same = of(other.astype(np.float32), batch_of(labels))
    assert loss == again
    np.testing.assert_array_equal(gradient, same)


def test_equal_losses_count_exactly_as_many():
    losses, mask = jnp.ones((2, 10)), jnp.ones((2, 10), bool).at[1, 3:].set(False)
    of_image = jax.jit(lambda losses, mask: hardest(losses, mask, 0.25, "image", mask[:, 0]))
    chosen = of_image(losses, mask)
    np.testing.assert_array_equal(chosen.sum(1), [2, 1])
    np.testing.assert_array_equal(np.flatnonzero(chosen[0]), [0, 1])


@pytest.mark.parametrize("weight", [1.0, 0.4])
def test_heads_each_mine_their_own_pixels(weight):
    _, labels = scene(3)
    heads = [scene(seed)[0] for seed in range(3)]
    task = task_of(hard=0.25, hard_of="released", auxiliary=weight)
    found = jax.jit(lambda heads, batch: loss_of(task, heads, batch))(heads, batch_of(labels))
    expected = ref.heads_loss(heads, labels, weights=[1, weight, weight], real=REAL)
    assert float(found) == pytest.approx(expected, 1e-5)


class Head(AuxiliaryHead):
    classes: int

    @nn.compact
    def __call__(self, x):
        return ff.models.layers.Conv(self.classes, (1, 1))(x)


class TwoHeads(nn.Module):
    """Logits by one convolution, and a head beside it."""

    num_classes: int

    @nn.compact
    def __call__(self, x, *, train=False):
        del train
        Head(self.num_classes)(x)
        return ff.models.layers.Conv(self.num_classes, (1, 1), name="classifier")(x)


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_heads_are_there_in_training_only(precision):
    model = ff.models.from_linen(TwoHeads(3), (4, 4, 2), precision)
    variables = model.init(jax.random.key(0))
    images = jnp.ones((2, 4, 4, 2))
    trained = model.apply(variables, images, jax.random.key(1))
    assert [x.shape for x in trained.auxiliary] == [(2, 4, 4, 3)]
    assert trained.auxiliary[0].dtype == jnp.float32
    assert model.apply(variables, images).auxiliary == ()


def dataset_of(images, labels):
    return ff.data.from_arrays(images, labels, num_classes=CLASSES, task="segmentation",
                               max_value=255.0, mean=(0.0,) * 3, std=(1.0,) * 3)


def coordinates(height=12, width=10):
    """An image whose colours say where each pixel was, with labels that say the same."""
    rows, columns = np.mgrid[:height, :width]
    image = np.stack([20 * rows, 20 * columns, np.full_like(rows, 7)], -1).astype(np.float32)
    return image, (rows % 5).astype(np.uint8)


def move(image, labels, moves, seed=0):
    one = jax.jit(lambda key, image, labels: scenes.move(key, image, labels, moves))
    return one(jax.random.key(seed), image, labels)


def test_scaled_by_one_and_not_cropped_is_the_image():
    image, labels = coordinates()
    moved = move(image, labels, scenes.Moves((1.0, 1.0)))
    np.testing.assert_array_equal(moved[0], image)
    np.testing.assert_array_equal(moved[1], labels)


@pytest.mark.parametrize("scale", [(0.5, 1.5), (2.0, 2.0), (0.5, 0.5)])
def test_labels_go_where_pixels_go(scale):
    """Where the image says which row it shows, the label is that row's, or one beside it."""
    image, labels = coordinates()
    moves = scenes.Moves(scale, (8, 8), True)
    pair = jnp.asarray(image), jnp.asarray(labels)
    each = jax.jit(jax.vmap(lambda key: scenes.move(key, *pair, moves)))
    images, moved = map(np.asarray, each(jax.random.split(jax.random.key(1), 40)))
    assert images.shape == (40, 8, 8, 3)
    assert moved.dtype == np.uint8
    inside = moved != 255
    np.testing.assert_array_equal(inside, images[..., 2] > 0)
    row = images[..., 0] / 20
    near = [np.clip(np.floor(row + shift), 0, 11) % 5 == moved for shift in (0.01, 0.5, 0.99)]
    assert np.any(near, axis=0)[inside].all()
    assert inside.mean() > 0.4
    flipped = images[:, 4, 2, 1] > images[:, 4, 5, 1]
    assert 5 < flipped.sum() < 35


def test_twice_as_large_against_a_plain_loop():
    image, labels = coordinates(4, 5)
    moves = scenes.Moves((2.0, 2.0), (8, 10))
    big, moved = move(image, labels, moves)
    np.testing.assert_array_equal(moved, labels.repeat(2, 0).repeat(2, 1))
    expected = np.clip((np.arange(8) + 0.5) / 2 - 0.5, 0, 3) * 20
    np.testing.assert_allclose(big[:, 0, 0], expected, atol=1e-4)


def test_smaller_than_the_crop_is_surrounded_by_nothing():
    image, labels = coordinates()
    small, moved = move(image.astype(np.uint8), labels, scenes.Moves((0.5, 0.5), (12, 10)), 2)
    assert (np.asarray(moved) != 255).sum() == 6 * 5
    assert (np.asarray(small)[np.asarray(moved) == 255] == 0).all()


def test_colours():
    image = np.random.default_rng(0).integers(0, 256, (6, 5, 3)).astype(np.uint8)
    colours = jax.jit(ff.data.augment.random_colours, static_argnums=(2, 3))
    key = jax.random.key(0)
    np.testing.assert_array_equal(colours(key, image, (0, 0, 0), 255.0), image)
    factor = lambda i, a: float(
        jax.random.uniform(jax.random.fold_in(key, i), (), jnp.float32, 1 - a, 1 + a)
    )
    grey = image @ [0.299, 0.587, 0.114]
    b, c, s = factor(0, 0.5), factor(1, 0.4), factor(2, 0.3)
    expected = {
        (0.5, 0, 0): b * image, (0, 0.4, 0): c * image + (1 - c) * grey.mean(),
        (0, 0, 0.3): s * image + (1 - s) * grey[..., None],
    }
    for amounts, values in expected.items():
        found = np.asarray(colours(key, image, amounts, 255.0), float)
        np.testing.assert_allclose(found, np.clip(values, 0, 255), atol=0.51)


def test_the_pipeline_moves_both_and_evaluates_neither():
    image, labels = coordinates()
    data = dataset_of(image[None].repeat(3, 0), labels[None].repeat(3, 0))
    preprocess = ff.data.preprocess(
        data, scale=(0.5, 1.5), crop=(8, 6), flip=True, jitter=(0.1, 0.1, 0.1)
    )
    stored = Batch(jnp.asarray(data.train.inputs), jnp.asarray(data.train.labels),
                   jnp.ones(3, bool))
    train, plain = jax.jit(preprocess.train)(stored, jax.random.key(0)), preprocess.evaluate(stored)
    assert train.inputs.shape == (3, 8, 6, 3)
    assert train.labels.shape == (3, 8, 6)
    assert not (np.asarray(train.labels[0]) == np.asarray(train.labels[1])).all()
    np.testing.assert_array_equal(plain.labels, labels[None].repeat(3, 0))
    np.testing.assert_allclose(plain.inputs[0], image / 255, rtol=1e-6)
    assert preprocess.moves_labels


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"scale": (1.5, 0.5)}, "expected .low, high."),
        ({"crop": (8,)}, "expected .height, width."),
        ({"crop": (80, 8)}, "larger than any image of 12x10 at scale 1"),
        ({"jitter": (0.5,)}, "expected three numbers"),
    ],
)
def test_moves_that_cannot_work(options, text):
    image, labels = coordinates()
    with pytest.raises(ff.UsageError, match=text):
        ff.data.preprocess(dataset_of(image[None], labels[None]), **options)


def test_moves_of_images_without_labels_of_pixels():
    images = np.zeros((2, 8, 8, 3), np.uint8)
    with pytest.raises(ff.UsageError, match="a label for every pixel"):
        ff.data.preprocess(ff.data.from_arrays(images, np.array([0, 1])), crop=(4, 4))
    image, labels = coordinates()
    dataset = dataset_of(image[None], labels[None])
    model = ff.models.Model(init=lambda key: (), apply=lambda *a: ())
    with pytest.raises(ff.UsageError, match="labels would not follow"):
        ff.tasks.segmentation(model, ff.data.preprocess(dataset, rotation=0.1), dataset)
