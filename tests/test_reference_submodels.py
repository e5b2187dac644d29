"""The NumPy versions of sub-models, robustness and privacy, against hand and against limits."""

import itertools

import numpy as np
import pytest
import reference_methods as methods
import reference_robust as robust
import reference_submodels as sub

ROUNDS, SIZES = 4, (6, 9, 0, 4, 5)


@pytest.fixture
def c():
    """Five clients of different sizes, one without examples; an MLP 3 - 6 - 5 - 4."""
    rng = np.random.default_rng(0)
    widths = (3, 6, 5, 4)
    layers = [(rng.normal(size=s), rng.normal(size=s[1])) for s in itertools.pairwise(widths)]
    ends = np.cumsum(SIZES)
    x, y = rng.normal(size=(ends[-1], 3)), rng.integers(0, 4, ends[-1])
    members = [np.arange(e - n, e) for e, n in zip(ends, SIZES, strict=True)]
    drawn = []
    for _ in range(ROUNDS):
        order = {int(k): rng.permutation(members[k]) for k in rng.permutation(5)[:4]}
        drawn.append({k: [o[i : i + 4] for i in range(0, len(o), 4)] for k, o in order.items()})
    return methods.Clients(layers, x, y, members, drawn, 0.1)


def fedavg(c):
    return methods.fedopt(c, methods.plain)


def everything(t, k):
    return [np.arange(6), np.arange(5)]


def some(t, k):
    rng = np.random.default_rng([t, k])
    return [rng.permutation(n)[: rng.integers(2, n)] for n in (6, 5)]


def close(a, b, atol=1e-12):
    np.testing.assert_allclose(a, b, rtol=0, atol=atol)


def models(c, w, t):
    return {k: c.train(w, b, c.grad) for k, b in c.cohort(t).items()}


# ---- sub-models --------------------------------------------------------------------------------


def test_counts_and_table_5_1():
    kept = {d: [sub.kept_count(n, d) for n in (32, 64, 512)] for d in (0.8, 0.75, 0.7)}
    assert kept == {0.8: [26, 51, 410], 0.75: [24, 48, 384], 0.7: [22, 45, 358]}
    rows = {d: sub.parameters(sub.tier_shapes(sub.FEMNIST, d)) for d in (1, 0.8, 0.75, 0.7)}
    assert rows[1] == (800 + 51_200 + 1_605_632 + 31_744, 32 + 64 + 512 + 62)
    assert rows[0.8][1] == 26 + 51 + 410 + 62
    totals = [sum(row) for row in rows.values()]
    assert totals == [1_690_046, 1_084_359, 956_894, 837_373]
    assert [round(100 * (1 - n / totals[0])) for n in totals[1:]] == [36, 43, 50]
    assert sub.kept_count(5, 0.5) == 2
    assert sub.kept_count(5, 0.01) == 1


def test_ordered_counts_are_ceilings_of_the_exact_product():
    assert [sub.ordered_count(5, d) for d in (0.2, 0.21, 0.5, 0.6, 1)] == [1, 2, 3, 3, 5]
    assert sub.ordered_count(100, 0.55) == 55  # 0.55 * 100 > 55 in binary


@pytest.mark.parametrize(
    ("rates", "factors"),
    [
        ([1] * 4, [1.56, 1.77, 2.02]),
        ([None] * 4, [6.2, 7.1, 8.1]),
        ([0.01] * 4, [148.4, 167.6, 190.8]),
        ([None, None, 0.01, None], [66.0, 74.0, 83.4]),
    ],
)
def test_factors_of_table_5_3(rates, factors):
    full = 32 * sum(sub.parameters(sub.FEMNIST))
    for d, factor in zip((0.8, 0.75, 0.7), factors, strict=True):
        bits = sub.upload_bits(sub.tier_shapes(sub.FEMNIST, d), rates)
        assert abs(full / bits - factor) < (0.006 if factor < 3 else 0.06)
    if rates == [None, None, 0.01, None]:
        assert round(full / sub.upload_bits(sub.FEMNIST, rates), 2) == 44.87


def test_extract_and_remap_by_hand():
    layers = [
        (np.array([[1.0, 2, 3], [4, 5, 6]]), np.array([7.0, 8, 9])),
        (np.array([[1.0, 2], [3, 4], [5, 6]]), np.array([-1.0, -2])),
    ]
    kept = [np.array([2, 0])]
    small = sub.extract(layers, kept)
    assert small[0][0].tolist() == [[3, 1], [6, 4]]
    assert small[0][1].tolist() == [9, 7]
    assert small[1][0].tolist() == [[5, 6], [1, 2]]
    assert small[1][1].tolist() == [-1, -2]
    back = sub.remap(small, kept, [(2, 3), (3, 2)])
    assert back[0][0].tolist() == [[1, 0, 3], [4, 0, 6]]
    assert back[0][1].tolist() == [7, 0, 9]
    assert back[1][0].tolist() == [[1, 2], [0, 0], [5, 6]]
    assert back[1][1].tolist() == [-1, -2]
    mask = sub.coverage_mask(kept, [(2, 3), (3, 2)])
    assert mask[0][0].tolist() == [[1, 0, 1]] * 2
    assert mask[1][0].tolist() == [[1, 1], [0, 0], [1, 1]]


def test_flatten_by_hand():
    """Two places, three channels, channel 1 kept: inputs 1 and 4 of the dense layer."""
    pairs = sub.indices([(1, 1, 2, 3), (6, 4)], [np.array([1])])
    assert [r.tolist() for r, _ in pairs] == [[0, 1], [1, 4]]
    assert [o.tolist() for _, o in pairs] == [[1], [0, 1, 2, 3]]
    pairs = sub.indices([(1, 1, 2, 3), (6, 4)], [np.array([2, 0])])
    assert pairs[1][0].tolist() == [2, 0, 5, 3]


def chain(shapes, seed=1):
    rng = np.random.default_rng(seed)
    return [(rng.normal(size=s), rng.normal(size=s[-1])) for s in shapes]


@pytest.mark.parametrize("net", ["mlp", "cnn"])
def test_sub_model_is_the_masked_model(net):
    rng = np.random.default_rng(2)
    if net == "mlp":
        shapes, x = [(3, 6), (6, 5), (5, 4)], rng.normal(size=(7, 3))
        kept = [np.array([5, 1, 2]), np.array([0, 4])]
    else:
        shapes = [(3, 5, 2, 4), (5, 3, 4, 6), (2 * 3 * 6, 5), (5, 3)]
        x = rng.normal(size=(7, 8, 12, 2))
        kept = [np.array([3, 0]), np.array([4, 1, 2]), np.array([2, 0, 3])]
    layers = chain(shapes)
    small = sub.extract(layers, kept)
    close(sub.forward(small, x), sub.forward(layers, x, kept))
    assert np.abs(sub.forward(small, x) - sub.forward(layers, x)).max() > 0.1
    back = sub.remap(small, kept, shapes)
    for (w, b), (v, a) in zip(small, sub.extract(back, kept), strict=True):
        assert np.array_equal(w, v)
        assert np.array_equal(b, a)
    mask = sub.coverage_mask(kept, shapes)
    for (w, b), (m, n), (v, a) in zip(layers, mask, back, strict=True):
        assert np.array_equal(w * m, v)
        assert np.array_equal(b * n, a)
    close(sub.forward(back, x), sub.forward(small, x))  # dropped units have no bias left


def test_convolution_by_hand():
    x = np.arange(12.0).reshape(1, 3, 4, 1)
    kernel = np.zeros((3, 3, 1, 2))
    kernel[1, 1, 0, 0], kernel[0, 2, 0, 1] = 2, 1  # twice itself; the neighbour above to the right
    out = sub.convolve(x, kernel, np.array([0.0, 100]))
    assert np.array_equal(out[..., 0], 2 * x[..., 0])
    assert out[0, :, :, 1].tolist() == [[100] * 4, [101, 102, 103, 100], [105, 106, 107, 100]]


@pytest.mark.parametrize("coverage", [False, True])
def test_whole_models_are_fedavg(c, coverage):
    close(sub.hfd(c, everything, coverage=coverage), fedavg(c))
    shuffled = lambda t, k: [np.array([3, 0, 5, 1, 4, 2]), np.array([4, 3, 0, 1, 2])]
    close(sub.hfd(c, shuffled, coverage=coverage), fedavg(c))
    close(sub.fjord(c, lambda t, k: 1.0), fedavg(c))


@pytest.mark.parametrize("coverage", [False, True])
def test_hfd_is_training_with_dropped_units_at_zero(c, coverage):
    """A unit whose weights are all 0 stays so: the sub-model inside full vectors."""
    w = c.w0
    for t in range(ROUNDS):
        change, weight, total = 0, 0, 0
        for k, batches in c.cohort(t).items():
            mask = c.flat(sub.coverage_mask(some(t, k), [(3, 6), (6, 5), (5, 4)]))
            n = len(c.members[k])
            change = change + n * (c.train(w * mask, batches, c.grad) - w * mask)
            weight, total = weight + n * mask, total + n
        moved = change / np.where(weight > 0, weight, 1)
        assert (change[weight == 0] == 0).all()
        w = w + (moved if coverage else change / total)
    close(sub.hfd(c, some, coverage=coverage), w)


def test_coverage_by_hand(c):
    """Clients of 6 and 9 examples; the second coordinate kept by the larger, the third by none."""
    w, changes = np.zeros(3), {0: np.array([1.0, 0, 0]), 1: np.array([2.0, 5, 0])}
    masks = {0: np.array([1.0, 0, 0]), 1: np.array([1.0, 1, 0])}
    close(sub.merge(c, w, changes, masks, False), [1.6, 3, 0])
    close(sub.merge(c, w, changes, masks, True), [1.6, 5, 0])


def test_stc_by_hand():
    assert sub.stc(np.array([1.0, -4, 2, 0]), 0.5).tolist() == [0, -3, 3, 0]
    assert sub.stc(np.array([1.0, -1, 1]), 0.4).tolist() == [1, 0, 0]
    layers = [(np.array([[1.0, -9]]), np.array([5.0, 6])), (np.array([[3.0], [0]]), np.ones(1))]
    joint = sub.joint_stc(0.5)(layers)
    assert [w.tolist() for w, _ in joint] == [[[0, -6]], [[6], [0]]]
    assert [b.tolist() for _, b in joint] == [[5, 6], [1]]
    apart = sub.layer_stc([0.5, None])(layers)
    assert [w.tolist() for w, _ in apart] == [[[0, -9]], [[3], [0]]]


def test_ce_hfd(c):
    """Near HFD with 8 bits; a joint STC moves round(p N) weights of a lone client, and biases."""
    plain, eight = sub.hfd(c, some), sub.ce_hfd(c, some)
    assert 0 < np.abs(plain - eight).max() < 0.05
    alone = methods.Clients(c.layers(c.w0), c.x, c.y, c.members, [{1: [c.members[1]]}], 0.1)
    kept = [np.array([0, 2, 3]), np.array([1, 4])]  # 3 x 3 + 3 x 2 + 2 x 4 = 23 weights
    moved = c.layers(sub.ce_hfd(alone, lambda t, k: kept, sub.joint_stc(0.2)) - c.w0)
    weights = np.concatenate([w.ravel() for w, _ in moved])
    assert (weights != 0).sum() == 5
    assert len(np.unique(np.abs(weights[weights != 0]).round(12))) == 1
    small = sub.eight_bits(sub.extract(c.layers(c.w0), kept))
    exact = sub.reference.mean_gradient(small, c.x[c.members[1]], c.y[c.members[1]])
    for (_, b), (_, g) in zip(sub.extract(moved, kept), exact, strict=True):
        close(b, -0.1 * g)
    top = np.sort(np.concatenate([0.1 * np.abs(g).ravel() for g, _ in exact]))[-5:]
    close(np.abs(weights).max(), top.mean())


def test_fjord_is_nested(c):
    widths = lambda t, k: (0.5, 0.75, 1.0, 0.3, 0.5)[k]
    first = lambda t, k: [np.arange(int(np.ceil(n * widths(t, k)))) for n in (6, 5)]
    close(sub.fjord(c, widths), sub.hfd(c, first, coverage=True))
    narrow = c.layers(sub.fjord(c, lambda t, k: 0.5) - c.w0)
    assert (narrow[0][0][:, 3:] == 0).all()
    assert (narrow[1][0][:3, :3] != 0).any()


def test_adaptive_dropout_by_hand():
    draws = np.array([0.1, 0.9, 0.5, 0.3])
    assert sub.afd_choose(np.zeros(4), 0.5, draws).tolist() == [1, 2]
    assert sub.afd_choose(np.array([3.0, 0, 0, 1]), 0.5, draws).tolist() == [0, 3]
    # log(draw) / score: -2.3 / 3 = -0.77, -inf, -inf, -1.2 / 1: the same two, then unit 1
    assert sub.afd_choose(np.array([3.0, 0, 0, 1]), 0.75, draws, weighted=True).tolist() == [
        0,
        1,
        3,
    ]
    assert sub.afd_choose(np.zeros(4), 0.5, draws, weighted=True, floor=1.0).tolist() == [1, 2]
    scores, kept = [np.zeros(3), np.ones(2)], [np.array([0, 2]), np.array([1])]
    for loss, last in ((2.0, None), (2.0, 2.0), (3.0, 2.0)):
        same, better = sub.afd_update(scores, kept, loss, last)
        assert not better
        assert same is scores
    new, better = sub.afd_update(scores, kept, 1.5, 2.0)
    assert better
    assert [s.tolist() for s in new] == [[0.25, 0, 0.25], [1, 1.25]]
    over, _ = sub.afd_update(scores, kept, 1.5, 2.0, accumulate=False)
    assert over[1].tolist() == [1, 0.25]


def test_weighted_choice_follows_the_scores():
    rng = np.random.default_rng(0)
    picks = [sub.afd_choose(np.array([1.0, 3]), 0.5, rng.random(2), True)[0] for _ in range(2000)]
    assert abs(np.mean(picks) - 0.75) < 0.04


@pytest.mark.parametrize("single", [False, True])
def test_adaptive_dropout(c, single):
    asked = []

    def draws(t, k):
        asked.append((t, k))
        return [np.random.default_rng([t, 9 if k is None else k]).random(n) for n in (6, 5)]

    close(sub.afd(c, 1.0, draws, single=single), fedavg(c))
    asked.clear()
    w = sub.afd(c, 0.5, draws, single=single)
    # drawn in the first visit and in the second (after the first there is nothing to compare)
    visits = [(t, None if single else k) for t in range(ROUNDS) for k in c.cohort(t)]
    owners = {k: sorted({t for t, o in visits if o == k}) for _, k in visits}
    assert {(ts[i], k) for k, ts in owners.items() for i in range(min(2, len(ts)))} <= set(asked)
    assert len(asked) == len(set(asked))
    assert np.abs(w - fedavg(c)).max() > 1e-3
    once = methods.Clients(c.layers(c.w0), c.x, c.y, c.members, c.rounds[:1], c.lr)
    order = lambda t, k: [np.sort(np.argsort(u)[-3 if len(u) == 6 else -2 :]) for u in
                          draws(t, None if single else k)]  # fmt: skip
    close(sub.afd(once, 0.5, draws, single=single), sub.hfd(once, order))


@pytest.mark.parametrize("single", [False, True])
@pytest.mark.parametrize(("lr", "asked"), [(0.01, [0, 1]), (-0.01, [0, 1, 2, 3, 4])])
def test_a_sub_model_is_trained_again_if_its_loss_fell(c, lr, asked, single):
    """The loss falls in every round with a small step, and rises with a step backwards."""
    rounds, seen = [{1: [c.members[1]]}] * 5, []
    alone = methods.Clients(c.layers(c.w0), c.x, c.y, c.members, rounds, lr)

    def draws(t, k):
        assert k == (None if single else 1)
        seen.append(t)
        return [np.full(6, 0.5), np.full(5, 0.5)]

    sub.afd(alone, 1.0, draws, single=single)
    assert seen == asked
    seen.clear()  # equal draws: the last units, every time, so that the sub-model stays
    half = sub.afd(alone, 0.5, draws, single=single)
    assert seen == asked
    close(half, sub.hfd(alone, lambda t, k: [np.arange(3, 6), np.arange(3, 5)]))


# ---- robustness --------------------------------------------------------------------------------


def test_attacks(c):
    w, v = np.array([1.0, 1]), np.array([2.0, 0])
    assert robust.sign_flip()(w, v).tolist() == [0, 2]
    assert robust.scaled(10)(w, v).tolist() == [11, -9]
    assert robust.flip_labels(np.array([0, 1, 2, 3, 5]), [(0, 2), (3, 5)]).tolist() == [
        2,
        1,
        0,
        5,
        3,
    ]
    bad = robust.with_flipped_labels(c, [1], [(0, 1)])
    assert np.array_equal(bad.y != c.y, np.isin(np.arange(24), c.members[1]) & (c.y < 2))
    mean = lambda t, w, sent: c.mean(sent)
    close(robust.rounds(c, mean), fedavg(c))
    close(robust.rounds(c, mean, {k: robust.scaled(0) for k in range(5)}), c.w0)


def test_trimmed_mean_and_median():
    models = np.array([[1.0, 9], [2, 8], [6, -5], [100, 0], [3, 7]])
    close(robust.trimmed_mean(models, 0), models.mean(0))
    close(robust.trimmed_mean(models, 1), [11 / 3, 5])
    close(robust.trimmed_mean(models, 2), [3, 7])
    assert robust.median(models).tolist() == [3, 7]
    assert robust.median(models[:4]).tolist() == [4, 4]
    with pytest.raises(ValueError, match="leaves nothing"):
        robust.trimmed_mean(models, 3)


def test_slsgd(c):
    mean = lambda t, w, sent: sum(sent.values()) / len(sent)
    close(robust.slsgd(c, 0), robust.rounds(c, mean))
    close(robust.slsgd(c, 1, alpha=0.0), c.w0)
    halfway = methods.Clients(c.layers(c.w0), c.x, c.y, c.members, c.rounds[:1], c.lr)
    close(robust.slsgd(halfway, 1, 0.5), (c.w0 + robust.slsgd(halfway, 1)) / 2)
    huge = {1: robust.scaled(1e6)}
    near = np.abs(robust.slsgd(c, 1, attacks=huge) - c.w0).max()
    far = np.abs(robust.slsgd(c, 0, attacks=huge) - c.w0).max()
    assert near < 5
    assert far > 1e3
    assert np.abs(robust.slsgd(c, 0, attacks=huge, centre=robust.median) - c.w0).max() < 5


def test_foolsgold_weights_by_hand():
    three = np.eye(3)
    assert robust.foolsgold_weights(three).tolist() == [1, 1, 1]
    sybils = np.array([[1.0, 0, 0], [0, 1, 0], [0, 0, 1], [0, 0, 2]])
    assert robust.foolsgold_weights(sybils).tolist() == [1, 1, 0, 0]
    assert robust.foolsgold_weights(np.ones((2, 3))).tolist() == [0, 0]
    assert robust.foolsgold_weights(np.array([[1.0, 0], [-1, 0], [0, 0]])).tolist() == [1, 1, 1]
    # cosines: 0.6 between 0 and 1, 0.8 between 1 and 2, 0 between 0 and 2: v = 0.6, 0.8, 0.8;
    # row 0 is pardoned: 0.6 * 0.6 / 0.8 = 0.45; a = 0.55, 0.2, 0.2; over 0.55: 1, 4/11, 4/11
    plane = np.array([[1.0, 0], [0.6, 0.8], [0, 3]])
    expected = np.log(4 / 7) + 0.5
    assert expected < 0
    assert robust.foolsgold_weights(plane).tolist() == [1, 0, 0]
    # a = 1 - 0.5, 1 - 0.5, 1 -> logit(0.5) + 0.5 = 0.5; with kappa 0.5, 0.25
    pair = np.array([[1.0, 0, 0], [0.5, np.sqrt(0.75), 0], [0, 0, 1]])
    close(robust.foolsgold_weights(pair), [0.5, 0.5, 1])
    close(robust.foolsgold_weights(pair, kappa=0.5), [0.25, 0.25, 1])
    # cosine 0.5 between the first two, -0.5 to the third: it is like nobody, v = 0
    apart = np.array([[0.5, np.sqrt(0.5), 0.5], [0.5, np.sqrt(0.5), -0.5], [-1, 0, 0]])
    close(robust.foolsgold_weights(apart), [0.5, 0.5, 1])


def test_foolsgold(c):
    once = methods.Clients(c.layers(c.w0), c.x, c.y, c.members, c.rounds[:1], c.lr)
    sent = models(once, c.w0, 0)
    changes = np.array([v - c.w0 for v in sent.values()])
    a = robust.foolsgold_weights(changes)
    n = np.array([len(c.members[k]) for k in sent])
    assert 0 < a.sum() < len(a)
    moved = lambda share, **rest: robust.foolsgold(once, share=share, **rest) - c.w0
    close(moved("sum"), a @ changes)
    close(moved("mean"), a @ changes / len(a))
    close(moved("normalised"), a @ changes / a.sum())
    close(moved("examples"), (a * n) @ changes / n.sum())
    last = slice(-24, None)
    close(moved("sum", features=last), robust.foolsgold_weights(changes[:, last]) @ changes)
    same = {k: lambda received, trained: received + 1 for k in range(5)}  # all sybils
    close(robust.foolsgold(c, attacks=same), c.w0)


def test_foolsgold_remembers(c):
    """Alike now, but not over both rounds: a = 1 - 0.4 / |(1, 0.4)| = 0.63, logit above 1/2."""
    e = np.eye(len(c.w0))
    sent = {0: [e[0], e[0]], 1: [e[1], 0.4 * e[0]], 3: [e[2], e[2]]}
    queues = {k: iter(v) for k, v in sent.items()}
    attacks = {k: lambda received, _, q=q: received + next(q) for k, q in queues.items()}
    drawn = [{k: [c.members[k]] for k in sent}] * 2
    two = methods.Clients(c.layers(c.w0), c.x, c.y, c.members, drawn, c.lr)
    moved = robust.foolsgold(two, share="sum", attacks=attacks) - c.w0
    close(moved, 2.4 * e[0] + e[1] + 2 * e[2])


def test_private_mean_by_hand():
    changes = np.array([[3.0, 4], [0, 1], [0, 10]])  # norms 5, 1, 10
    mean, bound = robust.private_mean(changes, 0.0, np.zeros(2))
    assert bound == 5
    close(mean, [1, 10 / 3])
    mean, bound = robust.private_mean(changes, 0.5, np.array([1.0, -2]), bound=2.5)
    assert bound == 2.5
    close(mean, [(1.5 + 1.25) / 3, (2 + 1 + 2.5 - 2.5) / 3])
    assert robust.clip(np.ones(3), 0).tolist() == [0, 0, 0]


def test_dp_fedavg(c):
    zeros = lambda t: np.zeros(len(c.w0))
    close(robust.dp_fedavg(c, 3.0, zeros, bound=1e9), robust.slsgd(c, 0))
    rng = np.random.default_rng(0)
    normals = [rng.normal(size=len(c.w0)) for _ in range(ROUNDS)]
    small = robust.dp_fedavg(c, 2.0, lambda t: normals[t], bound=1e-9) - c.w0
    noise = sum(2e-9 * z / len(c.cohort(t)) for t, z in enumerate(normals))
    assert np.abs(small - noise).max() < 1e-8
    assert np.abs(robust.dp_fedavg(c, 0.0, zeros) - robust.slsgd(c, 0)).max() > 1e-3


# ---- secure aggregation ------------------------------------------------------------------------


def test_fixed_point_by_hand():
    x = np.array([1.0, -1, 0.125, 0.375, 3])
    q = robust.encode(x, 2, 8, bound=2.0)
    assert q.tolist() == [4, 252, 0, 2, 8]
    assert robust.decode(q, 2, 8).tolist() == [1, -1, 0, 0.5, 2]


@pytest.mark.parametrize("bits", [8, 32, 62])
@pytest.mark.parametrize("lost", [(), (3,), (1, 3, 8)])
def test_secure_sum_is_exact(bits, lost):
    rng = np.random.default_rng(bits)
    members, modulus = [8, 1, 3, 4, 6], 2**bits
    table = rng.integers(0, modulus, (9, 9, 20))
    own, prg = (lambda u: table[u, u]), (lambda u, v: table[u, v])
    x = {u: rng.integers(0, modulus, 20) for u in members}
    sent = {u: robust.masked(u, x[u], members, own, prg, modulus) for u in members if u not in lost}
    assert all((y != x[u]).any() for u, y in sent.items())
    total = robust.unmasked_sum(sent, members, own, prg, modulus, threshold=2)
    exact = [sum(int(x[u][i]) for u in sent) % modulus for i in range(20)]
    assert total.tolist() == exact
    plain = sum(sent.values()) % modulus if bits < 60 else None
    if not lost and plain is not None:  # pair masks cancel by themselves
        masks = sum(own(u) for u in members)
        assert ((plain - masks) % modulus).tolist() == exact
    with pytest.raises(ValueError, match="needed"):
        robust.unmasked_sum(sent, members, own, prg, modulus, threshold=6)


@pytest.mark.parametrize("weighted", [True, False])
def test_secure_fedavg(c, weighted):
    bits, size = 48, len(c.w0) + 1
    draw = lambda *key: np.random.default_rng(key).integers(0, 2**bits, size)
    own_of, prg_of = lambda t: lambda u: draw(t, u, u), lambda t: lambda u, v: draw(t, u, v)
    args = c, 30, bits, own_of, prg_of
    same = fedavg(c) if weighted else robust.slsgd(c, 0)
    close(robust.secure_fedavg(*args, weighted=weighted), same, 1e-7)
    rest = [{k: b for k, b in r.items() if k != 1} for r in c.rounds]
    without = methods.Clients(c.layers(c.w0), c.x, c.y, c.members, rest, c.lr)
    same = fedavg(without) if weighted else robust.slsgd(without, 0)
    lost = robust.secure_fedavg(*args, lost_of=lambda t: [1], weighted=weighted)
    close(lost, same, 1e-7)
    assert np.abs(robust.secure_fedavg(*args, bound=1e-3) - c.w0).max() <= ROUNDS * 1e-3 + 1e-8
    assert np.array_equal(robust.secure_fedavg(*args, lost_of=lambda t: range(5)), c.w0)
