"""Every codec against NumPy: what is decoded, what stays behind, what it weighs."""

import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import reference_codecs as ref
from conftest import assert_same_bits

import fedjax_flat as ff
from fedjax_flat import wire
from fedjax_flat.ops.select import largest

rotation_lib = sys.modules["fedjax_flat.wire.rotation"]  # wire.rotation is the codec
KEY = jax.random.key(0)
SHAPES = {
    "params/Conv_0/bias": (4,), "params/Conv_0/kernel": (3, 3, 1, 4),
    "params/Conv_1/bias": (5,), "params/Conv_1/kernel": (3, 3, 4, 5),
    "params/Dense_0/bias": (7,), "params/Dense_0/kernel": (20, 7),
    "params/Norm_0/scale": (4,), "stats/batch_stats/Norm_0/mean": (4,),
}
KERNELS = [name for name in SHAPES if name.endswith("kernel")]
SIZE = sum(int(np.prod(SHAPES[name])) for name in KERNELS)

CODECS = {
    "8bit": wire.eight_bit(), "stc": wire.stc(0.1), "layer_stc": wire.layer_stc("-,.1,.05"),
    "sstc": wire.sstc(0.1, 0.25), "topk": wire.topk(0.1), "sbc": wire.sbc(0.1),
    "mask": wire.mask(0.1, unbiased=False), "qsgd": wire.qsgd(5), "sign": wire.sign(0.1),
    "rotation": wire.rotation(3),
}


def model(seed=0, digits=9):
    rng = np.random.default_rng(seed)
    return {n: jnp.asarray(np.round(rng.normal(size=s), digits), jnp.float32)
            for n, s in SHAPES.items()}


def part(tree):
    """Two tensors and a statistic, for codecs that draw a number for each."""
    names = ("params/Conv_0/bias", "params/Conv_0/kernel", "stats/batch_stats/Norm_0/mean")
    return {name: tree[name] for name in names}


def in_numpy(tree, names=KERNELS):
    return [np.asarray(tree[name], float) for name in names]


def through(codec, tree, key=KEY):
    """(packet, what is decoded)."""

    def both(tree, key):
        packet, _ = codec.encode(tree, codec.init(tree), key)
        return packet, codec.decode(packet)

    # Selections step by step: on small arrays that is faster than compiling their loops.
    with jax.disable_jit(codec not in [CODECS[n] for n in ("8bit", "qsgd", "rotation", "sign")]):
        packet, decoded = jax.jit(both)(tree, key)
    assert {n: x.shape for n, x in decoded.items()} == {n: x.shape for n, x in tree.items()}
    return packet, {name: np.asarray(x) for name, x in decoded.items()}


def assert_rest_is_exact(tree, decoded, coded=KERNELS):
    for name in set(tree) - set(coded):
        np.testing.assert_array_equal(decoded[name], tree[name])


def close(ours, theirs, atol=1e-6):
    for a, b in zip(ours, theirs, strict=True):
        np.testing.assert_allclose(a, b, rtol=0, atol=atol)


# ---- selection ---------------------------------------------------------------------------------


@pytest.mark.parametrize("digits", [9, 1, 0])
def test_the_largest_are_exactly_as_many_and_the_first_of_equals(digits):
    find = jax.jit(largest)
    for seed, size in enumerate((1, 2, 37, 400)):
        x = np.random.default_rng(seed).normal(size=size).round(digits).astype(np.float32) + 0
        for n in {0, 1, size // 3, size - 1, size}:
            for values in (x, np.abs(x), (1000 * x).astype(np.int32)):
                found = np.flatnonzero(find(jnp.asarray(values), n))
                assert found.tolist() == ref.largest(values, n).tolist()


def test_selection_within_vmap():
    x = np.random.default_rng(0).normal(size=(3, 50)).round(1).astype(np.float32)
    found = jax.vmap(lambda v: largest(jnp.abs(v), 10))(jnp.asarray(x))
    for row, values in zip(np.asarray(found), x, strict=True):
        assert np.flatnonzero(row).tolist() == ref.largest(np.abs(values), 10).tolist()


# ---- codecs ------------------------------------------------------------------------------------


@pytest.mark.parametrize("digits", [9, 0])
@pytest.mark.parametrize("rate", [0.02, 0.3, 1.0])
def test_stc(rate, digits):
    tree = model(digits=digits)
    _, decoded = through(wire.stc(rate), tree)
    kernels = in_numpy(tree)
    close(in_numpy(decoded), ref.split(ref.stc(ref.flat(kernels), rate), kernels))
    assert_rest_is_exact(tree, decoded)
    if digits:
        assert sum(np.count_nonzero(decoded[n]) for n in KERNELS) == round(rate * SIZE)
    parameters = [n for n in SHAPES if n.startswith("params")]
    _, decoded = through(wire.stc(rate, biases=True), tree)
    everything = in_numpy(tree, parameters)
    close(in_numpy(decoded, parameters), ref.split(ref.stc(ref.flat(everything), rate), everything))
    assert_rest_is_exact(tree, decoded, parameters)


def test_stc_by_layer():
    tree = model()
    for rates in ([0.1, None, 0.02], [None, 1.0, 0.5]):
        text = ",".join("-" if p is None else str(p) for p in rates)
        _, decoded = through(wire.layer_stc(text), tree)
        theirs = ref.per_layer_stc([(w, None) for w in in_numpy(tree)], rates)
        steps = [np.ptp(w) / 255 for w in in_numpy(tree)]
        for a, (b, _), p, step in zip(in_numpy(decoded), theirs, rates, steps, strict=True):
            # Between two levels of 8 bits, float32 may take the other.
            np.testing.assert_allclose(a, b, rtol=0, atol=1.01 * step if p is None else 1e-6)
        assert_rest_is_exact(tree, decoded)


@pytest.mark.parametrize("variant", ["all", "selected"])
@pytest.mark.parametrize("digits", [9, 0])
def test_sstc(variant, digits):
    tree = model(digits=digits)
    packet, decoded = through(wire.sstc(0.1, 0.25, variant), tree)
    *conv, fc = in_numpy(tree)
    a, b, chosen = ref.sstc(conv, [fc], 0.1, 0.25, variant)
    close(in_numpy(decoded), [*a, *b])
    assert_rest_is_exact(tree, decoded)
    masks = [np.asarray(packet.sent.signs.chosen[n]) for n in KERNELS[:2]]
    assert np.flatnonzero(ref.flat(masks)).tolist() == chosen.tolist()
    few, decoded = through(wire.sstc(1.0, 1 / 24, variant), tree)  # fewer are open than asked for
    assert np.count_nonzero(ref.flat(masks)) == 6
    assert few.sent.signs.survivors == 9 + fc.size


@pytest.mark.parametrize("digits", [9, 0])
def test_sstc_of_all_kernels_is_stc_bit_for_bit(digits):
    tree = model(digits=digits)
    assert_same_bits(through(wire.sstc(0.1, 1.0), tree)[1], through(wire.stc(0.1), tree)[1])


def test_top_k():
    tree = model()
    kernels = in_numpy(tree)
    _, decoded = through(wire.topk(0.1), tree)
    close(in_numpy(decoded), ref.split(ref.top_k(ref.flat(kernels), 0.1), kernels))
    assert_same_bits(through(wire.topk(1.0), tree)[1], {n: np.asarray(x) for n, x in tree.items()})


@pytest.mark.parametrize("original", [False, True])
def test_sbc(original):
    for seed in range(4):
        tree = model(seed)
        kernels = in_numpy(tree)
        _, decoded = through(wire.sbc(0.1, original), tree)
        theirs = ref.sbc(ref.flat(kernels), 0.1, original)
        close(in_numpy(decoded), ref.split(theirs, kernels))
        assert_rest_is_exact(tree, decoded)


def test_a_random_mask():
    tree = model()
    vector = ref.flat(in_numpy(tree))
    packet, plain = through(wire.mask(0.2, unbiased=False), tree)
    mask = ref.flat(in_numpy(packet.sent.values)) != 0
    assert mask.sum() == round(0.2 * SIZE)
    close([ref.flat(in_numpy(plain))], [ref.random_mask(vector, mask)])
    _, scaled = through(wire.mask(0.2), tree)
    close([ref.flat(in_numpy(scaled))], [ref.random_mask(vector, mask, mask.sum() / SIZE)], 1e-5)
    assert_rest_is_exact(tree, scaled)
    many = jax.vmap(lambda key: wire.mask(0.2).encode(tree, (), key)[0].sent.values)(
        jax.random.split(KEY, 400)
    )
    mean = ref.flat([np.asarray(many[n]).mean(0) for n in KERNELS])
    spread = 5 * np.abs(vector) * np.sqrt(4 / 400) + 1e-6
    assert (np.abs(mean - vector) < spread).all()  # unbiased, and other places for another key


def uniforms_of(key, *folds):
    """What the codec draws."""
    return lambda shape: np.asarray(
        jax.random.uniform(ff.rng.fold(key, *folds), shape, jnp.float32), float
    )


def test_qsgd():
    tree = part(model())
    learned = list(tree)[:2]
    _, decoded = through(CODECS["qsgd"], tree)
    for name in learned:
        x = np.asarray(tree[name], float)
        theirs = ref.qsgd(x, 5, uniforms_of(KEY, name)(x.shape))
        np.testing.assert_allclose(decoded[name], theirs, rtol=0, atol=1e-6)
    assert_rest_is_exact(tree, decoded, learned)
    _, decoded = through(CODECS["qsgd"], {name: 0 * x for name, x in tree.items()})
    assert not any(x.any() for x in decoded.values())


def test_signs():
    trees = [part(model(seed, digits=0)) for seed in range(4)]  # with zeros
    learned, measured = list(trees[0])[:2], list(trees[0])[2]
    codec = CODECS["sign"]
    sent = [through(codec, tree)[1] for tree in trees]
    close(in_numpy(sent[0], learned), [0.1 * np.sign(x) for x in in_numpy(trees[0], learned)])
    assert_rest_is_exact(trees[0], sent[0], learned)
    mean = {name: jnp.mean(jnp.stack([s[name] for s in sent]), axis=0) for name in sent[0]}
    vote = codec.vote(mean)
    for name in learned:
        theirs = ref.sign_majority([np.asarray(t[name], float) for t in trees])
        np.testing.assert_array_equal(vote[name], np.float32(0.1) * theirs)
    np.testing.assert_array_equal(vote[measured], mean[measured])
    _, down = through(codec.down, {n: x + 1e-4 for n, x in vote.items()})  # rounding is forgiven
    close(in_numpy(down, learned), in_numpy(vote, learned))


@pytest.mark.slow
def test_rotation(monkeypatch):
    x = np.random.default_rng(0).normal(size=(3, 256)).astype(np.float32)
    for size in (1, 2, 256):
        ours = np.asarray(rotation_lib.hadamard(jnp.asarray(x[:, :size])))
        np.testing.assert_allclose(ours, x[:, :size] @ ref.hadamard(size), rtol=0, atol=1e-5)
    monkeypatch.setattr(rotation_lib, "BLOCK", 16)  # so that the kernel is three blocks
    tree = part(model())
    learned = list(tree)[:2]
    _, decoded = through(CODECS["rotation"], tree)
    for name in learned:
        values = np.asarray(tree[name], float).ravel()
        signs = np.asarray(rotation_lib.signs_of(name, values.size, KEY), float)
        length = min(16, values.size)
        uniforms = uniforms_of(KEY, name, "levels")((-(-values.size // length), length))
        padded = np.pad(signs * values, (0, -values.size % length)).reshape(-1, length)
        theirs = [ref.rotation_sketch(v, np.ones(length), u, bits=3)
                  for v, u in zip(padded, uniforms, strict=True)]
        theirs = signs * ref.flat(theirs)[: values.size]
        np.testing.assert_allclose(decoded[name].ravel(), theirs, rtol=0, atol=1e-5)
    assert_rest_is_exact(tree, decoded, learned)


def test_all_are_here():
    assert set(CODECS) == set(wire.CODECS)


@pytest.mark.parametrize("name", [n for n in CODECS if n not in ("qsgd", "rotation")])
def test_feedback_loses_nothing(name):
    codec = wire.feedback(CODECS[name])
    state, sent, total = codec.init(model()), None, None
    add = lambda a, b: b if a is None else jax.tree.map(jnp.add, a, b)
    for seed in range(4):
        update = model(seed)
        with jax.disable_jit():
            packet, state = codec.encode(update, state, jax.random.key(seed))
            decoded = codec.decode(packet)
        sent, total = add(sent, decoded), add(total, update)
    residual = state[1]
    for n in SHAPES:
        np.testing.assert_allclose(sent[n] + residual[n], total[n], rtol=0, atol=5e-6)
    assert not np.asarray(residual["stats/batch_stats/Norm_0/mean"]).any() or name == "8bit"
