"""SAM and ASAM against NumPy, and their limits."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import reference
from conftest import Problem, assert_close, assert_same_bits
from test_fedavg import SIZES, largest_difference, randomness, reference_data

import fedjax_flat as ff
from fedjax_flat import UsageError

ASAM = {"rho": 0.7, "eta": 0.2}


def random_tree(seed):
    rng = np.random.default_rng(seed)
    scale = 10.0 ** rng.uniform(-6, 3)
    shapes = {"kernel": (3, 4), "bias": (4,), "conv": (2, 2, 1, 3), "scale": (3,)}
    return {k: jnp.asarray(scale * rng.normal(size=s), jnp.float32) for k, s in shapes.items()}


def ascent(transform, params, grads, round=0):
    """The perturbation a transform adds to `params`: with grad_fn(p) = p, what comes out less w."""
    seen, _ = transform.update(
        grads, transform.init(params), params, grad_fn=lambda p: p, round=jnp.int32(round)
    )
    return jax.tree.map(jnp.subtract, seen, params)


@pytest.mark.parametrize(
    ("transform", "gradient"),
    [
        (ff.client.sam(0.1), functools.partial(reference.sam_gradient, rho=0.1)),
        (ff.client.asam(**ASAM), functools.partial(reference.asam_gradient, **ASAM)),
        (
            ff.client.asam(**ASAM, scale="all"),
            functools.partial(reference.asam_gradient, **ASAM, biases=True),
        ),
    ],
    ids=["sam", "asam", "asam of all parameters"],
)
class TestAgainstNumPy:
    def test_one_gradient(self, transform, gradient):
        problem = Problem((6,))
        x, y = reference_data(problem)

        def grad_fn(p):
            layers = reference.unpack(p)
            g = reference.mean_gradient(layers, x, y)
            names = [n for n in p if n != "classifier"] + ["classifier"]
            return {n: {"kernel": jnp.float32(w), "bias": jnp.float32(b)}
                    for n, (w, b) in zip(names, g, strict=True)}

        params = problem.params
        got, _ = transform.update(
            grad_fn(params), transform.init(params), params, grad_fn=grad_fn, round=jnp.int32(0)
        )
        assert largest_difference(got, gradient(reference.unpack(params), x, y)) < 1e-6

    def test_federated_with_momentum_and_weight_decay(self, transform, gradient):
        """Both passes see one batch, and the ascent sees no weight decay."""
        problem = Problem(SIZES)
        local = {"momentum": 0.9, "weight_decay": 0.01}
        client = ff.client.sgd(0.1, **local)
        algorithm = problem.fedavg(client=client, sharpness=transform)
        state, _ = problem.run(algorithm, 2, cohort=3)
        drawn = randomness(problem, rounds=2, cohort=3, batch_size=4, epochs=1)
        expected = reference.fedavg(
            reference.unpack(problem.params), *reference_data(problem), drawn, lr=0.1,
            gradient=gradient, **local,
        )
        assert largest_difference(state.server.model.params, expected) < 1e-5


@pytest.mark.parametrize("strategy", ["map", "vmap"])
@pytest.mark.parametrize("transform", [ff.client.sam(0.0), ff.client.asam(0.0, 0.2)])
def test_without_radius_it_is_fedavg_bit_for_bit(transform, strategy):
    problem = Problem(SIZES)
    client = ff.client.sgd(0.3, weight_decay=0.01)
    sharp, plain = problem.fedavg(client=client, sharpness=transform), problem.fedavg(client=client)
    a, _ = problem.run(sharp, 3, cohort=4, strategy=strategy)
    b, _ = problem.run(plain, 3, cohort=4, strategy=strategy)
    assert_same_bits(a, b)


@pytest.mark.parametrize("seed", range(5))
def test_length_of_the_perturbation_is_rho(seed):
    grads = random_tree(seed)
    zero = jax.tree.map(jnp.zeros_like, grads)
    eps = ascent(ff.client.sam(0.3), zero, grads)
    assert float(optax.tree.norm(eps)) == pytest.approx(0.3, rel=1e-6)


@pytest.mark.parametrize("seed", range(3))
def test_asam_with_unit_scale_is_sam(seed):
    """At w = 0 with eta = 1, T is 1 everywhere."""
    grads = random_tree(seed)
    zero = jax.tree.map(jnp.zeros_like, grads)
    for scale in ("kernels", "all"):
        assert_same_bits(
            ascent(ff.client.asam(0.3, 1.0, scale=scale), zero, grads),
            ascent(ff.client.sam(0.3), zero, grads),
        )


def test_asam_scales_kernels_only_unless_asked():
    params = {"kernel": jnp.full((2, 2), 3.0), "bias": jnp.full((2,), 3.0)}
    grads = {"kernel": jnp.full((2, 2), 1e-3), "bias": jnp.full((2,), 1e-3)}
    plain = ascent(ff.client.asam(0.1, 1.0), params, grads)
    assert float(plain["kernel"][0, 0] / plain["bias"][0]) == pytest.approx(16, rel=1e-3)
    scaled = ascent(ff.client.asam(0.1, 1.0, scale="all"), params, grads)
    assert float(scaled["kernel"][0, 0] / scaled["bias"][0]) == pytest.approx(1, rel=1e-3)


def test_adaptive_sharpness_does_not_see_a_rescaling_of_layers():
    """Scaling layer 1 by a and layer 2 by 1/a leaves the function, and ASAM's worst loss, alone."""

    def loss(params):
        x = jnp.linspace(-1, 1, 12, dtype=jnp.float32).reshape(4, 3)
        return jnp.sum(jnp.square(jax.nn.relu(x @ params["a"]) @ params["b"] - 1.0))

    def worst(transform, params):
        moved, _ = transform.update(
            jax.grad(loss)(params), transform.init(params), params, grad_fn=lambda p: p
        )
        return float(loss(moved) - loss(params))

    rng = np.random.default_rng(0)
    params = {
        "a": jnp.asarray(rng.normal(size=(3, 5)), jnp.float32),
        "b": jnp.asarray(rng.normal(size=(5, 1)), jnp.float32),
    }
    rescaled = {"a": 8.0 * params["a"], "b": params["b"] / 8.0}
    assert float(loss(params)) == pytest.approx(float(loss(rescaled)), rel=1e-6)
    adaptive, plain = ff.client.asam(0.1, 0.0), ff.client.sam(0.1)
    assert worst(adaptive, params) == pytest.approx(worst(adaptive, rescaled), rel=1e-4)
    assert abs(worst(plain, params) / worst(plain, rescaled) - 1) > 0.2


@pytest.mark.parametrize("transform", [ff.client.sam(0.5), ff.client.asam(0.5, 0.2)])
def test_a_zero_gradient_moves_nothing(transform):
    params = random_tree(0)
    zero = jax.tree.map(jnp.zeros_like, params)
    assert_same_bits(ascent(transform, params, zero), zero)


def test_radius_warms_up():
    rho = ff.client.warm_up(0.001, 0.2, 4)
    values = [float(rho(jnp.int32(r))) for r in range(6)]
    expected = [0.001 + 0.199 * t / 4 for t in (1, 2, 3)] + [0.2, 0.2, 0.2]
    np.testing.assert_allclose(values, expected, rtol=1e-6)
    zero, grads = (jax.tree.map(f, random_tree(0)) for f in (jnp.zeros_like, jnp.asarray))
    lengths = [float(optax.tree.norm(ascent(ff.client.sam(rho), zero, grads, r))) for r in (0, 5)]
    np.testing.assert_allclose(lengths, [expected[0], 0.2], rtol=1e-5)


def test_training_loss_is_the_one_at_w():
    problem = Problem((6,))
    _, sharp = problem.run(problem.fedavg(sharpness=ff.client.sam(0.5), batch_size=6), 1)
    _, plain = problem.run(problem.fedavg(batch_size=6), 1)
    assert_close(sharp.report, plain.report, 1e-6)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: ff.client.sam(-0.1), "rho = -0.1"),
        (lambda: ff.client.asam(0.1, -1.0), "eta = -1.0"),
        (lambda: ff.client.asam(0.1, 0.2, scale="kernel"), "'kernels'"),
    ],
)
def test_impossible_radii_are_refused(make, message):
    with pytest.raises(UsageError, match=message):
        make()
