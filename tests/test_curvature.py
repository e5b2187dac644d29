"""Hessian products and spectra against dense Hessians, closed forms and known matrices."""

import logging

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import Problem, assert_close, assert_same_bits
from jax.flatten_util import ravel_pytree

import fedjax_flat as ff
from fedjax_flat import curvature, memory
from fedjax_flat.curvature import Operator, spectrum
from fedjax_flat.curvature.data_loss import _compiled, _in_evaluation
from fedjax_flat.models import Variables

KEY = jax.random.key(0)


def matrix_operator(values, seed=0):
    """(operator, matrix) with a known spectrum in a random basis, float32."""
    rng = np.random.default_rng(seed)
    q, _ = np.linalg.qr(rng.normal(size=(len(values), len(values))))
    matrix = jnp.asarray(q @ np.diag(values) @ q.T, jnp.float32)
    product = jax.jit(lambda v: matrix @ v)
    return Operator(product, len(values), jnp.float32, lambda v: v)


@pytest.fixture(scope="module")
def network():
    """(loss, params, dense Hessian) of a small network on 23 examples in batches of 5."""
    problem = Problem((23,), hidden=(3,))
    loss = curvature.of_examples(problem.task, problem.dataset.train, batch_size=5)
    flat, unravel = ravel_pytree(problem.params)
    whole = ff.data.Batch(
        jnp.asarray(problem.dataset.train.inputs), jnp.asarray(problem.dataset.train.labels),
        jnp.ones(23, bool),
    )
    value = lambda w: problem.task.evaluate(Variables(unravel(w)), whole)["loss"] / 23
    dense = jax.hessian(value)(flat)
    return loss, problem.params, np.asarray(dense, np.float64)


def residuals_of(dense, found):
    """||H v - lambda v|| in double precision."""
    vectors = np.asarray(found.vectors, np.float64)
    return np.linalg.norm(vectors @ dense - found.values[:, None] * vectors, axis=1)


def loss_at(problem, params):
    """The mean loss over all examples in one batch, in double precision."""
    train = problem.dataset.train
    stored = ff.data.Batch(jnp.asarray(train.inputs), jnp.asarray(train.labels), jnp.ones(23, bool))
    batch = problem.task.prepare(stored, None)
    batch = batch._replace(inputs=batch.inputs.astype(jnp.float64))
    outputs = problem.task.forward(Variables(params), batch, None)
    return problem.task.measure(outputs, batch)["loss"] / 23


@pytest.mark.slow
def test_a_clients_loss_is_that_of_its_examples():
    problem = Problem((7, 12, 4), hidden=(3,))
    data = problem.data
    for k in range(3):
        own = curvature.of_client(problem.task, data, k, batch_size=5)
        index = data.indices[data.offsets[k] : data.offsets[k] + data.sizes[k]]
        examples = ff.data.Examples(data.examples.inputs[index], data.examples.labels[index])
        same = curvature.of_examples(problem.task, examples, batch_size=100)
        assert own.examples == same.examples == (7, 12, 4)[k]
        np.testing.assert_allclose(
            own.value(problem.params), same.value(problem.params), rtol=1e-6
        )
        assert_close(own.gradient(problem.params), same.gradient(problem.params))


def test_losses_of_one_network_share_their_executables():
    problem = Problem((7, 12, 4), hidden=(3,))
    for k in range(3):
        curvature.of_client(problem.task, problem.data, k).gradient(problem.params)
    measure = _in_evaluation(problem.task, "float32")
    assert _compiled(measure)["gradient"]._cache_size() == 1


class TestProduct:
    def test_uneven_batches_equal_the_dense_hessian(self, network):
        loss, params, dense = network
        assert loss.examples == 23
        operator = curvature.flat_hessian(loss, params)
        vector = jax.random.normal(KEY, (operator.size,))
        np.testing.assert_allclose(
            operator.product(vector), dense @ np.asarray(vector), rtol=1e-4, atol=1e-5
        )

    def test_linearised_once_or_without_the_memory_for_it(self, network, monkeypatch):
        loss, params, _ = network
        vector = jax.tree.map(lambda w: jax.random.normal(KEY, w.shape), params)
        expected = loss.product(params, vector)
        assert_close(loss.hessian(params)(vector), expected, 1e-5)
        monkeypatch.setattr(memory, "free", lambda: memory.Memory(None, 1000))
        assert_same_bits(loss.hessian(params)(vector), expected)

    def test_finite_difference_of_gradients(self, network):
        loss, params, _ = network
        vector = jax.tree.map(lambda w: jax.random.normal(KEY, w.shape), params)
        h = 1e-3
        moved = [jax.tree.map(lambda w, v, s=s: w + s * v, params, vector) for s in (h, -h)]
        plus, minus = (ravel_pytree(loss.gradient(p))[0] for p in moved)
        expected = (np.asarray(plus, float) - np.asarray(minus, float)) / (2 * h)
        got = ravel_pytree(loss.product(params, vector))[0]
        np.testing.assert_allclose(got, expected, rtol=2e-2, atol=5e-3)

    def test_weight_decay_adds_a_multiple_of_the_identity(self, network):
        loss, params, _ = network
        problem = Problem((23,), hidden=(3,))
        decayed = curvature.of_examples(
            problem.task, problem.dataset.train, batch_size=23, weight_decay=0.5
        )
        vector = jax.tree.map(jnp.ones_like, params)
        difference = jax.tree.map(
            lambda a, b: a - b, decayed.product(params, vector), loss.product(params, vector)
        )
        for leaf in jax.tree.leaves(difference):
            np.testing.assert_allclose(leaf, 0.5, atol=1e-4)
        squares = sum(float(jnp.sum(w**2)) for w in jax.tree.leaves(params))
        assert float(decayed.value(params)) == pytest.approx(
            float(loss.value(params)) + 0.25 * squares, rel=1e-5
        )

    @pytest.mark.parametrize("kind", ["linear", "logistic", "softmax"])
    def test_closed_forms(self, kind):
        """X'X / n; X' diag(s (1 - s)) X / n; and the softmax's (diag p - p p') kron x x'."""
        rng = np.random.default_rng(0)
        x = rng.normal(size=(12, 3))
        y = rng.integers(0, 2, 12)

        def mean_loss(w, batch):
            inputs, targets = batch
            if kind == "linear":
                losses = 0.5 * (inputs @ w - targets) ** 2
            elif kind == "logistic":
                z = inputs @ w
                losses = jax.nn.softplus(z) - targets * z
            else:
                logits = inputs @ w.reshape(3, 2)
                picked = jnp.take_along_axis(logits, targets.astype(jnp.int32)[:, None], axis=1)
                losses = jax.nn.logsumexp(logits, axis=1) - picked[:, 0]
            return jnp.mean(losses)

        w = rng.normal(size=6 if kind == "softmax" else 3)
        if kind == "linear":
            dense = x.T @ x / 12
        elif kind == "logistic":
            s = 1 / (1 + np.exp(-x @ w))
            dense = x.T @ np.diag(s * (1 - s)) @ x / 12
        else:
            p = np.exp(x @ w.reshape(3, 2))
            p /= p.sum(1, keepdims=True)
            dense = sum(
                np.kron(np.outer(a, a), np.diag(q) - np.outer(q, q))
                for a, q in zip(x, p, strict=True)
            ) / 12
        data = tuple(jnp.asarray(v, jnp.float32) for v in (x, y))
        loss = curvature.data_loss(mean_loss, data, batch_size=5)
        operator = curvature.flat_hessian(loss, jnp.asarray(w, jnp.float32))
        rows = np.stack([operator.product(e) for e in jnp.eye(len(w))])
        np.testing.assert_allclose(rows, dense, rtol=1e-4, atol=1e-5)


class TestLanczos:
    def test_eigenvalues_of_a_network(self, network):
        loss, params, dense = network
        found = curvature.lanczos(curvature.flat_hessian(loss, params), 8, key=KEY)
        expected = np.linalg.eigvalsh(dense)[::-1][:8]
        np.testing.assert_allclose(found.values, expected, rtol=1e-3, atol=1e-5)
        assert found.converged[:5].all()

    @pytest.mark.parametrize(
        "values",
        [
            np.linspace(1, 20, 20),
            np.r_[-50.0, np.linspace(0, 5, 29)],  # largest in magnitude is negative
            np.r_[5.0, 5.0, 5.0, np.zeros(30)],  # repeated, and rank deficient
            np.r_[3.0, 2.0, 1.0, np.zeros(40)],
        ],
        ids=["spread", "negative", "repeated", "low rank"],
    )
    def test_largest_algebraic(self, values):
        operator = matrix_operator(values)
        found = curvature.lanczos(operator, 3, key=KEY, depth=len(values))
        distinct = np.unique(values)[::-1]
        assert found.values[0] == pytest.approx(distinct[0], rel=1e-4)
        # Of a repeated eigenvalue one copy is in the Krylov space of one vector.
        for value in found.values[found.converged]:
            assert np.abs(distinct - value).min() < 1e-3

    def test_residuals_are_those_of_the_vectors(self, network):
        """Of a dense Hessian; before convergence the recurrence estimates them well."""
        loss, params, dense = network
        operator = curvature.flat_hessian(loss, params)
        found = curvature.lanczos(operator, 4, key=KEY, depth=7, tolerance=1e-6)
        actual = residuals_of(dense, found)
        assert actual.min() > 1e-3
        np.testing.assert_allclose(found.residuals, actual, rtol=1e-3)
        np.testing.assert_allclose(found.estimates, actual, rtol=1e-2)
        assert not found.converged.any()

    def test_rounding_is_part_of_the_residual(self, network):
        """Where the recurrence has ended, its estimate is 0; ||H v - lambda v|| is not."""
        loss, params, dense = network
        operator = curvature.flat_hessian(loss, params)
        found = curvature.lanczos(operator, 4, key=KEY, depth=operator.size, tolerance=0.0)
        actual = residuals_of(dense, found)
        assert found.estimates[0] < 1e-3 * actual[0]
        assert found.residuals[0] == pytest.approx(actual[0], rel=0.5)
        assert not found.converged.any(), "no residual is 0"

    def test_vectors_cost_a_product_each(self):
        operator = matrix_operator(np.linspace(-3, 10, 40))
        solve = lambda **options: curvature.lanczos(operator, 4, key=KEY, depth=12, **options)
        found, some, none = solve(), solve(vectors=2), solve(vectors=0)
        assert (found.products, some.products, none.products) == (16, 14, 12)
        assert_same_bits(some.vectors, found.vectors[:2])
        assert_same_bits(some.residuals, found.residuals[:2])
        assert (len(none.vectors), len(none.residuals)) == (0, 0)
        np.testing.assert_array_equal(none.converged, none.estimates <= 1e-3 * none.values)
        with pytest.raises(ff.UsageError, match="vectors = 5 of 4 eigenvalues: expected 0 to 4"):
            solve(vectors=5)

    def test_start_inside_an_invariant_subspace(self):
        """The identity: every vector is an eigenvector, and the first step breaks down."""
        operator = Operator(lambda v: 2.0 * v, 10, jnp.float32, lambda v: v)
        found = curvature.lanczos(operator, 1, key=KEY)
        assert found.values[0] == pytest.approx(2.0, rel=1e-6)
        assert found.products == 2  # one of them for the residual
        assert np.isfinite(found.residuals).all()
        zero = Operator(jnp.zeros_like, 10, jnp.float32, lambda v: v)
        assert curvature.lanczos(zero, 1, key=KEY).values[0] == 0


    @pytest.mark.slow
    def test_double_precision(self, network):
        """To 1e-9 of a dense float64 Hessian, eight orders below what float32 can tell."""
        problem = Problem((23,), hidden=(3,))
        _, params, dense = network
        with jax.enable_x64(True):
            params = jax.tree.map(lambda w: jnp.asarray(w, jnp.float64), params)
            loss = curvature.of_examples(
                problem.task, problem.dataset.train, batch_size=5, precision="float64"
            )
            operator = curvature.flat_hessian(loss, params)
            assert operator.dtype == jnp.float64
            dense = np.stack([operator.product(row) for row in jnp.eye(operator.size)])
            np.testing.assert_allclose(dense, dense.T, atol=1e-14)
            exact = jax.hessian(
                lambda w: loss_at(problem, operator.unravel(w))
            )(ravel_pytree(params)[0])
            np.testing.assert_allclose(dense, exact, atol=1e-12)
            found = curvature.lanczos(
                operator, 5, key=KEY, depth=operator.size, tolerance=1e-10
            )
        np.testing.assert_allclose(
            found.values, np.linalg.eigvalsh(np.asarray(exact))[::-1][:5], rtol=1e-9
        )

    def test_basis_on_the_host(self, network, monkeypatch, caplog):
        """The same eigenvalues, and the log says where the basis is."""
        loss, params, _ = network
        operator = curvature.flat_hessian(loss, params)
        device = curvature.lanczos(operator, 3, key=KEY)
        small = memory.Memory(device=10_000, host=10**10)
        monkeypatch.setattr(memory, "free", lambda: small)
        with caplog.at_level(logging.INFO, "fedjax_flat"):
            host = curvature.lanczos(operator, 3, key=KEY)
        assert "in host memory" in caplog.text
        np.testing.assert_allclose(host.values, device.values, rtol=1e-4)
        assert host.products == device.products
        monkeypatch.setattr(memory, "free", lambda: memory.Memory(None, 1000))
        with pytest.raises(ff.UsageError, match=r"basis of 23 vectors .* needs .* method without"):
            curvature.lanczos(operator, 3, key=KEY)

    @pytest.mark.parametrize("place", ["device", "host"])
    def test_no_eigenvalue_comes_back_in_a_basis_of_many_blocks(self, place):
        """Large eigenvalues that settle early return as ghosts where orthogonality is lost."""
        exact = np.concatenate([0.6 ** np.arange(8), np.linspace(0, 0.01, 192)])
        found = curvature.lanczos(
            matrix_operator(exact), 8, key=KEY, depth=90, tolerance=0.0, basis_in=place
        )
        assert found.products > 40  # in blocks of 20
        np.testing.assert_allclose(found.values, exact[:8], rtol=1e-4)
        np.testing.assert_allclose(found.vectors @ found.vectors.T, np.eye(8), atol=1e-4)

    def test_matfree_finds_the_same(self, network):
        """A second library, from the same start vector."""
        from matfree import decomp, eig

        loss, params, _ = network
        operator = curvature.flat_hessian(loss, params)
        ours = curvature.lanczos(operator, 4, key=KEY, depth=20, tolerance=0.0)
        start = jax.random.normal(KEY, (operator.size,))
        theirs, _ = eig.eigh_partial(decomp.tridiag_sym(20))(operator.product, start)
        np.testing.assert_allclose(ours.values, np.sort(theirs)[::-1][:4], rtol=1e-4)


def test_vectors_are_made_orthogonal_in_full_precision(monkeypatch):
    """TPUs round factors to bfloat16 unless told otherwise; the network's own products may be."""
    seen = {"basis": set(), "network": set()}

    def noted(where, f):
        def call(*arguments):
            seen[where].add(jax.config.jax_default_matmul_precision)
            return f(*arguments)

        return call

    operator = matrix_operator(np.linspace(-3, 10, 12))
    operator = operator._replace(product=noted("network", operator.product))
    monkeypatch.setattr(
        spectrum, "_without_on_device", noted("basis", spectrum._without_on_device)
    )
    curvature.lanczos(operator, 2, key=KEY, basis_in="device")
    assert seen == {"basis": {"highest"}, "network": {None}}
    step = jax.make_jaxpr(spectrum._power_step)(*map(jnp.ones, (5, 5, 2, (2, 5))))
    assert str(step).count("Precision.HIGHEST") == 2 * str(step).count("dot_general") == 6


@pytest.mark.parametrize("solve", [curvature.lanczos, curvature.power_iteration])
def test_what_was_stopped_goes_on_bit_for_bit(solve):
    operator = matrix_operator(np.linspace(-3, 10, 40))
    rows = []
    keep = lambda vector, first, second: rows.append((vector, first, second))
    whole = solve(operator, 4, key=KEY, after_step=keep)
    for done in (1, len(rows) // 2, len(rows)):
        start = curvature.Found(*(np.array(x) for x in zip(*rows[:done], strict=True)))
        again = solve(operator, 4, key=KEY, start=start)
        assert_same_bits(again[:-1], whole[:-1])


class TestPowerIteration:
    def test_agrees_with_lanczos_on_a_network(self, network):
        loss, params, dense = network
        operator = curvature.flat_hessian(loss, params)
        power = curvature.power_iteration(operator, 2, key=KEY, iterations=200, tolerance=1e-6)
        krylov = curvature.lanczos(operator, 2, key=KEY)
        np.testing.assert_allclose(power.values, krylov.values, rtol=1e-2)
        np.testing.assert_allclose(power.residuals, residuals_of(dense, power), rtol=1e-2)

    def test_finds_the_largest_magnitude_with_its_sign(self):
        operator = matrix_operator(np.r_[-50.0, 20.0, np.linspace(0, 5, 20)])
        found = curvature.power_iteration(operator, 2, key=KEY, iterations=50)
        np.testing.assert_allclose(found.values, [20.0, -50.0], rtol=1e-3)

    def test_at_most_twenty_products_each_by_default(self):
        operator = matrix_operator(np.linspace(9, 10, 30))  # hard: no gap
        found = curvature.power_iteration(operator, 3, key=KEY, tolerance=0.0)
        assert found.products == 60
        assert not found.converged.any()

    def test_zero_matrix(self):
        zero = Operator(jnp.zeros_like, 5, jnp.float32, lambda v: v)
        found = curvature.power_iteration(zero, 2, key=KEY)
        np.testing.assert_array_equal(found.values, 0)


class TestDensityAndTrace:
    def test_two_clusters(self):
        """70 eigenvalues near 0 and 30 near 10."""
        rng = np.random.default_rng(0)
        values = np.r_[rng.normal(0, 0.1, 70), rng.normal(10, 0.1, 30)]
        found = curvature.density(matrix_operator(values), key=KEY, probes=20, depth=20)
        np.testing.assert_allclose(found.weights.sum(1), 1, rtol=1e-6)
        grid = np.linspace(-5, 15, 2001)
        mean, error = found.on(grid, width=0.2)
        step = grid[1] - grid[0]
        assert mean.sum() * step == pytest.approx(1, abs=1e-3)
        upper = (found.weights * (found.nodes > 5)).sum(1)
        assert abs(upper.mean() - 0.3) < 3 * upper.std(ddof=1) / np.sqrt(20) + 1e-3
        assert error.max() > 0

    def test_trace_within_three_standard_errors(self):
        operator = matrix_operator(np.linspace(-2, 7, 60))
        exact = 60 * 2.5
        inside = 0
        for seed in range(20):
            estimate, error = curvature.trace(operator, key=jax.random.key(seed), probes=10)
            inside += abs(estimate - exact) <= 3 * error
        assert inside >= 18

    def test_trace_of_a_diagonal_matrix_is_exact(self):
        diagonal = jnp.arange(5.0)
        operator = Operator(lambda v: diagonal * v, 5, jnp.float32, lambda v: v)
        assert curvature.trace(operator, key=KEY, probes=3) == (10.0, 0.0)


@pytest.mark.parametrize("top", [0, 11])
def test_more_eigenvalues_than_parameters(top):
    operator = matrix_operator(np.ones(10))
    for method in (curvature.lanczos, curvature.power_iteration):
        with pytest.raises(ff.UsageError, match=f"{top} eigenvalues of a Hessian of 10"):
            method(operator, top, key=KEY)


class TestAnyLoss:
    """What JAX users have: a scalar loss of (params, batch), any arrays or iterable of batches."""

    X = np.random.default_rng(0).normal(size=(23, 3)).astype(np.float32)
    Y = (X @ np.array([1.0, -2.0, 0.5])).astype(np.float32)
    DENSE = X.T @ X / 23

    @staticmethod
    def loss(w, batch):
        x, y = batch
        return 0.5 * jnp.mean(jnp.square(x @ w - y))

    def rows(self, found, w):
        operator = curvature.flat_hessian(found, w)
        return np.stack([operator.product(e) for e in jnp.eye(operator.size)])

    @pytest.mark.parametrize("kind", ["arrays", "dict", "list", "generator", "one batch"])
    def test_data_of_every_kind(self, kind):
        """23 examples in batches of 5, 10 and 8, or in one, are the same loss."""
        cuts = [(0, 5), (5, 15), (15, 23)]
        batches = [(self.X[a:b], self.Y[a:b]) for a, b in cuts]
        loss = self.loss
        if kind == "dict":
            loss = lambda w, batch: self.loss(w, (batch["x"], batch["y"]))
        data = {
            "arrays": (self.X, self.Y), "dict": {"x": self.X, "y": self.Y}, "list": batches,
            "generator": (b for b in batches), "one batch": [(self.X, self.Y)],
        }[kind]
        found = curvature.data_loss(loss, data, batch_size=7)
        w = jnp.array([0.3, 0.1, -0.2])
        assert found.examples == 23
        np.testing.assert_allclose(self.rows(found, w), self.DENSE, rtol=1e-4, atol=1e-6)
        residual = self.X @ np.asarray(w) - self.Y
        assert float(found.value(w)) == pytest.approx(0.5 * np.mean(residual**2), rel=1e-5)
        np.testing.assert_allclose(found.gradient(w), self.X.T @ residual / 23, rtol=1e-4)

    def test_flax_nnx(self):
        from flax import nnx

        model = nnx.Linear(3, 1, use_bias=False, rngs=nnx.Rngs(0))
        squared = lambda model, batch: 0.5 * jnp.mean(jnp.square(model(batch[0])[:, 0] - batch[1]))
        loss, params = curvature.from_nnx(squared, model)
        found = curvature.data_loss(loss, (self.X, self.Y))
        np.testing.assert_allclose(self.rows(found, params), self.DENSE, rtol=1e-4, atol=1e-6)
        top = curvature.lanczos(curvature.flat_hessian(found, params), 1, key=KEY, depth=3)
        assert top.values[0] == pytest.approx(np.linalg.eigvalsh(self.DENSE)[-1], rel=1e-4)

    def test_flax_linen_and_a_landscape(self):
        import flax.linen as nn

        module = nn.Dense(1)
        params = module.init(KEY, self.X)

        def loss(params, batch):
            with jax.numpy_rank_promotion("allow"):
                return jnp.mean(jnp.square(module.apply(params, batch[0])[:, 0] - batch[1]))

        found = curvature.data_loss(loss, (self.X, self.Y), batch_size=10)
        direction = ff.landscape.filter_normalised(KEY, params)
        line = ff.landscape.line(
            found, params, jax.tree.map(jnp.add, params, direction), points=3
        )
        assert line.loss[0] == pytest.approx(float(loss(params, (self.X, self.Y))), rel=1e-5)
        assert np.isnan(line.error).all(), "a loss has no score"

    @pytest.mark.parametrize(
        ("loss", "data", "message"),
        [
            (lambda w, b: w * b, np.ones((4, 3)), r"shape \(4, 3\): expected a number"),
            (lambda w, b: 0.0, [], "the data are empty"),
            (lambda w, b: 0.0, (np.ones(3), np.ones(4)), r"arrays of \[3, 4\] examples"),
        ],
    )
    def test_wrong_inputs(self, loss, data, message):
        with pytest.raises(ff.UsageError, match=message):
            curvature.data_loss(loss, data).value(jnp.ones((1, 3)))
