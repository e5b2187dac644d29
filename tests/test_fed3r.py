"""Fed3R, Fed3R-RF and FedNCM: against scikit-learn and NumPy, for any split, order and grouping."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import reference_ridge as ref
from conftest import Problem, assert_same_bits, small_config
from sklearn.kernel_ridge import KernelRidge
from sklearn.linear_model import Ridge
from sklearn.neighbors import NearestCentroid

import fedjax_flat as ff
from fedjax_flat import testing
from fedjax_flat.algorithms import Uploads, closed_form
from fedjax_flat.algorithms.fed3r import solve, statistics
from fedjax_flat.algorithms.fedncm import nearest_mean
from fedjax_flat.engine import sampling
from fedjax_flat.engine.round import traffic
from fedjax_flat.experiment import config as config_lib

CLIENTS, COHORT, WIDTH, CLASSES = 20, 3, 48, 10
ROUNDS = -(-CLIENTS // COHORT)
GROUPINGS_AGREE_TO = 5e-6  # float32 sums within a cohort, in another order


class Digits:
    """The embedded digits, and an untrained network of 48 features."""

    def __init__(self):
        self.dataset = ff.data.load("digits")
        self.model = ff.models.build(
            "mlp", num_classes=CLASSES, inputs=self.dataset.inputs, hidden=(WIDTH,)
        )
        self.task = ff.tasks.classification(self.model, ff.data.preprocess(self.dataset))
        self.variables = jax.jit(self.model.init)(jax.random.key(1))
        worker = ff.client.local_training(self.task, ff.client.sgd(0.1), batch_size=50)
        self.worker = worker
        self.train, self.test = self.dataset.train, self.dataset.test

    @functools.cached_property
    def features(self):
        of = jax.jit(lambda v, x: self.model.apply(v, self.prepared(x)).features)
        return [np.asarray(of(self.variables, s.inputs), float) for s in (self.train, self.test)]

    def prepared(self, x):
        mask = jnp.ones(x.shape[0], bool)
        return self.task.prepare(ff.data.Batch(x, (), mask), None).inputs

    def data(self, alpha, seed=0):
        clients = ff.data.dirichlet(self.train.labels, CLIENTS, alpha=alpha, seed=seed)
        return clients, self.owned_by(clients)

    def owned_by(self, clients):
        """Clients of any sizes in arrays of one shape, so that splits share an executable."""
        data, count = ff.data.federate(self.train, clients), len(self.train.labels)
        indices = jnp.pad(data.indices, (0, count - data.indices.shape[0]))
        return data.replace(indices=indices, max_size=count, equal_sizes=False)

    def start(self, algorithm, seed=0):
        return ff.init_state(algorithm, self.variables, CLIENTS, jax.random.key(seed))


@functools.cache
def digits():
    return Digits()


@functools.cache
def step_of(name, sample=None, **settings):
    make = getattr(ff.algorithms, name)
    algorithm = make(digits().worker, **settings)
    sample = sample or ff.once(CLIENTS, COHORT)
    step = ff.round_step(algorithm, sample, ff.cohort_map("map"), task=digits().task)
    return algorithm, jax.jit(step)


def trained(name, data, rounds=ROUNDS, seed=0, **settings):
    algorithm, step = step_of(name, **settings)
    state, infos = digits().start(algorithm, seed), []
    for _ in range(rounds):
        state, info = step(state, data)
        infos.append(info)
    return state, infos


def head(state):
    classifier = state.server.model.params["classifier"]
    return np.asarray(classifier["kernel"]), np.asarray(classifier["bias"])


def scores(state, split=1):
    kernel, bias = head(state)
    return digits().features[split] @ kernel.astype(float) + bias


@functools.cache
def sklearns_ridge(ridge=0.01):
    """The centralised solution on the same features, of another library."""
    target = ref.one_hot(digits().train.labels, CLASSES)
    fit = Ridge(alpha=ridge, fit_intercept=False, solver="cholesky", tol=0)
    w = fit.fit(digits().features[0], target).coef_.T
    return w / np.linalg.norm(w, axis=0)


@pytest.mark.parametrize("alpha", [0.0, 0.5, 1000.0])
@pytest.mark.parametrize("order", [0, 1])
def test_it_is_centralised_ridge_whatever_the_split_and_the_order(alpha, order):
    state, _ = trained("fed3r", digits().data(alpha, seed=order)[1], seed=order)
    kernel, bias = head(state)
    expected = sklearns_ridge()
    assert np.abs(kernel - expected).max() < 1e-4 * np.abs(expected).max()
    assert not bias.any()
    for split in (0, 1):
        predicted = scores(state, split).argmax(1)
        central = (digits().features[split] @ expected).argmax(1)
        np.testing.assert_array_equal(predicted, central)
    plain, _ = ref.normal_equations(digits().features[0], digits().train.labels, CLASSES, 0.01)
    assert np.abs(kernel - plain).max() < 1e-4 * np.abs(plain).max()


@pytest.mark.parametrize(
    "settings",
    [{"bias": True}, {"variant": "released"}, {"normalised": False},
     {"normalised": False, "bias": True, "ridge": 3.0}],
    ids=str,
)
def test_variants_against_numpy(settings):
    algorithm = ff.algorithms.fed3r(digits().worker, **settings)
    whole = ff.data.whole(digits().train)

    @jax.jit
    def solved(variables, data):
        """One client that has everything."""
        server, counted = algorithm.init(variables, 1)
        (part,) = algorithm.exchanges
        reply = part.local(variables, counted, data, jnp.int32(0), jax.random.key(0))
        uploads = Uploads((), reply.sum, (), jnp.ones(1), jnp.float32(1))
        return part.update(server, uploads, jnp.int32(0))[0].model.params["classifier"]

    given = {"ridge": 0.01, **settings}
    released = given.pop("variant", "") == "released"
    expected = ref.normal_equations(
        digits().features[0], digits().train.labels, CLASSES, **given, released=released
    )
    found = solved(digits().variables, whole)
    for ours, theirs in zip((found["kernel"], found["bias"]), expected, strict=True):
        assert np.abs(np.asarray(ours) - theirs).max() < 1e-4 * np.abs(expected[0]).max()
    assert expected[1].any() == bool(released or settings.get("bias"))


def test_after_every_round_it_is_the_ridge_of_the_clients_so_far():
    clients, data = digits().data(0.0)
    algorithm, step = step_of("fed3r")
    state, own = digits().start(algorithm), []
    for t in range(ROUNDS):
        cohort = sampling.draw(ff.once(CLIENTS, COHORT), state.key, jnp.int32(t))
        mask = np.ones(COHORT, bool) if cohort.mask is None else np.asarray(cohort.mask)
        own += [clients.client(k) for k in np.asarray(cohort.clients)[mask]]
        state, _ = step(state, data)
        if t in (0, 3):
            here = np.concatenate(own)
            x, y = digits().features[0][here], np.asarray(digits().train.labels)[here]
            expected, _ = ref.normal_equations(x, y, CLASSES, 0.01)
            assert np.abs(head(state)[0] - expected).max() < 1e-3
            absent = np.setdiff1d(np.arange(CLASSES), y)
            assert not head(state)[0][:, absent].any(), "a class that nobody has"
    assert len(own) == CLIENTS


def test_the_recursive_form_ends_where_the_sums_do():
    """Equation 3.15, corrected, over clients in any order."""
    clients, data = digits().data(0.5)
    state, _ = trained("fed3r", data)
    x, y = digits().features[0], np.asarray(digits().train.labels)
    order = np.random.default_rng(0).permutation(CLIENTS)
    w = ref.recursive([(x[i], y[i]) for i in map(clients.client, order)], CLASSES, 0.01)
    assert np.abs(head(state)[0] - w / np.linalg.norm(w, axis=0)).max() < 1e-4


def test_it_is_final_after_one_pass():
    data = digits().data(0.5)[1]
    state, infos = trained("fed3r", data)
    assert sum(int(i.clients) for i in infos) == CLIENTS
    again, info = step_of("fed3r")[1](state, data)
    assert_same_bits(again.server, state.server)
    assert int(info.clients) == int(info.examples) == 0
    assert float(info.metrics["bytes_up"]) == 0


def test_nobody_counts_twice_where_clients_are_drawn_again():
    """The worst case of figure 3.9: every round draws from all clients."""
    clients, data = digits().data(1000.0)
    sample = ff.uniform(CLIENTS, 8)
    state, infos = trained("fed3r", data, rounds=4, sample=sample)
    drawn = [set(np.asarray(sampling.draw(sample, jax.random.key(0), jnp.int32(t)).clients)
                 .tolist()) for t in range(4)]
    seen = set.union(*drawn)
    assert sum(map(len, drawn)) > len(seen), "some are drawn again"
    assert set(np.flatnonzero(np.asarray(state.clients)).tolist()) == seen
    assert sum(int(i.clients) for i in infos) == len(seen)
    here = np.concatenate([clients.client(k) for k in seen])
    expected, _ = ref.normal_equations(
        digits().features[0][here], np.asarray(digits().train.labels)[here], CLASSES, 0.01
    )
    assert np.abs(head(state)[0] - expected).max() < 1e-4


@pytest.mark.parametrize(
    ("strategy", "cohort"),
    [("vmap", CLIENTS), *(pytest.param(*case, marks=pytest.mark.slow)
                          for case in (("chunked", 5), ("map", 1)))],
)
def test_sums_under_any_grouping_agree(strategy, cohort):
    data = digits().data(0.5)[1]
    whole, _ = trained("fed3r", data)
    algorithm = step_of("fed3r")[0]
    step = jax.jit(ff.round_step(
        algorithm, ff.once(CLIENTS, cohort), ff.cohort_map(strategy, chunk=2), task=digits().task
    ))
    state = digits().start(algorithm)
    for _ in range(CLIENTS // cohort):
        state, _ = step(state, data)
    assert np.abs(head(state)[0] - head(whole)[0]).max() < GROUPINGS_AGREE_TO
    a, b = (np.asarray(s.server.sums.high["A"], float) for s in (state, whole))
    assert np.abs(a - b).max() < 1e-6 * np.abs(b).max()


def test_sums_over_rounds_lose_nothing():
    total = closed_form.Total({"a": jnp.float32(2**25)}, {"a": jnp.float32(0)})
    add = jax.jit(closed_form.add)
    for _ in range(1000):
        total = add(total, {"a": jnp.float32(0.3)})
    assert float(total.high["a"]) == 2**25, "float32 alone drops every one of them"
    exact = 2**25 + 1000 * float(np.float32(0.3))
    with jax.enable_x64(True):
        assert float(total.in_float64()["a"]) == pytest.approx(exact, rel=1e-11)


def test_chunks_of_data_that_come_later_are_added():
    """Continual learning: the sums of a first run are the prior of a second one's clients."""
    labels = np.asarray(digits().train.labels)
    x, new = digits().features[0], labels >= 6  # classes that come later
    first, second = (
        ff.data.Partition.of(np.array_split(np.flatnonzero(part), CLIENTS)) for part in (~new, new)
    )
    before, _ = trained("fed3r", digits().owned_by(first))
    old, _ = ref.normal_equations(x[~new], labels[~new], CLASSES, 0.01)
    assert np.abs(head(before)[0] - old).max() < 1e-4
    later = ff.algorithms.fed3r(digits().worker, prior=before.server.sums)
    state, step = digits().start(later), step_of("fed3r")[1]
    for _ in range(ROUNDS):
        state, _ = step(state, digits().owned_by(second))
    assert np.abs(head(state)[0] - sklearns_ridge()).max() < 1e-4, "nothing is forgotten"
    other = ff.algorithms.fed3r(digits().worker, prior=before.server.sums, bias=True)
    with pytest.raises(ff.UsageError, match=r"'A': \(48, 48\).*expected .*'A': \(49, 49\)"):
        digits().start(other)


class TestRandomFeatures:
    def make(self, count, **options):
        model = ff.models.with_random_features(digits().model, count, **options)
        variables = jax.jit(model.init)(jax.random.key(1))  # the same network
        apply = jax.jit(lambda v, x: model.apply(v, digits().prepared(x)))
        return model, variables, lambda s: apply(variables, s.inputs)

    def test_they_are_the_equation(self):
        _, variables, apply = self.make(40, sigma=30.0)
        random = {n: np.asarray(x, float) for n, x in variables.stats["random_features"].items()}
        outputs = apply(digits().test)
        expected = ref.random_features(digits().features[1], **random)
        np.testing.assert_allclose(outputs.features, expected, atol=2e-6)
        w = variables.params["classifier"]
        np.testing.assert_allclose(
            outputs.logits, expected @ np.asarray(w["kernel"], float) + np.asarray(w["bias"]),
            atol=1e-5,
        )
        assert outputs.stats is not None
        assert random["omega"].std() == pytest.approx(np.sqrt(2 / 30), rel=0.05)
        assert 0 <= random["beta"].min() < random["beta"].max() < 2 * np.pi

    @pytest.mark.parametrize(
        ("law", "sigma", "gamma"), [("printed", 4.0, 1 / 4), ("kernel", 2.0, 1 / 8)]
    )
    def test_ridge_on_them_tends_to_kernel_ridge(self, law, sigma, gamma):
        """exp(-r^2 / sigma) or exp(-r^2 / (2 sigma^2)), scikit-learn's KernelRidge."""
        few = jax.tree.map(lambda x: x[:200], digits().train)
        _, _, apply = self.make(10_000, sigma=sigma, law=law)
        z, tested = (np.asarray(apply(s).features, float) for s in (few, digits().test))
        (x, tests), y = digits().features, np.asarray(few.labels)
        exact = np.exp(-gamma * np.square(x[:30, None] - x[None, :30]).sum(-1))
        assert np.abs(z[:30] @ z[:30].T - exact).max() < 5 / np.sqrt(10_000)
        kernel = KernelRidge(alpha=0.1, kernel="rbf", gamma=gamma)
        expected = kernel.fit(x[:200], ref.one_hot(y, CLASSES)).predict(tests)
        dual = np.linalg.solve(z @ z.T + 0.1 * np.eye(200), ref.one_hot(y, CLASSES))
        found = tested @ (z.T @ dual)
        assert np.abs(found - expected).max() < 0.1
        assert (found.argmax(1) == expected.argmax(1)).mean() > 0.97

    def test_fed3r_rf_is_ridge_on_them(self):
        model, variables, apply = self.make(100, sigma=30.0)
        task = ff.tasks.classification(model, ff.data.preprocess(digits().dataset))
        worker = ff.client.local_training(task, ff.client.sgd(0.1), batch_size=200)
        algorithm = ff.algorithms.fed3r(worker)
        step = jax.jit(ff.round_step(
            algorithm, ff.once(CLIENTS, 10), ff.cohort_map("map"), task=task
        ))
        state = ff.init_state(algorithm, variables, CLIENTS, jax.random.key(0))
        for _ in range(2):
            state, _ = step(state, digits().data(0.0)[1])
        z = np.asarray(apply(digits().train).features, float)
        expected, _ = ref.normal_equations(z, digits().train.labels, CLASSES, 0.01)
        assert np.abs(head(state)[0] - expected).max() < 1e-4
        assert_same_bits(state.server.model.stats, variables.stats)

    @pytest.mark.parametrize(
        ("options", "message"),
        [({"count": 0}, "random features = 0: expected 1 or more"),
         ({"sigma": 0.0}, "sigma = 0.0: expected more than 0"),
         ({"law": "kernl"}, "Did you mean 'kernel'")],
    )
    def test_wrong_ones(self, options, message):
        with pytest.raises(ff.UsageError, match=message):
            self.make(**{"count": 5, **options})


class TestNearestMean:
    def test_it_is_sklearns(self):
        state, _ = trained("fedncm", digits().data(0.0)[1])
        centroid = NearestCentroid().fit(digits().features[0], digits().train.labels)
        np.testing.assert_array_equal(
            scores(state).argmax(1), centroid.predict(digits().features[1])
        )
        means = ref.class_means(digits().features[0], digits().train.labels, CLASSES)
        np.testing.assert_allclose(head(state)[0], means.T, rtol=1e-5, atol=1e-6)
        np.testing.assert_allclose(head(state)[1], -np.square(means).sum(1) / 2, rtol=1e-5)

    def test_by_angle(self):
        x, y = digits().features[0], digits().train.labels
        high = {"features": x.T @ ref.one_hot(y, CLASSES), "examples": np.bincount(y)}
        high = jax.tree.map(lambda v: jnp.asarray(v, jnp.float32), high)
        total = closed_form.Total(high, jax.tree.map(jnp.zeros_like, high))
        kernel, bias = jax.jit(lambda total: nearest_mean(total, cosine=True))(total)
        means = ref.class_means(x, y, CLASSES)
        means /= np.linalg.norm(means, axis=1, keepdims=True)
        np.testing.assert_allclose(kernel, means.T, rtol=1e-5, atol=1e-6)
        assert not np.asarray(bias).any()

    def test_a_class_that_nobody_has_is_never_nearest(self):
        state, _ = trained("fedncm", digits().data(0.0)[1], rounds=1)
        seen = {int(c) for c in np.flatnonzero(np.asarray(state.server.sums.high["examples"]))}
        assert 0 < len(seen) < CLASSES
        assert set(scores(state).argmax(1).tolist()) <= seen


class TestTraffic:
    TRIANGLE = WIDTH * (WIDTH + 1) // 2

    def sent(self, name, **settings):
        algorithm, _ = step_of(name, **settings)
        return traffic(algorithm, digits().start(algorithm), digits().data(0.5)[1])

    def test_the_network_is_there_already(self):
        assert self.sent("fed3r").down == self.sent("fedncm").down == 0

    def test_the_upper_triangle_and_all_columns(self):
        assert self.sent("fed3r", sync=True).up == 32 * (self.TRIANGLE + WIDTH * CLASSES)
        assert self.sent("fedncm").up == 32 * (WIDTH + 1) * CLASSES
        wide = (WIDTH + 1) * (WIDTH + 2) // 2
        assert self.sent("fed3r", bias=True).up == 32 * (wide + (WIDTH + 1) * CLASSES)

    def test_only_the_columns_of_own_classes(self):
        clients, data = digits().data(0.5)
        _, infos = trained("fed3r", data)
        classes = sum(
            len(np.unique(np.asarray(digits().train.labels)[clients.client(k)]))
            for k in range(CLIENTS)
        )
        total = sum(float(i.metrics["bytes_up"]) for i in infos)
        assert total == 4 * (CLIENTS * self.TRIANGLE + WIDTH * classes)
        _, infos = trained("fed3r", data, rounds=1, sync=True)
        assert "bytes_up" not in infos[0].metrics


@pytest.mark.parametrize(
    "name", ["fed3r", pytest.param("fedncm", marks=pytest.mark.slow)]
)
def test_the_contract(name):
    """A hard problem: clients of unequal sizes, one of them empty."""
    problem = Problem()
    run = testing.Run(testing.algorithm_of(name, problem.task), problem, rounds=3)
    testing.check_resume(run)
    testing.check_padding(run)
    assert bool(run.infos[-1].finite)
    assert int(run.states[-1].clients.sum()) > 2
    assert not bool(run.states[-1].clients[2]), "a client without examples is never counted"


@pytest.mark.slow
@pytest.mark.parametrize("name", ["fed3r", "fedncm"])
def test_vmap_agrees_with_map(name):
    problem = Problem()
    testing.check_strategies(
        testing.Run(testing.algorithm_of(name, problem.task), problem, rounds=2), 2e-5
    )


def test_a_group_counts_once():
    problem = Problem((6, 3, 5, 4))
    groups = ff.data.Partition.of([np.array([0, 2]), np.array([1, 3])])
    problem.data = ff.data.grouped(problem.data, groups)
    run = testing.Run(ff.algorithms.fedncm(problem.client()), problem, rounds=2)
    assert [int(i.examples) for i in run.infos] == [18, 0]
    assert_same_bits(run.states[1].server, run.states[2].server)


@jax.jit
def without_penalty(x, y):
    found = statistics(x, y)
    total = closed_form.Total(found, jax.tree.map(jnp.zeros_like, found))
    return solve(total, ridge=0.0)[0], solve(total, ridge=0.1)[0]


@pytest.mark.parametrize("regular", [True, False])
def test_lambda_zero(regular):
    """Least squares where A is regular; where a feature is a copy of another, not finite."""
    random = np.random.default_rng(0)
    x = random.integers(0, 9, (40, 6)).astype(np.float32)
    if not regular:
        x[:, 5] = x[:, 0]
    y = ref.one_hot(np.arange(40) % 3, 3)
    plain, penalised = map(np.asarray, without_penalty(x, y.astype(np.float32)))
    assert np.isfinite(penalised).all()
    if not regular:
        assert not np.isfinite(plain).any()
        return
    w = np.linalg.lstsq(x, y, rcond=None)[0]
    np.testing.assert_allclose(plain, w / np.linalg.norm(w, axis=0), atol=1e-5)


def test_a_singular_matrix_is_an_error_that_says_what_to_do(tmp_path):
    """Of the digits as they are: the pixels in their corners are always 0."""
    config = small_config(
        algorithm__name="fed3r", algorithm__fed3r__ridge=0.0, model__name="linear"
    )
    with pytest.raises(ff.DivergedError, match=r"round 1\..*A \+ lambda I is singular.*ridge"):
        ff.train(config, tmp_path / "singular", progress=False)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"algorithm__fed3r__ridge": -0.1}, "ridge = -0.1: expected 0 or more"),
        ({"algorithm__fed3r__variant": "release"}, "Did you mean 'released'"),
        ({"model__random__features": -1}, "random.features = -1: expected 0 or more"),
        ({"model__random__sigma": 10.0}, "model.random.features is 0"),
        ({"algorithm__weighting": "uniform"}, "fed3r adds up what clients send, as it is"),
        ({"wire__up": "8bit"}, "fed3r adds up what clients send, as it is"),
        ({"server__learning_rate": 0.5}, "the server step is part of fed3r"),
        ({"client__epochs": 2}, "clients take no local steps under fed3r"),
        ({"data__flip": True}, "fed3r sees the examples as they are"),
        ({"cohort__sampling": "one"}, "Did you mean 'once'"),
    ],
)
def test_settings_that_cannot_be(settings, message):
    config = small_config(**{"algorithm__name": "fed3r", **settings})
    with pytest.raises(ff.UsageError, match=message):
        ff.validate(config)


def test_a_name_means_random_features():
    config = small_config(algorithm__name="fed3r_rf")
    ff.validate(config)
    assert config_lib.used(config)["model.random.features"] == 5000
    config.model.random.features = 70
    state = jax.eval_shape(ff.build(config).init)
    assert state.server.model.params["classifier"]["kernel"].shape == (70, 10)


def test_a_model_without_a_classifier():
    with pytest.raises(ff.UsageError, match=r"named 'classifier'.*no such module"):
        closed_form.head_of(ff.models.Variables({"last": {"kernel": jnp.zeros((3, 2))}}))
