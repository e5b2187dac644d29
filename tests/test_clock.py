"""Simulated time: laws, the order of events, FedAsync and FedBuff against NumPy, FedCS and TiFL."""

import functools
import json

import conftest
import jax
import numpy as np
import pytest
import reference_sequence as reference
from jax.flatten_util import ravel_pytree

import fedjax_flat as ff
from fedjax_flat.algorithms.asynchronous import discount
from fedjax_flat.engine import clock as clocks
from fedjax_flat.engine import selection
from fedjax_flat.engine.sampling import draw

CLIENTS = 9


def make(speed="uniform(1, 3)", delay="exponential(0.7)", examples=None, seed=0):
    examples = np.arange(2, 2 + CLIENTS) if examples is None else np.asarray(examples)
    return clocks.clock(clocks.law("speed", speed), clocks.law("delay", delay), examples, seed)


class TestLaws:
    @pytest.mark.parametrize(("text", "mean"), [
        ("constant(2)", 2.0), ("uniform(1, 3)", 2.0), ("exponential(2)", 2.0),
        ("lognormal(2, 0.5)", 2 * np.exp(0.125)),
    ])
    def test_means_on_both_sides(self, text, mean):
        u = (np.arange(100_000) + 0.5) / 100_000
        law = clocks.law("clock.speed", text)
        assert law.at(u).mean() == pytest.approx(mean, rel=1e-3)
        traced = np.asarray(law.at(jax.numpy.asarray(u, jax.numpy.float32)))
        np.testing.assert_allclose(traced[1000:-1000], law.at(u)[1000:-1000], rtol=1e-3)

    @pytest.mark.parametrize(("text", "message"), [
        ("2", r"clock.delay = '2': expected one of constant\(seconds\), uniform"),
        ("uniform(1)", "expected one of"),
        ("constant(x)", "expected one of"),
        ("gaussian(1, 2)", "unknown clock.delay 'gaussian'.*expected one of constant"),
        ("uniform(-1, 2)", "0 or more; time does not run back"),
        ("uniform(3, 2)", "the least seconds first"),
        ("exponential(inf)", "0 or more"),
    ])
    def test_wrong_laws(self, text, message):
        with pytest.raises(ff.UsageError, match=message):
            clocks.law("clock.delay", text)


def by_slot(flights):
    """then(i, client) of the reference: who is sent out at the i-th arrival."""
    order, slots = flights.clients.ravel().tolist(), flights.slot.ravel().tolist()
    return lambda i, client: order[slots.index(slots[i], i + 1)]


ORDER = [3, 0, 5, 6, 2, 8, 4, 1]


class TestFlights:
    def test_order_against_the_reference(self):
        clock = make()
        found = clocks.flights(clock, slots=3, arrivals=2, rounds=20)
        first = [int(found.clients.ravel()[list(found.slot.ravel()).index(s)]) for s in range(3)]
        draws = clocks._uniform(0, "delay")
        delays = [float(clock.delay.at(np.float64(next(draws)))) for _ in range(60)]
        sent = iter(range(60))

        def duration(client, task):
            del task
            return round((clock.work[client] + delays[next(sent)]) * clocks.MICRO)

        count = 30  # of those after the last arrival of a slot it is not known who goes out
        _, log = reference.fedbuff(
            0.0, lambda w, k: w, duration, first, count, 2, then=by_slot(found), ties="one"
        )
        assert [k for _, k, _, _ in log] == found.clients.ravel().tolist()[:count]
        assert [d for *_, d in log] == found.staleness.ravel().tolist()[:count]
        at = np.cumsum(found.seconds)[: count // 2] * clocks.MICRO
        np.testing.assert_allclose(at, [time for time, *_ in log[1::2]], rtol=1e-9)

    def test_longer_begins_like_shorter_and_nobody_is_out_twice(self):
        short = clocks.flights(make(), slots=3, arrivals=2, rounds=7)
        long = clocks.flights(make(), slots=3, arrivals=2, rounds=30)
        np.testing.assert_array_equal(short.clients, long.clients[:7])
        np.testing.assert_array_equal(short.staleness, long.staleness[:7])
        assert all(len(set(row)) == 2 for row in long.clients)
        other = clocks.flights(make(seed=1), slots=3, arrivals=2, rounds=30)
        assert (other.clients != long.clients).any()

    def test_the_order_of_events_is_known(self):
        """Of seed 0; the same on every machine."""
        found = clocks.flights(make(), slots=3, arrivals=1, rounds=8)
        assert found.clients.ravel().tolist() == ORDER

    def test_equal_speeds(self):
        """All come back at once, in the order of dispatch: nobody is fresher than the rest."""
        clock = make("constant(1)", "constant(0)", np.ones(CLIENTS))
        found = clocks.flights(clock, slots=4, arrivals=1, rounds=12)
        assert found.staleness.ravel().tolist() == [0, 1, 2, 3] + [3] * 8
        assert found.slot.ravel().tolist() == [0, 1, 2, 3] * 3
        assert found.seconds.tolist() == [1, 0, 0, 0] * 3

    def test_clients_without_examples_stay_home(self):
        clock = make(examples=[0, 5, 5, 0, 5, 5, 5, 5, 0])
        found = clocks.flights(clock, slots=3, arrivals=2, rounds=40)
        assert set(found.clients.ravel()) == {1, 2, 4, 5, 6, 7}

    def test_too_few_clients(self):
        with pytest.raises(ff.UsageError, match=r"8 clients in flight.*at least 10 clients"):
            clocks.flights(make(), slots=8, arrivals=2, rounds=1)


SIZES = (4, 7, 3, 6, 5, 8, 2, 5, 4)  # of nine clients


@functools.cache
def problem():
    return conftest.Problem(SIZES)


@functools.cache
def trained():
    """train(w, k) of the reference, of vectors: full batches, so that no key matters."""
    one, worker = problem(), problem().client(batch_size=8, epochs=2)
    _, unravel = ravel_pytree(one.variables)

    @jax.jit
    def train(vector, client):
        model = worker.train(
            unravel(vector), one.data.client(client), jax.random.key(0), round=jax.numpy.int32(0)
        ).variables
        return ravel_pytree(model)[0]

    return lambda w, k: np.asarray(train(w.astype(np.float32), np.int32(k)), np.float64)


def run(flights, s, alpha=None, strategy="map", server=None, rounds=None):
    base = problem().fedavg(batch_size=8, epochs=2, server=server, weighting="uniform")
    algorithm = ff.algorithms.asynchronous(base, flights, s, alpha=alpha)
    step = jax.jit(ff.round_step(
        algorithm, clocks.arrivals(flights), ff.cohort_map(strategy, chunk=2), task=problem().task
    ))
    state = ff.init_state(algorithm, problem().variables, CLIENTS, jax.random.key(0))
    models, infos = [], []
    for _ in range(rounds or len(flights.clients)):
        state, info = step(state, problem().data)
        models.append(np.asarray(ravel_pytree(algorithm.models(state.server)["global"])[0]))
        infos.append(info)
    return models, infos


def expected(flights, *, alpha=None, s=None):
    """(models, log) of the reference's own queue, in which the i-th arrival is at time i + 1."""
    order, slots = flights.clients.ravel().tolist(), flights.slot.ravel().tolist()
    first = [order[slots.index(i)] for i in range(flights.slots)]
    ends = {k: [i + 1 for i, other in enumerate(order) if other == k] for k in set(order)}
    arrived = []

    def train(w, k):
        arrived.append(k)
        return trained()(w, k)

    duration = lambda client, task: ends[client][task] - len(arrived)
    w0 = np.asarray(ravel_pytree(problem().variables)[0], np.float64)
    last = min(len(order) - 1 - slots[::-1].index(i) for i in range(flights.slots))
    count = last - last % flights.clients.shape[1]  # of later ones it is not known who goes out
    rest = {"s": s, "then": by_slot(flights), "ties": "one"}
    if alpha is not None:
        return reference.fedasync(w0, train, duration, first, count, alpha, **rest)
    return reference.fedbuff(w0, train, duration, first, count, flights.clients.shape[1], **rest)


LAWS = {"constant": (reference.constant(), ()), "polynomial": (reference.polynomial(0.7), (0.7,)),
        "hinge": (reference.hinge(0.5, 1.0), (0.5, 1.0))}


@pytest.mark.parametrize("kind", LAWS)
def test_fedasync_against_numpy(kind):
    s, numbers = LAWS[kind]
    flights = clocks.flights(make(), slots=4, arrivals=1, rounds=16)
    wanted, log = expected(flights, alpha=0.6, s=s)
    found, infos = run(flights, discount(kind, *numbers), alpha=0.6)
    assert len(wanted) > 8
    assert {d for *_, d in log} >= {0, 1, 3}
    for a, b in zip(found, wanted, strict=False):
        np.testing.assert_allclose(a, b, atol=3e-6)
    assert [float(i.metrics["staleness"]) for i in infos[: len(log)]] == [d for *_, d in log]


def test_fedbuff_against_numpy():
    flights = clocks.flights(make(), slots=4, arrivals=2, rounds=10)
    wanted, _ = expected(flights)
    found, infos = run(flights, discount("polynomial", 0.5))
    assert len(wanted) > 8
    for a, b in zip(found, wanted[1::2], strict=False):
        np.testing.assert_allclose(a, b, atol=3e-6)
    assert sum(float(i.metrics["seconds"]) for i in infos) == pytest.approx(flights.seconds.sum())
    assert (flights.staleness == 0).any()
    assert (flights.staleness > 1).any()


def test_vmap_and_map_agree():
    flights = clocks.flights(make(), slots=4, arrivals=2, rounds=4)
    one, _ = run(flights, discount("hinge"))
    other, _ = run(flights, discount("hinge"), strategy="vmap")
    np.testing.assert_allclose(one[-1], other[-1], atol=1e-6)


def test_equal_speeds_and_no_delay_is_the_closed_form():
    """w_t+1 = (1 - a) w_t + a train(w_t-3): four clients in flight, each as late as the others."""
    flights = clocks.flights(
        make("constant(1)", "constant(0)", np.ones(CLIENTS)), slots=4, arrivals=1, rounds=9
    )
    found, _ = run(flights, discount("polynomial", 0.5), alpha=0.5)
    w = [np.asarray(ravel_pytree(problem().variables)[0], np.float64)]
    for t in range(9):
        late = min(t, 3)
        a = 0.5 * (late + 1) ** -0.5
        w.append((1 - a) * w[t] + a * trained()(w[t - late], flights.clients[t, 0]))
    for a, b in zip(found, w[1:], strict=True):
        np.testing.assert_allclose(a, b, atol=3e-6)


def test_lowers_for_accelerators():
    flights = clocks.flights(make(), slots=4, arrivals=2, rounds=3)
    algorithm = ff.algorithms.asynchronous(
        problem().fedavg(), flights, discount("hinge"), alpha=0.5
    )
    step = ff.round_step(
        algorithm, clocks.arrivals(flights), ff.cohort_map("vmap"), task=problem().task
    )
    state = ff.init_state(algorithm, problem().variables, CLIENTS, jax.random.key(0))
    made = jax.export.export(jax.jit(step), platforms=("cuda", "tpu"))(state, problem().data)
    assert "callback" not in made.mlir_module()


def test_one_in_flight_is_sequential_training():
    """Nobody is late, and with alpha = 1 the model is handed on."""
    flights = clocks.flights(make(), slots=1, arrivals=1, rounds=5)
    found, infos = run(flights, discount("constant"), alpha=1.0)
    w = np.asarray(ravel_pytree(problem().variables)[0], np.float64)
    for t in range(5):
        w = trained()(w, flights.clients[t, 0])
        np.testing.assert_allclose(found[t], w, atol=3e-6)
    assert all(float(i.metrics["staleness"]) == 0 for i in infos)


class TestSelection:
    def test_deadline(self):
        clock = make("uniform(0.1, 1)", "exponential(1)")
        sample = selection.deadline(clock, 3, candidates=6, seconds=4.0)
        admitted = 0
        for t in range(30):
            clients, mask = draw(sample, jax.random.key(0), np.int32(t))
            taken = np.asarray(clock.duration(np.int32(t), clients))
            assert len(set(np.asarray(clients).tolist())) == 3
            np.testing.assert_array_equal(np.asarray(mask), taken <= 4.0)
            assert (np.diff(taken) >= 0).all(), "the fastest first"
            admitted += int(mask.sum())
        assert 0 < admitted < 90, "some are too slow"

    def test_tiers(self):
        clock = make("constant(1)", examples=np.array([9, 1, 5, 3, 8, 2, 7, 4, 6]))
        sample = selection.tiers(clock, 2, tiers=3)
        seen = set()
        for t in range(40):
            clients, _ = draw(sample, jax.random.key(1), np.int32(t))
            tier = {int((clock.examples[k] - 1) // 3) for k in np.asarray(clients)}
            assert len(tier) == 1
            assert len(set(np.asarray(clients).tolist())) == 2
            seen |= tier
        assert seen == {0, 1, 2}

    def test_refused(self):
        with pytest.raises(ff.UsageError, match=r"a tier has 3, fewer than cohort.size = 4"):
            selection.tiers(make(), 4, tiers=3)
        with pytest.raises(ff.UsageError, match=r"cohort.candidates = 10: expected between"):
            selection.deadline(make(), 4, candidates=10, seconds=1.0)


def settings(**more):
    return conftest.small_config(
        algorithm__name="fedprox+fedbuff+swa", clock__speed="lognormal(0.01, 1)",
        clock__delay="exponential(1)", partition__clients=30, cohort__size=3,
        server__swa__start=2.0, server__swa__cycle=2,
        **more,
    )


def test_resume_inside_the_queue_is_exact(tmp_path):
    whole = ff.train(settings(), tmp_path / "whole")
    config = settings()
    config.rounds = 3
    ff.train(config, tmp_path / "cut")
    again = ff.train(settings(), tmp_path / "cut")
    ff.testing.assert_same_bits(whole.state.server, again.state.server)
    records = [json.loads(x) for x in (tmp_path / "cut/metrics.jsonl").read_text().splitlines()]
    seconds = [r["seconds"] for r in records if r["split"] == "cohort"]
    assert len(seconds) == 6
    assert all(s > 0 for s in seconds)


@pytest.mark.parametrize(("overrides", "message"), [
    ({"clock__speed": "none", "clock__delay": "constant(0)"},
     "needs a clock: set clock.speed to a law"),
    ({"algorithm__name": "scaffold+fedasync"}, "scaffold sends something else. Choose fedavg"),
    ({"algorithm__name": "fedasync+fedbuff"}, "choose one of fedasync and fedbuff"),
    ({"secure__sum": True}, "secure.sum does not go with fedbuff"),
    ({"clock__delay": "uniform(-1, 1)"}, "time does not run back"),
    ({"partition__clients": 12}, "10 clients in flight and 3 heard of"),
    ({"cohort__sampling": "once"}, "cohort.sampling = 'once' would change nothing: who comes back"),
    ({"algorithm__name": "fedavg", "cohort__tiers": 2}, "cohort.sampling is not tiers"),
    ({"algorithm__name": "fedavg", "clock__speed": "none"}, "clock.delay.*there is no clock"),
])
def test_wrong_settings(overrides, message):
    config = settings()
    for name, value in overrides.items():
        *path, last = name.split("__")
        functools.reduce(lambda node, part: node[part], path, config)[last] = value
    if "swa" not in config.algorithm.name:
        config.server.swa.start, config.server.swa.cycle = 0.75, 10
    with pytest.raises(ff.UsageError, match=message):
        ff.experiment.build(config)


def test_rounds_that_wait_take_as_long_as_the_slowest():
    config = conftest.small_config(clock__speed="uniform(0.01, 0.1)", clock__delay="constant(2)")
    built = ff.experiment.build(config)
    state = built.init()
    _, info = jax.jit(built.step)(state, built.data)
    clients, _ = built.cohort_of(state.key, state.round)
    visited = built.partition.sizes[np.asarray(clients)]
    seconds = float(info.metrics["seconds"])
    assert 2 + 0.01 * visited.max() <= seconds <= 2 + 0.1 * visited.max()
