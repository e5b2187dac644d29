"""Uploads that are trimmed, weighed, clipped, noised or masked: against NumPy, by hand, limits."""

import functools
import logging
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import reference
import reference_methods as ref
import reference_robust as robust_ref
from conftest import assert_close, assert_same_bits, small_config
from methods import algorithm_of, clients, problem

import fedjax_flat as ff
from fedjax_flat import rng, testing
from fedjax_flat.algorithms.private import clipped, epsilon, normals
from fedjax_flat.engine.round import traffic
from fedjax_flat.server.robust import foolsgold_weights, trimmed_mean
from fedjax_flat.wire import masks

fedavg = functools.partial(algorithm_of, "fedavg")
slow = functools.partial(pytest.param, marks=pytest.mark.slow)


def run(algorithm, **options):
    return testing.Run(algorithm, problem(), **options)


def disagreement(run, expected):
    ours = ref.Clients.flat(reference.unpack(run.model.params))
    return np.abs(ours - expected).max() / np.abs(expected).max()


def flat(tree):
    """As the references' vectors: layer by layer, kernel before bias."""
    return ref.Clients.flat(reference.unpack(tree.params))


def attacked(algorithm, attackers, factor):
    """The change of these clients times a factor."""
    (part,) = algorithm.exchanges

    def local(message, state, data, round, key):
        reply = part.local(message, state, data, round, key)
        bad = jnp.isin(jnp.asarray(data.client), jnp.array(attackers))
        scale = jnp.where(bad, factor, 1.0)
        return reply._replace(mean=jax.tree.map(lambda x: scale * x, reply.mean))

    return algorithm._replace(exchanges=(part._replace(local=local),))


# ---- trimmed mean, median, FoolsGold -----------------------------------------------------------


@pytest.mark.parametrize("trim", [0, 1, 2, None])
def test_trimmed_mean_and_median_against_numpy(trim):
    values = np.random.default_rng(0).normal(size=(7, 4, 3)).astype(np.float32)
    present = np.array([True, True, False, True, True, True, False])
    ours = trimmed_mean({"a": jnp.asarray(values)}, jnp.asarray(present), trim)["a"]
    some = values[present].reshape(5, -1)
    theirs = robust_ref.median(some) if trim is None else robust_ref.trimmed_mean(some, trim)
    assert_close(ours, theirs.reshape(4, 3).astype(np.float32))
    for count in (2, 4):  # an even number, and fewer than twice what is to be trimmed
        few = jnp.arange(7) < count
        middle = trimmed_mean(jnp.asarray(values), few, 3)
        theirs = robust_ref.median(values[:count].reshape(count, -1)).reshape(4, 3)
        assert_close(middle, theirs.astype(np.float32))


def test_no_number_is_the_largest():
    values = jnp.array([1.0, jnp.nan, 2.0, 3.0, jnp.inf])
    assert float(trimmed_mean(values, jnp.ones(5, bool), 2)) == 3
    assert float(trimmed_mean(values, jnp.ones(5, bool), None)) == 3
    assert float(trimmed_mean(values, jnp.zeros(5, bool), 1)) == 0


@pytest.mark.parametrize("kappa", [1.0, 0.5])
def test_foolsgold_weights_against_numpy(kappa):
    random = np.random.default_rng(1)
    similar = random.normal(size=(1, 30)) + 0.3 * random.normal(size=(3, 30))
    histories = np.concatenate([random.normal(size=(4, 30)), similar, np.zeros((1, 30))])
    theirs = robust_ref.foolsgold_weights(histories, kappa)
    assert 0 < theirs.sum() < len(theirs)
    absent = np.insert(histories, 2, histories[0], axis=0)  # somebody like the first, not there
    present = np.arange(9) != 2
    ours = foolsgold_weights(jnp.asarray(absent, jnp.float32), jnp.asarray(present), kappa)
    np.testing.assert_allclose(np.asarray(ours)[present], theirs, atol=1e-4)
    alike = jnp.asarray(np.repeat(histories[:1], 4, axis=0) * [[1], [2], [3], [4]], jnp.float32)
    assert not foolsgold_weights(alike, jnp.ones(4, bool)).any()


def test_slsgd_against_numpy():
    """Mixing with alpha is server SGD with that rate; an attacker moves nothing."""
    attacks = {3: robust_ref.scaled(50.0)}
    algorithm = attacked(fedavg(server__learning_rate=0.6), [3], 50.0)
    ours = run(ff.algorithms.robust(algorithm, trim=1))
    assert disagreement(ours, robust_ref.slsgd(clients(), 1, 0.6, attacks)) < 2e-5
    assert disagreement(ours, robust_ref.slsgd(clients(), 0, 0.6, attacks)) > 0.1
    sent = [traffic(r, ours.states[0], ours.data) for r in (ours.algorithm, fedavg())]
    assert sent[0] == sent[1]


@pytest.mark.slow
def test_median_against_numpy():
    attacks = {3: robust_ref.scaled(50.0)}
    ours = run(ff.algorithms.robust(attacked(fedavg(), [3], 50.0)))
    expected = robust_ref.slsgd(clients(), 0, attacks=attacks, centre=robust_ref.median)
    assert disagreement(ours, expected) < 2e-5
    testing.check_padding(ours)
    testing.check_strategies(ours)


@pytest.mark.slow
def test_nothing_trimmed_is_the_plain_mean():
    plain = run(fedavg(algorithm__weighting="uniform"))
    assert_close(run(ff.algorithms.robust(fedavg(), trim=0)).model, plain.model, 1e-6)


@pytest.mark.parametrize("share", ["examples", *map(slow, ("mean", "sum", "normalised"))])
def test_foolsgold_against_numpy(share):
    ours = run(ff.algorithms.foolsgold(fedavg(), share=share))
    expected = robust_ref.foolsgold(clients(), share=share)
    assert disagreement(ours, expected) < 1e-4
    assert disagreement(ours, ref.fedopt(clients(), ref.plain)) > 1e-3
    testing.check_resume(ours)
    assert 0 < float(ours.infos[-1].metrics["foolsgold"]) < 1
    size = sum(x.size for x in jax.tree.leaves(problem().params))
    assert traffic(ours.algorithm, ours.states[0], ours.data) == (32 * size, 32 * size)
    if share == "mean":
        testing.check_padding(ours)


@pytest.mark.slow
def test_foolsgold_by_the_classifier():
    ours = run(ff.algorithms.foolsgold(fedavg(), features="classifier"))
    last = slice(-(5 * 3 + 3), None)
    assert disagreement(ours, robust_ref.foolsgold(clients(), features=last)) < 1e-4
    assert ours.states[-1].server.histories.shape == (7, 18)
    testing.check_strategies(ours)


# ---- privacy -----------------------------------------------------------------------------------


def test_clipping_by_hand():
    tree = {"a": jnp.array([3.0]), "b": jnp.array([[4.0]])}
    assert_close(clipped(tree, 10.0), tree)
    assert_close(clipped(tree, 1.0), {"a": jnp.array([0.6]), "b": jnp.array([[0.8]])})
    assert_close(clipped(tree, 0.0), {"a": jnp.zeros(1), "b": jnp.zeros((1, 1))})
    zeros = {"a": jnp.zeros(2)}
    assert_same_bits(clipped(zeros, 1.0), zeros)


@pytest.mark.parametrize("clip", [0.3, None])
def test_private_fedavg_against_numpy(clip):
    ours = run(ff.algorithms.private(fedavg(), clip=clip, noise=0.5, seed=7))

    def draws(t):
        """The server subtracts the mean of differences; the reference adds that of changes."""
        key = rng.fold(jax.random.key(7), "privacy", 0, t)
        return -flat(normals(key, problem().variables))

    expected = robust_ref.dp_fedavg(clients(), 0.5, draws, bound=clip)
    assert disagreement(ours, expected) < 2e-5
    if clip is None:
        c = clients()
        norms = [np.linalg.norm(c.train(c.w0, b, c.grad) - c.w0) for b in c.cohort(0).values()]
        assert float(ours.infos[0].metrics["privacy_clip"]) == pytest.approx(
            np.median(norms), rel=1e-5
        )
        testing.check_resume(ours)


def test_normal_draws_are_normal():
    drawn = normals(jax.random.key(0), {"a": jnp.zeros((50, 50)), "b": jnp.zeros((2500,))})
    both = np.concatenate([np.asarray(x).ravel() for x in drawn.values()])
    assert abs(both.mean()) < 0.06
    assert abs(both.std() - 1) < 0.05
    assert abs(np.corrcoef(both[:2500], both[2500:])[0, 1]) < 0.1


@pytest.mark.slow
def test_no_noise_and_no_clip_is_the_plain_mean():
    plain = run(fedavg(algorithm__weighting="uniform"))
    loose = ff.algorithms.private(fedavg(), clip=1e6, noise=0.0)
    assert_close(run(loose).model, plain.model, 1e-6)
    counted = run(ff.algorithms.private(fedavg(), clip=1e6, noise=0.0, expected=8.0), rounds=1)
    n = float(counted.infos[0].clients)
    move = lambda model: jax.tree.map(jnp.subtract, model, problem().variables)
    first = run(fedavg(algorithm__weighting="uniform"), rounds=1).model
    assert_close(move(counted.model), jax.tree.map(lambda x: n / 8 * x, move(first)), 1e-6)
    testing.check_padding(run(loose))


def gaussian_epsilon(z, rounds, delta):
    """Mironov's Renyi divergence of Gaussians, and Canonne et al.'s conversion, by hand."""
    orders = np.concatenate([np.linspace(1.05, 11, 400), np.arange(11, 600)])
    spent = rounds * orders / (2 * z**2)
    spent = spent + np.log1p(-1 / orders) - np.log(delta * orders) / (orders - 1)
    return spent.min()


def test_epsilon():
    pytest.importorskip(
        "dp_accounting", reason="the accountant is not here: pip install 'fedjax-flat[privacy]'"
    )
    of = functools.partial(epsilon, clients=1000, delta=1e-5)
    every = of(noise=5.0, cohort=1000, rounds=30, sampling="bernoulli")
    assert every == pytest.approx(gaussian_epsilon(5.0, 30, 1e-5), rel=0.01)
    some = of(noise=1.0, cohort=10, rounds=1000, sampling="bernoulli")
    # RdpAccountant of dp-accounting 0.6.0, composed by hand: q = 0.01, z = 1, 1000 steps
    assert some == pytest.approx(2.101, abs=0.001)
    assert of(noise=1.0, cohort=10, rounds=1000, sampling="uniform") > some
    assert of(noise=2.0, cohort=10, rounds=1000, sampling="bernoulli") < some
    assert of(noise=0.0, cohort=10, rounds=1, sampling="uniform") == math.inf


def test_epsilon_without_the_package(monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "dp_accounting", None)
    with pytest.raises(ff.UsageError, match="needs the package dp-accounting: pip install"):
        epsilon(noise=1.0, clients=9, cohort=3, rounds=1, delta=0.1, sampling="uniform")


# ---- secure sums -------------------------------------------------------------------------------


def test_fixed_point_by_hand():
    x = {"a": jnp.array([1.0, -1, 0.125, 0.375, -2])}
    q = masks.encode(x, 2)
    assert q["a"].tolist() == [4, 2**32 - 4, 0, 2, 2**32 - 8]
    assert masks.decode(q, 2)["a"].tolist() == [1, -1, 0, 0.5, -2]


@pytest.mark.parametrize("lost", [(), (3,), (8, 1, 4)])
def test_masks_cancel_bit_for_bit(lost):
    """Against the reference's masked uploads and exact integer sums, with our draws for its PRG."""
    key, members, slots = jax.random.key(5), [8, 1, 3, 4, 6], [8, 1, -1, 3, 4, 6, -1]
    random = np.random.default_rng(0)
    x = {u: random.integers(0, 2**32, 20).astype(np.uint32) for u in members}
    like = jnp.zeros(20, jnp.uint32)
    of = lambda draw: np.asarray(draw).astype(np.int64)
    own = lambda u: of(masks.own_mask(key, u, like))
    prg = lambda u, v: of(masks.pair_mask(key, u, v, like))
    mask = jax.jit(masks.masked)
    sent = {u: mask(key, u, jnp.asarray(x[u]), jnp.array(slots)) for u in members if u not in lost}
    for u, y in sent.items():
        theirs = robust_ref.masked(u, x[u].astype(np.int64), members, own, prg, 2**32)
        np.testing.assert_array_equal(of(y), theirs)
        assert (np.asarray(y) != x[u]).all()
    total = functools.reduce(jnp.add, sent.values())
    there = jnp.array([u in sent for u in slots])
    opened = jax.jit(masks.unmasked)(key, total, jnp.array(slots), there)
    assert opened.tolist() == [sum(int(x[u][i]) for u in sent) % 2**32 for i in range(20)]
    if lost:  # what is left if nobody recovers
        assert (np.asarray(opened) != np.asarray(masks.unmasked(
            key, total, jnp.where(there, jnp.array(slots), -1), there))).any()


def secured(algorithm=None, *, run_seed=0, **options):
    cohort = ff.uniform(problem().data.num_clients, testing.COHORT)
    members = lambda t: cohort(rng.fold(jax.random.key(run_seed), "cohort", t)).clients
    options = {"largest": 12, "fraction_bits": 24, **options}
    return ff.algorithms.secure(algorithm or fedavg(), members, **options)


def test_secure_fedavg_against_numpy():
    """Clients without examples are in the cohort, and recovered from; so are those that drop out.
    """
    ours = run(secured(dropout=0.4))
    arrives = lambda t, k: float(jax.random.uniform(
        rng.fold(jax.random.key(0), "client", t, k, "drop-out", 0))) >= 0.4
    c = clients()
    lost = [[k for k in c.cohort(t) if not arrives(t, k)] for t in range(testing.ROUNDS)]
    assert any(lost)
    rest = [{k: b for k, b in r.items() if k not in lost[t]} for t, r in enumerate(c.rounds)]
    left = ref.Clients(c.layers(c.w0), c.x, c.y, c.members, rest, c.lr)
    draw = lambda *key: np.random.default_rng(key).integers(0, 2**32, len(c.w0) + 1)
    expected = robust_ref.secure_fedavg(
        c, 24, 32, lambda t: lambda u: draw(t, u, u), lambda t: lambda u, v: draw(t, u, v),
        lost_of=lambda t: lost[t],
    )
    assert disagreement(ours, expected) < 2e-5
    np.testing.assert_allclose(expected, ref.fedopt(left, ref.plain), atol=1e-5)
    empty = [len(r) - len(c.cohort(t)) for t, r in enumerate(c.rounds)]
    assert [float(i.metrics["lost"]) for i in ours.infos] == [
        e + len(gone) for e, gone in zip(empty, lost, strict=True)
    ]
    testing.check_resume(ours)
    size = sum(x.size for x in jax.tree.leaves(problem().params))
    sent = traffic(ours.algorithm, ours.states[0], ours.data)
    assert sent == (32 * (size + testing.COHORT), 32 * size)


@pytest.mark.slow
def test_secure_sums_with_all_clients_at_once():
    testing.check_strategies(run(secured()))


@pytest.mark.slow
def test_too_few_uploads_open_nothing():
    too_few = run(secured(threshold=4, dropout=0.4))
    for before, after, info in zip(too_few.states, too_few.states[1:], too_few.infos, strict=False):
        same = jax.tree.map(lambda a, b: bool((a == b).all()), before.server, after.server)
        assert all(jax.tree.leaves(same)) == (float(info.clients) < 4)


# ---- from settings -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    "settings",
    [
        slow({"secure__sum": True, "privacy__bound": "fixed", "privacy__noise": 0.01}),
        slow({"server__aggregate": "trimmed_mean", "submodel__tiers": (0.5,)}),
        slow({"server__aggregate": "median", "wire__up": "8bit"}),
        slow({"server__aggregate": "foolsgold", "server__foolsgold__features": "classifier"}),
        slow({"privacy__bound": "median", "privacy__noise": 0.01,
              "cohort__sampling": "bernoulli"}),
        slow({"secure__sum": True, "cohort__sampling": "bernoulli", "secure__dropout": 0.2}),
    ],
)
def test_settings_train(settings, tmp_path):
    config = small_config(rounds=4, cohort__size=5, partition__name="iid", **settings)
    records = ff.train(config, tmp_path, progress=False).records
    losses = [r["loss"] for r in records if r["split"] == "test"]
    assert losses[-1] < losses[0]


def test_a_secure_cohort_is_the_engines():
    """Masks would not cancel otherwise: with an exact sum, the run is that without masks."""
    built = ff.build(small_config(secure__sum=True, cohort__size=3))
    message = built.algorithm.exchanges[0].broadcast(built.init().server, jnp.int32(4))
    cohort = built.cohort_of(built.init().key, jnp.int32(4)).clients
    assert message.members.tolist() == cohort.tolist()


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"server__trim": 2}, "server.aggregate is not trimmed_mean"),
        ({"server__aggregate": "trimmed_mean", "server__trim": 5}, "5 from each end of 10 clients"),
        ({"server__aggregate": "trimmed_mean", "server__trim": -1}, "expected 0 or more"),
        ({"server__aggregate": "krum"}, "expected one of mean, trimmed_mean, median, foolsgold"),
        ({"server__foolsgold__kappa": 0.5}, "server.aggregate is not foolsgold"),
        ({"server__aggregate": "median", "secure__sum": True}, "it looks at every upload"),
        ({"server__aggregate": "median", "privacy__bound": "fixed"}, "the noise is that of a sum"),
        ({"server__aggregate": "median", "algorithm__name": "scaffold"}, "this method sums them"),
        ({"server__aggregate": "median", "algorithm__weighting": "uniform"}, "weigh the same"),
        ({"server__aggregate": "median", "submodel__tiers": (0.5,), "submodel__coverage": True},
         "it divides means"),
        ({"privacy__noise": 0.5}, "privacy.bound is none"),
        ({"privacy__bound": "fixed", "privacy__noise": -0.5}, "noise = -0.5: expected 0 or more"),
        ({"privacy__bound": "fixed", "privacy__clip": 0.0}, "clip = 0.0: expected more than 0"),
        ({"privacy__bound": "median", "privacy__clip": 2.0}, "privacy.bound is not fixed"),
        ({"privacy__bound": "median", "secure__sum": True}, "every upload's norm"),
        ({"privacy__bound": "fixed", "algorithm__name": "mime"}, "given away twice"),
        ({"secure__bound": 0.5}, "secure.sum is False"),
        ({"secure__sum": True, "secure__fraction_bits": 30}, "of 32 bits. Lower"),
        ({"secure__sum": True, "secure__threshold": 99}, "a cohort has at most 10 clients"),
        ({"secure__sum": True, "wire__up": "8bit"}, "what is masked cannot be made smaller"),
        ({"secure__sum": True, "submodel__tiers": (0.5,)}, "masks of different shapes"),
    ],
)
def test_refused(settings, message):
    def trace():
        built = ff.build(small_config(**settings))
        jax.eval_shape(built.step, built.init(), built.data)

    with pytest.raises(ff.UsageError, match=message):
        trace()


def test_epsilon_is_logged(caplog, monkeypatch):
    from fedjax_flat.experiment import method

    asked = {}
    monkeypatch.setattr(method, "epsilon", lambda **given: asked.update(given) or 2.5)
    caplog.set_level(logging.INFO, "fedjax_flat")
    ff.build(small_config(privacy__bound="fixed", privacy__delta=1e-5))
    assert "privacy: epsilon = 2.5 at delta = 1e-05 after 6 rounds" in caplog.text
    assert asked == {"noise": 1.0, "clients": 20, "cohort": 10, "rounds": 6, "delta": 1e-5,
                     "sampling": "uniform"}
