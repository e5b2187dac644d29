"""The NumPy versions of superclients, chains and asynchrony, against hand and against limits."""

import itertools

import numpy as np
import pytest
import reference_groups as groups
import reference_sequence as seq

K, SIZES = 6, [3, 5, 2, 4, 6, 1]


def close(a, b, atol=1e-12):
    np.testing.assert_allclose(a, b, rtol=0, atol=atol)


# ---- groups ------------------------------------------------------------------------------------


def estimates(clients=12, classes=4, seed=0):
    rng = np.random.default_rng(seed)
    return rng.dirichlet(np.full(classes, 0.3), clients), rng.integers(20, 60, clients)


def test_distances_by_hand():
    a, b = np.array([1.0, 0.0]), np.array([0.5, 0.5])
    close(groups.euclidean(a, b), 0.5**0.5)
    close(groups.cosine(a, b), 1 - 0.5**0.5)
    close(groups.cosine(a, 0 * a), 1)
    close(groups.kl(a, b), np.log(2))
    assert groups.kl(b, a) == np.inf
    close(groups.gini(a, b), 1 - (0.75**2 + 0.25**2))
    close(groups.kl_released(a, a[::-1]), 1)
    close(groups.kl_released(a, a), 1 - np.log(2))
    # a / (a + b) = (2/3, 0), b / (a + b) = (1/3, 1)
    close(groups.normalised_cosine(a, b), 1 - (2 / 9) / (2 / 3 * (10 / 9) ** 0.5))
    close(groups.normalised_cosine(a, a), 0)


def test_estimates_by_hand():
    p = np.array([[0.9, 0.1], [0.5, 0.5], [0.2, 0.8]])
    close(groups.confidence(p, np.array([0, 0, 1]), 2, released=True), [0.7 / 1.5, 0.8 / 1.5])
    close(
        groups.confidence(p, np.array([0, 0, 1]), 2), np.exp([0.7, 0.8]) / np.exp([0.7, 0.8]).sum()
    )
    x = np.random.default_rng(0).normal(size=(8, 5)) * [5, 3, 1, 0.1, 0.1]
    reduced = groups.pca(x)
    assert reduced.shape[1] < 5
    total = ((x - x.mean(0)) ** 2).sum()
    assert (reduced**2).sum() >= 0.9 * total > (reduced[:, :-1] ** 2).sum()
    close(groups.pca(x, 1 - 1e-9) @ groups.pca(x, 1 - 1e-9).T, (x - x.mean(0)) @ (x - x.mean(0)).T)


def every_grouping(x, sizes, d_min, k_max):
    rng = np.random.default_rng(1)
    order = rng.permutation(len(sizes))
    yield groups.in_order(order, sizes, d_min, k_max)
    labels = x.argmax(1)
    for args in ((), (order,), (order, True)):
        yield groups.round_robin(labels, sizes, d_min, k_max, *args)
    for tau in (groups.euclidean, groups.cosine, groups.normalised_cosine, groups.kl, groups.gini):
        yield groups.greedy(x, sizes, d_min, k_max, tau, first=rng.choice)
    for tau in (groups.cosine, groups.kl_released, groups.gini):
        yield groups.greedy_released(x, sizes, d_min, k_max, tau)


@pytest.mark.parametrize("seed", range(4))
def test_every_client_once_within_the_constraints(seed):
    x, sizes = estimates(seed=seed)
    for made in every_grouping(x, sizes, 100, 6):
        assert not groups.faults(made, sizes, 100, 6)


def test_extreme_constraints():
    x, sizes = estimates()
    for made in every_grouping(x, sizes, 0, 6):
        assert sorted(made) == [[k] for k in range(12)]
    for made in every_grouping(x, sizes, sizes.sum(), 12):
        assert len(made) == 1
        assert not groups.faults(made, sizes)
    with pytest.raises(ValueError, match="no room"):
        groups.in_order(range(12), sizes, sizes.sum() + 1, 12)
    with pytest.raises(ValueError, match="no room"):
        groups.in_order(range(5), [10] * 5, 20, 2)


def test_left_overs_by_hand():
    sizes = [30, 10, 10, 20, 5, 4, 3]
    made = groups.in_order(range(7), sizes, 20, 4)
    # closed: [0] with 30, [1, 2] with 20, [3] with 20; 4, 5, 6 have 12: last first, smallest first
    assert made == [[0, 4], [1, 2, 6], [3, 5]]
    assert groups.redistribute([[0], [1, 2]], [3, 4], [9, 1, 1, 1, 1], 3) == [[0, 3], [1, 2, 4]]
    assert groups.redistribute([[0], [1, 2]], [3, 4, 5], [9, *[1] * 5], 3) == [[0, 4, 3], [1, 2, 5]]


def test_round_robin_by_hand():
    labels, sizes = [0, 0, 0, 1, 2, 2], [1] * 6
    assert groups.round_robin(labels, sizes, 2, 2) == [[2, 3], [5, 1], [4, 0]]
    assert groups.round_robin(labels, sizes, 2, 2, range(6)) == [[0, 3], [4, 1], [5, 2]]
    assert groups.round_robin(labels, sizes, 2, 2, range(6), True) == [[0, 3], [1, 4], [2, 5]]


def test_greedy_by_hand():
    x, sizes = np.eye(3)[[0, 0, 1, 1, 2, 2]], [1] * 6
    first = lambda remaining: remaining[-1]
    for tau in (groups.euclidean, groups.cosine, groups.gini):
        made = groups.greedy(x, sizes, 3, 3, tau, first)
        assert made == [[5, 0, 2], [4, 1, 3]]
    skewed = np.array([[0.4, 0.6], [0.9, 0.1], [0.2, 0.8]])
    # farthest from (.5, .5): 1; then farthest from that: 2
    assert groups.greedy(skewed, [1] * 3, 3, 3, groups.euclidean) == [[1, 2, 0]]
    # 0, then 10; their mean is 5, or 9 by examples; the third is the one farther from it
    line, lengths, lowest = np.array([[0.0], [10], [4], [7]]), [1, 9, 1, 1], min
    assert groups.greedy(line, lengths, 12, 4, groups.euclidean, lowest) == [[0, 1, 3, 2]]
    assert groups.greedy(line, lengths, 12, 4, groups.euclidean, lowest, True) == [[0, 1, 2, 3]]
    same = np.eye(10)[[3, 3, 3]]
    assert groups.greedy_released(same, [1] * 3, 3, 3, groups.kl_released) == [[0, 1, 2]]


def test_brute_force_is_at_least_as_good():
    x, sizes = estimates(7)
    best = groups.best_grouping(sizes, 70, 4, lambda g: groups.balance(g, x, sizes))
    assert not groups.faults(best, sizes, 70, 4)
    for made in every_grouping(x, sizes, 70, 4):
        if not groups.faults(made, sizes, 70, 4):
            key = [(len(g), groups.balance(g, x, sizes)) for g in (made, best)]
            assert key[0] <= key[1]
    assert sum(1 for _ in groups.partitions(list(range(6)))) == 203
    assert groups.best_grouping([1, 1], 3, 2) is None


def test_assignment_and_balanced_clusters():
    rng = np.random.default_rng(2)
    cost = rng.normal(size=(5, 5))
    totals = {p: cost[range(5), p].sum() for p in itertools.permutations(range(5))}
    assert tuple(groups.assign(cost)) == min(totals, key=totals.get)
    x = np.repeat(np.eye(3) * 9, 3, axis=0) + rng.normal(size=(9, 3)) * 0.1
    labels = groups.balanced_kmeans(x, x[[0, 3, 6]])
    assert labels == [0, 0, 0, 1, 1, 1, 2, 2, 2]
    assert sorted(groups.balanced_kmeans(x, x[[0, 1, 2]])) == labels


@pytest.mark.parametrize("n_groups", range(1, 12))
def test_icg(n_groups):
    x, sizes = estimates(11)
    order = np.random.default_rng(3).permutation(11)
    made = groups.icg(x, n_groups, sizes, order)
    assert not groups.faults(made, sizes)
    assert len(made) == n_groups
    lengths = [len(g) for g in made]
    assert max(lengths) - min(lengths) <= 1


def test_icg_takes_one_of_each_kind():
    x = np.repeat(np.eye(3), 4, axis=0)
    order = [0, 4, 8, *[k for k in np.random.default_rng(4).permutation(12) if k % 4]]
    made = groups.icg(x, 4, [1] * 12, order)
    assert all(sorted(k // 4 for k in g) == [0, 1, 2] for g in made)


def test_growth_against_item_20():
    exact = groups.table_5_4(None)
    close(exact["cifar10"][0], 497, 0.5)
    for name, mean in (("cifar10", 107), ("cifar100", 303), ("femnist", 98), ("shakespeare", 54)):
        close(exact[name][1], mean, 0.5)
    # with the floor inside the bracket the two consistent rows are Table 5.4's
    bracket = groups.table_5_4("bracket")
    for name, parallelism in (("cifar10", 2.09), ("shakespeare", 2.09)):
        assert int(bracket[name][1]) == groups.TABLE_5_4[name][-1]
        close(bracket[name][2], parallelism, 0.005)
    for kind, at_three in (("linear", 5 * 1.4), ("log", 5 * (1 + 0.2 * np.log(3))), ("exp", 7.2)):
        close(groups.growth(1, kind, 0.2, 5), 5)
        close(groups.growth(3, kind, 0.2, 5), at_three)
        curve = groups.growth_curve(300, 20, kind, 0.2, 5)
        assert curve[0] == 5
        assert curve[-1] <= 20
        assert curve == sorted(curve)


def test_messages_of_table_5_2():
    c, k, n = 0.2, 500, 50
    assert sum(groups.messages("fedavg", c, k)) == 2 * c * k
    assert sum(groups.messages("scaffold", c, k)) == 4 * c * k
    assert sum(groups.messages("cyclic", c, k)) == c * k + 1
    assert groups.messages("fedseq", c, k, n) == (10, 10, 90)
    assert sum(groups.messages("fedseq", c, k, n)) == c * (n + k)
    assert groups.chain_messages([10] * 10) == (10, 10, 90)
    lengths = [3, 5, 1]
    assert sum(groups.chain_messages(lengths)) == 3 + sum(lengths)
    assert groups.chain_messages([1] * 100) == groups.messages("fedavg", c, k)
    assert groups.chain_messages([100]) == groups.messages("cyclic", c, k)
    assert groups.chain_messages([3], passes=2) == (1, 1, 5)


def test_analyses():
    rng = np.random.default_rng(5)
    w = rng.normal(size=(4, 6))
    d = groups.similarity_matrix(w)
    close(np.diag(d), 1)
    close(d, d.T)
    line, apart = np.array([[0.0], [1], [10], [11]]), [0, 0, 1, 1]
    close(groups.silhouette(line, apart, groups.euclidean), 1 - (1 / 10.5 + 1 / 9.5) / 2)
    assert groups.silhouette(line, [0, 1, 0, 1], groups.euclidean) < 0
    close(groups.silhouette(line[:3], [0, 0, 1], groups.euclidean), (0.9 + 8 / 9) / 3)
    assert groups.rounds_to_reach([10, 50, 60, 80], 80, 0.7) == 3
    assert groups.rounds_to_reach([10], 80, 0.7) is None
    a = rng.normal(size=(50, 3))
    close(groups.frechet(a, a), 0, 1e-10)
    close(groups.frechet(a, a + np.array([1, 0, 2])), 5, 1e-10)
    one, two = a[:, :1], 3 * a[:, :1]
    s = one.std(ddof=1)
    both = [np.hstack([v, a[:, 1:2] * 0]) for v in (one, two)]
    close(groups.frechet(*both), (2 * one.mean()) ** 2 + (2 * s) ** 2, 1e-10)


# ---- sequences ---------------------------------------------------------------------------------

W0 = np.array([1.0, -2.0, 0.5])
TARGETS = np.random.default_rng(7).normal(size=(K, 3))
RATES = np.linspace(0.1, 0.4, K)


def train(w, k):
    """A step towards the client's own optimum: affine, and no two clients commute."""
    return w + RATES[k] * (TARGETS[k] - w)


def stay(w, k):
    return w


def orders(rounds, seed=8):
    rng = np.random.default_rng(seed)
    return [[int(k) for k in rng.permutation(K)] for _ in range(rounds)]


def by_affine_maps(w, clients):
    """A chain in closed form: w times the product of (1 - rate), plus what the clients add."""
    kept = np.cumprod([1 - RATES[k] for k in clients][::-1])[::-1]
    after = [*kept[1:], 1.0]
    added = sum(a * RATES[k] * TARGETS[k] for a, k in zip(after, clients, strict=True))
    return kept[0] * w + added


def test_one_superclient_each_is_fedavg():
    cohorts = [o[:4] for o in orders(5)]
    chains = [[[k] for k in c] for c in cohorts]
    fedavg = seq.fedavg(W0, train, SIZES, cohorts)
    close(seq.fedseq(W0, train, SIZES, chains), fedavg)
    close(seq.fedasyncseq(W0, train, SIZES, chains, 1)[0], fedavg)
    p = np.array([SIZES[k] for k in cohorts[0]]) / sum(SIZES[k] for k in cohorts[0])
    close(fedavg[0], sum(a * train(W0, k) for a, k in zip(p, cohorts[0], strict=True)))


def test_one_superclient_is_cyclic():
    cyclic = seq.fedcyclic(W0, train, orders(5))
    close(seq.fedseq(W0, train, SIZES, [[o] for o in orders(5)]), cyclic)
    close(seq.fedasyncseq(W0, train, SIZES, [[o] for o in orders(5)], 3)[1], cyclic)
    close(cyclic[0], by_affine_maps(W0, orders(5)[0]))
    close(cyclic[-1], by_affine_maps(W0, [k for o in orders(5) for k in o]))


def test_fedseq_by_hand():
    chains = [[0, 3], [5, 1, 2]]
    ends = [by_affine_maps(W0, c) for c in chains]
    close(seq.fedseq(W0, train, SIZES, [chains])[0], (7 * ends[0] + 8 * ends[1]) / 15)
    ends = [by_affine_maps(W0, 2 * c) for c in chains]
    close(seq.fedseq(W0, train, SIZES, [chains], 2)[0], (7 * ends[0] + 8 * ends[1]) / 15)
    half = seq.seq_round(W0, train, SIZES, [[0], [5, 1]], masses=[7, 8])
    close(half, (7 * by_affine_maps(W0, [0]) + 8 * by_affine_maps(W0, [5, 1])) / 15)


def async_schedule(rounds, seed=9):
    made = [[0, 1], [2], [3, 4, 5]]
    return made, seq.draw_async(made, 2, rounds, np.random.default_rng(seed))


def test_fedasyncseq():
    _, schedule = async_schedule(12)
    close(seq.fedasyncseq(W0, train, SIZES, schedule, 1)[0], seq.fedseq(W0, train, SIZES, schedule))
    close(*seq.fedasyncseq(W0, train, SIZES, schedule, 1))
    # merged once, at the end: every chain on its own until then
    merged, mixed = seq.fedasyncseq(W0, train, SIZES, schedule, 12)
    ends = [by_affine_maps(W0, [k for r in schedule for k in r[i]]) for i in range(2)]
    p = [sum(SIZES[k] for r in schedule for k in r[i]) for i in range(2)]
    close(merged[-1], (p[0] * ends[0] + p[1] * ends[1]) / sum(p))
    close(merged[:-1], [W0] * 11)
    # every 4: three times the same, each from the model merged before
    merged, mixed = seq.fedasyncseq(W0, train, SIZES, schedule, 4)
    w = W0
    for start in (0, 4, 8):
        w = seq.fedasyncseq(w, train, SIZES, schedule[start : start + 4], 4)[0][-1]
        close(merged[start + 3], w)
        close(mixed[start + 3], w)
    close(merged[4:7], [merged[3]] * 3)


def test_no_chain_meets_a_superclient_twice_in_a_row():
    made, schedule = async_schedule(50)
    where = [[made.index(sorted(c)) for c in chains] for chains in schedule]
    for before, after in itertools.pairwise(where):
        assert all(a != b for a, b in zip(before, after, strict=True))
        assert len(set(after)) == 2
    assert len(seq.draw_async([[0, 1]], 1, 3, np.random.default_rng(0))) == 3


def test_fedseq2par():
    x, _ = estimates(K)
    rounds, rng, order = 30, np.random.default_rng(10), np.arange(K)
    target = lambda t: min(K, groups.growth(t, "exp", 0.1, 1, "floor"))
    asked = []

    def regroup(n):
        asked.append(n)
        return groups.icg(x, n, SIZES, order)

    drawn = []

    def draw(t, made):
        drawn.append(seq.draw_chains(made, len(made), rng))
        return drawn[-1]

    models, used = seq.fedseq2par(W0, train, SIZES, rounds, target, regroup, draw)
    curve = groups.growth_curve(rounds, K, "exp", 0.1, 1)
    assert [len(g) for g in used] == curve
    assert asked == sorted(set(curve))
    assert all(not groups.faults(g, SIZES) for g in used)
    close(models, seq.fedseq(W0, train, SIZES, drawn))
    # begins as FedCyclic, ends as FedAvg over everybody
    close(models[0], by_affine_maps(W0, drawn[0][0]))
    close(models[-1], seq.fedavg(models[-2], train, SIZES, [range(K)])[0])


def test_draws():
    rng = np.random.default_rng(11)
    made = [[0, 1], [2, 3], [4, 5]]
    for _ in range(20):
        chains = seq.draw_chains(made, 2, rng)
        assert len(chains) == 2
        assert all(sorted(c) in made for c in chains)
    assert seq.cohort_size(0.2, 50) == 10
    assert seq.cohort_size(0.2, 3) == 1


# ---- hierarchies, virtual clients, gossip ------------------------------------------------------


def test_hierfavg_limits():
    clusters = [[0, 1, 2], [3, 4, 5]]
    everybody = seq.fedavg(W0, train, SIZES, [range(K)] * 6)
    for weights in ("cluster", "seen"):
        close(seq.hierfavg(W0, train, SIZES, [clusters] * 6, 1, weights=weights)[0], everybody)
    # partial cohorts, merged every round: FedAvg over the union only if what was seen counts
    cohorts = [[o[:2], o[2:3]] for o in orders(6)]
    union = seq.fedavg(W0, train, SIZES, [o[:3] for o in orders(6)])
    close(seq.hierfavg(W0, train, SIZES, cohorts, 1, clusters, "seen")[0], union)
    _, edges = seq.hierfavg(W0, train, SIZES, cohorts[:2], 3, clusters)
    seen = [sum(SIZES[k] for cohort in cohorts[:2] for k in cohort[c]) for c in range(2)]
    merged, _ = seq.hierfavg(W0, train, SIZES, cohorts[:2], 2, clusters, "seen")
    close(merged[1], (seen[0] * edges[1][0] + seen[1] * edges[1][1]) / sum(seen))
    # one cluster: FedAvg whatever the period
    for period in (1, 2, 5):
        one, edges = seq.hierfavg(W0, train, SIZES, [[range(K)]] * 6, period)
        close(edges, [[w] for w in everybody])
        close(one[period - 1 :: period], everybody[period - 1 :: period])
    # merged at the end only: every cluster its own FedAvg
    merged, edges = seq.hierfavg(W0, train, SIZES, [clusters] * 6, 6)
    own = [seq.fedavg(W0, train, SIZES, [c] * 6) for c in clusters]
    close(edges[4], [own[0][4], own[1][4]])
    close(merged[-1], (10 * own[0][-1] + 11 * own[1][-1]) / 21)
    close(merged[:-1], [W0] * 5)
    equal = seq.hierfavg(W0, train, SIZES, [clusters] * 6, 6, weights="equal")[0]
    close(equal[-1], (own[0][-1] + own[1][-1]) / 2)
    # a cluster with nobody this round keeps its model
    edges = seq.hierfavg(W0, train, SIZES, [clusters, [[0], []]], 3)[1]
    close(edges[1][1], edges[0][1])


def test_virtual_clients():
    members = [np.arange(0, 7), np.arange(7, 9), np.array([], int), np.arange(9, 12)]
    made = seq.virtual_clients(members, 3)
    expected = [(0, [0, 1, 2]), (0, [3, 4, 5]), (0, [6, 0, 1]), (1, [7, 8, 7]), (3, [9, 10, 11])]
    assert [(k, list(e)) for k, e in made] == expected
    close(seq.virtual_probabilities([7, 2, 0, 3]), np.array([7, 2, 0, 3]) / 12)
    data = np.random.default_rng(12).normal(size=(12, 3))
    on = lambda w, v: w + 0.5 * (data[made[v][1]].mean(0) - w)
    after = seq.fedvc(W0, on, [[0, 3, 4]])[0]
    rows = data[[0, 1, 2, 7, 8, 7, 9, 10, 11]]
    close(after, 0.5 * W0 + 0.5 * rows.mean(0))
    for local, rounds in ((125, 3200), (500, 800), (4000, 100)):
        assert seq.fixed_iterations(2_000_000, local, 5) == rounds


def test_gossip():
    models = [W0, 2 * W0, 3 * W0]
    after, ages = seq.gossip(models, lambda w, k: w + W0, [(0, 1), (1, 0), (0, 1)])
    close(after, [3.5 * W0, (2 * 3.5 + 1 * 2.5) / 3 * W0 + W0, 3 * W0])
    assert ages == [2, 3, 0]
    after, ages = seq.gossip(models, stay, [(0, 2), (2, 1)])
    close(after[1], 2 * W0)  # the mean of 0 and 2, of age 1, replaces a model of age 0
    assert ages == [0, 2, 1]
    pushes = [(0, 1), (1, 2), (2, 0), (1, 0)] * 50
    after, _ = seq.gossip(models, lambda w, k: w + 0.5 * (TARGETS[0] - w), pushes)
    close(after, [TARGETS[0]] * 3, 1e-9)


# ---- asynchrony --------------------------------------------------------------------------------


def test_staleness_functions():
    assert [seq.constant()(d) for d in (0, 9)] == [1, 1]
    close([seq.polynomial(0.5)(d) for d in (0, 3)], [1, 0.5])
    close([seq.hinge(10, 4)(d) for d in (0, 4, 5, 6)], [1, 1, 1 / 11, 1 / 21])
    close([seq.hinge(2, 0)(d) for d in (0, 1)], [1, 1 / 3])


def test_equal_speeds_in_closed_form():
    equal, n = seq.durations([1] * 4, [1] * 4), 4
    _, log = seq.fedasync(W0, train, equal, range(n), 12, 0.5)
    assert log == [(1 + i // n, i % n, i // n * n, i % n) for i in range(12)]
    _, log = seq.fedasync(W0, train, equal, range(n), 12, 0.5, ties="one")
    assert [k for _, k, _, _ in log] == [0, 1, 2, 3] * 3
    assert [d for *_, d in log] == [0, 1, 2, 3] + [n - 1] * 8
    # the order in which they started does not matter, the client does
    _, log = seq.fedasync(W0, train, equal, [2, 0, 3, 1], 12, 0.5, ties="one")
    assert [k for _, k, _, _ in log] == [0, 1, 2, 3] * 3


def test_fedasync_by_hand():
    # client 0 takes 2, client 1 takes 5: at 2, 4 (0); 5 (1); 6, 8 (0); 10 (both: 0, then 1)
    s, alpha = seq.polynomial(1), 0.6
    models, log = seq.fedasync(W0, train, lambda k, j: (2, 5)[k], [0, 1], 7, alpha, s)
    assert [(t, k) for t, k, _, _ in log] == [
        (2, 0),
        (4, 0),
        (5, 1),
        (6, 0),
        (8, 0),
        (10, 0),
        (10, 1),
    ]
    assert [d for *_, d in log] == [0, 0, 2, 1, 0, 0, 3]
    assert [v for _, _, v, _ in log] == [0, 1, 0, 2, 4, 5, 3]
    history, w = [W0], W0
    for _, k, born, d in log:
        a = alpha / (1 + d)
        w = (1 - a) * w + a * train(history[born], k)
        history.append(w)
    close(models, history[1:])
    literal, _ = seq.fedasync(W0, train, lambda k, j: (2, 5)[k], [0, 1], 1, alpha, s, offset=1)
    close(literal[0], W0 + alpha / 2 * (train(W0, 0) - W0))


def test_fedasync_alone_is_sequential():
    lone = seq.durations([3.0], [1.5])
    models, log = seq.fedasync(W0, train, lone, [0], 4, 1.0, seq.hinge(1, 0))
    close(models, seq.fedcyclic(W0, train, [[0]] * 4))
    assert [t for t, *_ in log] == [2, 4, 6, 8]
    # one model on its way to one client after another: FedCyclic
    order = [2, 5, 1, 0]
    models, _ = seq.fedasync(
        W0, train, lambda k, j: 1, order[:1], 4, 1.0, then=lambda i, k: order[(i + 1) % 4]
    )
    close(models[-1], seq.fedcyclic(W0, train, [order])[0])


def test_delays_repeat_and_speeds_divide():
    took = seq.durations([6, 6], [2, 3], [[0, 1], [4]])
    assert [took(0, j) for j in range(4)] == [3, 4, 3, 4]
    assert took(1, 5) == 6
    with pytest.raises(ValueError, match="takes time"):
        seq.fedasync(W0, train, lambda k, j: 0, [0], 1, 1.0)


def test_fedbuff_limits():
    equal = lambda k, j: 1
    for sizes in (SIZES, None):
        models, log = seq.fedbuff(W0, train, equal, range(K), 3 * K, K, sizes=sizes)
        assert {d for *_, d in log} == {0}
        close(models[K - 1 :: K], seq.fedavg(W0, train, sizes, [range(K)] * 3))
        close(models[: K - 1], [W0] * (K - 1))
    # each sent back at once: all but the last still receive the old model
    _, log = seq.fedbuff(W0, train, equal, range(K), 2 * K, K, ties="one")
    assert [d for *_, d in log] == [0] * K + [1] * (K - 1) + [0]
    # a buffer of one and a single client: FedAsync
    one = seq.fedbuff(W0, train, equal, [3], 5, 1, lr=0.3)[0]
    close(one, seq.fedasync(W0, train, equal, [3], 5, 0.3)[0])


def test_fedbuff_by_hand():
    models, log = seq.fedbuff(W0, train, lambda k, j: (2, 5)[k], [0, 1], 4, 2, lr=0.5)
    # arrivals 0, 0 | 1 (stale by one), 0 (sent at 4, after the change)
    w1 = W0 + 0.5 * ((train(W0, 0) - W0) + (train(W0, 0) - W0)) / 2
    w2 = w1 + 0.5 * ((train(W0, 1) - W0) / 2**0.5 + (train(w1, 0) - w1)) / 2
    assert [(t, k, d) for t, k, _, d in log] == [(2, 0, 0), (4, 0, 0), (5, 1, 1), (6, 0, 0)]
    close(models, [W0, w1, w1, w2])


# ---- attacks -----------------------------------------------------------------------------------


def test_flip_maps():
    both = seq.flip_map(10, seq.CIFAR10_SWAPS["both"])
    assert list(both) == [2, 1, 0, 5, 4, 3, 6, 7, 8, 9]
    assert list(both[both]) == list(range(10))
    with pytest.raises(ValueError, match="two pairs"):
        seq.flip_map(4, [(0, 1), (1, 2)])
    rng, coarse = (
        np.random.default_rng(14),
        np.random.default_rng(15).permutation(np.arange(100) % 20),
    )
    for draw, kind in ((seq.intra_pairs, "intra"), (seq.extra_pairs, "extra")):
        pairs = draw(coarse, rng)
        assert seq.kind_of_pairs(pairs, coarse) == kind
        assert (seq.flip_map(100, pairs) != np.arange(100)).sum() == 20
        for fixed in (True, False):
            maps = seq.flip_maps([1, 4, 6], lambda d=draw: d(coarse, rng), 100, fixed)
            assert len({tuple(m) for m in maps.values()}) == (1 if fixed else 3)
    assert seq.kind_of_pairs([(0, 1), (2, 3)], [0, 0, 0, 1]) is None


def test_attackers():
    made = [list(range(10 * i, 10 * i + 10)) for i in range(50)]
    rng = np.random.default_rng(16)
    for of_groups, of_clients in itertools.product((0.1, 0.3, 0.5), (0.1, 0.5)):
        bad = seq.draw_attackers(made, of_groups, of_clients, rng)
        counts = np.bincount([k // 10 for k in bad], minlength=50)
        assert sorted(set(counts)) == [0, round(10 * of_clients)]
        assert (counts > 0).sum() == round(50 * of_groups)
        assert len(seq.draw_attackers_fedavg(500, of_groups, of_clients, rng)) == len(bad)


def test_poisoning():
    cohorts = [list(range(K))] * 3
    flipped = seq.poisoned(train, range(K), -1)
    close(
        seq.fedavg(W0, flipped, SIZES, cohorts[:1])[0],
        2 * W0 - seq.fedavg(W0, train, SIZES, cohorts)[0],
    )
    close(
        seq.fedavg(W0, seq.poisoned(train, [2], 1), SIZES, cohorts),
        seq.fedavg(W0, train, SIZES, cohorts),
    )
    # boosted by 1 / p_k while nobody else moves: the attacker's model replaces the average
    lone = lambda w, k: train(w, k) if k == 4 else w
    boosted = seq.poisoned(lone, [4], sum(SIZES) / SIZES[4])
    close(seq.fedavg(W0, boosted, SIZES, cohorts[:1])[0], train(W0, 4))
    # in a chain the change is that to what the client before handed on
    turned = seq.fedcyclic(W0, seq.poisoned(train, [1], -2), [[0, 1]])[0]
    before = train(W0, 0)
    close(turned, before - 2 * (train(before, 1) - before))
