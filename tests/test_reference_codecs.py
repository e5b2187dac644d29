"""The NumPy codecs against cases worked by hand."""

import numpy as np
import pytest
import reference_codecs as ref
import reference_methods
import reference_open

TOY = np.array([0.1, -0.9, 0.3, 0.0, 0.5, -0.2, 0.7, 0.05, -0.4, 0.6])
SHAPES = [(3, 3, 1, 4), (3, 3, 4, 5)]  # 24 kernels


def draw(*shapes, seed=0):
    rng = np.random.default_rng(seed)
    return [rng.normal(size=s) for s in shapes]


def close(a, b, atol=1e-12):
    np.testing.assert_allclose(a, b, rtol=0, atol=atol)


def test_stc_keeps_the_two_largest_of_ten():
    close(ref.stc(TOY, 0.2), [0, -0.8, 0, 0, 0, 0, 0.8, 0, 0, 0])
    close(ref.top_k(TOY, 0.2), [0, -0.9, 0, 0, 0, 0, 0.7, 0, 0, 0])
    close(ref.stc(TOY, 0.25), ref.stc(TOY, 0.2))  # 2.5 survivors are 2
    close(ref.stc(TOY, 0.35), ref.stc(TOY, 0.4))  # and 3.5 are 4
    close(ref.stc(TOY, 0.04), np.zeros(10))
    close(np.abs(ref.stc(TOY, 1.0)), np.where(TOY == 0, 0, np.abs(TOY).mean()))
    close(ref.stc(np.array([1.0, -2, 2, 2, -2]), 0.4), [0, -2, 2, 0, 0])  # ties


def test_networks_leave_biases_alone():
    layers = [(np.array([[4.0, -1], [0, 2]]), np.array([9.0])), (np.array([[-6.0], [3]]), None)]
    (w1, b1), (w2, _) = ref.stc_network(layers, 0.5)  # 4, 3, -6 of six
    close(w1, [[13 / 3, 0], [0, 0]])
    close(w2, [[-13 / 3], [13 / 3]])
    assert b1 is layers[0][1]
    (w1, _), (w2, _) = ref.per_layer_stc(layers, (0.5, 0.5))
    close(w1, [[3, 0], [0, 3]])
    close(w2, [[-6], [0]])
    (w1, _), _ = ref.per_layer_stc(layers, (None, 0.5))
    close(w1, np.array([[255, 0], [51, 153]]) * 5 / 255 - 1)  # 0 is level 51, 2 is level 153


@pytest.mark.parametrize("p", [0.02, 0.1, 0.5])
def test_sstc_of_all_kernels_is_stc(p):
    conv, fc = draw(*SHAPES), draw((20, 3), seed=1)
    for digits in (9, 0):  # 0: many ties
        conv, fc = ([np.round(v, digits) for v in vs] for vs in (conv, fc))
        a, b, chosen = ref.sstc(conv, fc, p, 1.0)
        close(ref.flat(a + b), ref.stc(ref.flat(conv + fc), p))
        assert chosen.tolist() == list(range(24))


@pytest.mark.parametrize("relative_to", ["all", "selected"])
def test_sstc_is_the_printed_algorithm(relative_to):
    conv, fc = draw(*SHAPES), draw((20, 3), seed=1)
    t = np.concatenate([w.reshape(9, -1) for w in conv], 1)
    best = np.sort(np.argsort(-np.abs(t).mean(0))[:6])  # a quarter of 24
    v = np.concatenate([t[:, best].ravel(), fc[0].ravel()])
    n = round(0.1 * (276 if relative_to == "all" else 6 * 9 + 60))
    kept = np.argsort(-np.abs(v))[:n]
    y = np.zeros_like(v)
    y[kept] = np.abs(v[kept]).mean() * np.sign(v[kept])
    t = np.zeros_like(t)
    t[:, best] = y[:54].reshape(9, 6)
    a, b, chosen = ref.sstc(conv, fc, 0.1, 0.25, relative_to)
    close(a[0], t[:, :4].reshape(SHAPES[0]))
    close(a[1], t[:, 4:].reshape(SHAPES[1]))
    close(b[0], y[54:].reshape(20, 3))
    assert chosen.tolist() == best.tolist()
    few, _, _ = ref.sstc(conv, [], 0.5, 1 / 24)  # fewer weights are open than p asks for
    assert np.count_nonzero(ref.flat(few)) == 9


def test_one_sign():
    x = np.array([5.0, -4, -6, 1, 2, -0.5])
    close(ref.sbc(x, 0.5), [5, 0, 0, 0, 0, 0])  # survivors 5 | -4, -6: a draw
    close(ref.sbc(x - [1, 0, 0, 0, 0, 0], 0.5), [0, -5, -5, 0, 0, 0])
    close(ref.sbc(x, 0.5, original=True), [0, -3.5, -3.5, 0, 0, -3.5])  # 8 / 3 against 10.5 / 3
    signs = [np.array([1.0, -3, 0, 2]), np.array([9.0, 5, 0, -7]), np.array([-1.0, -1, 2, 0])]
    close(ref.sign_majority(signs), [1, -1, 1, 0])


def test_random_codecs():
    x = np.array([3.0, -4.0, 0.0])  # levels 4 |x| / 5: 2.4, 3.2, 0
    close(ref.qsgd(x, 4, np.array([0.39, 0.21, 0.0])), [5 * 3 / 4, -5 * 3 / 4, 0])
    close(ref.qsgd(x, 4, np.array([0.41, 0.19, 0.0])), [5 * 2 / 4, -5.0, 0])
    close(ref.qsgd(np.zeros(2), 4, np.zeros(2)), np.zeros(2))
    close(ref.random_mask(x, np.array([True, False, True])), [3, 0, 0])
    close(ref.random_mask(x, np.array([True, True, False]), 0.25), [12, -16, 0])
    close(ref.affine(np.array([0.0, 1, 4]), 1, np.array([0.9, 0.2, 0.9])), [0, 4, 4])
    close(ref.affine(np.array([0.0, 1, 6]), 2, np.array([0.9, 0.6, 0.9])), [0, 0, 6])
    grid = (np.arange(1000) + 0.5) / 1000
    means = [ref.affine(np.array([0.0, 0.3, 1]), 1, np.full(3, u)) for u in grid]
    close(np.mean(means, 0), [0, 0.3, 1], 1e-3)


def test_rotation():
    h = ref.hadamard(8)
    close(h @ h, np.eye(8))
    close(ref.hadamard(2), np.array([[1, 1], [1, -1]]) / np.sqrt(2))
    x, signs = np.array([3.0, 1.0]), np.array([1.0, -1.0])
    close(ref.rotation_sketch(x, signs, np.full(2, 0.5)), x)  # two values, two levels
    x, signs = TOY, np.where(np.arange(10) % 3, 1.0, -1.0)
    close(ref.rotation_sketch(x, signs, np.full(16, 0.5), bits=20), x, 1e-5)
    pad = np.concatenate([x, np.zeros(6)])
    more = np.concatenate([signs, np.ones(6)])
    close(ref.rotation_sketch(pad, more, np.full(16, 0.3))[:10],
          ref.rotation_sketch(x, signs, np.full(16, 0.3)))


def test_feedback_loses_nothing():
    updates, residual, total = draw((50, 30))[0], np.zeros(30), np.zeros(30)
    step = ref.with_feedback(lambda v: ref.stc(v, 0.1))
    for update in updates:
        sent, residual = step(update, residual)
        assert np.count_nonzero(sent) == 3
        total += sent
    close(total + residual, updates.sum(0))


def test_without_compression_it_is_fedavg():
    c = reference_open.example()
    exact = reference_methods.fedopt(c, reference_methods.plain)
    for feedback in (False, True):
        close(ref.compressed(c, lambda v: v, feedback)[0], exact)
    close(ref.fedavg_per_layer(c, (None, None))[0], reference_open.fedavg_8bit(c, biases=False))
    w, own = ref.fedavg_stc(c, 0.2)
    assert not own.any()
    kept, own = ref.fedavg_stc(c, 0.2, feedback=True)
    assert np.abs(kept - w).max() > 1e-3
    assert not any(own[1])  # has no examples
    assert not any(b.any() for r in own for _, b in c.layers(r))
    assert own[0].any()
    layered, own = ref.fedavg_per_layer(c, (0.2, None), feedback=True)
    assert np.abs(layered - kept).max() > 1e-3
    assert all(w.any() for w, _ in c.layers(own[0]))


@pytest.mark.parametrize("kernels", [False, True])
def test_both_ways_lose_nothing(kernels, monkeypatch):
    c = reference_open.example(sizes=(6, 6, 6), rounds=5, every=True)
    updates = []
    train = c.train
    monkeypatch.setattr(c, "train", lambda w, *a: (v := train(w, *a), updates.append(v - w))[0])
    w, own, server = ref.bidirectional_stc(c, 0.2, 0.1, kernels=kernels)
    assert len(updates) == 15
    close(w - c.w0 + server + own.mean(0), sum(updates) / 3)
    biases = np.concatenate([b for r in (*own, server) for _, b in c.layers(r)])
    assert biases.any() != kernels


def test_one_round_both_ways():
    c = reference_open.example(sizes=(6, 9), rounds=1, every=True)
    a, b = (c.train(c.w0, c.rounds[0][k], c.grad) - c.w0 for k in (0, 1))
    sent = ref.stc(a, 0.3), ref.stc(b, 0.3)
    for weighted, mean in ((False, sum(sent) / 2), (True, 0.4 * sent[0] + 0.6 * sent[1])):
        w, own, server = ref.bidirectional_stc(c, 0.3, 0.2, weighted)
        close(w - c.w0, ref.stc(mean, 0.2))
        close(own, [a - sent[0], b - sent[1]])
        close(server, mean - ref.stc(mean, 0.2))


def test_catching_up():
    bits = [ref.catch_up_bits(s, 6, 100, 3200, 10, 45) for s in range(8)]
    assert bits == [0, 100, 200, 300, 400, 450, 450, 3200]
    assert ref.catch_up_bits(3, 6, 100, 250, 10, 45, cheaper=True) == 250


def test_tables():
    ref.check_tables()
    assert ref.index_bits(10, 3, 24, 3) == (10 * 8, 3 * (5 + 18))
    assert ref.word_bits([24, 30], [0.1, None], 11, rounded=True) == 32 * 2 + 8 * 30 + 32 * 11


def test_golomb_by_hand():
    assert [ref.golomb_parameter(p) for p in (0.01, 0.1, 0.2, 0.5, 1.0)] == [6, 3, 2, 0, 0]
    assert ref.golomb_mean_bits(0.01, 6) == pytest.approx(8.108, abs=1e-3)
    assert ref.golomb_mean_bits(0.01, 7) == pytest.approx(8.382, abs=1e-3)
    bits = [0, 0, 1, 1, 1, 0, 0, 0, 0]  # gaps 2 and 5: 1 = 0 * 4 + 1, 4 = 1 * 4 + 0
    assert ref.golomb_bits([1, 6], [True, False], 2) == bits
    assert ref.golomb_pairs([*bits, 0, 0], 2, 2) == [(1, 1), (6, 0)]
    data = ref.encode_stc(ref.stc(TOY, 0.2), 0.2)
    assert data == bytes([0, 0, 0, 2]) + np.array(0.8, ">f4").tobytes() + bytes([0b00111000, 0])


@pytest.mark.parametrize("p", [0.001, 0.02, 0.3, 0.7, 1.0])
def test_golomb_round_trip(p):
    for seed in range(4):
        y = ref.stc(draw((997,), seed=seed)[0], p)
        close(ref.decode_stc(ref.encode_stc(y, p), y.size, p), y, 1e-6)
    close(ref.decode_stc(ref.encode_stc(np.zeros(9), p), 9, p), np.zeros(9))


def test_golomb_length_is_as_expected():
    positions = np.flatnonzero(np.random.default_rng(0).random(200000) < 0.02)
    lengths = [len(ref.golomb_bits(positions, positions < 0, b)) for b in (4, 5, 6)]
    expected = [len(positions) * (1 + ref.golomb_mean_bits(0.02, b)) for b in (4, 5, 6)]
    np.testing.assert_allclose(lengths, expected, rtol=0.01)
    assert lengths[1] == min(lengths)
    assert ref.golomb_parameter(0.02) == 5


def test_kernel_map_round_trip():
    conv, _, chosen = ref.sstc(draw(*SHAPES), draw((20, 3), seed=1), 0.1, 0.3)
    data = ref.encode_kernels(conv, chosen)
    assert len(data) == 8 + -(-ref.index_bits(0, len(chosen), 24, 3)[1] // 8)
    back, again = ref.decode_kernels(data, SHAPES)
    assert again.tolist() == chosen.tolist()
    for a, b in zip(back, conv, strict=True):
        close(a, b, 1e-6)
    one = np.zeros((2, 2, 1, 3))
    one[0, 1, 0, 2], one[1, 0, 0, 2] = 0.5, -0.5
    data = ref.encode_kernels([one], [2])  # kernel 2 of 3 in 2 bits, then 0 + - 0
    assert data[8:] == bytes([0b10000110, 0])
