"""The NumPy version of personalisation, against hand and against limits."""

import functools

import numpy as np
import pytest
import reference_personal as ref

LR, C, COUNTS = 0.1, 5, {0: 7, 1: 4, 2: 0, 3: 9}


def close(a, b, tolerance=1e-12):
    assert set(a) == set(b)
    for n in a:
        np.testing.assert_allclose(a[n], b[n], rtol=0, atol=tolerance)


@pytest.fixture
def rng():
    return np.random.default_rng(0)


@pytest.fixture
def params(rng):
    shapes = {"W1": (3, 6), "b1": (6,), "W": (6, C), "b": (C,)}
    return {n: rng.normal(size=s) for n, s in shapes.items()}


@pytest.fixture
def drawn(rng):
    """Four clients, one without examples; batches of 4, two epochs."""
    out = {}
    for k, n in COUNTS.items():
        x, y = rng.normal(size=(n, 3)), rng.integers(0, C, n)
        orders = [rng.permutation(n) for _ in range(2)]
        parts = [o[i : i + 4] for o in orders for i in range(0, n, 4)]
        out[k] = [(x[p], y[p]) for p in parts]
    return out


def bound(update, **options):
    return functools.partial(update, gradient=ref.gradient, lr=LR, **options)


def slopes(f, params, eps=1e-6):
    out = {}
    for n, a in params.items():
        out[n] = np.zeros_like(a)
        for i in np.ndindex(a.shape):
            step = np.zeros_like(a)
            step[i] = eps
            up, down = params | {n: a + step}, params | {n: a - step}
            out[n][i] = (f(up) - f(down)) / (2 * eps)
    return out


@pytest.mark.parametrize("classes", [None, [1, 2, 4]])
@pytest.mark.parametrize("layers", [1, 2])
def test_gradient_by_finite_differences(params, rng, layers, classes):
    if layers == 1:
        params = {"W": params["W"][:3], "b": params["b"]}
    batch = rng.normal(size=(8, 3)), rng.choice(classes or C, 8)
    options = {"tau": 0.7, "classes": classes}
    g = ref.gradient(params, batch, **options)
    close(g, slopes(lambda p: ref.loss(p, batch, **options), params), 1e-7)
    if classes:
        assert not g["W"][:, [0, 3]].any()
        assert not g["b"][[0, 3]].any()


def test_penalties_by_finite_differences(params, drawn, rng):
    batch = drawn[0][0]
    anchor = {n: rng.normal(size=a.shape) for n, a in params.items()}

    def ditto(p, factor):
        return ref.loss(p, batch) + factor * sum(((p[n] - anchor[n]) ** 2).sum() for n in p)

    for half, factor in ((False, 0.3), (True, 0.15)):
        g = ref.toward(ref.gradient, anchor, 0.3, half)(params, batch)
        close(g, slopes(lambda p, f=factor: ditto(p, f), params), 1e-6)
    stepped = ref.moreau(anchor, params, [batch], ref.gradient, 1.0, 0.3)
    g = {n: params[n] - stepped[n] for n in params}
    close(g, slopes(lambda p: ditto(p, 0.15), params), 1e-6)


def test_nothing_own_is_fedavg(params, drawn):
    avg = ref.fedavg_round(params, drawn, COUNTS, ref.gradient, LR, server_lr=0.5)
    sim, states = ref.partial_round(params, {}, drawn, COUNTS, (), bound(ref.fedsim), 0.5)
    halves = {k: ([], b) for k, b in drawn.items()}
    alt, _ = ref.partial_round(params, {}, halves, COUNTS, (), bound(ref.fedalt), 0.5)
    close(sim, avg)
    close(alt, avg)
    assert states == {0: {}, 1: {}, 3: {}}


def test_everything_own_is_local_training(params, drawn):
    new, states = params, {}
    for _ in range(2):
        new, states = ref.partial_round(new, states, drawn, COUNTS, params, bound(ref.fedsim))
    close(new, params)
    assert 2 not in states
    for k in (0, 1, 3):
        alone = ref.finetune(params, drawn[k] * 2, ref.gradient, LR)
        close(ref.personal_model(new, states, k), alone)
    close(ref.personal_model(new, states, 2), params)


def test_alternation_by_hand(params, drawn):
    own = ref.leaves(params, "psi")
    shared, mine = ref.split(params, own)
    a, b = drawn[3][:2]
    g = ref.gradient(params, a)
    v = {n: params[n] - LR * g[n] for n in own}
    g = ref.gradient(shared | v, b)
    u = {n: params[n] - LR * g[n] for n in shared}
    got = ref.fedalt(shared, mine, ([a], [b]), ref.gradient, LR)
    close(got[0], u)
    close(got[1], v)
    assert set(shared) == ref.leaves(params, "phi")


def test_one_step_of_fedsim_averages_what_is_shared(params, drawn):
    own = ref.leaves(params, "phi")
    first = {k: b[:1] for k, b in drawn.items() if b}
    counts = {0: 1, 1: 1, 3: 2}
    new, states = ref.partial_round(params, {}, first, counts, own, bound(ref.fedsim))
    g = {k: ref.gradient(params, b[0]) for k, b in first.items()}
    for n in params:
        if n in own:
            for k in first:
                np.testing.assert_allclose(states[k][n], params[n] - LR * g[k][n])
            assert new[n] is params[n]
        else:
            total = (g[0][n] + g[1][n] + 2 * g[3][n]) / 4
            np.testing.assert_allclose(new[n], params[n] - LR * total)


def test_moreau_envelope_of_a_quadratic():
    """L = a/2 ||theta - m||^2: theta* = (a m + p w)/(a + p); w goes to m at a known rate."""
    a, p, m = 2.0, 3.0, np.array([1.0, -2.0])
    quadratic = lambda q, _: {"w": a * (q["w"] - m)}
    w = {"w": np.array([4.0, 4.0])}
    got, theta = ref.pfedme(w, [0], quadratic, 0.1, p, 200, 0.1)
    np.testing.assert_allclose(theta["w"], (a * m + p * w["w"]) / (a + p))
    envelope = a * p / (a + p) * (w["w"] - m)
    np.testing.assert_allclose(got["w"], w["w"] - 0.1 * envelope)


def test_readings_of_pfedme(params, drawn):
    b = drawn[3]
    got = {}
    for start in ("w", "theta"):
        for pull in (True, False):
            options = {"penalty": 0.5, "steps": 3, "start": start, "pull": pull}
            got[start, pull] = ref.pfedme(params, b, ref.gradient, LR, **options)[0]["W"]
    assert len({w.tobytes() for w in got.values()}) == 4
    # One batch, lr * penalty = 1, no pull: theta replaces w, so the server does FedAvg.
    one = {k: v[:1] for k, v in drawn.items()}
    update = bound(ref.pfedme, penalty=1 / LR, steps=1, pull=False)
    new, thetas = ref.pfedme_round(params, one, COUNTS, update, beta=0.5)
    close(new, ref.fedavg_round(params, one, COUNTS, ref.gradient, LR, 0.5))
    assert set(thetas) == {0, 1, 3}
    # The first step from theta = w has no pull.
    assert not np.any(
        new["W"]
        != ref.pfedme_round(params, one, COUNTS, bound(ref.pfedme, penalty=1 / LR, steps=1), 0.5)[
            0
        ]["W"]
    )
    # beta 0: nothing changes.
    close(ref.pfedme_round(params, one, COUNTS, update, 0.0)[0], params)


def test_states_of_partial_pfedme(params, drawn):
    own = ref.leaves(params, "psi")
    update = bound(ref.pfedme, penalty=1.0, steps=2)
    whole, _ = ref.pfedme_round(params, drawn, COUNTS, update)
    for state in ("kept", "reset", "carried"):
        nothing, _ = ref.pfedme_partial_round(params, {}, drawn, COUNTS, (), update, state=state)
        close(nothing, whole)
    kept, states = ref.pfedme_partial_round(params, {}, drawn, COUNTS, own, update)
    reset, none = ref.pfedme_partial_round(params, {}, drawn, COUNTS, own, update, state="reset")
    close(kept, reset)  # all clients are new
    assert none == {}
    assert set(states) == {0, 1, 3}
    _, carried = ref.pfedme_partial_round(params, {}, drawn, COUNTS, own, update, state="carried")
    w = params
    for k in (0, 1, 3):
        w = ref.split(params, own)[0] | ref.split(update(w, drawn[k])[0], own)[1]
    close(carried["carried"], ref.split(w, own)[1])


def test_limits_of_ditto(params, drawn, rng):
    b = drawn[3]
    close(
        ref.finetune(params, b, ref.gradient, LR, penalty=0.0),
        ref.sgd(params, b, ref.gradient, LR),
    )
    anchor = {n: rng.normal(size=a.shape) for n, a in params.items()}
    for half, lr in ((False, 5e-9), (True, 1e-8)):  # the penalty alone reaches the anchor at once
        held = ref.finetune(params, b, ref.gradient, lr, penalty=1e8, anchor=anchor, half=half)
        close(held, anchor, 1e-6)
    for part in ("psi", "phi"):
        names = ref.leaves(params, part)
        new = ref.finetune(params, b, ref.gradient, LR, names, penalty=0.1)
        assert {n for n in params if np.any(new[n] != params[n])} == names
    pairs = {k: (v, v) for k, v in drawn.items()}
    new, states = ref.ditto_round(params, {}, pairs, COUNTS, ref.gradient, LR, 0.0)
    close(new, ref.fedavg_round(params, drawn, COUNTS, ref.gradient, LR))
    close(new, ref.mean(states, COUNTS))


def test_only_local_labels(params, rng):
    y = np.array([4, 1, 1, 2, 4, 2])
    x = rng.normal(size=(6, 3))
    classes = ref.local_classes(y)
    assert classes == [1, 2, 4]
    pruned, local = ref.prune(params, classes), ref.relabel(y, classes)
    assert local.tolist() == [2, 0, 0, 1, 2, 1]
    assert pruned["W"].shape == (6, 3)
    masked = functools.partial(ref.gradient, classes=classes)
    assert np.isclose(ref.loss(pruned, (x, local)), ref.loss(params, (x, y), classes=classes))
    # Training a pruned head is training a masked one, and cutting afterwards.
    cut = ref.finetune(pruned, [(x, local)] * 3, ref.gradient, LR)
    whole = ref.finetune(params, [(x, y)] * 3, masked, LR)
    close(cut, ref.prune(whole, classes))
    np.testing.assert_array_equal(whole["W"][:, [0, 3]], params["W"][:, [0, 3]])
    full = np.mean(ref.predictions(ref.logits(params, x)) == y)
    assert ref.oll_accuracy(pruned, x, y, classes) >= full
    z = ref.masked_logits(ref.logits(params, x), classes)
    got = ref.predictions(ref.logits(pruned, x), classes)
    np.testing.assert_array_equal(got, ref.predictions(z))
    assert set(got) <= set(classes)
    assert ref.predictions(ref.masked_logits(-np.ones((1, C)), classes, 0.0)).tolist() == [0]
    with pytest.raises(ValueError, match="0"):
        ref.relabel([0], classes)
    assert ref.head_floats(1280, 2028) == 1280 * 2028
    assert ref.head_floats(6, 3, bias=True) == pruned["W"].size + pruned["b"].size
    rates = [ref.learning_rate(a, b) for a in (False, True) for b in (False, True)]
    np.testing.assert_allclose(rates, [0.1, 0.01, 0.01, 0.001])


def test_measures(rng):
    right = [rng.integers(0, 2, n) for n in (3, 5, 8)]
    pooled = np.concatenate(right).mean()
    accs = [r.mean() for r in right] + [np.nan]
    assert np.isclose(ref.weighted_mean_accuracy(accs, [3, 5, 8, 0]), pooled)
    values = rng.normal(size=11)
    for q in (0, 0.05, 0.25, 0.5, 0.9, 1):
        assert np.isclose(ref.quantile(values, q), np.quantile(values, q))
    assert ref.weighted_quantile([3, 1, 2], [1, 1, 2], 0.5) == 2
    assert ref.weighted_quantile([3, 1, 2], [1, 1, 2], 0.25) == 1.5
    assert ref.weighted_quantile([3, 1, 2], [1, 1, 2], 0.99) == 3
    y, predicted = [0, 0, 1, 2, 2, 2], [0, 1, 1, 2, 0, 2]
    got = ref.local_and_absent(predicted, y, [0, 1], 4)
    np.testing.assert_allclose(got, [0.75, 2 / 3])
    got = ref.local_and_absent(predicted, y, [0, 1], 4, empty=0.0)
    np.testing.assert_allclose(got, [0.75, 1 / 3])


def test_bytes():
    """FedAvg on Landmarks is 1.157 TB; d = 1280, b = 2,223,872 (7.2)."""
    size = {"b": 2223872, "d": 1280, "c": 2028}
    phases = [("Fed3R", 823), ("FT(f)", 30000), ("PP(psi)", 10000), ("PP(phi)", 10000), ("FP", 823)]
    got = ref.phase_bytes(phases, **size, local=40)
    assert got[0] == 823 * 4 * (819840 + 1280 * 40)
    assert round(got[1] / 1e12, 3) == 1.157
    assert got[2] + got[3] == got[1] // 3
    assert got[4] == 0
    assert ref.phase_floats("Fed3R-Sync", **size) == (0, 819840 + 1280 * 2028)


def test_weights():
    assert ref.batch_counts({0: 64, 1: 65, 2: 0, 3: 1}, 64) == {0: 1, 1: 2, 2: 0, 3: 1}
