"""Directions, grids, planes and lines."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import Problem, assert_close

import fedjax_flat as ff
from fedjax_flat import curvature, landscape

KEY = jax.random.key(0)


@pytest.fixture(scope="module")
def problem():
    return Problem((23,), hidden=(4, 3))


@pytest.fixture(scope="module")
def loss(problem):
    return curvature.of_examples(problem.task, problem.dataset.train, batch_size=5)


def quadratic(function):
    """A DataLoss of one example whose loss is `function(params)`."""
    return curvature.data_loss(lambda p, b: function(p) + 0 * jnp.sum(b), jnp.zeros((1, 1)))


def test_centre_of_a_surface_is_the_loss_exactly(problem, loss):
    axis = landscape.symmetric(1.0, 5)
    assert axis[2] == 0
    np.testing.assert_array_equal(axis, -axis[::-1])
    directions = tuple(
        landscape.filter_normalised(k, problem.params) for k in jax.random.split(KEY)
    )
    surface = landscape.grid(loss, problem.params, directions, axis, axis)
    means = loss.means(problem.params)
    assert surface.loss[2, 2] == float(means["loss"])
    assert surface.error[2, 2] == 1 - float(means["accuracy"])
    assert np.isfinite(surface.loss).all()


def test_orientation():
    """f = (a - 1)^2 + 10 (b + 2)^2 tells x from y and left from right."""
    loss = quadratic(lambda p: (p["a"] - 1) ** 2 + 10 * (p["b"] + 2) ** 2)
    zero, one = jnp.float32(0), jnp.float32(1)
    x, y = np.array([0.0, 1.0, 2.0]), np.array([-2.0, 0.0])
    found = landscape.grid(
        loss, {"a": zero, "b": zero}, ({"a": one, "b": zero}, {"a": zero, "b": one}), x, y
    )
    expected = (x[:, None] - 1) ** 2 + 10 * (y[None, :] + 2) ** 2
    np.testing.assert_allclose(found.loss, expected, rtol=1e-6)


def test_an_unfinished_grid_goes_on_where_it_stopped(problem, loss):
    axis = landscape.symmetric(0.5, 3)
    directions = (problem.params, jax.tree.map(jnp.ones_like, problem.params))
    seen = []
    whole = landscape.grid(
        loss, problem.params, directions, axis, axis, after_row=lambda g: seen.append(g)
    )
    rows = []
    again = landscape.grid(
        loss, problem.params, directions, axis, axis, start=seen[1],
        progress=lambda missing: rows.extend(missing) or missing,
    )
    assert rows == [2]
    np.testing.assert_array_equal(again.loss, whole.loss)


def rescaled(params, a):
    """The same function: layer 1 times a, layer 2 divided by a (biases of layer 1 too)."""
    out = jax.tree.map(lambda w: w, params)
    names = [n for n in out if n != "classifier"]
    first, second = names[0], names[1]
    out[first] = jax.tree.map(lambda w: a * w, out[first])
    out[second] = {**out[second], "kernel": out[second]["kernel"] / a}
    return out


def test_rescaling_layers_leaves_a_filter_normalised_surface_alone(problem, loss):
    other = rescaled(problem.params, 8.0)
    assert float(loss.value(other)) == pytest.approx(float(loss.value(problem.params)), rel=1e-5)
    axis = landscape.symmetric(1.0, 3)
    surfaces = []
    for params in (problem.params, other):
        directions = tuple(
            landscape.filter_normalised(k, params) for k in jax.random.split(KEY)
        )
        surfaces.append(landscape.grid(loss, params, directions, axis, axis).loss)
    np.testing.assert_allclose(*surfaces, rtol=1e-4)
    plain = [
        landscape.grid(
            loss, p, (jax.tree.map(jnp.ones_like, p), jax.tree.map(jnp.ones_like, p)), axis, axis
        ).loss
        for p in (problem.params, other)
    ]
    assert np.abs(plain[0] / plain[1] - 1).max() > 0.1


def test_filters_have_the_models_lengths(problem):
    direction = landscape.filter_normalised(KEY, problem.params)
    for name, layer in problem.params.items():
        assert_close(
            jnp.linalg.norm(direction[name]["kernel"], axis=0),
            jnp.linalg.norm(layer["kernel"], axis=0), 1e-5,
        )
        assert not np.any(direction[name]["bias"])
    full = landscape.filter_normalised(KEY, problem.params, one_dimensional=True)
    assert_close(
        jnp.abs(full["classifier"]["bias"]), jnp.abs(problem.params["classifier"]["bias"]), 1e-6
    )


def test_plane_reproduces_its_models(problem, loss):
    models = [problem.model.init(k).params for k in jax.random.split(KEY, 4)]
    plane = landscape.plane(*models)
    assert plane.points.shape == (4, 2)
    np.testing.assert_allclose(plane.points[0], 0, atol=1e-6)
    assert abs(plane.points[1][1]) < 1e-5, "the second model is on the x axis"
    for model, (x, y) in zip(models[:3], plane.points, strict=False):
        found = landscape.grid(
            loss, plane.origin, (plane.u, plane.v), np.array([x]), np.array([y])
        )
        assert found.loss[0, 0] == pytest.approx(float(loss.value(model)), rel=1e-5)
    x, y = landscape.plane_axes(plane, 7)
    assert x[0] < plane.points[:, 0].min() < plane.points[:, 0].max() < x[-1]
    assert y[0] < plane.points[:, 1].min() < plane.points[:, 1].max() < y[-1]


def test_permuted_copy_has_a_barrier_in_the_middle_only(problem, loss):
    """Swapping hidden units keeps the function, but not the points between."""
    params = problem.params
    for _ in range(150):
        params = jax.tree.map(lambda w, g: w - 0.3 * g, params, loss.gradient(params))
    assert float(loss.value(params)) < 0.3
    copy = jax.tree.map(lambda w: w, params)
    names = [n for n in params if n != "classifier"]
    order = jnp.array([2, 3, 0, 1])
    copy[names[0]] = {
        "kernel": params[names[0]]["kernel"][:, order], "bias": params[names[0]]["bias"][order]
    }
    copy[names[1]] = {**params[names[1]], "kernel": params[names[1]]["kernel"][order]}
    between = landscape.line(loss, params, copy, points=11)
    assert between.loss[0] == pytest.approx(between.loss[-1], rel=1e-5)
    assert between.barrier > 0.01
    itself = landscape.line(loss, params, params, points=5)
    assert itself.barrier == pytest.approx(0, abs=1e-5)
    wide = landscape.line(loss, params, copy, points=11, margin=0.2)
    assert wide.x[0] == pytest.approx(-0.2)
    assert wide.x[-1] == pytest.approx(1.2)
    assert wide.barrier == pytest.approx(between.barrier, rel=1e-4)


class TestSharpness:
    """On f = 1/2 (9 a^2 + b^2) at (0, 1) everything is known."""

    loss = staticmethod(
        lambda: quadratic(lambda p: 0.5 * (9 * p["w"][0] ** 2 + p["w"][1] ** 2))
    )
    at = {"w": jnp.array([0.0, 1.0])}  # noqa: RUF012

    def test_first_order_and_ascent(self):
        loss = self.loss()
        assert curvature.sharpness.first_order(loss, self.at, 0.1) == pytest.approx(0.1)
        rise = curvature.sharpness.ascent(loss, self.at, 0.1)
        assert rise == pytest.approx(0.5 * 1.1**2 - 0.5, rel=1e-4)

    def test_projected_ascent_finds_the_steep_axis(self):
        """From a point a little off it, the ascent turns towards the curvature of 9."""
        loss, at = self.loss(), {"w": jnp.array([0.01, 0.1])}
        one = curvature.sharpness.ascent(loss, at, 0.5)
        many = curvature.sharpness.projected_ascent(loss, at, 0.5, steps=20)
        best = max(
            4.5 * (0.01 + 0.5 * np.cos(t)) ** 2 + 0.5 * (0.1 + 0.5 * np.sin(t)) ** 2
            for t in np.linspace(0, 2 * np.pi, 1000)
        ) - (4.5 * 0.01**2 + 0.5 * 0.1**2)
        assert one < many <= best + 1e-5
        assert many > 0.9 * best

    def test_random_directions_stay_below_the_maximum(self):
        rise = curvature.sharpness.random_direction(self.loss(), self.at, 0.1, key=KEY)
        assert -0.2 < rise < 0.5 * 1.1**2 - 0.5 + 4.5 * 0.01

    def test_adaptive_ascent_of_a_network(self, problem, loss):
        assert curvature.sharpness.ascent(loss, problem.params, 0.1, eta=0.2) > 0


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: landscape.symmetric(1.0, 20), "20 points has no centre"),
        (lambda: landscape.symmetric(-1.0, 21), "radius = -1.0"),
        (lambda: landscape.plane(*({"w": jnp.array([i, 2.0 * i])} for i in (0.0, 1.0, 2.0))),
         "lie on a line"),
        (lambda: landscape.plane(*({"w": jnp.zeros(2)},) * 3), "the same model"),
        (lambda: landscape.plane({"w": jnp.zeros(2)}, {"w": jnp.zeros(3)}, {"w": jnp.ones(2)}),
         "different shapes .2 and 3 parameters"),
        (lambda: landscape.line(quadratic(lambda p: jnp.log(p["w"])), {"w": jnp.float32(-1)},
                                {"w": jnp.float32(1)}), "loss at the centre is nan"),
    ],
)
def test_wrong_inputs(make, message):
    with pytest.raises(ff.UsageError, match=message):
        make()
