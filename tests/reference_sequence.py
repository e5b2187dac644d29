"""Chains, cluster servers, virtual clients and asynchrony in plain NumPy, float64.

Written from caldarola.md (2.9-2.12, 2.16) and mora.md (3a, 3e), apart from the package; what is
recalled from papers says so. A model is an array; `train(params, client) -> params` is anything
(it does not change its argument) and `sizes[client]` its number of examples. What is drawn (orders,
cohorts, who pushes to whom) is an input: a `schedule` has one entry per round. `train` is called in
the order of the loops: rounds, then chains or clusters as listed, then clients as listed; with an
event queue when a model arrives. Models are returned after every round, w0 is not among them.
"""

import numpy as np


def mean(models, weights):
    """Sum of w_i / (sum of w) times model i."""
    total = sum(weights)
    return sum(w / total * m for w, m in zip(weights, models, strict=True))


def chain(w, train, clients, passes=1):
    """One model through the clients in order; `passes` is E_S, every time in the same order."""
    for _ in range(passes):
        for k in clients:
            w = train(w, k)
    return w


def mass(clients, sizes):
    return float(sum(sizes[k] for k in clients))


# ---- star: FedAvg, FedVC -----------------------------------------------------------------------


def fedavg(w0, train, sizes, schedule):
    """2.1, server learning rate 1; schedule[t]: the cohort. `sizes` None: all weigh the same."""
    w, history = w0, []
    for cohort in schedule:
        weights = [1.0 if sizes is None else sizes[k] for k in cohort]
        w = mean([train(w, k) for k in cohort], weights)
        history.append(w)
    return history


def virtual_clients(members, size):
    """FedVC (2.16): [(client, examples)], every one of `size` examples; members: arrays.

    A client is cut in the order given; its last piece, or all of a small client, is filled up from
    its own first examples, again and again. Clients without examples have none.
    """
    made = []
    for k, own in enumerate(members):
        for start in range(0, len(own), size):
            made.append((k, np.array([own[i % len(own)] for i in range(start, start + size)])))
    return made


def virtual_probabilities(sizes):
    """FedVC without cutting (as recalled): client k is drawn with n_k / n, trains on `size`."""
    return np.array(sizes) / sum(sizes)


def fedvc(w0, train, schedule):
    """FedAvg over virtual clients: they have the same number of examples, so the plain mean."""
    return fedavg(w0, train, None, schedule)


def fixed_iterations(total, local, cohort):
    """Rounds of the fixed-iteration study: I_loc T |C^t| = I_tot."""
    return total / (local * cohort)


# ---- sequences: FedCyclic, FedSeq, FedAsyncSeq, FedSeq2Par -------------------------------------


def fedcyclic(w0, train, schedule):
    """One model over the round's clients, no aggregation; schedule[t]: clients in order."""
    w, history = w0, []
    for clients in schedule:
        w = chain(w, train, clients)
        history.append(w)
    return history


def seq_round(w, train, sizes, chains, passes=1, masses=None):
    """One round of FedSeq; `masses` replace the chains' examples (clients may have dropped out)."""
    masses = [mass(c, sizes) for c in chains] if masses is None else masses
    return mean([chain(w, train, c, passes) for c in chains], masses)


def fedseq(w0, train, sizes, schedule, passes=1):
    """Alg. 6 without its asynchronous lines; schedule[t]: chains, each in its shuffled order."""
    w, history = w0, []
    for chains in schedule:
        w = seq_round(w, train, sizes, chains, passes)
        history.append(w)
    return history


def fedasyncseq(w0, train, sizes, schedule, period, passes=1):
    """Alg. 6 with lines 14, 18, 21-24; schedule[t][i]: where chain i of the bank goes in round t.

    Rounds t = 1, 2, ...; merged after round t if t mod `period` (R) is 0. Returns (merged, mixed)
    after every round: the last merged model (w0 before the first), and the bank's average by the
    examples since the last merge, which is what the released code evaluates. They agree where
    merged. Rounds after the last multiple of R are not in `merged`.
    """
    w, merged, mixed = w0, [], []
    bank, p = [w0] * len(schedule[0]), [0.0] * len(schedule[0])
    for t, chains in enumerate(schedule, 1):
        for i, clients in enumerate(chains):
            bank[i] = chain(bank[i], train, clients, passes)
            p[i] += mass(clients, sizes)
        mixed.append(mean(bank, p))
        if t % period == 0:
            w = mean(bank, p)
            bank, p = [w] * len(bank), [0.0] * len(bank)
        merged.append(w)
    return merged, mixed


def fedseq2par(w0, train, sizes, rounds, target, regroup, draw, passes=1):
    """FedSeq2Par: `regroup(n)` makes the superclients when target(t) > the n last asked for.

    target(t): f_gr as a whole number, at most K; t = 1, 2, ...; draw(t, groups): a round's chains.
    Returns (models, groups of every round).
    """
    w, history, used, current, groups = w0, [], [], 0, None
    for t in range(1, rounds + 1):
        if target(t) > current:
            current = target(t)
            groups = regroup(current)
        w = seq_round(w, train, sizes, draw(t, groups), passes)
        history.append(w)
        used.append(groups)
    return history, used


def cohort_size(fraction, n):
    """max(1, floor(C n)), as released."""
    return max(1, int(fraction * n))


def draw_chains(groups, count, rng):
    """A round of FedSeq: `count` superclients without replacement, clients of each shuffled."""
    chosen = rng.choice(len(groups), count, replace=False)
    return [[int(k) for k in rng.permutation(groups[i])] for i in chosen]


def draw_async(groups, count, rounds, rng):
    """A schedule of FedAsyncSeq: no chain goes twice in a row to the same superclient.

    Also across merges. Drawn again until that holds; with one superclient it cannot.
    """
    schedule, before = [], [-1] * count
    for _ in range(rounds):
        chosen = rng.choice(len(groups), count, replace=False)
        while len(groups) > 1 and any(a == b for a, b in zip(chosen, before, strict=True)):
            chosen = rng.choice(len(groups), count, replace=False)
        schedule.append([[int(k) for k in rng.permutation(groups[i])] for i in chosen])
        before = chosen
    return schedule


# ---- hierarchies: HierFAVG, cluster servers ----------------------------------------------------


def hierfavg(w0, train, sizes, schedule, period, clusters=None, weights="cluster"):
    """HierFAVG (mora.md 3a) and cluster servers (caldarola.md 2.16); schedule[t][c]: a cohort.

    A round is one edge aggregation: each cluster's cohort trains its cluster's model (`train` is
    the tau_1 local steps) and is averaged by examples; a cluster with nobody stays. After every
    `period` (tau_2, T_c) rounds the cluster models are merged and handed back. Cluster c weighs
      weights "cluster": the examples of clusters[c] (None: of its cohort in the first round)
              "seen": those trained on since the last merge;  "equal": 1.
    Returns (merged, edges) after every round: the last merged model, the clusters' models.
    """
    clusters = schedule[0] if clusters is None else clusters
    w, merged, edges = w0, [], []
    models, seen = [w0] * len(clusters), [0.0] * len(clusters)
    for t, cohorts in enumerate(schedule, 1):
        for c, cohort in enumerate(cohorts):
            if cohort:
                trained = [train(models[c], k) for k in cohort]
                models[c] = mean(trained, [sizes[k] for k in cohort])
                seen[c] += mass(cohort, sizes)
        if t % period == 0:
            share = {
                "cluster": [mass(c, sizes) for c in clusters],
                "seen": seen,
                "equal": [1.0] * len(clusters),
            }[weights]
            w = mean(models, share)
            models, seen = [w] * len(clusters), [0.0] * len(clusters)
        merged.append(w)
        edges.append(list(models))
    return merged, edges


# ---- gossip ------------------------------------------------------------------------------------


def gossip(models, train, pushes):
    """Gossip learning (mora.md 3a): `pushes` are (sender, receiver), one after the other.

    The receiver merges (a_s w_s + a_r w_r) / (a_s + a_r), age max(a_s, a_r), then one local update,
    age + 1. Ages begin at 0; two of age 0 are averaged. Returns (models, ages).
    """
    models, ages = list(models), [0] * len(models)
    for s, r in pushes:
        a, b = (ages[s], ages[r]) if ages[s] + ages[r] else (1, 1)
        models[r] = train((a * models[s] + b * models[r]) / (a + b), r)
        ages[r] = max(ages[s], ages[r]) + 1
    return models, ages


# ---- asynchrony: FedAsync, FedBuff -------------------------------------------------------------


def constant():
    return lambda d: 1.0


def polynomial(a):
    """(d + 1)^-a"""
    return lambda d: (d + 1.0) ** -a


def hinge(a, b):
    """1 while d <= b, then 1 / (a (d - b) + 1)."""
    return lambda d: 1.0 if d <= b else 1.0 / (a * (d - b) + 1)


def durations(work, speed, delays=None):
    """duration(client, j) of its j-th task, from 0: work / speed + delays[client][j], which repeat.

    Delays are the way to the client and back. Times that should tie are best whole numbers.
    """

    def duration(k, j):
        return work[k] / speed[k] + (delays[k][j % len(delays[k])] if delays is not None else 0)

    return duration


def event_queue(w0, train, server, duration, first, count, then=None, ties="all"):
    """`count` arrivals. server(w, staleness, received, trained, client) -> new w, None: not yet.

    `first` receive w0 at time 0 in that order; the i-th arrival (from 0), of client k, sends the
    model to then(i, k) (None: to k again) at that very time. duration(client, j) > 0.
    staleness: how often the server has changed its model since the client received it, 0 if not.
    Arrivals at the same time (exactly) are taken by client, then by who started first, and
      ties "all": all of them, and only then the server sends models;
           "one": after each the server sends its model, before it looks at the next.
    Returns (models, log) after every arrival; log: (time, client, version received, staleness).
    """
    w, version, number = w0, 0, 0
    waiting, tasks, models, log = [], {}, [], []  # waiting: (time, client, number, version, model)

    to_send, now = list(first), 0
    while True:
        for k in to_send:
            finish = now + duration(k, tasks.get(k, 0))
            if finish <= now:
                raise ValueError("a task takes time")
            waiting.append((finish, k, number, version, w))
            tasks[k] = tasks.get(k, 0) + 1
            number += 1
        now = min(job[0] for job in waiting)
        arrived = sorted((job for job in waiting if job[0] == now), key=lambda job: job[1:3])
        to_send = []
        for job in arrived if ties == "all" else arrived[:1]:
            waiting = [other for other in waiting if other[2] != job[2]]
            _, k, _, born, received = job
            new = server(w, version - born, received, train(received, k), k)
            log.append((now, k, born, version - born))
            if new is not None:
                w, version = new, version + 1
            models.append(w)
            to_send.append(k if then is None else then(len(log) - 1, k))
            if len(log) == count:
                return models, log


def fedasync(w0, train, duration, first, count, alpha, s=None, offset=0, then=None, ties="all"):
    """FedAsync (mora.md 3e): w <- (1 - a) w + a w_k, a = alpha s(staleness + offset).

    offset 0: a model that is not stale has s(0). Read literally, with t the number of the model
    being made, t - tau is 1 then: offset 1. The proximal term is the business of `train`.
    """
    s = s or constant()

    def server(w, staleness, received, trained, k):
        a = alpha * s(staleness + offset)
        return (1 - a) * w + a * trained

    return event_queue(w0, train, server, duration, first, count, then, ties)


def fedbuff(
    w0, train, duration, first, count, buffer, lr=1.0, s=None, sizes=None, then=None, ties="all"
):
    """FedBuff (Nguyen et al. 2022, as recalled): w <- w + lr mean of s(staleness) (w_k - received).

    After every `buffer` arrivals; the divisor is their number, not the sum of s. `s` None: 1 /
    sqrt(1 + staleness). With `sizes`: sum of n_k s_k change_k / sum of n_k. A client may be in the
    buffer twice. Staleness counts changes of the server's model and is taken on arrival.
    """
    s, held = s or polynomial(0.5), []

    def server(w, staleness, received, trained, k):
        held.append((1.0 if sizes is None else sizes[k], s(staleness) * (trained - received)))
        if len(held) < buffer:
            return None
        step = mean([change for _, change in held], [n for n, _ in held])
        held.clear()
        return w + lr * step

    return event_queue(w0, train, server, duration, first, count, then, ties)


# ---- attacks (2.12) ----------------------------------------------------------------------------

CIFAR10_SWAPS = {"planes": [(0, 2)], "cats": [(3, 5)], "both": [(0, 2), (3, 5)]}


def flip_map(classes, pairs):
    """Label flipping: new = map[old], the classes of each pair swapped."""
    new = np.arange(classes)
    if len({c for pair in pairs for c in pair}) != 2 * len(pairs):
        raise ValueError("a class is in two pairs")
    for a, b in pairs:
        new[a], new[b] = b, a
    return new


def intra_pairs(coarse, rng, classes=20):
    """INTRA_SC: pairs inside a superclass, one from each of classes / 2 superclasses."""
    pairs = []
    for group in rng.permutation(max(coarse) + 1)[: classes // 2]:
        own = [c for c in range(len(coarse)) if coarse[c] == group]
        pairs.append(tuple(int(c) for c in rng.choice(own, 2, replace=False)))
    return pairs


def extra_pairs(coarse, rng):
    """EXTRA_SC: one class of every superclass, paired at random: always across superclasses."""
    chosen = []
    for group in rng.permutation(max(coarse) + 1):
        chosen.append(int(rng.choice([c for c in range(len(coarse)) if coarse[c] == group])))
    return list(zip(chosen[::2], chosen[1::2], strict=True))


def kind_of_pairs(pairs, coarse):
    """ "intra", "extra" or None, whichever rule drew them."""
    if all(coarse[a] == coarse[b] for a, b in pairs):
        return "intra"
    groups = [coarse[c] for pair in pairs for c in pair]
    return "extra" if len(set(groups)) == len(groups) else None


def nearest(x):
    """The nearest whole number, halves up."""
    return int(np.floor(x + 0.5))


def draw_attackers(groups, share_groups, share_clients, rng):
    """A fraction L_S of the superclients, of each a fraction L of its clients (nearest numbers)."""
    attackers = []
    for i in rng.permutation(len(groups))[: nearest(share_groups * len(groups))]:
        count = nearest(share_clients * len(groups[i]))
        attackers += [int(k) for k in rng.permutation(groups[i])[:count]]
    return sorted(attackers)


def draw_attackers_fedavg(clients, share_groups, share_clients, rng):
    """The same number without superclients: a fraction L_S L of all clients."""
    count = nearest(share_groups * share_clients * clients)
    return sorted(int(k) for k in rng.permutation(clients)[:count])


def flip_maps(attackers, draw, classes, fixed):
    """{attacker: map}; gamma_fixed: one draw() for all; gamma_random: one each, lowest first."""
    shared = draw() if fixed else None
    return {k: flip_map(classes, shared if fixed else draw()) for k in attackers}


def poisoned(train, attackers, factor):
    """Model poisoning: `attackers` hand on received + factor (trained - received).

    factor -1: the sign flipped; 1 / p_k: replacement of the average; in a chain, received is what
    the client before handed on.
    """

    def bad_train(w, k):
        return w + factor * (train(w, k) - w) if k in attackers else train(w, k)

    return bad_train
