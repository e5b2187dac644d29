"""Federated retrieval in plain NumPy, float64: pooling, pair-wise losses, mining, recall.

Written from caldarola.md (2.16, 4.4) and the issue, apart from the package. Where they leave
something open it is an option. Images are numbered 0..N-1; distances are Euclidean unless squared.
Loops are loops on purpose. Everything that sorts or picks takes the first of equals.
"""

import numpy as np

# ---- embeddings --------------------------------------------------------------------------------


def gem(x, p, eps=1e-6):
    """Generalised mean over space: x (..., H, W, C) -> (..., C), (mean of max(x, eps)^p)^(1/p).

    Radenovic, Tolias, Chum (2018). p = 1 is the average, p -> infinity the maximum.
    """
    return np.mean(np.maximum(x, eps) ** p, axis=(-3, -2)) ** (1 / p)


def gem_gradients(x, p, upstream, eps=1e-6):
    """(d/dx, d/dp) of sum(upstream * gem(x, p)); x of one image (H, W, C), one p for all channels.

    With m = mean of x^p and f = m^(1/p): df/dx = (1/N) m^(1/p - 1) x^(p-1) and
    df/dp = f (mean of x^p log x / (p m) - log m / p^2). Values below eps get no gradient.
    """
    h, w, _ = x.shape
    clipped = np.maximum(x, eps)
    m = np.mean(clipped**p, axis=(0, 1))
    f = m ** (1 / p)
    dx = upstream * m ** (1 / p - 1) * clipped ** (p - 1) / (h * w) * (x > eps)
    logs = np.mean(clipped**p * np.log(clipped), axis=(0, 1))
    dp = np.sum(upstream * f * (logs / (p * m) - np.log(m) / p**2))
    return dx, float(dp)


def l2_normalised(x, eps=1e-12):
    """x / max(|x|, eps) along the last axis."""
    return x / np.maximum(np.linalg.norm(x, axis=-1, keepdims=True), eps)


def l2_normalised_backward(x, upstream):
    """d/dx of sum(upstream * l2_normalised(x)): (u - y <u, y>) / |x|."""
    norm = np.linalg.norm(x, axis=-1, keepdims=True)
    y = x / norm
    return (upstream - y * np.sum(upstream * y, axis=-1, keepdims=True)) / norm


def distance(a, b, squared=False):
    """Euclidean, of two vectors."""
    d = float(np.sum((a - b) ** 2))
    return d if squared else float(np.sqrt(d))


# ---- losses ------------------------------------------------------------------------------------


def triplet_losses(query, positive, negative, margin, squared=False):
    """One loss per triplet (caldarola 2.10): max(0, d(q, p) - d(q, n) + margin).

    Rows are triplets. `squared`: d is the squared distance (NetVLAD, FaceNet), otherwise the
    distance itself (the loss of the Mapillary SLS benchmark).
    """
    return np.array([
        max(0.0, distance(q, p, squared) - distance(q, n, squared) + margin)
        for q, p, n in zip(query, positive, negative, strict=True)
    ])


def triplet_loss(query, positive, negative, margin, squared=False):
    """The mean of `triplet_losses`, also over triplets whose loss is 0."""
    return float(np.mean(triplet_losses(query, positive, negative, margin, squared)))


def triplet_gradients(query, positive, negative, margin, squared=False):
    """(d/dq, d/dp, d/dn) of the sum of `triplet_losses`; a triplet at or below 0 has none.

    squared: 2 (n - p), 2 (p - q), 2 (q - n). Otherwise, with unit vectors u = (q - p) / |q - p| and
    v = (q - n) / |q - n|: u - v, -u, v; a distance of 0 has gradient 0.
    """
    dq, dp, dn = (np.zeros_like(np.asarray(x, np.float64)) for x in (query, positive, negative))
    losses = triplet_losses(query, positive, negative, margin, squared)
    for i, (q, p, n) in enumerate(zip(query, positive, negative, strict=True)):
        if losses[i] <= 0:
            continue
        if squared:
            dq[i], dp[i], dn[i] = 2 * (n - p), 2 * (p - q), 2 * (q - n)
            continue
        u, v = _unit(q - p), _unit(q - n)
        dq[i], dp[i], dn[i] = u - v, -u, v
    return dq, dp, dn


def _unit(x):
    norm = np.linalg.norm(x)
    return x / norm if norm > 0 else np.zeros_like(x)


def contrastive_losses(first, second, same, margin):
    """One loss per pair: d^2 / 2 if the two are the same, else max(0, margin - d)^2 / 2.

    Hadsell, Chopra, LeCun (2006).
    """
    out = []
    for a, b, alike in zip(first, second, same, strict=True):
        d = distance(a, b)
        out.append(d**2 / 2 if alike else max(0.0, margin - d) ** 2 / 2)
    return np.array(out)


def contrastive_gradients(first, second, same, margin):
    """(d/dfirst, d/dsecond) of the sum of `contrastive_losses`."""
    da = np.zeros_like(np.asarray(first, np.float64))
    for i, (a, b, alike) in enumerate(zip(first, second, same, strict=True)):
        d = distance(a, b)
        if alike:
            da[i] = a - b
        elif d < margin:
            da[i] = -(margin - d) * _unit(a - b)
    return da, -da


def multi_similarity_losses(
    embeddings, positive, negative, alpha=2.0, beta=50.0, base=0.5, epsilon=0.1, mined=True
):
    """One loss per image (Wang et al. 2019, eq. 15), with similarities S = <x_i, x_j>:

        log(1 + sum over P_i of exp(-alpha (S_ik - base))) / alpha
        + log(1 + sum over N_i of exp(beta (S_ik - base))) / beta

    `positive[i, j]`, `negative[i, j]` say which pairs are which (i itself is neither). `mined`
    keeps, by eq. (11) and (12), a negative with S_ij > min over positives S_ik - epsilon and a
    positive with S_ij < max over negatives S_ik + epsilon; the extremes are those before mining. An
    image without a positive or without a negative has nothing to compare with and keeps no pair.
    """
    s = embeddings @ embeddings.T
    count = len(s)
    out = np.zeros(count)
    for i in range(count):
        ps = [k for k in range(count) if positive[i, k] and k != i]
        ns = [k for k in range(count) if negative[i, k] and k != i]
        if mined:
            if not ps or not ns:
                continue
            lowest, highest = min(s[i, k] for k in ps), max(s[i, k] for k in ns)
            ns = [k for k in ns if s[i, k] > lowest - epsilon]
            ps = [k for k in ps if s[i, k] < highest + epsilon]
        pull = sum(np.exp(-alpha * (s[i, k] - base)) for k in ps)
        push = sum(np.exp(beta * (s[i, k] - base)) for k in ns)
        out[i] = np.log1p(pull) / alpha + np.log1p(push) / beta
    return out


def multi_similarity_loss(embeddings, positive, negative, **options):
    """The mean of `multi_similarity_losses` over all images (1/m in eq. 15)."""
    return float(np.mean(multi_similarity_losses(embeddings, positive, negative, **options)))


# ---- which pairs are what ----------------------------------------------------------------------


def pairs_by_radius(a, b, radius, negative_radius):
    """(positive, negative), bools of len(a) x len(b), of positions in metres.

    Positive within `radius` (at it too), negative beyond `negative_radius` (at it not). What lies
    between is neither.
    """
    positive = np.zeros((len(a), len(b)), bool)
    negative = np.zeros((len(a), len(b)), bool)
    for i in range(len(a)):
        for j in range(len(b)):
            d = distance(np.float64(a[i]), np.float64(b[j]))
            positive[i, j] = d <= radius
            negative[i, j] = d > negative_radius
    return positive, negative


def pairs_by_identity(a, b):
    """(positive, negative) of identities: the same number, another number."""
    same = np.array([[x == y for y in b] for x in a], bool).reshape(len(a), len(b))
    return same, ~same


def not_itself(positive):
    """Of images compared with themselves: an image is not its own positive."""
    out = positive.copy()
    np.fill_diagonal(out, False)
    return out


# ---- mining ------------------------------------------------------------------------------------


def best_positive(embeddings, positive, i, among=None):
    """The positive of image i that is nearest in feature space (2.11); None if there is none.

    `among`: the images to choose from (those of i's client, or of its database); first of equals.
    """
    return _nearest(embeddings, i, positive[i], among, 1, leave=i)[0]


def hardest_negatives(embeddings, negative, i, count=1, among=None):
    """The `count` negatives of image i nearest in feature space (2.12), nearest first.

    Shorter than `count` when there are fewer.
    """
    return [j for j in _nearest(embeddings, i, negative[i], among, count, leave=i) if j is not None]


def _nearest(embeddings, i, allowed, among, count, leave):
    among = range(len(embeddings)) if among is None else among
    allowed = [j for j in among if allowed[j] and j != leave]
    found = sorted((distance(embeddings[i], embeddings[j]), j) for j in allowed)
    return [j for _, j in found[:count]] or [None]


def mined_triplets(embeddings, positive, negative, queries=None, database=None, negatives=1):
    """[(query, best positive, hardest negative), ...] of one client, brute force.

    `queries` and `database` are the client's images in either role (all of them without); a query
    that lacks a positive or a negative in the database gives no triplet. With several negatives a
    query gives several triplets, hardest first.
    """
    out = []
    for q in range(len(embeddings)) if queries is None else queries:
        p = best_positive(embeddings, positive, q, database)
        ns = hardest_negatives(embeddings, negative, q, negatives, database)
        if p is not None:
            out += [(q, p, n) for n in ns]
    return out


# ---- recall ------------------------------------------------------------------------------------


def nearest_in_database(query, database, count):
    """The `count` rows of `database` nearest to one query, nearest first, first of equals."""
    distances = [distance(query, row, squared=True) for row in database]
    return sorted(range(len(database)), key=lambda j: (distances[j], j))[:count]


def recall_at(queries, database, positive, ns=(1, 5, 10), without="wrong"):
    """{n: share of queries with a positive among the n nearest of the database}.

    `positive[q]`: bools over the database, or the list of right answers. A query that has no
    positive in the database counts as `wrong`, or is left out with without="skip".
    """
    hits, asked = dict.fromkeys(ns, 0), 0
    for q, query in enumerate(queries):
        right = np.asarray(positive[q])
        right = set((np.flatnonzero(right) if right.dtype == bool else right).tolist())
        if not right and without == "skip":
            continue
        asked += 1
        found = nearest_in_database(query, database, max(ns))
        for n in ns:
            hits[n] += bool(right & set(found[:n]))
    return {n: hits[n] / asked if asked else float("nan") for n in ns}
