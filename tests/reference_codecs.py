"""Compressed uploads in plain NumPy, float64: codecs, error feedback, and what they cost in bits.

Written from mora.md 2.2-2.6, apart from the package. `Clients` is that of `reference_methods`; a
network is [(W, b), ...]; random numbers are inputs. Chosen where the text leaves room:
  survivors  N = round(rate * size), halves to the even number; N = 0 sends nothing (all zeros)
  ties       in |x|, or in a kernel's score: the lower index first
  zeros      a survivor that is exactly 0 counts in N and in mu; it is sent as 0
  updates    Delta = w_local - w_received; the server adds
"""

import math

import numpy as np
import reference_open

quantise8 = reference_open.quantise8  # 256 levels, min to max, halves to the even level
count = lambda rate, size: round(rate * size)
# Indices of the n largest values, in increasing order.
largest = lambda values, n: np.sort(np.argsort(-values, kind="stable")[:n])
flat = lambda arrays: np.concatenate([v.ravel() for v in arrays])

# ---- codecs ------------------------------------------------------------------------------------


def split(x, like):
    parts = np.split(x, np.cumsum([v.size for v in like])[:-1])
    return [v.reshape(u.shape) for v, u in zip(parts, like, strict=True)]


def ternary(x, kept):
    y = np.zeros_like(x)
    y[kept] = np.abs(x[kept]).sum() / max(len(kept), 1) * np.sign(x[kept])
    return y


# The N largest |x_i| as mu sign(x_i), mu their mean absolute value; a flat vector.
stc = lambda x, p: ternary(x, largest(np.abs(x), count(p, x.size)))
top_k = lambda x, p: np.where(stc(x, p) != 0, x, 0)


def stc_network(layers, p):
    """One threshold and one mu over all kernels, in the order of the layers; biases as they are."""
    kernels = [w for w, _ in layers]
    sent = split(stc(flat(kernels), p), kernels)
    return [(w, b) for w, (_, b) in zip(sent, layers, strict=True)]


def per_layer_stc(layers, rates):
    """STC of every kernel by itself; a rate of None is 8 bits; biases as they are."""
    return [
        (quantise8(w) if p is None else stc(w.ravel(), p).reshape(w.shape), b)
        for (w, b), p in zip(layers, rates, strict=True)
    ]


def sstc(conv, fc, p, kfrac, relative_to="all"):
    """Structured STC (2.3): (conv, fc, chosen), kernels in HWIO.

    A kernel is the K x K slice of one (input, filter) pair; kernels are numbered layer after layer,
    input * filters + filter within a layer. chosen: the round(kfrac * kernels) of largest mean |.|,
    over all conv layers, in increasing order. STC then acts on the chosen kernels and all of fc.
    relative_to (A3): N is p of "all" conv and fc weights, or of the "selected" ones; never more
    than there are. Ties between weights: the order of the layers as they are, conv before fc.
    """
    scores = [np.abs(w).mean((0, 1)) for w in conv]
    kernels = flat(scores).size
    chosen = largest(flat(scores), count(kfrac, kernels))
    mask = np.isin(np.arange(kernels), chosen)
    allowed = [m + np.zeros(w.shape) for m, w in zip(split(mask, scores), conv, strict=True)]
    allowed = np.flatnonzero(flat([*allowed, *map(np.ones_like, fc)]))
    x = flat([*conv, *fc])
    n = count(p, {"all": x.size, "selected": allowed.size}[relative_to])
    sent = split(ternary(x, allowed[largest(np.abs(x[allowed]), n)]), [*conv, *fc])
    return sent[: len(conv)], sent[len(conv) :], chosen


def sbc(x, p, original=False):
    """Sparse binary: one sign only, at its mean. Equal means: the positive sign.

    mora.md 2.2: of the N largest |x_i| the sign of larger mean |.| is sent (mean 0 if it has none).
    original=True, Sattler et al. 2018 as recalled: N largest x_i against N largest -x_i.
    """
    n = count(p, x.size)
    kept = largest(np.abs(x), n)
    sides = [largest(s * x, n) if original else kept[s * x[kept] > 0] for s in (1, -1)]
    plus, minus = (x[i].mean() if len(i) else 0.0 for i in sides)
    y = np.zeros_like(x)
    y[sides[0 if plus >= -minus else 1]] = plus if plus >= -minus else minus
    return y


# Stochastic rounding: the mean is a.
stochastic = lambda a, uniforms: np.floor(a) + (uniforms < a - np.floor(a))
# sign(sum of signs): clients count once each, whatever their examples; a draw is 0.
sign_majority = lambda vectors: np.sign(sum(np.sign(v) for v in vectors))
# What the mask keeps; divided by its probability p if given (then the mean is x).
random_mask = lambda x, mask, p=1: np.where(mask, x, 0) / p


def qsgd(x, levels, uniforms):
    """||x|| sign(x) level / levels, level the stochastic rounding of levels |x| / ||x||."""
    length = np.sqrt((x**2).sum())
    level = stochastic(levels * np.abs(x) / (length or 1), uniforms)
    return length * np.sign(x) * level / levels


def affine(x, bits, uniforms):
    """Stochastic rounding to 2^bits levels from min(x) to max(x); a constant x as it is."""
    low, step = x.min(), (x.max() - x.min()) / (2**bits - 1)
    return low + step * stochastic((x - low) / step, uniforms) if step > 0 else x.copy()


def hadamard(n):
    """The orthonormal, symmetric Walsh-Hadamard matrix in natural (Sylvester) order."""
    h = np.ones((1, 1))
    while len(h) < n:
        h = np.block([[h, h], [h, -h]])
    return h / np.sqrt(len(h))


def rotation_sketch(x, signs, uniforms, bits=1):
    """H D x, x padded with zeros to a power of two, by `affine`, and back; uniforms as padded."""
    h, signs = hadamard(x.size), signs[: x.size]
    rotated = h @ np.concatenate([signs * x, np.zeros(len(h) - x.size)])
    return signs * (h @ affine(rotated, bits, uniforms))[: x.size]


# ---- federated averaging with compressed updates -----------------------------------------------


def with_feedback(compress):
    """step(update, residual) -> (sent, residual): sent + new residual = update + old residual."""

    def step(update, residual):
        sent = compress(update + residual)
        return sent, update + residual - sent

    return step


def uploads(c, t, w, step, own):
    """What the clients of round t send; `own`, their residuals, change in place."""
    sent = {}
    for k, batches in c.cohort(t).items():
        sent[k], own[k] = step(c.train(w, batches, c.grad) - w, own[k])
    return sent


def compressed(c, compress, feedback=False):
    """FedAvg (weights: examples), every client's update through `compress`, a map of flat vectors.

    Returns (w, residuals [client, weight]): kept while a client is absent, zero without feedback.
    """
    step = with_feedback(compress) if feedback else lambda v, r: (compress(v), r)
    w, own = c.w0, np.zeros((c.num_clients, c.w0.size))
    for t in range(len(c.rounds)):
        w = w + c.mean(uploads(c, t, w, step, own))
    return w, own


# Biases are exact; with feedback the rounding of 8-bit kernels is carried over too.
kernel_stc = lambda c, p: lambda v: c.flat(stc_network(c.layers(v), p))
layer_stc = lambda c, rates: lambda v: c.flat(per_layer_stc(c.layers(v), rates))
fedavg_stc = lambda c, p, feedback=False: compressed(c, kernel_stc(c, p), feedback)
fedavg_per_layer = lambda c, rates, feedback=False: compressed(c, layer_stc(c, rates), feedback)


def bidirectional_stc(c, p_up, p_down, weighted=False, kernels=False):
    """Both ways with residuals on both sides (2.2): (w, clients' residuals, server's residual).

    As printed: the plain mean of the uploads, STC over the whole vector, biases too. weighted=True:
    mean by examples. kernels=True: STC over the kernels alone, biases exact in both directions.
    A round without clients changes nothing, the server's residual neither.
    """
    codec = lambda p: with_feedback(kernel_stc(c, p) if kernels else lambda v: stc(v, p))
    up, down = codec(p_up), codec(p_down)
    w, own, server = c.w0, np.zeros((c.num_clients, c.w0.size)), np.zeros_like(c.w0)
    for t in range(len(c.rounds)):
        sent = uploads(c, t, w, up, own)
        if sent:
            mean = c.mean(sent) if weighted else sum(sent.values()) / len(sent)
            update, server = down(mean, server)
            w = w + update
    return w, own, server


def catch_up_bits(s, tau, update_bits, model_bits, survivors, size, cheaper=False):
    """Download of a client that lacks the last s global updates; the server caches sums of <= tau.

    s > tau: the model. Else the sum of s updates, billed as min(s * survivors, size) survivors at
    update_bits / survivors each, rounded up: supports as if disjoint, the sum's many magnitudes not
    billed. cheaper=True: the model whenever it costs less (not in mora.md 2.2).
    """
    partial = -(-update_bits * min(s * survivors, size) // max(survivors, 1))
    return model_bits if s > tau or (cheaper and model_bits < partial) else partial


# ---- accounting --------------------------------------------------------------------------------


def index_bits(nonzeros, kept, kernels, side, printed=False):
    """(STC, SSTC) of conv layers with `kernels` kernels of side x side, by the formulas of 2.3.

    STC: nonzeros * b_p, b_p = 1 + floor(log2(weights)); SSTC: kept * (b_k + 2 side^2), b_k = 1 +
    floor(log2(kernels)). Not counted: mu, STC's signs. printed=True (A4): b_k without the 1, so the
    11 of the text for 2080 kernels, which cannot name the last 32 of them.
    """
    b_p, b_k = (side**2 * kernels).bit_length(), kernels.bit_length() - printed
    return nonzeros * b_p, kept * (b_k + 2 * side**2)


def word_bits(sizes, rates, biases, rounded=False):
    """2.6: 32 bits a survivor, 8 a weight at rate None, 32 a bias, mu and ranges free.

    Rate 1.0: not compressed. The tables need rate * size as it is; rounded=True counts survivors.
    """
    bits = lambda n, p: 8 * n if p is None else 32 * (count(p, n) if rounded else p * n)
    return 32 * biases + sum(bits(n, p) for n, p in zip(sizes, rates, strict=True))


# Bits to bytes, the first bit highest, zeros at the end; an integer in `width` bits; and back.
pack = lambda bits: np.packbits(np.array(bits, np.uint8)).tobytes()
unpack = lambda data: np.unpackbits(np.frombuffer(data, np.uint8)).tolist()
binary = lambda value, width: [value >> i & 1 for i in reversed(range(width))]
number = lambda bits: sum(bit << i for i, bit in enumerate(reversed(bits)))
# 32 bits of a count, 32 of mu as a big-endian float32; and back.
header = lambda n, mu: binary(n, 32) + unpack(np.array(mu, ">f4").tobytes())
read_header = lambda bits: (number(bits[:32]), float(np.frombuffer(pack(bits[32:64]), ">f4")[0]))


def golomb_parameter(p):
    """b* = 1 + floor(log2(log(phi - 1) / log(1 - p))) (Sattler et al. 2019), at least 0.

    6 at p = .01: 8.11 bits a position. 8.38, quoted from the paper by others, belong to b = 7.
    """
    ratio = math.log((math.sqrt(5) - 1) / 2) / math.log(1 - p) if p < 1 else 1 / 4
    return max(0, 1 + math.floor(math.log2(ratio)))


# Expected bits of one position (its sign is one more), gaps geometric with p.
golomb_mean_bits = lambda p, b: b + 1 / (1 - (1 - p) ** 2**b)


def golomb_bits(positions, negative, b):
    """Per survivor: gap - 1 = q 2^b + r as q ones, a zero, r in b bits; then 1 if negative."""
    bits, last = [], -1
    for i, sign in zip(positions, negative, strict=True):
        q, r = divmod(int(i) - last - 1, 2**b)
        bits += [1] * q + [0] + binary(r, b) + [int(sign)]
        last = int(i)
    return bits


def golomb_pairs(bits, n, b):
    """[(position, negative)] of the first n survivors: the inverse of `golomb_bits`."""
    pairs, at, last = [], 0, -1
    for _ in range(n):
        q = bits.index(0, at) - at
        at += q + b + 2
        last += 1 + q * 2**b + number(bits[at - 1 - b : at - 1])
        pairs.append((last, bits[at - 1]))
    return pairs


def encode_stc(y, p):
    """Bytes of a ternary vector: header, then its nonzero entries by `golomb_bits`."""
    i, b = np.flatnonzero(y), golomb_parameter(p)
    return pack(header(len(i), np.abs(y).max()) + golomb_bits(i, y[i] < 0, b))


def decode_stc(data, size, p):
    bits, y = unpack(data), np.zeros(size)
    n, mu = read_header(bits)
    for i, negative in golomb_pairs(bits[64:], n, golomb_parameter(p)):
        y[i] = -mu if negative else mu
    return y


# The (K K) x kernels matrix of HWIO kernels, layers side by side.
columns = lambda conv: np.concatenate([w.reshape(w.shape[0] * w.shape[1], -1) for w in conv], 1)


def encode_kernels(conv, chosen):
    """Header, then per chosen kernel its number in b_k bits and its entries, row by row, 2 bits.

    b_k = 1 + floor(log2(kernels)), so kept * (b_k + 2 K^2) bits after the header: `index_bits`.
    Entries: 00 zero, 01 mu, 10 -mu. Chosen kernels of zeros are sent too.
    """
    matrix = columns(conv)
    bits = header(len(chosen), np.abs(matrix).max())
    for j in chosen:
        bits += binary(int(j), matrix.shape[1].bit_length())
        bits += [int(sign) for v in matrix[:, j] for sign in (v < 0, v > 0)]
    return pack(bits)


def decode_kernels(data, shapes):
    """(conv, chosen) from the bytes and the shapes of the layers."""
    matrix, bits, chosen = columns([np.zeros(s) for s in shapes]), unpack(data), []
    width, area = matrix.shape[1].bit_length(), matrix.shape[0]
    n, mu = read_header(bits)
    for i in range(n):
        part = bits[64 + i * (width + 2 * area) :]
        chosen.append(number(part[:width]))
        entries = np.array(part[width : width + 2 * area]).reshape(area, 2)
        matrix[:, chosen[-1]] = mu * (entries[:, 1] - entries[:, 0])
    parts = np.split(matrix, np.cumsum([s[2] * s[3] for s in shapes])[:-1], axis=1)
    return [v.reshape(s) for v, s in zip(parts, shapes, strict=True)], np.array(chosen, int)


def femnist_cnn(d=1.0):
    """(weights per kernel, biases) of the CNN with a fraction d of its units (2.5)."""
    a, b, f = (count(d, n) for n in (32, 64, 512))
    return [25 * a, 25 * a * b, 49 * b * f, 62 * f], a + b + f + 62


def check_tables():
    """Tables 4.1, 5.1, 5.2, 5.3 and the rates of p.l. HSTC, to the digits that mora.md has."""
    by_stc, by_sstc = index_bits(2537, 260, 2080, 5, printed=True)
    assert (by_stc, by_sstc) == (16 * 2537, 260 * 61)
    conv = [52000 * 32 / v for v in (by_stc, by_sstc, index_bits(0, 260, 2080, 5)[1])]
    assert [round(v, 1) for v in conv] == [41.0, 104.9, 103.2]
    assert [round(16 * n / by_sstc, 1) for n in (2000, 3000)] == [2, 3]  # survivors of Fig. 4.5
    costs = [index_bits(0, k, 2080, 5, True)[1] for k in (665, 666)]  # even at 2537 * 16 / 61
    assert costs[0] < by_stc < costs[1]

    (sizes, biases), full, four = femnist_cnn(), 1690046, [None, None, 0.01, None]
    factor = lambda sizes, rates, digits: round(32 * full / word_bits(sizes, rates, biases), digits)
    assert sum(sizes) + biases == full
    assert factor(sizes, four, 2) == 44.87
    assert factor(sizes, [0.01] * 4, 1) == 96.2  # printed as 100: without the biases
    for rates in ([None, 0.05, 0.0075, 0.05], [None, 0.1, 0.005, 0.1]):  # printed as 100
        assert 98 < factor(sizes, rates, 1) < 100
    for d, parameters, *printed in (
        (0.8, 1084359, 36, 1.56, 6.2, 148.4, 66.0, 0.0100),
        (0.75, 956894, 43, 1.77, 7.1, 167.6, 74.0, 0.0131),
        (0.7, 837373, 50, 2.02, 8.1, 190.8, 83.4, 0.0168),
    ):
        sizes, biases = femnist_cnn(d)
        assert sum(sizes) + biases == parameters
        rest = word_bits(sizes, [None, None, 0.0, None], biases)  # p_3 for 1/66 of the full model
        assert printed == [
            round(100 - 100 * parameters / full),
            factor(sizes, [1.0] * 4, 2),
            factor(sizes, [None] * 4, 1),
            factor([sum(sizes)], [0.01], 1),
            factor(sizes, four, 1),
            round((32 * full / 66 - rest) / (32 * sizes[2]), 4),
        ]
    return conv
