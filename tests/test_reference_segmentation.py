"""The NumPy references of segmentation and styles against cases worked by hand."""

import numpy as np
import pytest
import reference_segmentation as seg
import reference_styles as sty

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


# ---- FDA, CFSI, LAB ----------------------------------------------------------------------------


def pictures(n=1, h=8, w=10, seed=0):
    return RNG(seed).uniform(0, 255, (n, h, w, 3))


def test_bands():
    assert sty.band(8, 10, 0.5) == (2, 6, 3, 8)
    assert sty.band(8, 10, 0.05) == (4, 4, 5, 5)  # nothing
    assert sty.band(8, 10, 1.0) == (0, 8, 0, 10)
    assert sty.band(40, 60, 0.05, "half") == (18, 23, 27, 34)
    assert sty.band(40, 60, 0.05, "square") == (18, 23, 28, 33)
    assert sty.band(8, 10, half=1) == (3, 6, 4, 7)
    assert sty.band(9, 9, half=9) == (0, 9, 0, 9)


def test_fda_leaves_own_style_and_lambda_zero():
    x, y = pictures(2)
    close(sty.fda(x, x, 0.5), x, 1e-9)
    close(sty.fda(x, y, 0.5, lam=0.0), x, 1e-9)
    close(sty.fda(x, y, 0.05), x, 1e-9)
    assert abs(sty.fda(x, y, 0.5) - x).max() > 1


def test_fda_swaps_what_it_should():
    x, y = pictures(2, 9, 11)
    out = sty.fda(x, y, half=2, lam=0.3)
    (a, phase), (b, _), (c, turned) = sty.spectrum(x), sty.spectrum(y), sty.spectrum(out)
    inside = np.zeros(a.shape, bool)
    inside[2:7, 3:8] = True
    close(c[~inside], a[~inside], 1e-8)
    close(c[inside], 0.7 * a[inside] + 0.3 * b[inside], 1e-8)
    close(np.exp(1j * turned), np.exp(1j * phase), 1e-9)
    constant = sty.fda(x, y, half=0)  # only the mean of each channel
    close(constant - x, (y.mean((0, 1)) - x.mean((0, 1))) * np.ones_like(x), 1e-9)
    everything = sty.fda(x, y, 1.0)
    close(sty.spectrum(everything)[0], b, 1e-8)


def test_windows_are_enough_for_a_donor():
    x, y = pictures(2)
    where = sty.band(8, 10, half=1)
    close(sty.swap(x, sty.spectrum(y)[0][3:6, 4:7], where), sty.fda(x, y, half=1), 1e-9)
    with pytest.raises(ValueError, match="amplitudes"):
        sty.swap(x, np.ones((2, 2, 3)), where)


def test_finishing():
    x = np.array([-3.7, 1.6, 255.4, 300.9])
    close(sty.finished(x, "clip"), [0, 1.6, 255, 255])
    close(sty.finished(x, "round"), [0, 2, 255, 255])
    close(sty.finished(abs(x), "wrap"), [3, 1, 255, 44])


def test_cfsi():
    clients = {"a": pictures(3, seed=1), "b": pictures(2, seed=2), "c": pictures(1, seed=3)}
    options = {"beta": 0.2, "rule": "half"}
    out = sty.cfsi(clients, "a", [1, None, 2], [0.4, None, 1.0], **options)
    close(out[0], sty.fda(clients["a"][0], clients["b"][1], lam=0.4, **options), 1e-9)
    close(out[1], clients["a"][1])
    close(out[2], sty.fda(clients["a"][2], clients["c"][0], lam=1.0, **options), 1e-9)
    own = sty.cfsi(clients, "a", [0] * 3, [1.0] * 3, which="all", half="all", **options)
    close(own[0], clients["a"][0], 1e-9)
    small = sty.cfsi(clients, "a", [1] * 3, [1.0] * 3, bank_half="even", **options)
    close(small[0], sty.fda(clients["a"][0], clients["c"][0], **options), 1e-9)
    alone = {"a": clients["a"]}
    close(sty.cfsi(alone, "a", [0] * 3, [1.0] * 3, **options), clients["a"])


def test_lab_of_known_colours():
    known = {(255, 255, 255): (100, 0, 0), (0, 0, 0): (0, 0, 0), (255, 0, 0): (53.24, 80.09, 67.20)}
    known |= {(0, 255, 0): (87.73, -86.18, 83.18), (0, 0, 255): (32.30, 79.19, -107.86)}
    for rgb, lab in known.items():
        close(sty.rgb_to_lab(np.array(rgb)), lab, 0.03)
    x = pictures()[0]
    close(sty.lab_to_rgb(sty.rgb_to_lab(x)), x, 1e-9)
    codes = np.array([[255, 255, 255], [0, 0, 0], [255, 0, 0]])
    byte = sty.rgb_to_lab(codes, unit="bytes")  # OpenCV: 255 128 128, 0 128 128, 136 208 195
    close(byte, [[255, 128, 128], [0, 128, 128], [136, 208, 195]])
    assert abs(sty.lab_to_rgb(byte, unit="bytes") - codes).max() <= 2


def test_lab_transfer():
    x = 100 + 0.2 * pictures()[0]
    close(sty.lab_transfer(x, sty.lab_statistics(x)), x, 1e-9)
    mean, std = sty.lab_statistics(x)
    out = sty.lab_transfer(x, (mean + 2, 1.1 * std))  # stays inside the screen's colours
    close(sty.lab_statistics(out), (mean + 2, 1.1 * std), 1e-9)
    flat = np.full((2, 2, 3), 90.0)
    close(sty.lab_statistics(sty.lab_transfer(flat, (mean, std)))[0], mean, 1e-9)
    assert abs(sty.lab_transfer(x, sty.lab_statistics(x, "bytes"), "bytes") - x).max() < 4
    clients = {0: [x, x, x], 1: [flat]}
    moved = sty.lab_client(clients, 0, [3, 0, 0])
    close(moved[1], x)
    close(moved[2], x, 1e-9)  # its own entry
    close(moved[0], 90 * np.ones_like(x), 1e-9)
    close(sty.lab_client(clients, 0, [0, 0, 0], "others")[2], 90 * np.ones_like(x), 1e-9)


# ---- LADD --------------------------------------------------------------------------------------


def test_styles_that_clients_send():
    xs = pictures(3)
    a = sty.client_style(xs)
    assert a.shape == (3, 3, 3)
    close(a[:, 1, 1], xs.mean(0).sum((0, 1)), 1e-9)
    close(a, a[:, ::-1, ::-1], 1e-9)
    close(sty.with_style(xs[0], sty.style(xs[0])), xs[0], 1e-9)
    close(sty.style(sty.with_style(xs[0], a)), a, 1e-8)
    close(sty.style(sty.with_style(xs[0], a, lam=0.25)), 0.75 * sty.style(xs[0]) + 0.25 * a, 1e-8)


def test_silhouettes_are_those_of_scikit_learn():
    metrics = pytest.importorskip("sklearn.metrics")
    styles, labels = RNG(0).normal(size=(9, 3, 3, 3)), [0, 0, 1, 1, 1, 2, 0, 1, 0]
    flat = styles.reshape(9, -1)
    close(sty.silhouettes(styles, labels), metrics.silhouette_samples(flat, labels), 1e-12)
    assert sty.silhouettes(styles, labels)[5] == 0
    assert not sty.silhouettes(np.zeros((4, 1)), [0, 0, 1, 1]).any()
    line = np.array([[0.0], [1.0], [10.0], [12.0]])
    close(sty.within(line, [0, 0, 1, 1]), [1, 1, 2, 2])
    close(sty.silhouettes(line, [0, 0, 1, 1]), [10 / 11, 9 / 10, 7.5 / 9.5, 9.5 / 11.5])


@pytest.mark.parametrize("keep", ["delta", "inertia"])
def test_clusters_are_found(keep):
    pytest.importorskip("sklearn")
    rng, truth = RNG(0), [0, 1, 2, 2, 1, 0, 0, 1, 2, 2]
    styles = 20.0 * np.array(truth)[:, None, None, None] + rng.normal(size=(10, 3, 3, 3))
    labels, scores = sty.cluster(styles, range(2, 6), range(3), keep)
    assert max(scores, key=scores.get) == 3
    assert sty.same_partition(labels, truth)
    assert not sty.same_partition(labels, [0] * 5 + [1] * 5)
    centres = sty.centroids(styles, labels)
    assert [sty.nearest(a, centres) for a in styles] == labels


def test_the_better_run_is_kept():
    line = np.array([[0.0], [1.0], [10.0], [11.0]])
    run = lambda flat, o, r: [[0, 1, 0, 1], [0, 0, 1, 1], [0, 1, 1, 1]][r]
    assert sty.cluster(line, [2], range(3), run=run)[0] == [0, 0, 1, 1]
    assert sty.cluster(line, [2, 5], range(3), run=run)[1].keys() == {2}


def test_images_go_to_the_nearest_style():
    xs = pictures(2)
    centres = [sty.style(x) for x in xs]
    models = [lambda x: x, lambda x: -x]
    s, out = sty.predicted(xs[1] + 1, centres, models, restyle=False)
    assert s == 1
    close(out, -xs[1] - 1)
    s, out = sty.predicted(xs[1] + 1, centres, models)
    close(out, -xs[1], 1e-9)


TAGS = {
    "conv": ("backbone", "weight"),
    "bn": ("backbone", "scale"),
    "mean": ("backbone", "mean"),
    "last": ("head", "weight"),
    "norm": ("head", "shift"),
}


def test_specific_names():
    assert sty.specific(TAGS, "none") == []
    assert sty.specific(TAGS, "all") == list(TAGS)
    assert sty.specific(TAGS, "cls") == ["last", "norm"]
    assert sty.specific(TAGS, "cls", head_norm=False) == ["last"]
    assert sty.specific(TAGS, "bn") == ["bn", "mean", "norm"]
    assert sty.specific(TAGS, "bn", statistics=False) == ["bn", "norm"]
    assert sty.specific(TAGS, "backbone") == ["conv", "bn", "mean"]


def const(value):
    return {n: np.array(float(value)) for n in TAGS}


def values(models, name):
    return [float(m[name]) for m in models]


def test_aggregation_by_cluster():
    models = [const(s) for s in (100, 200, 300)]
    trained, sizes = {0: const(1), 1: const(2), 2: const(9), 5: const(77)}, [1, 3, 4, 1, 1, 0]
    run = lambda which, **options: sty.aggregate(
        models, const(-1), trained, sizes, [0, 0, 1, 2, 2, 2], sty.specific(TAGS, which), **options
    )
    new, overall = run("cls")
    assert values(new, "conv") == [43 / 8] * 3
    assert values(new, "last") == [7 / 4, 9, 300]
    assert float(overall["last"]) == (7 / 4 + 9) / 2
    new, _ = run("all", empty="overall")
    assert values(new, "conv") == [7 / 4, 9, -1]
    new, _ = run("all")
    assert values(new, "conv") == [7 / 4, 9, 300]
    new, overall = run("none")
    assert values([*new, overall], "last") == [43 / 8] * 4
    new, _ = run("bn")
    assert values(new, "mean") == [7 / 4, 9, 300]
    assert values(new, "last") == [43 / 8] * 3
    assert sty.aggregate(models, const(0), {}, sizes, [], [])[0] is models


def test_teachers_average():
    teacher, seen = const(5), []
    for t in range(1, 13):
        teacher = sty.next_teacher(teacher, const(t), t, 2, 6)
        seen.append(float(teacher["conv"]))
    close(seen, [5, 2, 2, 4, 4, 6, 6, 7, 7, 8, 8, 9])  # from 6 on: means of 6, 8, 10, 12
    half = sty.next_teacher(const(1), const(4), 6, 2, 5)
    close(half["conv"], (0.5 * 1 + 4) / 1.5)
    close(sty.next_teacher(const(1), const(4), 6, 2, 5, count=0)["conv"], 4)
    close(sty.next_teacher(const(1), const(4), 6, 2, None)["conv"], 4)


def test_rounds_of_ladd():
    asked = []

    def train(t, k, model, teacher, begin):
        asked.append((t, k, float(model["last"]), float(teacher["last"])))
        return {n: v + 1 + k for n, v in model.items()}

    own = sty.specific(TAGS, "cls")
    run = [const(0), 2, [[0], [1], [0, 1]], train, [1, 1], [0, 1], own]
    models, teachers, _ = sty.ladd(*run, omega=1, start=2)
    assert asked == [(1, 0, 0, 0), (2, 1, 0, 0), (3, 0, 1, 1), (3, 1, 2, 2)]
    assert values(models, "last") == [2, 4]
    assert values(models, "conv") == [4.5, 4.5]
    assert values(teachers, "last") == [1.5, 3]  # means of rounds 2 and 3
    again = sty.ladd(*run, omega=1, start=2, tau="count")[1]
    assert values(again, "last") == [1.5, 3]
    fedavg = sty.ladd(*run[:-1], [])[0]
    assert values(fedavg, "last") == values(models, "conv")


def three(seed=0, shape=(2, 3, 2, 4)):
    return 2 * RNG(seed).normal(size=(3, *shape))


def test_entropy_and_divergence():
    z, g, _ = three()
    uniform = np.zeros((1, 1, 1, 5))
    close(sty.entropy(uniform), np.log(5))
    close(sty.entropy(uniform, rule="released"), (1 + 1e-8) ** 2)
    close(sty.kl(z, z), 0)
    p, q = seg.softmax(z), seg.softmax(g)
    close(sty.kl(z, g), (p * np.log(p / q)).sum(-1).mean())
    close(sty.kl(z, g, direction="teacher"), (q * np.log(q / p)).sum(-1).mean())
    cross = -(p * np.log(q)).sum(-1).mean()
    close(sty.kl(z, g), cross - sty.entropy(z))


def test_pseudo_labels():
    sure = np.array([0.95, 0.8, 0.7, 0.6, 0.55, 0.91])
    one = np.array([0, 0, 0, 0, 1, 1])
    p = np.where(np.arange(2) == one[:, None], sure[:, None], 1 - sure[:, None])
    z = np.log(p).reshape(1, 1, 6, 2)
    rule = lambda name: sty.pseudo_labels(z, name).ravel().tolist()
    assert rule("threshold") == [0, 255, 255, 255, 255, 1]
    assert rule("released") == [0, 0, 255, 255, 255, 1]  # floor(2.64) of four, floor(1.32) of two
    assert rule("fda") == [0, 255, 255, 255, 255, 1]  # 0.95 cut to 0.9; 0.91 cut to 0.9
    assert sty.pseudo_labels(z, "fda", share=0.5).ravel().tolist() == [0, 0, 255, 255, 255, 1]
    low = sty.pseudo_labels(z, "released", threshold=0.5)
    assert (low.ravel() == one).all()


def test_pseudo_labels_and_losses_do_not_see_padding():
    z, g, b = three()
    pad = lambda x: np.concatenate([x, 3 * x[:1]])
    real = [True, True, False]
    for rule in ("threshold", "released", "fda"):
        labels = sty.pseudo_labels(pad(z), rule, real=real)
        np.testing.assert_array_equal(labels[:2], sty.pseudo_labels(z, rule))
        assert (labels[2] == 255).all()
    for rule in ("printed", "symbols", "caldarola", "released"):
        close(
            sty.local_loss(pad(z), pad(g), pad(b), 3.0, rule, real=real)[0],
            sty.local_loss(z, g, b, 3.0, rule)[0],
        )


def test_self_training_means():
    z, labels = np.zeros((1, 1, 4, 2)), np.array([[[0, 1, 255, 255]]])
    close(sty.self_training(z, labels), np.log(2) / 2)
    close(sty.self_training(z, labels, over="kept"), np.log(2))


def test_local_losses():
    z, g, b = three(1)
    total, parts = sty.local_loss(z, g, b, 10.0)
    assert set(parts) == {"entropy", "ce", "teacher", "kd"}
    close(total, parts["entropy"] + parts["ce"] + parts["teacher"] + 10 * parts["kd"])
    assert set(sty.local_loss(z, g, b, 1.0, "symbols")[1]) == {"entropy", "teacher", "kd"}
    total, parts = sty.local_loss(z, g, b, 10.0, "released")
    kept = sty.pseudo_labels(b, "released") != 255
    mask = kept[..., None]
    close(parts["kd"], -(mask * seg.log_softmax(z) * seg.softmax(b / 2)).mean())
    close(parts["ce"], sty.self_training(z, sty.pseudo_labels(g, "released")))
    same = sty.local_loss(z, g, b, 0.0, "caldarola")[0]
    close(same, sty.local_loss(z, g, b, 0.0, "released")[0])


def test_slopes():
    z, g, _ = three(2, (1, 1, 2, 3))
    p, n = seg.softmax(z), 2
    h = -(p * np.log(p)).sum(-1, keepdims=True)
    close(sty.slope(sty.entropy, z), -p * (np.log(p) + h) / n, 1e-8)
    close(sty.slope(lambda x: sty.kl(x, g, direction="teacher"), z), (p - seg.softmax(g)) / n, 1e-8)
