"""What every method becomes in a limit, and where it ends on quadratics."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import quadratic
import reference_methods as ref
from conftest import Problem, assert_close, assert_same_bits
from methods import LIMITS, SAM, Run, algorithm_of, clients, limit_name, problem, run
from reference_released import fedgloss_radii
from test_fedavg import gradient_descent, largest_difference

import fedjax_flat as ff
from fedjax_flat.algorithms.fedgloss import released_radius
from fedjax_flat.testing import RATE as LR
from fedjax_flat.testing import SIZES


@functools.cache
def model_of(name, *settings):
    return Run(name, dict(settings), rounds=3).params


def params_of(name, **settings):
    return model_of(name, *settings.items())


# Beside those of FedGKD, FedMLB and MOON, which add to FedAvg in the same ways.
SLOW = ("fedmax", "fedrs", "feddistill_plus", "gma")


@pytest.mark.parametrize(
    ("limit", "base", "tolerance"),
    [pytest.param(*row, id=limit_name(row[0]), marks=pytest.mark.slow if row[0][0] in SLOW else ())
     for row in LIMITS],
)
def test_limit(limit, base, tolerance):
    (name, settings), (base_name, base_settings) = limit, base
    a, b = params_of(name, **settings), params_of(base_name, **base_settings)
    assert_close(a, b, tolerance) if tolerance else assert_same_bits(a, b)


def test_scaffold_with_equal_control_variates_steps_as_fedavg():
    """Report, task 3: if every client sets c_k = c, the local step is FedAvg's."""
    first = run("scaffold")
    state = first.states[0]
    control = jax.tree.map(lambda w: 0.3 * jnp.ones_like(w), problem().params)
    equal = jax.tree.map(lambda c: jnp.broadcast_to(c, (len(SIZES), *c.shape)), control)
    state = state._replace(server=state.server._replace(control=control), clients=equal)
    after, _ = first.step(state, first.data)
    fedavg = run("fedavg").states[1]
    assert_same_bits(after.server.base.model.params, fedavg.server.model.params)


def test_feddyn_without_regulariser_adds_up_its_steps():
    """alpha -> 0: clients train as in FedAvg, and the server adds (m / K) of all past steps."""
    c = clients()
    w, past = c.w0, 0
    for t in range(3):
        trained = {k: c.train(w, b, c.grad) for k, b in c.cohort(t).items()}
        past = past + sum(v - w for v in trained.values()) / c.num_clients
        w = c.mean(trained) + past
    ours = ref.Clients.flat(ref.reference.unpack(params_of("feddyn", feddyn__alpha=1e-4)))
    np.testing.assert_allclose(ours, w, rtol=1e-3, atol=1e-3)


def test_fedspeed_without_prox_doubles_the_first_step():
    """lambda -> infinity, a = 0: the upload is w_k + (w_k - x)."""
    speed = Run("fedspeed", {"fedspeed__prox": 1e6, "fedspeed__alpha": 0.0}, rounds=1).params
    double = Run("fedavg", {"server__learning_rate": 2.0}, rounds=1).params
    assert_close(speed, double, 1e-5)


@pytest.mark.parametrize("variant", ["paper", "released"])
def test_feddc_without_pull_doubles_the_first_step(variant):
    """No drift and no correction yet: the server adds h_k = w_k - x; released, 1/N of all h_k."""
    dc = Run("feddc", {"feddc__alpha": 0.0, "feddc__variant": variant}, rounds=1).params
    if variant == "paper":
        expected = Run("fedavg", {"server__learning_rate": 2.0}, rounds=1).params
    else:
        c = clients()
        ends = [c.train(c.w0, b, c.grad) - c.w0 for b in c.cohort(0).values()]
        expected = c.w0 + np.mean(ends, axis=0) + np.sum(ends, axis=0) / c.num_clients
        dc = ref.Clients.flat(ref.reference.unpack(dc))
    assert_close(dc, expected, 1e-5)


def test_fedgh_of_one_client_is_fedavg():
    small = Problem((6,))
    params = [small.run(algorithm_of(n, small.task), 2)[0].server.model.params
              for n in ("fedgh", "fedavg")]
    assert_close(*params, 1e-6)


def test_fedadam_on_one_client_is_adam():
    small = Problem((4,))
    settings = {"client__epochs": 1, "server__adaptive__bias_correction": True}
    fedadam = algorithm_of("fedadam", small.task, **settings)
    ours = small.run(fedadam, 4)[0].server.model.params
    adam = ff.algorithms.fedavg(
        small.client(lr=LR), optax.adam(0.01, b1=0.9, b2=0.99, eps=1e-3)
    )
    with jax.numpy_dtype_promotion("standard"):  # optax counts steps in integers
        assert_close(ours, small.run(adam, 4)[0].server.model.params, 1e-6)


def test_fedsgd_is_gradient_descent_on_the_union():
    settings = {"server__learning_rate": 0.3}
    state, _ = problem().run(algorithm_of("fedsgd", **settings), 5)
    assert largest_difference(state.server.model.params, gradient_descent(problem(), 5, 0.3)) < 1e-6


def test_naive_fedgloss_with_one_full_step_is_centralised_sam():
    """All clients, one full-batch step each, no duals: SAM on the mean loss with rate eta_l."""
    small = Problem((6, 3, 5))
    settings = {"client__batch_size": 16, "client__epochs": 1, "fedgloss__duals": False}
    naive = algorithm_of("naivefedgloss", small.task, **settings)
    ours = small.run(naive, 4)[0].server.model.params
    union = Problem((14,))
    union.variables = small.variables
    central = union.run(
        union.fedavg(lr=LR, batch_size=14, sharpness=ff.client.sam(0.15)), 4
    )[0].server.model.params
    assert_close(ours, central, 1e-6)


def test_fedgloss_error_of_its_ascent_is_measured():
    """(4.10): rho times the distance of two unit vectors, at most 2 rho, and rho in round 1."""
    measured = Run("fedgloss", {"fedgloss__measured": True}, rounds=4)
    errors = [float(i.metrics["delta_eps"]) for i in measured.infos]
    assert errors[0] == pytest.approx(0.15, rel=1e-5)  # no direction yet against a unit one
    assert all(0 < e <= 0.3 for e in errors)
    assert_close(measured.params, run("fedgloss").algorithm.models(
        run("fedgloss").states[4].server)["global"].params, 1e-6)


@pytest.mark.parametrize("warmup", [2, 5])
def test_released_fedgloss_has_the_radii_of_its_release(warmup):
    clients, server = fedgloss_radii(8, 0.001, 0.2, 0.01, warmup)
    at = lambda radius: [float(radius(jnp.int32(t))) for t in range(8)]
    ours = ff.client.warm_up(0.001, 0.2, warmup, first=0)
    np.testing.assert_allclose(at(ours), clients, rtol=1e-6)
    np.testing.assert_allclose(at(released_radius(0.01, 0.001, 0.2, warmup)), server, rtol=1e-6)


def test_released_fedgloss_without_a_warm_up_has_constant_radii():
    """The release begins a schedule with T_s = 2."""
    assert fedgloss_radii(3, 0.001, 0.2, 0.15, 1) == ([0.2] * 3, [0.15] * 3)
    one = algorithm_of("fedgloss", fedgloss__variant="released", **SAM, client__rho_warmup=1)
    server = one.init(problem().variables, 7)[0]
    server = server._replace(direction=server.model.params)
    for t in range(3):
        sent = one.exchanges[0].broadcast(server, jnp.int32(t)).params
        moved = optax.tree.norm(optax.tree.sub(sent, server.model.params))
        assert float(moved) == pytest.approx(0.15, rel=1e-5)


def test_conflicts_are_counted_and_harmonised():
    from fedjax_flat.algorithms.fedgh import conflicts, harmonised

    deltas = {"a": {"w": jnp.array([[1.0, 0.0], [-1.0, 1.0], [0.0, 1.0]])},
              "b": {"w": jnp.array([[1.0], [2.0], [3.0]])}}
    assert {k: float(v) for k, v in conflicts(deltas, "before").items()} == {
        "conflicts_before/a": 1.0, "conflicts_before/b": 0.0
    }
    layer = {"w": deltas["a"]["w"]}
    out = np.asarray(harmonised(layer)["w"])
    # (1, 0) off (-1, 1) and back; then neither conflicts with (0, 1)
    np.testing.assert_allclose(out, [[0.5, 0.5], [0.0, 1.0], [0.0, 1.0]], atol=1e-6)


class TestQuadratic:
    """All clients, five full local steps: who finds the optimum of the mean loss."""

    @pytest.mark.parametrize(
        ("name", "settings"),
        [
            ("scaffold", {}),
            ("scaffold", {"scaffold__option": 1}),
            ("feddyn", {"feddyn__alpha": 0.5}),
            ("fedgloss", {"fedgloss__rho": 0.0, "fedgloss__beta": 2.0}),
            ("mime", {"mime__momentum": 0.0}),
        ],
    )
    def test_finds_the_optimum(self, name, settings):
        np.testing.assert_allclose(quadratic.solve(name, **settings), quadratic.OPTIMUM, atol=1e-4)

    def test_fedgloss_stays_within_its_radius(self):
        found = quadratic.solve("fedgloss", fedgloss__rho=0.01, fedgloss__beta=2.0)
        assert np.linalg.norm(found - quadratic.OPTIMUM) < 0.03

    @pytest.mark.parametrize(
        ("name", "settings", "mu"),
        [("fedavg", {}, 0.0), ("fedprox", {"fedprox__mu": 1.0}, 1.0)],
    )
    def test_stops_at_its_biased_point(self, name, settings, mu):
        found, expected = quadratic.solve(name, **settings), quadratic.biased_point(mu)
        np.testing.assert_allclose(found, expected, atol=1e-4)
        assert np.linalg.norm(expected - quadratic.OPTIMUM) > 0.1
