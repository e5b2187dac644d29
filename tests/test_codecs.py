"""Every codec against NumPy: what is decoded, what stays behind, what it weighs."""

import functools
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import reference
import reference_codecs as ref
import reference_methods
from conftest import assert_same_bits
from methods import algorithm_of, clients, problem

import fedjax_flat as ff
from fedjax_flat import testing, wire
from fedjax_flat.engine.round import traffic
from fedjax_flat.testing import SIZES
from fedjax_flat.wire import pack as pack_lib
from fedjax_flat.wire.packet import weigh_counted
from fedjax_flat.wire.select import largest

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


def model(seed=0, digits=9):
    rng = np.random.default_rng(seed)
    return {n: jnp.asarray(np.round(rng.normal(size=s), digits), jnp.float32)
            for n, s in SHAPES.items()}


def in_numpy(tree, names=KERNELS):
    return [np.asarray(tree[name], float) for name in names]


@functools.cache
def coder(codec):
    """encode, then decode, compiled."""

    @jax.jit
    def through(tree, state, key):
        packet, state = codec.encode(tree, state, key)
        return packet, codec.decode(packet), state

    return through


def through(codec, tree, key=KEY):
    packet, decoded, _ = coder(codec)(tree, codec.init(tree), key)
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
    for rates in ([0.1, None, 0.02], [None, None, None], [1.0, 0.5, 0.3]):
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
    masks = [np.asarray(packet.sent.kernels.chosen[n]) for n in KERNELS[:2]]
    assert np.flatnonzero(ref.flat(masks)).tolist() == chosen.tolist()
    few, decoded = through(wire.sstc(1.0, 1 / 24, variant), tree)  # fewer are open than asked for
    assert np.count_nonzero(ref.flat(masks)) == 6
    assert few.sent.dense.kept == 9 + fc.size


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
    tree = model()
    parameters = [n for n in SHAPES if n.startswith("params")]
    _, decoded = through(wire.qsgd(4), tree)
    for name in parameters:
        x = np.asarray(tree[name], float)
        theirs = ref.qsgd(x, 4, uniforms_of(KEY, name)(x.shape))
        np.testing.assert_allclose(decoded[name], theirs, rtol=0, atol=1e-6)
    assert_rest_is_exact(tree, decoded, parameters)
    zero = {"params/a/kernel": jnp.zeros((3, 2))}
    np.testing.assert_array_equal(through(wire.qsgd(4), zero)[1]["params/a/kernel"], 0)


def test_signs():
    tree = model(digits=0)  # with zeros
    parameters = [n for n in SHAPES if n.startswith("params")]
    codec = wire.sign(0.5)
    _, decoded = through(codec, tree)
    close(in_numpy(decoded, parameters), [0.5 * np.sign(x) for x in in_numpy(tree, parameters)])
    assert_rest_is_exact(tree, decoded, parameters)
    trees = [model(seed, digits=0) for seed in range(4)]
    mean = {n: sum(jnp.asarray(through(codec, t)[1][n]) for t in trees) / 4 for n in SHAPES}
    vote = codec.vote(mean)
    for name in parameters:
        theirs = ref.sign_majority([np.asarray(t[name], float) for t in trees])
        np.testing.assert_array_equal(vote[name], 0.5 * theirs)
    np.testing.assert_array_equal(vote["stats/batch_stats/Norm_0/mean"],
                                  mean["stats/batch_stats/Norm_0/mean"])
    _, down = through(codec.down, {n: x + 1e-4 for n, x in vote.items()})  # rounding is forgiven
    close(in_numpy(down, parameters), in_numpy(vote, parameters))


def test_rotation():
    x = np.random.default_rng(0).normal(size=256).astype(np.float32)
    for size in (1, 2, 128, 256):
        ours = np.asarray(rotation_lib.hadamard(jnp.asarray(x[:size])))
        np.testing.assert_allclose(ours, ref.hadamard(size) @ x[:size], rtol=0, atol=1e-5)
    tree = model()
    for bits in (1, 4):
        _, decoded = through(wire.rotation(bits), tree)
        for name in KERNELS:
            values = np.asarray(tree[name], float).ravel()
            key = ff.rng.fold(KEY, name, "signs")
            signs = np.asarray(jax.random.rademacher(key, values.shape, jnp.float32), float)
            padded = (1 << (values.size - 1).bit_length(),)
            uniforms = uniforms_of(KEY, name, "levels")(padded)
            theirs = ref.rotation_sketch(values, signs, uniforms, bits)
            step = np.ptp(ref.hadamard(values.size) @ np.pad(
                signs * values, (0, padded[0] - values.size))) / (2**bits - 1)
            gap = np.abs(decoded[name].ravel() - theirs).max()
            assert gap < 1e-4 * step + 1e-5, "the same levels were drawn"
    assert_rest_is_exact(tree, decoded, [n for n in SHAPES if n.startswith("params")])
    one = {"params/a/kernel": jnp.full((2, 2), 0.7)}
    np.testing.assert_allclose(through(wire.rotation(4), one)[1]["params/a/kernel"], 0.7, atol=0.3)


CODECS = {
    "8bit": wire.eight_bit(), "stc": wire.stc(0.1), "layer_stc": wire.layer_stc("-,.1,.05"),
    "sstc": wire.sstc(0.1, 0.25), "topk": wire.topk(0.1), "sbc": wire.sbc(0.1),
    "mask": wire.mask(0.1, unbiased=False), "qsgd": wire.qsgd(5), "sign": wire.sign(0.1),
    "rotation": wire.rotation(3),
}


def test_all_are_here():
    assert set(CODECS) == set(wire.CODECS)


@pytest.mark.parametrize("name", [n for n in CODECS if n not in ("qsgd", "rotation")])
def test_feedback_loses_nothing(name):
    codec = wire.feedback(CODECS[name])
    state, sent, total = codec.init(model()), None, None
    add = lambda a, b: b if a is None else jax.tree.map(jnp.add, a, b)
    for seed in range(6):
        update = model(seed)
        _, decoded, state = coder(codec)(update, state, jax.random.key(seed))
        sent, total = add(sent, decoded), add(total, update)
    residual = state[1]
    for n in SHAPES:
        np.testing.assert_allclose(sent[n] + residual[n], total[n], rtol=0, atol=5e-6)
    assert not np.asarray(residual["stats/batch_stats/Norm_0/mean"]).any() or name == "8bit"


# ---- weights -----------------------------------------------------------------------------------

EXACT = 32 * (4 + 5 + 7 + 4 + 4)  # biases, normalisation, statistics


def test_bits_by_index():
    n = round(0.1 * SIZE)
    position = SIZE.bit_length()
    shapes = {name: jax.ShapeDtypeStruct(s, jnp.float32) for name, s in SHAPES.items()}
    bits = {name: codec.bits(shapes) for name, codec in CODECS.items()}
    assert bits["stc"] == n * (position + 1) + 32 + EXACT
    assert bits["topk"] == n * (position + 32) + EXACT
    assert bits["sbc"] == n * position + 32 + EXACT
    assert bits["mask"] == 32 * n + 64 + EXACT
    assert bits["8bit"] == sum(8 * int(np.prod(s)) + 64 for s in SHAPES.values())
    by_layer = (8 * 36 + 64) + (18 * (8 + 1) + 32) + (7 * (8 + 1) + 32)
    assert bits["layer_stc"] == by_layer + EXACT
    kernels = ref.index_bits(0, 6, 24, 3)[1]
    assert bits["sstc"] == kernels + n * ((140).bit_length() + 1) + 32 + EXACT
    learned = {k: int(np.prod(s)) for k, s in SHAPES.items() if k.startswith("params")}
    assert bits["qsgd"] == sum(4 * s + 32 for s in learned.values()) + 32 * 4  # 11 symbols
    assert bits["sign"] == sum(8 * -(-s // 5) for s in learned.values()) + 32 * 4
    padded = sum(1 << (s - 1).bit_length() for s in learned.values())
    assert bits["rotation"] == 3 * padded + 64 * len(learned) + 64 + 32 * 4


def test_bits_of_what_is_counted():
    """SBC's and SSTC's weight depends on the values: never more than shapes say."""
    tree = model()
    for codec, n_of in ((wire.sbc(0.1), 0), (wire.sstc(0.1, 0.25), 1)):
        packet, decoded = through(codec, tree)
        most = codec.bits(tree)
        part = packet.sent.signs if n_of == 0 else packet.sent.dense
        found = sum(np.count_nonzero(decoded[n]) for n in part.values)
        each = part.size.bit_length() + n_of
        assert int(codec.weigh(packet)) == most - (round(0.1 * SIZE) - found) * each
        assert found < round(0.1 * SIZE)


@pytest.mark.parametrize("name", CODECS)
def test_bytes_and_back(name):
    for seed in range(3):
        packet, _ = through(CODECS[name], model(seed), jax.random.key(seed))
        data = pack_lib.pack(packet)
        like = jax.eval_shape(lambda p: p, packet)
        again = pack_lib.unpack(data, like)
        assert_same_bits(jax.device_get(again), jax.device_get(packet))
        estimate = wire.weigh(packet, "packed")
        if name in ("sbc", "sstc"):
            estimate = int(weigh_counted(packet, "packed"))
        varies = name in ("stc", "layer_stc", "sstc", "topk", "sbc")
        assert len(data) == pytest.approx(estimate / 8, rel=0.08 if varies else 0), "small numbers"
    with pytest.raises(ff.UsageError, match="some are missing"):
        pack_lib.unpack(data[:-1], like)
    with pytest.raises(ff.UsageError, match="too many"):
        pack_lib.unpack(data + b"0", like)


def test_bytes_are_those_of_numpy():
    tree = model()
    kernels = in_numpy(tree)
    packet, _ = through(wire.stc(0.1), tree)
    theirs = ref.encode_stc(ref.stc(ref.flat(kernels), 0.1), 0.1)
    ours = pack_lib.pack(packet.sent.signs)
    assert ours == theirs[:4] + theirs[8:]  # mu stands behind
    packet, _ = through(wire.sstc(0.1, 0.25), tree)
    conv, _, chosen = ref.sstc(kernels[:2], kernels[2:], 0.1, 0.25)
    theirs = ref.encode_kernels(conv, chosen)
    assert pack_lib.pack(packet.sent.kernels) == theirs[:4] + theirs[8:]


@pytest.mark.parametrize("rate", [0.001, 0.01, 0.1, 0.6])
def test_packed_length_is_as_expected(rate):
    tree = {"params/a/kernel": jnp.asarray(
        np.random.default_rng(0).normal(size=(400, 500)), jnp.float32)}
    packet, _ = through(wire.stc(rate), tree)
    assert len(pack_lib.pack(packet)) == pytest.approx(wire.weigh(packet, "packed") / 8, rel=0.02)
    assert wire.weigh(packet, "packed") < wire.weigh(packet, "index")


# ---- federated runs ----------------------------------------------------------------------------

STC = {"wire__up": "stc", "wire__rate": 0.2}
BOTH = {**STC, "wire__down": "stc", "wire__rate_down": 0.1, "wire__feedback": True}
RUNS = {
    "stc": ("fedavg", STC, lambda c: ref.fedavg_stc(c, 0.2)),
    "stc with feedback": (
        "fedavg", {**STC, "wire__feedback": True}, lambda c: ref.fedavg_stc(c, 0.2, feedback=True)
    ),
    "by layer, with feedback": (
        "fedavg", {"wire__up": "layer_stc", "wire__rates": ".2,-", "wire__feedback": True},
        lambda c: ref.fedavg_per_layer(c, (0.2, None), feedback=True),
    ),
    "both ways": (
        "fedavg", BOTH, lambda c: ref.bidirectional_stc(c, 0.2, 0.1, weighted=True, kernels=True)
    ),
    "both ways, as printed": (
        "fedavg", {**BOTH, "wire__biases": True, "weighting": "uniform"},
        lambda c: ref.bidirectional_stc(c, 0.2, 0.1),
    ),
}


@functools.cache
def run_of(name, settings=()):
    case = RUNS.get(name)
    method, settings = case[:2] if case else (name, dict(settings))
    p = problem()
    return testing.Run(algorithm_of(method, data=p.data, **settings), p)


def flat(params):
    return reference_methods.Clients.flat(reference.unpack(params))


@pytest.mark.parametrize("name", RUNS)
def test_a_run_against_numpy(name):
    run, c = run_of(name), clients()
    w, own, *server = RUNS[name][2](c)
    largest_ = np.abs(w).max()
    assert np.abs(flat(run.model.params) - w).max() < 2e-5 * largest_
    kept = run.states[-1].clients.codecs[0]
    if "feedback" in name or "both" in name:
        residual = {n.removeprefix("params/"): np.asarray(x, float) for n, x in
                    kept["mean"][1].items()}
        for k in range(len(SIZES)):
            ours = c.flat([(residual[f"{m}/kernel"][k], residual[f"{m}/bias"][k])
                           for m in ("Dense_0", "classifier")])
            assert np.abs(-ours - own[k]).max() < 2e-5 * largest_  # we send w - w_k
    else:
        assert kept == ()
    if server:
        residual = {n.removeprefix("params/"): np.asarray(x, float) for n, x in
                    run.states[-1].server.codecs[0]["mean"][1].items()}
        ours = c.flat([(residual[f"{m}/kernel"], residual[f"{m}/bias"])
                       for m in ("Dense_0", "classifier")])
        assert np.abs(-ours - server[0]).max() < 2e-5 * largest_
        assert np.abs(server[0]).max() > 1e-3


def test_contracts_of_a_run_with_residuals():
    run = run_of("both ways")
    testing.check_resume(run)
    testing.check_members(run)
    testing.check_padding(run)


def test_without_loss_it_is_the_method_itself():
    p = problem()
    plain, coded = (
        testing.Run(algorithm_of("fedavg", **s), p, rounds=2).model
        for s in ({}, {"wire__up": "topk", "wire__rate": 1.0})
    )
    assert_same_bits(coded, plain)


SIZES_OF_MLP = {"Dense_0/kernel": 80, "classifier/kernel": 15}  # 16 x 5 and 5 x 3; 8 biases


def stc_bits(rate):
    return round(rate * 95) * ((95).bit_length() + 1) + 32 + 32 * 8


@pytest.mark.parametrize("name", ["scaffold", "feddyn"])
def test_methods_with_state_of_their_own(name):
    """Each model of an upload has its residual; the server's step is what travels down."""
    run = run_of(name, tuple(BOTH.items()))
    testing.check_members(run)
    assert bool(run.infos[-1].finite)
    kept = run.states[-1].clients.codecs[0]
    assert set(kept) == ({"mean", "sum"} if name == "scaffold" else {"mean"})
    sent = traffic(run.algorithm, run.states[0], run.data)
    assert sent.up == stc_bits(0.2) * len(kept)
    assert sent.down == stc_bits(0.1) * 2  # both steps by the mean and by the sum
