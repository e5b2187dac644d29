"""Attacks, robust aggregation, client-level privacy and secure sums in plain NumPy, float64.

Written from mora.md (3c, 3f) and, where marked, from papers as recalled; apart from the package.
`Clients` is that of `reference_methods`; clients without examples never take part. Normal draws
and masks are inputs. Changes are trained minus received: the server adds them.
"""

import numpy as np
from reference_methods import Clients, unit

# ---- attacks -----------------------------------------------------------------------------------


def scaled(factor):
    """Model poisoning: the change times `factor` (boosting; model replacement: 1 / p_k)."""
    return lambda received, trained: received + factor * (trained - received)


def sign_flip(factor=1.0):
    """The change backwards."""
    return scaled(-factor)


def flip_labels(y, pairs):
    """Label flipping: the classes of each pair swapped (caldarola.md: 0 <-> 2, 3 <-> 5)."""
    out = y.copy()
    for a, b in pairs:
        out[y == a], out[y == b] = b, a
    return out


def with_flipped_labels(c, attackers, pairs):
    """The same federation; the examples of `attackers` have swapped labels."""
    y = c.y.copy()
    for k in attackers:
        y[c.members[k]] = flip_labels(c.y[c.members[k]], pairs)
    return Clients(c.layers(c.w0), c.x, y, c.members, c.rounds, c.lr)


def rounds(c, aggregate, attacks=None):
    """`aggregate(t, w, {client: trained}) -> w`; `attacks`: {client: (received, trained) -> sent}.

    A round in which nobody has examples changes nothing.
    """
    w = c.w0
    for t in range(len(c.rounds)):
        sent = {k: c.train(w, b, c.grad) for k, b in c.cohort(t).items()}
        sent = {k: attacks[k](w, v) if k in (attacks or {}) else v for k, v in sent.items()}
        w = aggregate(t, w, sent) if sent else w
    return w


# ---- SLSGD, median -----------------------------------------------------------------------------


def trimmed_mean(models, b):
    """Per coordinate, without the b smallest and the b largest values, unweighted: (m, P) -> P."""
    if 2 * b >= len(models):
        raise ValueError(f"{b} from each side of {len(models)} leaves nothing")
    return np.sort(models, axis=0)[b : len(models) - b].mean(0)


def median(models):
    """Per coordinate; of an even number, the mean of the two in the middle."""
    ordered, m = np.sort(models, axis=0), len(models)
    return (ordered[(m - 1) // 2] + ordered[m // 2]) / 2


def slsgd(c, b, alpha=1.0, attacks=None, centre=None):
    """SLSGD (Xie et al. 2019): w <- (1 - alpha) w + alpha trimmed mean of the clients' models.

    `b` is a number of clients, each side, every round. `centre(models)` replaces the trimmed mean
    (`median`). Clients weigh the same, however many examples they have.
    """
    centre = centre or (lambda models: trimmed_mean(models, b))
    mix = lambda t, w, sent: (1 - alpha) * w + alpha * centre(np.array(list(sent.values())))
    return rounds(c, mix, attacks)


# ---- FoolsGold ---------------------------------------------------------------------------------


def foolsgold_weights(histories, kappa=1.0, tiny=1e-12):
    """FoolsGold (Fung et al. 2018): a learning rate in [0, 1] per client; histories (m, P).

    The order is that of the authors' code (DistributedML/FoolsGold 661f7fd, deep-fg/fg/
    foolsgold.py); where the two differ from the paper as recalled, it says so.
    1 similarity: s_ij = cosine of H_i and H_j, 0 if either is 0; s_ii = 0, and the diagonal takes
      part in maxima, so that the v below are never negative.
    2 v_i = max_j s_ij.
    3 pardoning: where v_i < v_j, s_ij <- s_ij v_i / v_j, with the v of step 2 throughout. Honest
      clients that resemble a sybil less than the sybils each other are let off; rows, not columns.
    4 a_i = 1 - max_j s_ij of the pardoned rows, clipped to [0, 1].
    5 a <- a / max a: at least one client is trusted. If max a <= tiny (all alike) every weight is 0
      (the code divides 0 by 0; with rounding it would trust whoever is furthest off by an ulp).
    6 logit: kappa (ln(a / (1 - a)) + 1/2), clipped to [0, 1]; a is first capped at 0.99 (the code
      replaces just 1: the same once clipped unless kappa < 0.2). a = 0 gives 0.
    """
    units = np.array([unit(h) for h in histories])
    similarity = units @ units.T
    np.fill_diagonal(similarity, 0)
    v = similarity.max(1)
    for i, j in np.ndindex(similarity.shape):
        if v[i] < v[j]:
            similarity[i, j] *= v[i] / v[j]
    a = np.clip(1 - similarity.max(1), 0, 1)
    if a.max() <= tiny:
        return np.zeros_like(a)
    a = np.clip(a / a.max(), 1e-300, 0.99)
    return np.clip(kappa * (np.log(a / (1 - a)) + 0.5), 0, 1)


def foolsgold(c, kappa=1.0, share="examples", features=None, attacks=None):
    """H_k: the sum of client k's changes so far, this round's too; kept while it is absent.

    Similarities are taken within the round's cohort (in the paper everyone takes part), over the
    coordinates `features` (a slice; the authors' deep version takes the last layer; None: all; the
    paper's weighting by importance is not here). With weights a_k, w moves by
      share "examples": sum p_k a_k change_k, p_k = n_k / n of the cohort: FedAvg if all a are 1
            "mean": sum a_k change_k / m;  "sum": sum a_k change_k, the paper's
            "normalised": sum a_k change_k / sum a_k; nothing moves if that is 0
    """
    histories = np.zeros((c.num_clients, len(c.w0)))

    def aggregate(t, w, sent):
        for k, v in sent.items():
            histories[k] += v - w
        seen = histories[list(sent)][:, slice(None) if features is None else features]
        a = dict(zip(sent, foolsgold_weights(seen, kappa), strict=True))
        moves = {k: a[k] * (v - w) for k, v in sent.items()}
        total = sum(a.values())
        by = {"mean": len(sent), "sum": 1, "normalised": total if total > 0 else 1}
        return w + (c.mean(moves) if share == "examples" else sum(moves.values()) / by[share])

    return rounds(c, aggregate, attacks)


# ---- client-level differential privacy ---------------------------------------------------------


def clip(change, bound):
    """change / max(1, ||change|| / bound); a bound of 0 gives 0."""
    length = np.linalg.norm(change)
    return change * (bound / length) if length > bound else change


def private_mean(changes, sigma, normals, bound=None):
    """(mean, bound) of changes (m, P): (sum of clipped + sigma bound normals) / m, unweighted.

    bound=None: the median of the unclipped norms (Geyer et al. 2017; even m: of the middle two the
    mean), itself not protected by noise. `normals`: P standard normal draws.
    """
    if bound is None:
        bound = median(np.array([np.linalg.norm(v) for v in changes]))
    total = sum(clip(v, bound) for v in changes)
    return (total + sigma * bound * normals) / len(changes), bound


def dp_fedavg(c, sigma, normals_of, bound=None, attacks=None):
    """w + private mean; `normals_of(t)`. m counts the cohort's clients that have examples."""

    def aggregate(t, w, sent):
        changes = np.array([v - w for v in sent.values()])
        return w + private_mean(changes, sigma, normals_of(t), bound)[0]

    return rounds(c, aggregate, attacks)


# ---- secure aggregation ------------------------------------------------------------------------


def encode(x, fraction_bits, bits, bound=None):
    """Fixed point modulo 2^bits: rint(x 2^fraction_bits), halves to even, as int64 in [0, 2^bits).

    bits <= 62. With `bound`, x is first clipped to [-bound, bound].
    """
    x = x if bound is None else np.clip(x, -bound, bound)
    return np.rint(x * 2.0**fraction_bits).astype(np.int64) % 2**bits


def decode(total, fraction_bits, bits):
    """Signed: from 2^(bits - 1) on, values are negative. True if |sum| < 2^(bits-1-fraction)."""
    return np.where(total >= 2 ** (bits - 1), total - 2**bits, total) / 2.0**fraction_bits


def pair_mask(u, v, prg, modulus):
    """What u adds for v: +PRG(s_uv) if u < v, -PRG(s_uv) if u > v, one seed per pair (A25).

    `prg(u, v)` is asked with u < v only. Bonawitz et al. 2017 write the signs the other way round.
    """
    return prg(u, v) % modulus if u < v else -prg(v, u) % modulus


def masked(u, x, members, own, prg, modulus):
    """y_u = x_u + PRG(b_u) + sum over the other members of pair masks; `own(u)` is PRG(b_u)."""
    y = (x + own(u)) % modulus
    for v in members:
        if v != u:
            y = (y + pair_mask(u, v, prg, modulus)) % modulus
    return y


def unmasked_sum(uploads, members, own, prg, modulus, threshold=1):
    """Sum of x over those that sent `uploads` {u: y_u}; `members`: all that agreed on seeds.

    Own masks of the senders are removed (their b_u is revealed), and the pair masks between a
    sender and one that dropped out (the latter's key is); a pair of senders cancels.
    """
    if len(uploads) < threshold:
        raise ValueError(f"{len(uploads)} uploads, {threshold} needed to open the masks")
    total = 0
    for u, y in uploads.items():
        total = (total + y - own(u)) % modulus
        for v in members:
            if v not in uploads:
                total = (total - pair_mask(u, v, prg, modulus)) % modulus
    return total


def secure_fedavg(c, fraction_bits, bits, own_of, prg_of, lost_of=None, bound=None, weighted=True):
    """FedAvg of the clients that did not drop out, through masked sums.

    A client's vector: n_k times its change, in fixed point, and then n_k as an integer; the server
    sees sums of both and divides. weighted=False sends the change itself, and 1. The bound is on
    the change. `own_of(t)`, `prg_of(t)` give the functions `own` and `prg` of integer vectors with
    P + 1 entries; `lost_of(t)`: clients that agreed on seeds and sent nothing.
    """

    def aggregate(t, w, sent):
        own, prg, lost = own_of(t), prg_of(t), lost_of(t) if lost_of else ()
        uploads = {}
        for k, v in sent.items():
            n = len(c.members[k]) if weighted else 1
            change = v - w if bound is None else np.clip(v - w, -bound, bound)
            if k not in lost:
                x = np.append(encode(n * change, fraction_bits, bits), n)
                uploads[k] = masked(k, x, list(sent), own, prg, 2**bits)
        if not uploads:
            return w
        total = unmasked_sum(uploads, list(sent), own, prg, 2**bits)
        return w + decode(total[:-1], fraction_bits, bits) / total[-1]

    return rounds(c, aggregate)
