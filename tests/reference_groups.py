"""Superclients in plain NumPy, float64: distances, groupings, growth, messages, their analyses.

Written from caldarola.md (2.9-2.11, 5, 6.4, 8 item 20, 9), apart from the package; what it marks as
seen in the released code is named `released` here. A grouping is a list of lists of clients; the
order inside a group is that of joining. Orders, first clients and cluster labels are inputs.
Ties: the lowest client.
"""

import itertools

import numpy as np

# ---- estimates psi -----------------------------------------------------------------------------


def confidence(probabilities, labels, classes, released=False):
    """psi_conf (5.1): per class the mean probability of the true class, then a softmax.

    probabilities (J, classes): one client's model on the public set. Released: divided by the sum.
    """
    p = np.array([probabilities[labels == c, c].mean() for c in range(classes)])
    p = p if released else np.exp(p - p.max())
    return p / p.sum()


def pca(x, variance=0.9):
    """psi_clf: centred rows on the fewest directions with at least `variance` of it.

    (m, P) -> (m, r); the sign of a column is arbitrary.
    """
    x = x - x.mean(0)
    u, s, _ = np.linalg.svd(x, full_matrices=False)
    share, r = np.cumsum(s**2) / (s**2).sum(), 1
    while share[r - 1] < variance:
        r += 1
    return u[:, :r] * s[:r]


def diagonal_fisher(gradients):
    """psi_t2v (5.2), diagonal: mean square of the examples' gradients of log p(y | x)."""
    return (np.asarray(gradients) ** 2).mean(0)


# ---- distances tau(client, group) --------------------------------------------------------------


def euclidean(a, b):
    return np.sqrt(((a - b) ** 2).sum())


def cosine(a, b):
    """1 - cosine of the angle; 1 if either is 0 (the released code divides 0 by 0)."""
    norms = np.sqrt((a**2).sum() * (b**2).sum())
    return 1 - (a * b).sum() / norms if norms > 0 else 1.0


def normalised_cosine(a, b):
    """Task2Vec's distance of two Fisher diagonals: cosine of a / (a + b) and b / (a + b).

    Lengths alone would not change a cosine, so this is the reading of "Norm-Cosine". Coordinates
    where both are 0 are left out.
    """
    kept = (a + b) != 0
    a, b = a[kept], b[kept]
    return cosine(a / (a + b), b / (a + b))


def kl(p, q):
    """KL(p || q), natural log; 0 ln 0 = 0; infinite where only q is 0."""
    total = 0.0
    for a, b in zip(p, q, strict=True):
        if a > 0:
            total += a * np.log(a / b) if b > 0 else np.inf
    return total


def kl_released(a, b):
    """1 - KL(mix || uniform), mix = (a + b) / 2: larger if the two together are balanced."""
    return 1 - kl((a + b) / 2, np.full(len(a), 1 / len(a)))


def gini_index(p):
    return 1 - (p**2).sum()


def gini(a, b):
    """Gini index of the mix (a + b) / 2: the index of one vector is no distance."""
    return gini_index((a + b) / 2)


# ---- groupings phi -----------------------------------------------------------------------------


def examples(group, sizes):
    return sum(sizes[k] for k in group)


def redistribute(groups, left, sizes, k_max):
    """Left-over clients to the others (released order), in place.

    The groups with room, fewest examples first (equal: the earlier; ordered once), take turns; each
    turn the LAST left-over client goes; a group that has become full is passed over.
    """
    if sum(map(len, groups)) + len(left) > k_max * len(groups):
        raise ValueError("no room for the left-over clients")
    left = list(left)
    turns = sorted((g for g in groups if len(g) < k_max), key=lambda g: examples(g, sizes))
    for group in itertools.cycle(turns) if left else ():
        if len(group) < k_max:
            group.append(left.pop())
        if not left:
            break
    return groups


def fill(pick, sizes, d_min, k_max):
    """`pick(group, remaining) -> client`; a group closes at d_min examples or at k_max clients.

    So a closed group may have fewer than d_min examples (k_max small clients). What remains at the
    end is a group if it has d_min examples; if not, it is redistributed, even if of k_max clients.
    """
    groups, group, remaining = [], [], list(range(len(sizes)))
    while remaining:
        if group and (examples(group, sizes) >= d_min or len(group) >= k_max):
            groups.append(group)
            group = []
        k = pick(group, remaining)
        remaining.remove(k)
        group.append(k)
    if examples(group, sizes) >= d_min:
        return [*groups, group]
    return redistribute(groups, group, sizes, k_max)


def in_order(order, sizes, d_min, k_max):
    """phi_rand: `order` is the random permutation."""
    return fill(lambda g, rest: next(k for k in order if k in rest), sizes, d_min, k_max)


def round_robin(labels, sizes, d_min, k_max, order=None, restart=False):
    """phi_kmeans: the clusters 0, 1, ... in turn give one client, empty ones are passed over.

    Inside a cluster the first in `order` goes (None: the highest index first, as released). The
    turn goes on from one superclient to the next (released); `restart`: each begins at cluster 0.
    """
    order = list(order if order is not None else range(len(sizes))[::-1])
    clusters = [[k for k in order if labels[k] == c] for c in range(max(labels) + 1)]
    turn = [0]

    def pick(group, remaining):
        if restart and not group:
            turn[0] = 0
        while True:
            cluster = clusters[turn[0] % len(clusters)]
            turn[0] += 1
            if cluster:
                return cluster.pop(0)

    return fill(pick, sizes, d_min, k_max)


def group_mean(group, x, sizes=None):
    """Mean estimate of a group; weighted by examples with `sizes` (released)."""
    weights = np.array([1.0 if sizes is None else sizes[k] for k in group])
    return sum(w * x[k] for w, k in zip(weights, group, strict=True)) / weights.sum()


def greedy(x, sizes, d_min, k_max, tau, first=None, weighted=False, floor=-np.inf):
    """phi_greedy: add argmax tau(x_k, mean of the group) until the group closes.

    `first(remaining) -> client` starts a group (the document: a random one); None as released: the
    one farthest from the uniform vector. `weighted`: mean by examples. `floor` 0 (released): if
    no candidate's tau is above it, the lowest client joins instead of the argmax.
    """
    uniform = np.full(x.shape[1], 1 / x.shape[1])

    def pick(group, remaining):
        if not group and first is not None:
            return first(list(remaining))
        centre = group_mean(group, x, sizes if weighted else None) if group else uniform
        best, best_k = floor, remaining[0]
        for k in remaining:
            if tau(x[k], centre) > best:
                best, best_k = tau(x[k], centre), k
        return best_k

    return fill(pick, sizes, d_min, k_max)


def greedy_released(x, sizes, d_min, k_max, tau):
    return greedy(x, sizes, d_min, k_max, tau, weighted=True, floor=0.0)


def assign(cost):
    """Cheapest one-to-one assignment of rows to columns (n, n), by dynamic programming over sets.

    Returns the column of each row; n up to about 16.
    """
    n = len(cost)
    best = {0: (0.0, ())}
    for row in range(n):
        grown = {}
        for used, (total, chosen) in best.items():
            for column in range(n):
                key = used | 1 << column
                if key != used:
                    new = total + cost[row, column]
                    if key not in grown or new < grown[key][0]:
                        grown[key] = (new, (*chosen, column))
        best = grown
    return list(best[2**n - 1][1])


def balanced_kmeans(x, centres, steps=100):
    """K-means with clusters of the same size: labels of the m rows, m a multiple of the centres.

    Lloyd's two steps; the first is the cheapest assignment (squared Euclidean) of rows to places.
    """
    size, labels = len(x) // len(centres), None
    for _ in range(steps):
        places = np.repeat(centres, size, axis=0)
        new = [c // size for c in assign(((x[:, None] - places[None]) ** 2).sum(-1))]
        if new == labels:
            break
        labels = new
        centres = np.array([x[np.array(labels) == c].mean(0) for c in range(len(centres))])
    return labels


def icg_from_clusters(clusters, left, sizes, k_max=None):
    """phi_ICG, second half: group m takes the m-th client of every cluster; then the left-overs.

    `clusters`: L lists of M clients, each in its drawn order; `left`: fewer than M clients.
    """
    groups = [list(group) for group in zip(*clusters, strict=True)]
    return redistribute(groups, left, sizes, k_max if k_max is not None else len(sizes))


def icg(x, n_groups, sizes, order, centres=None, k_max=None):
    """phi_ICG (FedGSP's inter-cluster grouping as recalled; the document does not spell it out).

    With M groups, L = K // M: the first L M clients of `order` fall into L clusters of M alike
    (balanced K-means from `centres`; None: the first L of them), each cluster gives one client, in
    `order`, to each group: M groups of L. FedGSP drops the K - L M others; here they are
    redistributed.
    """
    size = len(x) // n_groups
    order = [int(k) for k in order]
    chosen, left = order[: size * n_groups], order[size * n_groups :]
    labels = balanced_kmeans(x[chosen], x[order[:size]] if centres is None else centres)
    clusters = [[k for k, c in zip(chosen, labels, strict=True) if c == i] for i in range(size)]
    return icg_from_clusters(clusters, left, sizes, k_max)


def faults(groups, sizes, d_min=0, k_max=np.inf):
    """What is wrong with a grouping: a list of texts, empty if nothing."""
    seen = sorted(k for group in groups for k in group)
    found = [] if seen == list(range(len(sizes))) else [f"not every client once: {seen}"]
    for i, group in enumerate(groups):
        if examples(group, sizes) < d_min:
            found.append(f"group {i}: {examples(group, sizes)} examples")
        if not 0 < len(group) <= k_max:
            found.append(f"group {i}: {len(group)} clients")
    return found


def partitions(items):
    """Every way to split a list into non-empty groups (Bell's number of them)."""
    if not items:
        yield []
        return
    for rest in partitions(items[1:]):
        yield [[items[0]], *rest]
        for i in range(len(rest)):
            yield [*rest[:i], [items[0], *rest[i]], *rest[i + 1 :]]


def best_grouping(sizes, d_min, k_max, score=None):
    """As many groups as possible with |D_S| >= d_min and K_S <= k_max, by trying everything.

    Among those, the largest `score(groups)` (None: any). Returns the groups; None: there are none.
    """
    best, best_key = None, None
    for groups in partitions(list(range(len(sizes)))):
        if not faults(groups, sizes, d_min, k_max):
            key = (len(groups), score(groups) if score else 0)
            if best is None or key > best_key:
                best, best_key = groups, key
    return best


def balance(groups, x, sizes):
    """Mean over the groups of the Gini index of their (weighted) mean estimate: to maximise."""
    return np.mean([gini_index(group_mean(g, x, sizes)) for g in groups])


# ---- growth of FedSeq2Par ----------------------------------------------------------------------


def growth(t, kind, alpha, beta, rounding=None):
    """f_gr(t), t = 1, 2, ...: (5.3) linear, (5.4) log, (5.5) exp.

    rounding None; "floor", "ceil" of the whole; "bracket": beta times the floor of the bracket, as
    the brackets of FedGSP (as recalled), for which Table 5.4's 104 and 52 come out.
    """
    bracket = {
        "linear": lambda: alpha * (t - 1) + 1,
        "log": lambda: alpha * np.log(t) + 1,
        "exp": lambda: (1 + alpha) ** (t - 1),
    }[kind]()
    if rounding == "bracket":
        return beta * int(np.floor(bracket))
    value = beta * bracket
    if rounding is None:
        return value
    return int({"floor": np.floor, "ceil": np.ceil}[rounding](value))


def growth_curve(rounds, clients, kind, alpha, beta, rounding="floor"):
    """Number of superclients in each round, at most one per client."""
    return [min(clients, growth(t, kind, alpha, beta, rounding)) for t in range(1, rounds + 1)]


# name: (K, T, alpha_gr, beta_gr, N_S of FedSeq, mean N_S of FedSeq2Par as printed in Table 5.4)
TABLE_5_4 = {
    "cifar10": (500, 10_000, 4.6e-4, 5, 50, 104),
    "cifar100": (500, 20_000, 4.6e-4, 5, 50, 113),
    "femnist": (3500, 1500, 3e-3, 5, 175, 383),
    "shakespeare": (100, 250, 1.8e-2, 5, 25, 52),
}


def table_5_4(rounding="floor"):
    """{name: (last N_S before the cap, mean N_S, parallelism)} of the printed constants."""
    rows = {}
    for name, (clients, rounds, alpha, beta, n_s, _) in TABLE_5_4.items():
        mean = np.mean(growth_curve(rounds, clients, "exp", alpha, beta, rounding))
        rows[name] = (growth(rounds, "exp", alpha, beta, rounding), mean, mean / n_s)
    return rows


# ---- messages (Table 5.2) ----------------------------------------------------------------------


def messages(method, fraction, clients, n_groups=None):
    """One round's (server to client, client to server, client to client); add up for the total.

    "fedavg" (FedProx, FedDyn), "scaffold", "cyclic", "fedseq" (superclients of equal sizes).
    """
    m = fraction * clients
    if method == "fedseq":
        chains = fraction * n_groups
        return chains, chains, (clients / n_groups - 1) * chains
    return {"fedavg": (m, m, 0), "scaffold": (2 * m, 2 * m, 0), "cyclic": (1, 1, m - 1)}[method]


def chain_messages(lengths, passes=1):
    """The same by counting: `lengths` of the round's chains; `passes` is E_S, round and round."""
    down = up = across = 0
    for length in lengths:
        down += 1
        for _ in range(passes * length - 1):
            across += 1
        up += 1
    return down, up, across


# ---- analyses (section 5, 22-25) ---------------------------------------------------------------


def similarity_matrix(w):
    """22: D_ij = cos(w_i, w_j) of the rows."""
    return np.array([[1 - cosine(a, b) for b in w] for a in w])


def silhouette(x, labels, tau):
    """26: mean of (b - a) / max(a, b) (as recalled, Rousseeuw 1987), 0 for a client alone.

    a: the mean distance to the others of the class; b: to the class that is nearest on average.
    Distances that depend on the direction are the mean of both.
    """
    tau2 = lambda i, j: (tau(x[i], x[j]) + tau(x[j], x[i])) / 2
    n, scores = len(x), []
    for i in range(n):
        to = {c: [tau2(i, j) for j in range(n) if j != i and labels[j] == c] for c in set(labels)}
        if not to[labels[i]]:
            scores.append(0.0)
            continue
        a = np.mean(to[labels[i]])
        b = min(np.mean(d) for c, d in to.items() if c != labels[i])
        scores.append((b - a) / max(a, b))
    return np.mean(scores)


def rounds_to_reach(accuracies, target, share):
    """24: the first round, from 1, with accuracy >= share target (0.7, 0.9 of centralised)."""
    for t, accuracy in enumerate(accuracies, 1):
        if accuracy >= share * target:
            return t
    return None


def frechet(a, b):
    """25, FID: ||m_a - m_b||^2 + tr(S_a + S_b - 2 (S_a S_b)^(1/2)), unbiased covariances; rows."""
    (sa, ma), (sb, mb) = [(np.cov(v, rowvar=False), v.mean(0)) for v in (a, b)]
    values, vectors = np.linalg.eigh(sa)
    root = vectors * np.sqrt(np.clip(values, 0, None)) @ vectors.T
    cross = np.sqrt(np.clip(np.linalg.eigvalsh(root @ sb @ root), 0, None)).sum()
    return ((ma - mb) ** 2).sum() + np.trace(sa) + np.trace(sb) - 2 * cross
