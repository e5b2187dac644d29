"""The NumPy references of teachers, calibration and server rules against differences and limits."""

import numpy as np
import pytest
import reference
import reference_methods
import reference_open
import reference_teachers as rt

RNG = np.random.default_rng(0)
FEATURES, CLASSES = 4, 5
SHAPES = ((FEATURES, 6), (6, 7), (7, CLASSES))


def federation(sizes=(7, 0, 12, 5), rounds=4, every=False, seed=0):
    """Three layers, a client without examples, labels that some clients lack."""
    rng = np.random.default_rng(seed)
    ends = np.cumsum(sizes)
    x, y = rng.normal(size=(ends[-1], FEATURES)), rng.integers(0, CLASSES, ends[-1])
    layers = [(0.7 * rng.normal(size=s), 0.3 * rng.normal(size=s[1])) for s in SHAPES]
    members = [np.arange(e - n, e) for e, n in zip(ends, sizes, strict=True)]
    drawn = []
    for _ in range(rounds):
        some = range(len(sizes)) if every else rng.permutation(len(sizes))[:3]
        order = {int(k): rng.permutation(members[k]) for k in some}
        drawn.append({k: [o[i : i + 3] for i in range(0, len(o), 3)] for k, o in order.items()})
    return reference_methods.Clients(layers, x, y, members, drawn, 0.1)


C = federation()
X, Y = C.x[:9], C.y[:9]
HERE = C.layers(C.w0)
OTHER, THIRD = (C.layers(C.w0 + 0.5 * RNG.normal(size=C.w0.shape)) for _ in range(2))
TABLE = np.where(np.arange(CLASSES)[:, None] == Y[0], np.nan, RNG.normal(size=(CLASSES, CLASSES)))
COUNTS = np.where(np.isin(np.arange(CLASSES), Y), 3, 0)

LOSSES = {
    "gkd": lambda m: rt.gkd_loss(m, [OTHER], X, Y, 0.7),
    "gkd vote": lambda m: rt.gkd_loss(m, [OTHER, THIRD], X, Y, 0.7, 2.5),
    "gkd squared": lambda m: rt.gkd_loss(m, [OTHER], X, Y, 0.7, 2.5, squared=True),
    "mlb": lambda m: rt.mlb_loss(m, OTHER, X, Y, 0.6, 1.3),
    "moon": lambda m: rt.moon_loss(m, OTHER, THIRD, X, Y, 0.8, 0.5),
    "distill": lambda m: rt.distill_loss(m, TABLE, X, Y, 0.9),
    "max": lambda m: rt.max_loss(m, X, Y, 1.7),
    "lc": lambda m: rt.calibrated_loss(m, X, Y, 1.0, np.where(COUNTS > 0, -COUNTS / 7, -np.inf)),
    "rs": lambda m: rt.calibrated_loss(m, X, Y, np.where(COUNTS > 1, 1.0, 0.3), 0.0),
    "df": lambda m: rt.df_loss(m, [OTHER, THIRD], X),
}


def close(a, b, atol=1e-12):
    np.testing.assert_allclose(a, b, rtol=0, atol=atol)


def slopes(loss):
    return reference_open.slopes(lambda w: loss(C.layers(w))[0], C.w0)


@pytest.mark.parametrize("name", LOSSES)
def test_gradient_by_hand_is_that_of_differences(name):
    gradient = C.flat(LOSSES[name](HERE)[1])
    assert np.abs(gradient).max() > 1e-3
    close(gradient, slopes(LOSSES[name]), 1e-7)


def test_stopped_fedmlb_takes_the_hybrid_logits_as_fixed():
    features = reference_open.forward(HERE, X)[0]
    fixed = [reference_open.forward(OTHER[i:], features[i])[1] for i in (1, 2)]
    by_hand = C.flat(rt.mlb_loss(HERE, OTHER, X, Y, 0.6, 1.3, stopped=True)[1])
    close(by_hand, slopes(lambda m: rt.mlb_loss(m, OTHER, X, Y, 0.6, 1.3, True, fixed)), 1e-7)
    assert np.abs(by_hand - C.flat(LOSSES["mlb"](HERE)[1])).max() > 1e-3


def test_teacher_equal_to_student_pulls_nowhere():
    ce = C.flat(reference.mean_gradient(HERE, X, Y))
    close(C.flat(rt.gkd_loss(HERE, [HERE], X, Y, 3.0, 2.0)[1]), ce)
    close(C.flat(rt.df_loss(HERE, [HERE], X)[1]), 0)
    loss, gradient = rt.moon_loss(HERE, OTHER, OTHER, X, Y, 2.0, 0.5)
    close(C.flat(gradient), ce)
    close(loss, rt.cross_entropy(reference_open.forward(HERE, X)[1], Y)[0] + 2 * np.log(2))
    one, two = (C.flat(rt.mlb_loss(HERE, HERE, X, Y, 0.4, v)[1]) for v in (0.0, 5.0))
    close(one, two)
    last = slice(-SHAPES[-1][0] * CLASSES - CLASSES, None)
    close(one[last], ce[last])  # no hybrid path has a local classifier
    assert np.abs(one - ce)[: last.start].max() > 1e-3


def test_moon_without_any_active_feature():
    dead = [*HERE[:1], (HERE[1][0], HERE[1][1] - 1e3), *HERE[2:]]
    ce = C.flat(reference.mean_gradient(dead, X, Y))
    close(C.flat(rt.moon_loss(dead, OTHER, THIRD, X, Y, 1.0, 0.5)[1]), ce)
    assert np.isfinite(C.flat(rt.moon_loss(HERE, dead, THIRD, X, Y, 1.0, 0.5)[1])).all()


NOTHING = {
    "fedgkd": lambda c: rt.fedgkd(c, 0.0, size=3),
    "fedgkd vote": lambda c: rt.fedgkd(c, 0.0, size=3, vote=True),
    "fedmlb": lambda c: rt.fedmlb(c, 0.0, 0.0),
    "fedavgm fedmlb": lambda c: rt.fedavgm_fedmlb(c, 0.0, 0.0, 0.0),
    "moon": lambda c: rt.moon(c, 0.0),
    "feddistill": lambda c: rt.feddistill(c, 0.0),
    "fedmax": lambda c: rt.fedmax(c, 0.0),
    "fedlc": lambda c: rt.fedlc(c, 0.0, absent=0.0),
    "fedrs": lambda c: rt.fedrs(c, 1.0),
    "gma": lambda c: rt.gma(c, 0.0),
    "feddf": lambda c: rt.feddf(c, c.x, [[np.arange(5)]] * len(c.rounds), 0.0),
}


@pytest.mark.parametrize("name", NOTHING)
def test_weight_zero_is_fedavg(name):
    close(NOTHING[name](C), reference_methods.fedopt(C, reference_methods.plain))


SOMETHING = {
    "fedgkd": lambda c: rt.fedgkd(c, 1.0),
    "fedmlb": rt.fedmlb,
    "fedmlb stopped": lambda c: rt.fedmlb(c, stopped=True),
    "fedavgm fedmlb": lambda c: rt.fedavgm_fedmlb(c, 0.8),
    "feddyn fedmlb": lambda c: rt.feddyn_fedmlb(c, 0.1),
    "moon": rt.moon,
    "feddistill": lambda c: rt.feddistill(c, 1.0),
    "fedmax": lambda c: rt.fedmax(c, 1.0),
    "fedlc": lambda c: rt.fedlc(c, 1.0),
    "fedlc absent 0": lambda c: rt.fedlc(c, 1.0, absent=0.0),
    "fedrs": lambda c: rt.fedrs(c, 0.5),
    "wsm": rt.wsm,
    "fednova": rt.fednova,
    "gma": lambda c: rt.gma(c, 0.9),
    "feddf": lambda c: rt.feddf(c, c.x, [[np.arange(5)]] * len(c.rounds), 0.1),
}


@pytest.mark.parametrize("name", SOMETHING)
def test_default_weight_is_not_fedavg(name):
    w = SOMETHING[name](C)
    assert np.isfinite(w).all()
    assert np.abs(w - reference_methods.fedopt(C, reference_methods.plain)).max() > 1e-5


def test_fedgkd_buffer():
    one, vote = rt.fedgkd(C, 1.0), rt.fedgkd(C, 1.0, vote=True)
    close(one, vote)
    first = federation(rounds=1)  # only w0 so far, whatever the size
    close(rt.fedgkd(first, 1.0, size=5), rt.fedgkd(first, 1.0))
    close(rt.fedgkd(C, 1.0, size=4), rt.fedgkd(C, 1.0, size=9))  # four rounds: four models
    runs = one, rt.fedgkd(C, 1.0, size=2), rt.fedgkd(C, 1.0, size=2, vote=True)
    assert min(np.abs(a - b).max() for a, b in zip(runs, runs[1:] + runs[:1], strict=True)) > 1e-6


def test_fedgkd_third_round_by_hand():
    """One client: the teacher of round 2 is the mean of w1 and w2, those of VOTE are w1 and w2."""
    c = federation(sizes=(9,), rounds=3, every=True)
    for vote in (False, True):
        models = [c.w0]
        for cohort in c.rounds:
            w, recent = models[-1], models[-2:]
            teachers = [c.layers(m) for m in (recent if vote else [sum(recent) / len(recent)])]
            for b in cohort[0]:
                p = reference_open.softmax(reference_open.forward(c.layers(w), c.x[b])[1])
                q = [reference_open.softmax(reference_open.forward(t, c.x[b])[1]) for t in teachers]
                signal = p - np.eye(CLASSES)[c.y[b]] + 0.4 * (p - sum(q) / len(q))
                features = reference_open.forward(c.layers(w), c.x[b])[0]
                grads = reference_open.backward(c.layers(w), features, signal / len(b))
                w = w - c.lr * c.flat(grads)
            models.append(w)
        close(rt.fedgkd(c, 0.8, size=2, vote=vote), models[-1])


def test_fedlc_first_step_by_hand():
    c = federation(sizes=(6,), rounds=1, every=True)
    c.y[:] = [0, 0, 0, 0, 1, 3]
    c.rounds = [{0: [np.arange(6)]}]
    features, z = reference_open.forward(c.layers(c.w0), c.x)
    p = np.exp(z - 0.7 * np.array([4**-0.25, 1, np.inf, 1, np.inf]))
    signal = (p / p.sum(1, keepdims=True) - np.eye(CLASSES)[c.y]) / 6
    step = c.flat(reference_open.backward(c.layers(c.w0), features, signal))
    close(rt.fedlc(c, 0.7), c.w0 - c.lr * step)


def test_first_round_of_stateful_teachers_is_fedavg():
    first = federation(rounds=1)
    plain = reference_methods.fedopt(first, reference_methods.plain)
    close(rt.moon(first, 5.0), plain)
    close(rt.feddistill(first, 5.0), plain)


def test_moon_keeps_the_model_of_the_client_s_last_round():
    """Client 0 takes part in rounds 0 and 2; client 2 alone in round 1."""
    c = federation()
    b = {k: [c.members[k][:3], c.members[k][3:6]] for k in (0, 2)}
    c.rounds = [{0: b[0]}, {2: b[2]}, {0: b[0]}]
    start = {0: c.w0}
    for t, k in enumerate((0, 2)):
        start[t + 1] = c.train(start[t], b[k], c.grad)  # alone, first time: FedAvg
    pair = c.layers(start[2]), c.layers(start[1])
    w = start[2]
    for batch in b[0]:
        step = rt.moon_loss(c.layers(w), *pair, c.x[batch], c.y[batch], 2.0, 0.5)[1]
        w = w - c.lr * c.flat(step)
    close(rt.moon(c, 2.0), w)


def test_feddyn_without_fedmlb():
    equal = federation(sizes=(6, 6, 6, 6))
    close(rt.feddyn_fedmlb(equal, 0.2, 0.0, 0.0), reference_methods.fedgloss(equal, 0.0, 5.0))


def test_server_momentum_around_fedmlb():
    momentum = reference_methods.with_momentum(0.8)
    close(rt.fedavgm_fedmlb(C, 0.8, 0.0, 0.0), reference_methods.fedopt(C, momentum))


SPREAD = RNG.uniform(0.1, 3, (2, 3))
IMAGES, NOISE = RNG.normal(size=(5, 3, 2, 3)), RNG.normal(size=(2, 5, 3))
RUNNING = np.zeros(3), np.ones(3)
MASK = np.array([1, 1, 0, 1, 0])


def test_ffa_layer_as_written():
    y, (run_mu, run_sd) = rt.ffa_forward(IMAGES, RUNNING, SPREAD, NOISE)
    eps, c = 1e-6, 3
    mu, sd = IMAGES.mean((1, 2)), np.sqrt(IMAGES.var((1, 2)) + eps)
    close(run_mu, 0.01 * mu.mean(0))
    close(run_sd, 0.99 + 0.01 * sd.mean(0))
    variances = []
    for v, g in ((mu, SPREAD[0]), (sd, SPREAD[1])):
        gain = 1 / (1 + 1 / (g + eps))
        variances.append((1 + c * gain / gain.sum()) * (v.var(0) + eps))
    for n in range(5):
        beta = mu[n] + np.sqrt(variances[0]) * NOISE[0, n]
        gamma = sd[n] + np.sqrt(variances[1]) * NOISE[1, n]
        close(y[n], gamma * (IMAGES[n] - mu[n]) / sd[n] + beta)


def test_ffa_layer_limits():
    close(rt.ffa_forward(IMAGES, RUNNING, SPREAD, 0 * NOISE)[0], IMAGES)
    y, running = rt.ffa_forward(IMAGES, RUNNING, SPREAD, NOISE, apply=False)
    assert y is IMAGES
    assert running is RUNNING
    real = MASK > 0
    y, running = rt.ffa_forward(IMAGES, RUNNING, SPREAD, NOISE, mask=MASK)
    alone, same = rt.ffa_forward(IMAGES[real], RUNNING, SPREAD, NOISE[:, real])
    close(y[real], alone)
    close(running, same)
    y, running = rt.ffa_forward(IMAGES, RUNNING, SPREAD, NOISE, mask=0 * MASK)
    assert np.isfinite(y).all()
    close(running, RUNNING)


@pytest.mark.parametrize("mask", [None, MASK])
def test_ffa_gradient(mask):
    signal = RNG.normal(size=IMAGES.shape)
    if mask is not None:
        signal[mask == 0] = 0

    def loss(v):
        images = v.reshape(IMAGES.shape)
        return (signal * rt.ffa_forward(images, RUNNING, SPREAD, NOISE, mask=mask)[0]).sum()

    by_hand = rt.ffa_gradient(IMAGES, SPREAD, NOISE, signal, mask)
    close(by_hand.ravel(), reference_open.slopes(loss, IMAGES.ravel()), 1e-7)


def test_ffa_server():
    uploads = [(np.array([0.0, 1.0]), np.array([1.0, 1.0])), (np.array([2.0, 1.0]), np.ones(2))]
    close(rt.ffa_server(uploads), [[1, 0], [0, 0]])
    close(rt.ffa_server(uploads, pooled=True), [[0.5, 0.5], [0, 0]])


def test_label_teacher():
    uploads = {1: {0: (np.array([1.0, 0, 0]), 1), 4: (np.array([4.0, 3, 0]), 2)}}
    plain, heavy, own = (
        rt.label_teacher(uploads, 3, **k) for k in ({}, {"weighted": True}, {"skip": 4})
    )
    close(plain[1], [2.5, 1.5, 0])
    close(heavy[1], [3, 2, 0])
    close(own[1], [1, 0, 0])
    assert np.isnan(plain[[0, 2]]).all()
    alone = federation(sizes=(9,), every=True)  # its own share left out: no teacher at all
    close(
        rt.feddistill(alone, 3.0, leave_out=True),
        reference_methods.fedopt(alone, reference_methods.plain),
    )


def test_feddistill_second_round_by_hand():
    """Two clients, one shared label; nothing but the logits is exchanged."""
    c = federation(sizes=(4, 4), rounds=2, every=True)
    c.y[:] = [0, 0, 1, 1, 1, 2, 2, 2]
    first = [c.train(c.w0, c.rounds[0][k], c.grad) for k in (0, 1)]
    z = [reference_open.forward(c.layers(v), c.x[m])[1] for v, m in
         zip(first, c.members, strict=True)]  # fmt: skip
    table = np.full((CLASSES, CLASSES), np.nan)
    table[0], table[2] = z[0][:2].mean(0), z[1][1:].mean(0)
    table[1] = (z[0][2:].mean(0) + z[1][0]) / 2
    models = rt.feddistill(c, 0.9, shared=False)
    for k in (0, 1):
        w = first[k]
        for b in c.rounds[1][k]:
            w = w - c.lr * c.flat(rt.distill_loss(c.layers(w), table, c.x[b], c.y[b], 0.9)[1])
        close(models[k], w)


def test_calibration_limits():
    c = federation(sizes=(6, 6), every=True)
    c.y[:] = np.arange(12) % 3  # two examples of each of three classes, two classes nobody has
    close(rt.fedlc(c, 1.0), rt.wsm(c))  # equal counts: only the absent classes matter
    close(rt.fedlc(c, 1.0), rt.fedlc(c, 0.2))
    close(rt.fedlc(c, 1.0), rt.fedlc(c, 1.0, absent=200.0))
    c.y[:] = 0  # one class: nothing to learn where the others leave the softmax
    close(rt.wsm(c), c.w0)
    close(rt.fedlc(c, 1.0), c.w0)
    assert np.abs(rt.fedrs(c, 0.5) - c.w0).max() > 1e-3


def test_nova_norms():
    r, a = 0.9, 0.1 * 0.5
    for steps in (1, 2, 7):
        close(rt.nova_norm(steps, 0.1), steps)
        closed = (steps - r * (1 - r**steps) / (1 - r)) / (1 - r)
        close(rt.nova_norm(steps, 0.1, momentum=r), closed)
        close(rt.nova_norm(steps, 0.1, mu=0.5), (1 - (1 - a) ** steps) / a)


def test_fednova_limits():
    equal = federation(sizes=(6, 6, 6))
    plain, prox = (reference_methods.fedopt(equal, reference_methods.plain, m) for m in (0.0, 0.3))
    close(rt.fednova(equal), plain)
    close(rt.fednova(equal, mu=0.3, effective="norm"), prox)
    layers = equal.layers(equal.w0)
    heavy = reference.fedavg(layers, equal.x, equal.y, equal.rounds, lr=equal.lr, momentum=0.9)
    close(rt.fednova(equal, momentum=0.9, effective="norm"), equal.flat(heavy))
    once = federation(rounds=1, every=True)
    moved = {k: (once.w0 - once.train(once.w0, b, once.grad), len(b))
             for k, b in once.cohort(0).items()}  # fmt: skip
    n = {k: len(once.members[k]) / 24 for k in moved}
    tau = sum(n[k] * steps for k, (_, steps) in moved.items())
    close(rt.fednova(once), once.w0 - tau * sum(n[k] * d / t for k, (d, t) in moved.items()))


def test_gma_mask():
    deltas = np.array([[1.0, 1, 1, 0], [2, -1, 3, 0], [1, 1, -1, 0], [1, 1, 0, 0]])
    close(rt.gma_mask(deltas, 0.5), [1, 1, 0.25, 0])
    close(rt.gma_mask(deltas, 0.6), [1, 0.5, 0.25, 0])
    close(rt.gma_mask(deltas, 0.0), 1)
    alone = federation(sizes=(9,), every=True)
    close(rt.gma(alone, 1.0), reference_methods.fedopt(alone, reference_methods.plain))
