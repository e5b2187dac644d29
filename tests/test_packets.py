"""What packets weigh by each rule, as bytes, and in the thesis' tables."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import reference_codecs as ref
from conftest import assert_same_bits
from test_codecs import CODECS, KEY, SHAPES, SIZE, in_numpy, model, part, through

import fedjax_flat as ff
from fedjax_flat import wire
from fedjax_flat.wire import pack as pack_lib
from fedjax_flat.wire.packet import weigh_counted

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
        sparse = packet.sent.signs if n_of == 0 else packet.sent.signs.dense
        found = sum(np.count_nonzero(decoded[n]) for n in sparse.values)
        each = sparse.size.bit_length() + n_of
        assert int(codec.weigh(packet)) == most - (round(0.1 * SIZE) - found) * each
        assert found < round(0.1 * SIZE)


@pytest.mark.parametrize("name", CODECS)
def test_bytes_and_back(name):
    for seed in range(2):
        tree = part(model(seed)) if name in ("qsgd", "rotation") else model(seed)
        packet, _ = through(CODECS[name], tree, jax.random.key(seed))
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


def test_convolutions_alone():
    tree = {name: x for name, x in model().items() if "Conv" in name}
    for accounting, bits in (("word", 32 * 22), ("index", 6 * (5 + 18) + 32)):
        codec = wire.sstc(0.1, 0.25, accounting=accounting)
        packet, decoded = through(codec, tree)
        assert codec.bits(tree) == int(codec.weigh(packet)) == bits + 32 * 9
    data = pack_lib.pack(packet)
    assert len(data) == -(-wire.weigh(packet, "packed") // 8)
    again = pack_lib.unpack(data, jax.eval_shape(lambda p: p, packet))
    assert_same_bits(jax.device_get(again), jax.device_get(packet))
    assert sum(np.count_nonzero(decoded[n]) for n in tree if "kernel" in n) == 22


def test_bytes_are_those_of_numpy():
    tree = model()
    kernels = in_numpy(tree)
    packet, _ = through(wire.stc(0.1), tree)
    theirs = ref.encode_stc(ref.stc(ref.flat(kernels), 0.1), 0.1)
    ours = pack_lib.pack(packet.sent.signs)
    assert ours == theirs[:4] + theirs[8:]  # mu stands behind
    packet, _ = through(wire.sstc(0.1, 0.25), tree)
    conv, fc, chosen = ref.sstc(kernels[:2], kernels[2:], 0.1, 0.25)
    theirs = ref.encode_kernels(conv, chosen)
    dense = ref.encode_stc(fc[0].ravel(), packet.sent.signs.survivors / fc[0].size)
    ours = pack_lib.pack(packet.sent.signs)
    assert ours == theirs[:4] + theirs[8:] + dense[:4] + dense[8:]


@pytest.mark.parametrize("rate", [0.001, 0.01, 0.1, 0.6])
def test_packed_length_is_as_expected(rate):
    tree = {"params/a/kernel": jnp.asarray(
        np.random.default_rng(0).normal(size=(400, 500)), jnp.float32)}
    packet, _ = through(wire.stc(rate), tree)
    assert len(pack_lib.pack(packet)) == pytest.approx(wire.weigh(packet, "packed") / 8, rel=0.02)
    assert wire.weigh(packet, "packed") < wire.weigh(packet, "index")


# ---- the thesis' numbers -----------------------------------------------------------------------


def femnist(d=1.0):
    """Shapes of the CNN with a fraction d of its units, by name."""
    a, b, f = (round(d * n) for n in (32, 64, 512))
    kernels = {"Conv_0": (5, 5, 1, a), "Conv_1": (5, 5, a, b), "Dense_0": (49 * b, f),
               "classifier": (f, 62)}
    shapes = {f"params/{n}/kernel": s for n, s in kernels.items()}
    shapes |= {f"params/{n}/bias": s[-1:] for n, s in kernels.items()}
    return {n: jax.ShapeDtypeStruct(s, jnp.float32) for n, s in sorted(shapes.items())}


def test_the_network_is_ours():
    network = ff.models.build("femnist_cnn", num_classes=62, inputs=(28, 28, 1))
    shapes = ff.parts.take(jax.eval_shape(network.init, KEY), lambda name: True)
    assert {n: s.shape for n, s in shapes.items()} == {n: s.shape for n, s in femnist().items()}


@pytest.mark.parametrize(
    ("d", "none", "eight", "stc", "four", "p3"),
    [(1.0, 1.0, 4.0, 96.2, 44.9, None), (0.8, 1.56, 6.2, 148.4, 66.0, 0.0100),
     (0.75, 1.77, 7.1, 167.6, 74.0, 0.0131), (0.7, 2.02, 8.1, 190.8, 83.4, 0.0168)],
)
def test_factors_of_tables_5_2_and_5_3(d, none, eight, stc, four, p3):
    shapes, full = femnist(d), 1_690_046
    factor = lambda bits, digits=1: round(32 * full / bits, digits)
    assert factor(wire.bits_of(shapes), 2) == none
    assert factor(wire.eight_bit("word").bits(shapes)) == eight
    assert factor(wire.stc(0.01, accounting="word").bits(shapes)) == stc
    assert factor(wire.layer_stc("1", "word").bits(shapes)) == pytest.approx(stc, abs=0.11)
    assert factor(wire.layer_stc("4", "word").bits(shapes)) == four
    if p3:
        kernels = [s.size for n, s in shapes.items() if "kernel" in n]
        biases = sum(s.size for n, s in shapes.items() if "bias" in n)
        assert round(wire.rate_for(66, full, kernels, biases), 4) == p3


def test_factors_of_table_5_2_for_other_rates():
    for name in ("2", "3"):  # printed as 100
        assert 98 < 32 * 1_690_046 / wire.layer_stc(name, "word").bits(femnist()) < 100


def test_factors_of_table_4_1():
    """Convolutions alone: 41x is 2537 survivors of 16 bits, 104.9x kernel numbers of 11 bits."""
    conv = {n: s for n, s in femnist().items() if "Conv" in n and "kernel" in n}
    packet = jax.eval_shape(lambda t: wire.sstc(0.01, 0.125).encode(t, (), KEY)[0], femnist())
    kernels = packet.sent.signs
    assert (kernels.kept, sum(x.size for x in conv.values())) == (260, 52_000)
    ours = kernels.map_bits("index")
    assert round(52_000 * 32 / ours, 1) == 103.2
    assert round(52_000 * 32 / (ours - 260), 1) == 104.9  # 11 bits cannot name 2080 kernels
    stc = wire.Sparse(conv, 2537, value_bits=0).bits("index")
    assert stc == 2537 * 16
    assert round(52_000 * 32 / stc, 1) == 41.0
    for survivors, gain in ((2000, 2), (3000, 3)):  # Fig. 4.5
        assert round(survivors * 16 / (ours - 260)) == gain
