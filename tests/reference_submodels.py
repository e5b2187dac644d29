"""Federated Dropout and its relatives in plain NumPy, float64: clients train part of the units.

Written from mora.md (2.4 to 2.6, 3b) and, where marked, from papers as recalled; apart from the
package. `Clients` is that of `reference_methods`; clients without examples never take part.

A model is a chain [(kernel, bias), ...]: convolutions (kernel HWIO, padding "same", ReLU, 2 x 2
maximum), then dense layers with ReLU; the last is linear. Between the last convolution and the
first dense layer (H, W, C) is flattened row by row, the channel fastest: input
(row * W + column) * C + channel. A unit is a channel or a hidden value. `kept` has one array of
indices per hidden layer, in any order: unit j of the sub-model is unit kept[i][j] of the model.
Inputs and outputs are never dropped. Nothing is rescaled: not in training, not afterwards.
"""

import numpy as np
import reference
from reference_open import quantise8, softmax

FEMNIST = [(5, 5, 1, 32), (5, 5, 32, 64), (7 * 7 * 64, 512), (512, 62)]


def kept_count(n, d):
    """round(d n) units of n (mora.md A7), halves to the even number, at least 1."""
    return max(1, round(d * n))


def ordered_count(n, d):
    """FjORD: ceil(d n), where a product that is whole but for rounding counts as whole."""
    return max(1, int(np.ceil(d * n - 1e-9)))


def indices(shapes, kept):
    """Per layer, the rows (inputs) and columns (outputs) of its kernel that the sub-model has."""
    pairs, rows = [], np.arange(shapes[0][-2])
    for i, shape in enumerate(shapes):
        if i and len(shape) == 2 and len(shapes[i - 1]) == 4:
            channels = shapes[i - 1][-1]
            rows = (np.arange(shape[0] // channels)[:, None] * channels + rows).ravel()
        columns = np.asarray(kept[i]) if i < len(shapes) - 1 else np.arange(shape[-1])
        pairs.append((rows, columns))
        rows = columns
    return pairs


def tier_shapes(shapes, d, count=kept_count):
    """Kernel shapes of the sub-model with the fraction d of every hidden layer."""
    pairs = indices(shapes, [np.arange(count(s[-1], d)) for s in shapes[:-1]])
    return [(*s[:-2], len(r), len(c)) for s, (r, c) in zip(shapes, pairs, strict=True)]


def parameters(shapes):
    """(weights, biases) of a chain with these kernels."""
    return sum(int(np.prod(s)) for s in shapes), sum(s[-1] for s in shapes)


def upload_bits(shapes, rates):
    """mora.md 2.6: 32 bits a surviving weight, none for mu or index; 8 where no rate; 32 a bias.

    `rates`: per layer, the sparsity p (not rounded to whole weights; 1: all of them), or None.
    """
    bits = [8 if p is None else 32 * p for p in rates]
    weights = sum(b * int(np.prod(s)) for b, s in zip(bits, shapes, strict=True))
    return weights + 32 * sum(s[-1] for s in shapes)


def extract(layers, kept):
    """The sub-model's layers."""
    pairs = indices([w.shape for w, _ in layers], kept)
    return [(w[..., r[:, None], c], b[c]) for (w, b), (r, c) in zip(layers, pairs, strict=True)]


def remap(layers, kept, full_shapes):
    """Layers of a sub-model (or their change) at their places in full kernels; 0 elsewhere."""
    whole = [(np.zeros(s), np.zeros(s[-1])) for s in full_shapes]
    places = indices(full_shapes, kept)
    for (w, b), (rows, columns), (kernel, bias) in zip(layers, places, whole, strict=True):
        kernel[..., rows[:, None], columns] = w
        bias[columns] = b
    return whole


def coverage_mask(kept, full_shapes):
    """1 where the sub-model has a weight or a bias."""
    return remap([(1, 1)] * len(full_shapes), kept, full_shapes)


def convolve(x, kernel, bias):
    """Cross-correlation, stride 1, zeros around, odd kernels: x (N, H, W, I) -> (N, H, W, O)."""
    a, b = kernel.shape[0] // 2, kernel.shape[1] // 2
    padded = np.pad(x, ((0, 0), (a, a), (b, b), (0, 0)))
    part = lambda i, j: padded[:, i : i + x.shape[1], j : j + x.shape[2]]
    return bias + sum(part(i, j) @ kernel[i, j] for i, j in np.ndindex(kernel.shape[:2]))


def forward(layers, x, kept=None):
    """Logits; with `kept`, of the full model whose other hidden units are 0 after ReLU."""
    for i, (w, b) in enumerate(layers):
        x = x.reshape(len(x), -1) @ w + b if w.ndim == 2 else convolve(x, w, b)
        if i == len(layers) - 1:
            return x
        x = np.maximum(x, 0)
        if kept is not None:
            x = x * np.isin(np.arange(w.shape[-1]), kept[i])
        if w.ndim == 4:
            n, height, width, channels = x.shape
            x = x.reshape(n, height // 2, 2, width // 2, 2, channels).max((2, 4))


def visit(c, w, batches, kept, down=None, up=None):
    """One client's round: (change, 1 where it has a weight: vectors; loss while training).

    The change is trained minus received, both of the sub-model (mora.md A8). The loss: the mean
    over all examples visited, each at the model before the step of its batch.
    """
    received = extract(c.layers(w), kept)
    received = model = down(received) if down else received
    losses = []
    for b in batches:
        p = softmax(forward(model, c.x[b]))
        losses.extend(-np.log(p[np.arange(len(b)), c.y[b]]))
        model = reference.local_sgd(model, c.x, c.y, [b], lr=c.lr)
    change = reference.combine(np.subtract, model, received)
    change, full = up(change) if up else change, c.shapes[::2]
    return c.flat(remap(change, kept, full)), c.flat(coverage_mask(kept, full)), np.mean(losses)


def merge(c, w, changes, masks, coverage):
    """w + sum of p_k change_k, p_k = n_k / (examples of the cohort): a dropped unit adds 0.

    coverage=True divides every coordinate by the p_k of those that kept it, summed (mora.md A37);
    a coordinate that nobody kept stays.
    """
    if not changes:
        return w
    share = c.mean(masks) if coverage else np.ones_like(w)
    return w + c.mean(changes) / np.where(share > 0, share, 1)


def hfd(c, kept_of, coverage=False, down=None, up=None):
    """FedAvg on sub-models; `kept_of(t, k)`: what client k keeps in round t."""
    w = c.w0
    for t in range(len(c.rounds)):
        changes, masks = {}, {}
        for k, batches in c.cohort(t).items():
            changes[k], masks[k], _ = visit(c, w, batches, kept_of(t, k), down, up)
        w = merge(c, w, changes, masks, coverage)
    return w


def eight_bits(layers):
    """Every kernel to 256 levels, min to max; biases stay exact, as mora.md 2.6 counts them."""
    return [(quantise8(w), b) for w, b in layers]


def stc(x, p):
    """The round(p size), at least 1, largest |x| become mu sign(x), mu their mean |x|; else 0.

    Among equals the first in row-major order (and layer by layer) are kept.
    """
    keep = np.argsort(-np.abs(x), axis=None, kind="stable")[: max(1, round(p * x.size))]
    out = np.zeros(x.shape)
    out.flat[keep] = np.abs(x.flat[keep]).mean() * np.sign(x.flat[keep])
    return out


def joint_stc(p):
    """Of all kernels at once: one mu, one threshold; biases exact; no residual is kept."""

    def up(layers):
        kernels = stc(np.concatenate([w.ravel() for w, _ in layers]), p)
        parts = np.split(kernels, np.cumsum([w.size for w, _ in layers])[:-1])
        return [(v.reshape(w.shape), b) for v, (w, b) in zip(parts, layers, strict=True)]

    return up


def layer_stc(rates):
    """Kernel by kernel, each with its rate and mu; 8 bits where the rate is None; biases exact."""
    send = lambda w, p: quantise8(w) if p is None else stc(w, p)
    return lambda layers: [(send(w, p), b) for (w, b), p in zip(layers, rates, strict=True)]


def ce_hfd(c, kept_of, up=eight_bits, coverage=False):
    """HFD with 8 bits down (the server's own model stays exact); `up`: one of the three above."""
    return hfd(c, kept_of, coverage, eight_bits, up)


def fjord(c, d_of):
    """FjORD (Horvath et al. 2021): the first units, nested; every coordinate over its holders.

    `d_of(t, k)`: the client's width in the round. The paper also draws a width up to it for every
    local step, and distils from the client's widest; neither is here.
    """
    sizes = [s[-1] for s in c.shapes[:-2:2]]
    first = lambda t, k: [np.arange(ordered_count(n, d_of(t, k))) for n in sizes]
    return hfd(c, first, coverage=True)


def afd_choose(scores, d, draws, weighted=False, floor=0.0):
    """Units of one layer, sorted: the round(d n) of highest score, equals by the larger draw.

    `draws`: uniform in (0, 1), one per unit. weighted=True draws without replacement with chances
    in proportion to score + floor instead (the largest log(draw) / chance); chance 0 comes last.
    """
    if weighted:
        chance = scores + floor
        scores = np.where(chance > 0, np.log(draws) / np.where(chance > 0, chance, 1), -np.inf)
    return np.sort(np.lexsort((draws, scores))[::-1][: kept_count(len(scores), d)])


def afd_update(scores, kept, loss, last, accumulate=True):
    """(scores, whether the loss fell): the units trained gain (last - loss) / last if it fell.

    `last` None: a first visit, nothing to compare with. accumulate=False: the gain replaces.
    """
    if last is None or not loss < last:
        return scores, False
    scores = [s.copy() for s in scores]
    for s, units in zip(scores, kept, strict=True):
        s[units] = accumulate * s[units] + (last - loss) / last
    return scores, True


def afd(c, d, draws_of, single=False, coverage=False, accumulate=True, **choice):
    """Adaptive Federated Dropout (Bouacida et al. 2020), recalled, not checked against the paper.

    Each client (single=True: the server, for all of them) has a score per hidden unit, 0 at first,
    the sub-model it last trained and that training's loss. If the loss was lower than the one
    before, the units gain the relative improvement and the same sub-model is trained again; else a
    new one is chosen by `afd_choose`. Either way the loss is remembered. In the paper choices are
    weighted draws; mora.md 3b says the highest scores: the default here. single=True compares the
    plain mean of the cohort's losses. Aggregation is HFD's; the paper also compresses (DGC).
    `draws_of(t, k)`: draws per hidden layer, asked for only to choose; k None with single=True.
    """
    w, memory, zeros = c.w0, {}, [np.zeros(s[-1]) for s in c.shapes[:-2:2]]
    for t in range(len(c.rounds)):
        changes, masks, losses, chosen = {}, {}, {}, {}
        for k, batches in c.cohort(t).items():
            owner = None if single else k
            scores, kept, _ = memory.setdefault(owner, (zeros, None, None))
            if owner not in chosen:
                pairs = () if kept else zip(scores, draws_of(t, owner), strict=True)
                chosen[owner] = kept or [afd_choose(s, d, u, **choice) for s, u in pairs]
            changes[k], masks[k], loss = visit(c, w, batches, chosen[owner])
            losses.setdefault(owner, []).append(loss)
        w = merge(c, w, changes, masks, coverage)
        for owner, kept in chosen.items():
            (scores, _, last), loss = memory[owner], np.mean(losses[owner])
            scores, better = afd_update(scores, kept, loss, last, accumulate)
            memory[owner] = scores, kept if better else None, loss
    return w
