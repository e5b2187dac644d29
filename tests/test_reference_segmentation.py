"""The NumPy references of segmentation and styles against cases worked by hand."""

import numpy as np
import pytest
import reference_segmentation as seg

RNG = np.random.default_rng


def close(a, b, atol=1e-12):
    np.testing.assert_allclose(a, b, rtol=0, atol=atol)


# ---- scores ------------------------------------------------------------------------------------

TRUTH = np.array([[0, 0, 1], [1, 255, 255]])
GUESS = np.array([[0, 1, 1], [1, 2, 0]])


def test_scores_by_hand():
    m = seg.confusion(TRUTH, GUESS, 4)
    assert m.tolist() == [[1, 1, 0, 0], [0, 2, 0, 0], [0] * 4, [0] * 4]
    close(seg.class_iou(m), [1 / 2, 2 / 3, np.nan, np.nan])
    close(seg.mean_iou(m), 7 / 12)
    close(seg.mean_iou(m, "all"), 7 / 24)
    close(seg.mean_iou(m, "all", absent=1.0), (7 / 6 + 2) / 4)
    close(seg.pixel_accuracy(m), 3 / 4)
    close(seg.class_accuracy(m), [1 / 2, 1, np.nan, np.nan])


def test_a_class_that_is_only_predicted():
    m = seg.confusion([0, 0], [0, 2], 3)
    close(seg.mean_iou(m, "truth"), 1 / 2)
    close(seg.mean_iou(m, "union"), 1 / 4)
    close(seg.mean_iou(m, "all"), 1 / 6)


def test_labels_outside_the_classes():
    with pytest.raises(ValueError, match="label 7"):
        seg.confusion([7], [0], 3)
    assert seg.confusion([7, -1, 255, 1], [0, 0, 0, 1], 3, outside="skip").sum() == 1
    assert seg.confusion([0, 1], [0, 1], 2, ignore=0).tolist() == [[0, 0], [0, 1]]


def test_set_and_images_differ():
    y, p = np.array([[0, 0, 0, 1], [1, 1, 1, 1]]), np.array([[0, 0, 0, 0], [1, 1, 1, 1]])
    close(seg.set_miou(y, p, 2), (3 / 4 + 4 / 5) / 2)
    close(seg.image_miou(y, p, 2), (3 / 8 + 1 / 2) / 2)
    close(seg.image_miou(y, p, 2, over="truth"), (3 / 8 + 1) / 2)
    nothing = np.full((1, 4), 255)
    assert np.isnan(seg.set_miou(nothing, p[:1], 2))
    with_nothing = seg.image_miou(np.concatenate([y, nothing]), np.concatenate([p, p[:1]]), 2)
    close(with_nothing, (3 / 8 + 1 / 2) / 3)


def test_final_score_takes_twenty_evaluations():
    history = {t: float(t > 1500) for t in range(5, 1601, 5)}
    assert sum(t > 1500 for t in history) == 20
    assert seg.final_score(history) == (1.0, 0.0)


# ---- hard mining -------------------------------------------------------------------------------


def batch(images=2, h=3, w=4, classes=3, seed=0, ignored=0.2):
    rng = RNG(seed)
    labels = rng.integers(0, classes, (images, h, w))
    labels[rng.random(labels.shape) < ignored] = 255
    return rng.normal(size=(images, h, w, classes)), labels


def test_mining_by_sorting():
    z, y = batch(ignored=0)
    losses = seg.pixel_losses(z, y)
    top = np.sort(losses.reshape(2, -1), 1)[:, -3:]
    close(seg.mined(z, y)[0], top.mean())
    close(seg.mined(z, y, scope="batch")[0], np.sort(losses.ravel())[-6:].mean())
    close(seg.mined(z, y, share=1.0)[0], losses.mean())
    close(seg.mined(z, y, share=1.0)[0], seg.mean_ce(z, y))


@pytest.mark.parametrize("count", ["all", "valid"])
@pytest.mark.parametrize("scope", ["image", "batch"])
@pytest.mark.parametrize("weigh", ["images", "pixels"])
def test_mining_does_not_see_padding(count, scope, weigh):
    options = {"count": count, "scope": scope, "weigh": weigh}
    z, y = batch()
    loss, gradient = seg.mined(z, y, **options)
    zz, yy = np.concatenate([z, 9 * z]), np.concatenate([y, (y + 1) % 3])
    loss2, gradient2 = seg.mined(zz, yy, real=[True, True, False, False], **options)
    close(loss2, loss)
    close(gradient2[:2], gradient)
    assert not gradient2[2:].any()
    wide = np.concatenate([z, 9 * z], 2), np.concatenate([y, np.zeros_like(y)], 2)
    loss3, _ = seg.mined(*wide, real=np.arange(8) < 4 + np.zeros((2, 3, 1)), **options)
    close(loss3, loss)


def test_mining_counts():
    z, y = batch(1, 2, 4, ignored=0)
    y[0, 0] = 255  # 4 of 8 pixels count
    losses = np.sort(seg.pixel_losses(z, y).ravel())
    close(seg.mined(z, y, count="all")[0], losses[-2:].mean())
    close(seg.mined(z, y, count="valid")[0], losses[-1])
    y[0, 1, 1:] = 255  # one pixel: "all" averages it with a 0
    only = seg.pixel_losses(z, y).max()
    close(seg.mined(z, y, count="all")[0], only / 2)
    close(seg.mined(z, y, count="valid")[0], only)
    assert seg.mined(z, np.full_like(y, 255), count="valid")[0] == 0


def test_mining_gradient():
    z, y = batch(seed=3)
    for options in ({}, {"count": "valid"}, {"count": "valid", "weigh": "pixels"}):
        _, gradient = seg.mined(z, y, **options)
        step = 1e-6 * RNG(1).normal(size=z.shape)
        change = seg.mined(z + step, y, **options)[0] - seg.mined(z - step, y, **options)[0]
        close(change / 2, (gradient * step).sum(), 1e-14)


def test_heads():
    z, y = batch()
    close(seg.heads_loss([z, z, z], y), 3 * seg.mined(z, y)[0])


# ---- Algorithm 8 -------------------------------------------------------------------------------

HAS = np.array([[1, 0, 0], [1, 0, 1], [1, 1, 0], [1, 1, 0], [1, 0, 0], [1, 0, 0]], bool)
FIRST = lambda pool, m: pool[:m]


def test_the_rarest_class_goes_first():
    assert seg.class_imbalance(HAS, [2, 2, 2], FIRST) == [[1, 2], [3, 0], [4, 5]]
    assert seg.class_imbalance(HAS, [3, 3], lambda pool, m: pool[-m:]) == [[1, 2, 3], [0, 4, 5]]


def test_images_without_classes():
    has = np.array([[0], [1], [0]], bool)
    assert seg.class_imbalance(has, [2, 1], FIRST) == [[1, 0], [2]]
    assert seg.class_imbalance(has, [2, 1], FIRST, rest="leave") == [[1], []]


def test_any_draw_is_accepted_and_others_are_not():
    for seed in range(5):
        rng = RNG(seed)
        has = rng.random((40, 6)) < [0.9, 0.5, 0.3, 0.1, 0.05, 0.02]
        split = seg.class_imbalance(has, [10, 7, 13, 10], seg.uniform_choice(rng))
        assert sorted(i for c in split for i in c) == list(range(40))
        assert seg.class_imbalance_fault(has, [10, 7, 13, 10], split) is None
        shuffled = np.split(rng.permutation(40), [10, 17, 30])
        assert seg.class_imbalance_fault(has, [10, 7, 13, 10], shuffled) is not None
    assert "twice" in seg.class_imbalance_fault(HAS, [2, 2], [[1, 2], [2, 3]])


def test_classes_in_and_doubled():
    labels = np.array([[[0, 255]], [[2, 2]]])
    assert seg.classes_in(labels, 3).tolist() == [[True, False, False], [False, False, True]]
    images = np.arange(12.0).reshape(2, 1, 2, 3)
    x, y = seg.doubled(images, labels, 3)
    assert len(x) == 4
    assert y[2].tolist() == [[255, 0]]
    close(x[2, 0, 0], images[0, 0, 1])
    assert len(seg.doubled(images, labels, 2)[0]) == 2


# ---- batch normalisation -----------------------------------------------------------------------

KINDS = {k: k for k in ("weight", "scale", "shift", "mean", "var")}
START = {k: np.zeros(1) for k in KINDS}


def plus(t, k, model):
    return {n: v + 10.0**k for n, v in model.items()}


def test_what_is_kept():
    run = lambda strategy, cohorts: seg.bn_rounds(
        strategy, START, KINDS, cohorts, plus, [1, 3, 2, 0]
    )
    server, clients = run("fedavg", [[0, 1], [1, 3]])
    assert all(v == (1 + 3 * 10) / 4 + 10 for v in server.values())
    assert all(clients[2][n] == server[n] for n in server)
    server, clients = run("silobn", [[0, 1], [1, 3]])
    assert [server[n][0] for n in KINDS] == [17.75] * 3 + [0, 0]
    assert [clients[0][n][0] for n in KINDS] == [17.75] * 3 + [1, 1]
    assert [clients[1][n][0] for n in KINDS] == [17.75] * 3 + [20, 20]
    server, clients = run("fedbn", [[0, 1], [1, 3], [3]])
    assert [clients[1][n][0] for n in KINDS] == [17.75] + [20] * 4
    assert [clients[2][n][0] for n in KINDS] == [17.75] + [0] * 4
    assert seg.uploaded(KINDS, "fedbn") == ["weight"]
    assert seg.uploaded(KINDS, "silobn") == ["weight", "scale", "shift"]


def test_running_statistics():
    x = np.array([[1.0], [3.0]])
    close(seg.running(np.zeros(1), np.ones(1), x), ([0.2], [1.0]))
    close(seg.running(np.zeros(1), np.ones(1), x, unbiased=True), ([0.2], [1.1]))
    close(seg.running(np.zeros(1), 4 * np.ones(1), x, 0.5, space="std"), ([1.0], [2.25]))
    padded = np.array([[1.0], [3.0], [99.0]])
    close(seg.running(0, 1, padded, real=[1, 1, 0]), seg.running(0, 1, x))


def network(rng, width=3):
    a, b = rng.normal(size=(2, width, width))
    pair = lambda: (rng.normal(size=width), rng.normal(size=width))
    return [lambda x: x @ a, pair(), lambda x: np.maximum(x, 0) @ b, pair()]


def test_adabn_normalises_what_comes():
    rng = RNG(0)
    layers, x = network(rng), rng.normal(2, 3, (4, 5, 5, 3))
    out, statistics = seg.adabn(layers, x, eps=0)
    close(out.mean((0, 1, 2)), layers[-1][1])
    close(out.std((0, 1, 2)), abs(layers[-1][0]))
    close(seg.with_statistics(layers, statistics, x, eps=0), out)
    close(seg.adabn(layers, 5 * x, eps=0)[0], out)  # the first linear map has no shift
    padded = np.concatenate([x, 100 + x[:2]])
    close(seg.adabn(layers, padded, 0, np.arange(6) < 4)[0][:4], out)


def test_by_domain_pools_the_pixels():
    rng = RNG(1)
    layers = network(rng)
    tests = {d: (rng.normal(d, 1, (2, 4, 4, 3)), rng.integers(0, 3, (2, 4, 4))) for d in (0, 5)}
    statistics = {d: seg.adabn(layers, x)[1] for d, (x, _) in tests.items()}
    matrix = seg.by_domain_confusion(layers, tests, statistics, 3)
    assert matrix.sum() == 64
    np.testing.assert_array_equal(matrix, seg.standard_confusion(layers, tests.values(), 3))
    swapped = {0: statistics[5], 5: statistics[0]}
    assert (seg.by_domain_confusion(layers, tests, swapped, 3) != matrix).any()
