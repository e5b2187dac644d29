"""Clients in sequence, chains and clusters: against NumPy, their limits, messages and errors."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import reference_groups as ref_groups
import reference_methods as ref
import reference_sequence as seq
from conftest import Problem, assert_close, assert_same_bits, small_config
from methods import algorithm_of

import fedjax_flat as ff
from fedjax_flat import experiment, testing
from fedjax_flat.algorithms import fedseq2par
from fedjax_flat.data import Partition
from fedjax_flat.data.federated import shuffled_positions
from fedjax_flat.engine import sampling
from fedjax_flat.experiment import assembly
from fedjax_flat.report import client_groups as report

GROUPS = [[3, 0], [4, 2, 1], [6, 5]]
KEY, ROUNDS = jax.random.key(0), 3
CLUSTERS = np.array([0, 1, 1, 0, 1, 0, 0], np.int32)


@functools.cache
def problem():
    return Problem()


def data_of(groups, passes=1):
    return ff.data.grouped(problem().data, Partition.of(groups), passes=passes)


class Run:
    """Some rounds of an algorithm on the problem's clients in groups."""

    def __init__(self, algorithm, data, sampler, rounds=ROUNDS, chained=False, members=None):
        self.algorithm = algorithm
        over = ff.cohort_map("map")
        self.step = jax.jit(ff.round_step(
            algorithm, sampler, over, task=problem().task, chained=chained
        ))
        members = 1 if chained else members or data.num_clients
        state = ff.init_state(algorithm, problem().variables, members, KEY)
        self.models, self.infos = [], []
        for _ in range(rounds):
            state, info = self.step(state, data)
            self.models.append(algorithm.models(state.server)["global"])
            self.infos.append(info)
        self.state = state


@functools.cache
def in_numpy():
    """The problem's loss in NumPy, whose clients draw the batches that the engine draws."""
    drawn = testing.drawn(problem(), rounds=1)
    params = problem().params
    names = sorted(params)
    layers = [(np.asarray(params[n]["kernel"], float), np.asarray(params[n]["bias"], float))
              for n in names if n != "classifier"]
    head = params["classifier"]
    layers.append((np.asarray(head["kernel"], float), np.asarray(head["bias"], float)))
    return ref.Clients(layers, drawn.x, drawn.y, drawn.members, [], drawn.rate)


def flat(variables):
    c, p = in_numpy(), variables.params
    names = [*(n for n in sorted(p) if n != "classifier"), "classifier"]
    pairs = [(np.asarray(p[n]["kernel"], float), np.asarray(p[n]["bias"], float)) for n in names]
    return c.flat(pairs)


def batches(t, k, turn=0):
    own = in_numpy().members[k]
    key = ff.rng.fold(KEY, "client", t, k)
    if turn:
        key = ff.rng.fold(key, "pass", turn)
    found = []
    for e in range(testing.EPOCHS):
        order = np.asarray(shuffled_positions(ff.rng.fold(key, "shuffle", e), len(own), 12))
        order = order[: len(own)]
        found += [own[order[i : i + 4]] for i in range(0, len(own), 4)]
    return found


class Trainer:
    """`train(w, client)` of the references; it knows the round and how often it saw a client."""

    def __init__(self, per_round, direction=None):
        self.per_round, self.calls, self.seen = per_round, 0, {}
        self.direction = direction or in_numpy().grad

    def __call__(self, w, k):
        t = next(i for i, n in enumerate(np.cumsum(self.per_round)) if self.calls < n)
        self.calls += 1
        turn = self.seen.get((t, k), 0)
        self.seen[t, k] = turn + 1
        return in_numpy().train(w, batches(t, k, turn), self.direction)


def orders(groups, t, chosen):
    """The round's chains, shuffled as the engine shuffles them."""
    found = []
    for g in chosen:
        key = ff.rng.fold(KEY, "group", t, g, "order")
        group = data_of(groups).client(jnp.int32(g)).group.shuffled(key)
        found.append(np.asarray(group.clients)[: int(group.length)].tolist())
    return found


def schedule(groups, sampler, rounds=ROUNDS):
    cohorts = [np.asarray(sampling.draw(sampler, KEY, jnp.int32(t)).clients).tolist()
               for t in range(rounds)]
    return [orders(groups, t, chosen) for t, chosen in enumerate(cohorts)]


def calls(chains, passes=1):
    return [passes * sum(map(len, c)) for c in chains]


def assert_agree(run, expected, tolerance=2e-5):
    for ours, theirs in zip(run.models, expected, strict=True):
        np.testing.assert_allclose(flat(ours), theirs, atol=tolerance * np.abs(theirs).max())


SIZES = list(testing.SIZES)
fedavg = functools.cache(lambda: algorithm_of("fedavg", problem().task))


@pytest.mark.parametrize("passes", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_fedseq_is_numpys(passes):
    sampler = ff.uniform(3, 2)
    run = Run(algorithm_of("fedseq", problem().task), data_of(GROUPS, passes), sampler)
    chains = schedule(GROUPS, sampler)
    assert any(c != sorted(c) for r in chains for c in r), "chains are shuffled"
    train = Trainer(calls(chains, passes))
    assert_agree(run, seq.fedseq(flat(problem().variables), train, SIZES, chains, passes))


@pytest.mark.slow
def test_fedseq_with_sam_and_a_proximal_term():
    """Terms are anchored at what the group received, which FedProx's reference does not do."""
    sampler, c = ff.uniform(3, 2), in_numpy()
    settings = {"client__sharpness": "sam", "client__rho": 0.2}
    run = Run(algorithm_of("fedseq", problem().task, **settings), data_of(GROUPS), sampler, 2)
    chains = schedule(GROUPS, sampler, 2)
    train = Trainer(calls(chains), ref.sam(c, 0.2))
    assert_agree(run, seq.fedseq(flat(problem().variables), train, SIZES, chains))
    prox = algorithm_of("fedprox+fedseq", problem().task, fedprox__mu=0.5)
    run = Run(prox, data_of(GROUPS), sampler, 1)
    w = flat(problem().variables)
    train = Trainer(calls(chains), lambda v, batch: c.grad(v, batch) + 0.5 * (v - w))
    assert_agree(run, seq.fedseq(w, train, SIZES, chains[:1]))


@pytest.mark.parametrize("name", [pytest.param("fedavg", marks=pytest.mark.slow), "feddyn"])
def test_groups_of_one_are_the_method_itself(name):
    """N_S = K, bit for bit, client state and all."""
    alone = algorithm_of(name, problem().task)
    grouped = algorithm_of(f"{name}+fedseq", problem().task)
    sampler = ff.uniform(7, 4)
    a = Run(alone, problem().data, sampler)
    b = Run(grouped, data_of([[k] for k in range(7)]), sampler)
    assert_same_bits(a.state, b.state)


def test_one_group_of_all_is_fedcyclic_and_training_on_the_concatenation():
    one = Run(fedavg(), data_of([list(range(7))]), ff.uniform(1, 1), 2)
    cyclic = Run(
        algorithm_of("fedcyclic", problem().task), problem().data, ff.uniform(7, 7), 2, chained=True
    )
    assert_same_bits(one.models, cyclic.models)
    chains = [orders([list(range(7))], t, [0])[0] for t in range(2)]
    train = Trainer([7, 7])
    w = flat(problem().variables)
    assert_agree(cyclic, seq.fedcyclic(w, train, chains))
    c = in_numpy()
    whole = [b for k in chains[0] for b in batches(0, k)]  # all batches, one after the other
    np.testing.assert_allclose(flat(cyclic.models[0]), c.train(w, whole, c.grad), atol=2e-5)


@pytest.mark.slow
def test_fedcyclic_of_some_clients():
    sampler = ff.uniform(7, 3)
    run = Run(algorithm_of("fedcyclic", problem().task), problem().data, sampler, 2, chained=True)
    for t, info in enumerate(run.infos):
        clients = np.asarray(sampler(ff.rng.fold(KEY, "cohort", t)).clients)
        assert int(info.links) == 2
        assert int(info.examples) == testing.EPOCHS * sum(SIZES[k] for k in clients)


@pytest.mark.parametrize("evaluated", [pytest.param("merged", marks=pytest.mark.slow), "bank"])
def test_fedasyncseq_is_numpys(evaluated):
    sampler = ff.uniform(3, 2)
    algorithm = ff.algorithms.fedasyncseq(
        problem().client(lr=testing.RATE, epochs=2), chains=2, every=2, evaluated=evaluated
    )
    run = Run(algorithm, data_of(GROUPS), sampler, 5)
    chains = schedule(GROUPS, sampler, 5)
    merged, mixed = seq.fedasyncseq(
        flat(problem().variables), Trainer(calls(chains)), SIZES, chains, 2
    )
    assert_agree(run, merged if evaluated == "merged" else mixed)


def test_fedasyncseq_that_merges_in_every_round_is_fedseq():
    """With the same groups drawn; `apart`, which the paper asks for, draws others."""
    client = problem().client(lr=testing.RATE, epochs=2)
    chains = ff.algorithms.fedasyncseq(client, chains=2, every=1)
    a = Run(chains, data_of(GROUPS), ff.uniform(3, 2))
    b = Run(fedavg(), data_of(GROUPS), ff.uniform(3, 2))
    assert_close(a.models, b.models, 1e-6)
    by_default = Run(ff.algorithms.fedasyncseq(client, chains=2), data_of(GROUPS),
                     ff.uniform(3, 2))
    assert_same_bits(by_default.models[1], problem().variables)  # R = N_S = 3
    assert_same_bits(by_default.models[2], by_default.algorithm.models(
        by_default.state.server)["global"])
    assert float(by_default.state.server.mass.sum()) == 0


def test_hierarchies_are_numpys():
    data = problem().data.replace(clusters=jnp.asarray(CLUSTERS))
    rows = np.array([[0, 3, 5, 6], [1, 2, 4, -1]], np.int32)
    sampler = sampling.stratified(rows, 4)
    client = problem().client(lr=testing.RATE, epochs=2)
    make = functools.partial(ff.algorithms.hierfavg, client, clusters=2)
    run = Run(make(every=2), data, sampler, 4)
    cohorts = [np.asarray(sampler(ff.rng.fold(KEY, "cohort", t)).clients) for t in range(4)]
    parted = [[[int(k) for k in c if CLUSTERS[k] == i and SIZES[k]] for i in (0, 1)]
              for c in cohorts]
    assert all(len(c) == 4 and sum(CLUSTERS[c]) == 2 for c in cohorts)
    merged, _ = seq.hierfavg(
        flat(problem().variables), Trainer(calls(parted)), SIZES, parted, 2, weights="seen"
    )
    assert_agree(run, merged)
    every_round = Run(make(every=1), data, sampler)
    assert_close(every_round.models, Run(fedavg(), problem().data, sampler).models, 1e-6)


def test_messages_are_those_of_the_table():
    """C = 2/3 of three groups, of two and three clients; and what a run records of them."""
    sampler, passes = ff.uniform(3, 2), 2
    run = Run(fedavg(), data_of(GROUPS, passes), sampler, 2)
    for info, chains in zip(run.infos, schedule(GROUPS, sampler, 2), strict=True):
        _, _, across = ref_groups.chain_messages([len(c) for c in chains], passes)
        assert float(info.links) == across
    rows = jnp.array([[0, 1, -1], [3, 4, -1], [5, 6, -1]], jnp.int32)
    _, info = run.step(run.state, data_of(GROUPS, passes).replace(groups=rows))
    down, _, across = ref_groups.messages("fedseq", 2 / 3, 6, 3)
    assert (float(info.clients), float(info.links)) == (down, across + 2 * 2)  # twice around
    assert ref_groups.messages("cyclic", 3 / 7, 7)[2] == 2  # as test_fedcyclic_of_some_clients


def test_compiled_work_does_not_grow_with_groups():
    def lines(groups):
        step = ff.round_step(fedavg(), ff.uniform(1, 1), ff.cohort_map("map"), task=problem().task)
        state = ff.init_state(fedavg(), problem().variables, 1, KEY)
        return len(str(jax.make_jaxpr(step)(state, data_of(groups))).splitlines())

    assert lines([[3, 0]]) == lines([[3, 0, 4, 2, 1, 6, 5]])


@pytest.mark.parametrize("law", fedseq2par.__globals__["LAWS"])
@pytest.mark.parametrize("rounding", fedseq2par.__globals__["ROUNDINGS"])
def test_growth_is_numpys(law, rounding):
    growth, stages = (fedseq2par.__globals__[n] for n in ("growth", "stages"))
    found = growth(law, 300, alpha=0.03, beta=5, rounding=rounding)
    expected = [ref_groups.growth(t, law, 0.03, 5, rounding) for t in range(1, 301)]
    np.testing.assert_array_equal(found, expected)
    starts, counts = stages(found, 60)
    curve = ref_groups.growth_curve(300, 60, law, 0.03, 5, rounding)
    at = [counts[np.searchsorted(starts, t, side="right") - 1] for t in range(300)]
    np.testing.assert_array_equal(at, curve)


@pytest.mark.parametrize(("name", "last", "mean"), [
    ("cifar10", 497, 107), ("cifar100", 500, 303), ("femnist", 445, 98), ("shakespeare", 100, 54),
])
def test_growth_of_the_table(name, last, mean):
    """The printed constants give means of about 107, 303, 98 and 54, not all of them printed."""
    clients, rounds, alpha, beta, _, _ = ref_groups.TABLE_5_4[name]
    found = fedseq2par.__globals__["growth"]("exp", rounds, alpha=alpha, beta=beta)
    curve = np.minimum(found, clients)
    assert curve[-1] == pytest.approx(last, abs=3)
    assert curve.mean() == pytest.approx(mean, abs=1.5)


class TestSamplers:
    def cohorts(self, sampler, rounds=40):
        draw = jax.jit(lambda t: sampling.draw(sampler, KEY, t))
        return [draw(jnp.int32(t)) for t in range(rounds)]

    def test_apart(self):
        found = [np.asarray(c.clients) for c in self.cohorts(sampling.apart(9, 4))]
        assert all(len(set(c)) == 4 for c in found)
        assert not any((a == b).any() for a, b in itertools.pairwise(found))
        assert set(np.concatenate(found)) == set(range(9))

    def test_growing(self):
        starts, counts = np.array([0, 10, 20]), np.array([3, 5, 12])
        sampler = sampling.growing(starts, counts, 0.5)
        for t, c in enumerate(self.cohorts(sampler, 30)):
            there = np.asarray(c.clients)[np.asarray(c.mask)]
            n = counts[t // 10]
            assert len(there) == len(set(there)) == max(1, n // 2)
            assert there.max() < n
        longer = sampling.growing(np.array([0, 10, 20, 30]), np.array([3, 5, 12, 40]), 0.5)
        for a, b in zip(self.cohorts(sampler, 30), self.cohorts(longer, 30), strict=True):
            real = int(a.mask.sum())  # later groups change no cohort
            np.testing.assert_array_equal(a.clients[:real], b.clients[:real])

    def test_sizes(self):
        examples = np.array([10, 0, 30, 60])
        found = [int(c.clients[0]) for c in self.cohorts(sampling.sizes(examples, 1), 2000)]
        np.testing.assert_allclose(np.bincount(found) / 2000, examples / 100, atol=0.03)

    def test_wrong(self):
        with pytest.raises(ff.UsageError, match="expected as many of each"):
            sampling.stratified(np.zeros((3, 2), np.int32), 4)


GROWING = {
    "algorithm__name": "fedseq2par", "algorithm__fedseq2par__alpha": 0.5,
    "algorithm__fedseq2par__beta": 2, "cohort__share": 0.5, "groups__name": "icg",
    "groups__estimator": "labels", "partition__alpha": 0.1,
}


@pytest.mark.slow
def test_a_growing_run_is_resumed_bit_for_bit(tmp_path):
    """Stopped between two changes of groups, and continued; its folder says who was with whom."""
    config = small_config(**GROWING)
    whole = ff.train(config, tmp_path / "a", progress=False)
    short = small_config(**GROWING, rounds=3, checkpoint__every=3)
    ff.train(short, tmp_path / "b", progress=False)
    config.checkpoint.every = 3
    resumed = ff.train(config, tmp_path / "b", progress=False)
    assert_same_bits(whole.state, resumed.state)
    kept = Partition.load(tmp_path / "a" / "groups.npz")
    built = experiment.build(config)
    assert kept.content_hash == built.grouping.at(0).content_hash
    assert [built.grouping.at(t).num_clients for t in range(6)] == [2, 3, 4, 6, 10, 15]
    cohorts = [r for r in whole.records if r["split"] == "cohort"]
    assert [r["clients"] for r in cohorts] == [1, 1, 2, 3, 5, 7]
    model = cohorts[0]["bytes_up"]
    assert all(r["bytes_across"] == r["links"] * model for r in cohorts)
    text = report.groups(str(tmp_path / "a"))
    assert "random" in text
    assert "silhouette by largest class: " in text
    for name in ("growth", "distances", "similarity", "embeddings"):
        assert (tmp_path / "a" / "figures" / f"{name}.png").stat().st_size > 5000
    scores = [r["accuracy"] for r in whole.records if r["split"] == "test"]
    text = report.reach([str(tmp_path / "a")], 100 * max(scores), str(tmp_path / "reach.png"))
    at = [r["round"] for r in whole.records if r["split"] == "test"]
    expected = [ref_groups.rounds_to_reach(scores, max(scores), share) for share in (0.7, 0.9)]
    assert [int(x) for x in text.splitlines()[2].split()[1:3]] == [at[i - 1] for i in expected]
    sent = sum(2 * r["clients"] + r["links"] for r in cohorts)
    assert report.messages(whole.records) == sent
    other = small_config(**{**GROWING, "groups__seed": 1})
    with pytest.raises(ff.UsageError, match=r"groups\.seed"):
        ff.train(other, tmp_path / "a", progress=False)


@pytest.mark.parametrize(("settings", "message"), [
    ({"algorithm__name": "fedseq", "groups__examples": 10**6}, "which all clients have together"),
    ({"algorithm__name": "fedseq", "groups__clients": 0}, "groups.clients = 0"),
    ({"algorithm__name": "fedseq", "groups__clients": 20}, "a cohort of 10 from 1 groups"),
    ({"groups__clients": 3}, "algorithm.name has no groups"),
    ({"algorithm__name": "fedseq+fedcyclic"}, "both say who trains"),
    ({"algorithm__name": "fedseq2par", "cohort__share": 0.2, "algorithm__fedseq2par__beta": 21},
     "begins with 21 groups of 20"),
    ({"algorithm__name": "feddyn+fedseq2par", "cohort__share": 0.2}, "those of fedseq2par change"),
    ({"algorithm__name": "fedseq", "groups__metric": "kl"}, "groups.name is not greedy"),
    ({"algorithm__name": "fedseq", "groups__name": "kmeans", "groups__estimator": "labels",
      "groups__clusters": 30}, "clusters = 30 of 20 clients"),
    ({"algorithm__name": "hierfavg", "cohort__size": 5}, "expected as many of each"),
    ({"algorithm__name": "fedasyncseq", "cohort__share": 0.2}, "as many chains"),
    ({"algorithm__name": "fedseq+fedbn", "model__norm": "batch"}, "handed on whole"),
    ({"algorithm__name": "fedseq", "groups__name": "greedi"}, "greedy"),
])
def test_wrong_settings(settings, message):
    with pytest.raises(ff.UsageError, match=message):
        experiment.build(small_config(**settings))


@pytest.mark.slow
def test_clients_on_the_host_give_the_same_groups(tmp_path):
    settings = {"algorithm__name": "fedseq", "cohort__size": 2, "rounds": 2}
    a = ff.train(small_config(**settings), tmp_path / "a", progress=False)
    b = ff.train(small_config(**settings, data__placement="host"), tmp_path / "b", progress=False)
    assert_same_bits(a.state, b.state)


def test_estimates_are_made_once(tmp_path, monkeypatch):
    monkeypatch.setenv("FEDJAX_FLAT_CACHE", str(tmp_path))
    settings = {"algorithm__name": "fedseq", "groups__name": "greedy", "groups__epochs": 1,
                "partition__alpha": 0.0}
    built = experiment.build(small_config(**settings))
    monkeypatch.setattr(
        "fedjax_flat.experiment.grouping.estimator", lambda *a: pytest.fail("made again")
    )
    again = experiment.build(small_config(**settings))
    assert built.grouping.content_hash == again.grouping.content_hash
    labels = np.asarray(built.data.examples.labels)
    first = [labels[built.partition.client(k)[0]] for k in range(20)]  # one class per client
    pairs = [{first[k] for k in built.grouping.at(0).client(g)} for g in range(10)]
    assert sum(len(p) == 2 for p in pairs) >= 9, "classifiers tell classes apart"
    assert assembly.members_in("groups", 20, built.grouping) == 10
