"""FedCG: the branch, the graph and rounds against NumPy; limits, padding, traffic, settings."""

import functools
import json
import pathlib
import runpy

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import reference_cg as ref
from conftest import Problem, assert_close, assert_same_bits, small_config
from jax import export
from PIL import Image

import fedjax_flat as ff
from fedjax_flat import models, parts, tasks, testing
from fedjax_flat.algorithms import METHODS
from fedjax_flat.algorithms.fedcg import fedcg, network
from fedjax_flat.engine.round import traffic
from fedjax_flat.models import Variables, domains

DEFAULTS = {
    **{n: s.default for n, s in METHODS["fedcg"].settings.items()}, "classifier": "mlp",
}
RATE = 0.3
own = lambda name: name.startswith("params/domains/")


def near(found, expected, tolerance=2e-6):
    """Relative to the largest number that is expected."""
    largest = max(np.abs(expected).max(initial=0), 1e-3)
    np.testing.assert_allclose(found, expected, rtol=0, atol=tolerance * largest)


@functools.cache
def problem(norm="none", **settings):
    p = Problem(norm=norm)
    p.model = network(p.model, {**DEFAULTS, "rank": 7, **settings})
    p.task = tasks.classification(p.model, ff.data.preprocess(p.dataset))
    p.variables = jax.jit(p.model.init)(jax.random.key(100))
    return p


@functools.cache
def run(norm="none", rounds=4, every=2, beta=0.3, graph="learned", **settings):
    p = problem(norm, **settings)
    server = optax.sgd(1.0)
    algorithm = fedcg(p.client(lr=RATE), server, every=every, beta=beta, graph=graph)
    return testing.Run(algorithm, p, rounds=rounds)


# ---- Against NumPy -------------------------------------------------------------------------------


def layers(params):
    """A chain of dense layers in the reference's form, in float64."""
    names = sorted(params)  # Dense_0, ..., classifier
    names = [n for n in names if n != "classifier"] + ["classifier"]
    out = {}
    for i, name in enumerate(names):
        out |= {f"W{i}": np.asarray(params[name]["kernel"], float),
                f"b{i}": np.asarray(params[name]["bias"], float)}
    return out


def state_of(variables, round=0):
    """The reference's state."""
    plain = {n: x for n, x in variables.params.items() if n != "domains"}
    part, stats = variables.params["domains"], variables.stats["domains"]
    own = {n: np.asarray(x, float) for n, x in part["classifier"].items()}
    names = {"domains": "V1", "scale": "lambda1", "mix": "G1", "expand": "E1"}
    return {
        "params": layers(plain) | {names[n]: x for n, x in own.items()},
        "student": layers(part["student"]), "teacher": layers(stats["teacher"]),
        "adjacency": {1: np.asarray(stats["graph"], float)}, "round": round,
    }


def agrees(variables, state):
    found = state_of(variables)
    for part in ("params", "student", "teacher", "adjacency"):
        assert found[part].keys() == state[part].keys()
        for name in found[part]:
            near(found[part][name], state[part][name])


def rounds_of(first, settings):
    """The reference's state after the rounds that were run, with the same cohorts and batches."""
    drawn = testing.drawn(first.problem, rounds=len(first.infos), epochs=1)
    state = ref.start(**{k: x for k, x in state_of(first.states[0].server.model).items()
                         if k != "round"})
    for members in drawn.rounds:
        clients = [
            {"x": drawn.x[place], "y": drawn.y[place],
             "batches": [np.searchsorted(place, b) for b in members[k]]}
            for k, place in enumerate(drawn.members) if k in members
        ]
        state = ref.round_step(state, clients, RATE, **settings)
    return drawn, state


VARIANTS = {
    "default": {},
    "uniform": {"start": "uniform"},
    "full": {"mixing": "full"},
    "no W": {"mixing": "none", "relu": False},
    "no relu": {"relu": False},
    "fixed": {"graph": "fixed", "start": "uniform", "scale": -0.5},
    "one domain": {"domains": 1},
    "linear, six": {"domains": 6, "classifier": "linear", "every": 1},
    "never": {"every": 0},
}


@pytest.mark.parametrize("variant", VARIANTS)
def test_rounds_are_those_of_numpy(variant):
    settings = VARIANTS[variant]
    first = run(**settings)
    drawn, expected = rounds_of(first, {
        "every": settings.get("every", 2), "beta": 0.3, "relu": settings.get("relu", True),
        "learn_graph": settings.get("graph", "learned") == "learned",
    })
    agrees(first.states[-1].server.model, expected)
    assert float(jnp.abs(first.states[-1].server.model.params["domains"]["classifier"]["domains"]
                         - first.states[0].server.model.params["domains"]["classifier"]["domains"]
                         ).max()) > 1e-4
    assert len(np.unique(ref.assign(expected["teacher"], drawn.x).argmax(1))) > (
        0 if settings.get("domains") == 1 else 1
    ), "a hard problem has several domains"


@pytest.mark.parametrize("by", domains.EXPERTS)
@pytest.mark.parametrize("soft", [True, False])
def test_what_is_tested_is_that_of_numpy(by, soft):
    """Another `by` and `soft` on the model that was trained; also padded, and in one report."""
    first = run()
    other = problem(by=by, soft=soft)
    examples = first.data.examples
    x = jnp.asarray(testing.drawn(first.problem, rounds=1).x, jnp.float32).reshape(-1, 4, 4, 1)
    found = other.model.apply(first.model, x)
    state = state_of(first.model)
    near(found.logits, ref.predict(state, np.asarray(x, float).reshape(len(x), -1), by, soft))
    assert found.auxiliary == ()
    assert_same_bits(found.stats, first.model.stats)
    assert len(examples.labels) == len(x)


def test_graphs_are_those_of_numpy():
    random = np.random.default_rng(0)
    v = random.normal(size=(5, 7))
    equal = v.copy()
    equal[3] = equal[1] = equal[0]
    for rows in (v, equal, np.zeros((3, 2)), v[:2], v[:1]):
        for beta in (0.0, 0.5, 1.0):
            found = domains.similarity(jnp.asarray(rows, jnp.float32), beta)
            near(found, ref.similarity(rows.astype(np.float32).astype(float), beta), 1e-6)
            np.testing.assert_allclose(found.sum(1), 1, rtol=1e-6)


def test_convolution_by_hand():
    part = {"domains": jnp.array([[1.0, 2], [3, -8]])}
    a = jnp.array([[0.5, 0.5], [0, 1]])
    used = lambda relu=True, **more: domains.convolve({**part, **more}, a, relu=relu).tolist()
    assert used(relu=False) == [[2, -3], [3, -8]]
    mix = jnp.array([[0.0, 1], [1, 0]])
    assert used(mix=mix) == [[0, 2], [0, 3]]
    assert used(mix=mix, expand=jnp.array([[1.0, 1], [1, -1]])) == [[2, 0], [3, 0]]


# ---- Limits --------------------------------------------------------------------------------------


def test_without_the_branch_it_is_fedavg():
    """lambda = 0, and nothing of domains is trained: bit for bit."""
    p = problem(scale=0.0)
    still = testing.Run(
        fedcg(p.client(lr=RATE, frozen=own), optax.sgd(1.0)), p, rounds=3
    )
    other = Problem()
    fedavg = testing.Run(other.fedavg(lr=RATE), other, rounds=3)
    assert_same_bits(domains.plain(still.states[0].server.model), other.variables)
    assert_same_bits(domains.plain(still.model), fedavg.model)
    assert [i.report["loss"] for i in still.infos] == [i.report["loss"] for i in fedavg.infos]


def test_the_network_starts_as_without_domains():
    assert_same_bits(domains.plain(problem().variables), Problem().variables)
    head = parts.take(problem().variables, parts.head)
    assert {n for n in head if "/student/" not in n and "/teacher/" not in n} == {
        "params/classifier/bias", "params/classifier/kernel",
        *(f"params/domains/classifier/{n}" for n in ("domains", "expand", "mix", "scale")),
    }


def with_teacher(variables, bias):
    """Whose teacher says the domain with the largest of `bias`, of all examples."""
    stats = jax.tree.map(jnp.zeros_like, variables.stats["domains"]["teacher"])
    stats["classifier"]["bias"] = jnp.asarray(bias, jnp.float32)
    own = {**variables.stats["domains"], "teacher": stats}
    return variables._replace(stats={**variables.stats, "domains": own})


def one_round(p, variables, **settings):
    first = testing.Run(fedcg(p.client(lr=RATE), optax.sgd(1.0), **settings), p, rounds=0)
    state, _ = first.step(first.start(variables), first.data)
    return state.server.model


def test_an_empty_domain_stays_or_moves_through_the_graph():
    for start in domains.STARTS:
        p = problem(start=start)
        begin = with_teacher(p.variables, [0, 0, 9, 0])
        after = one_round(p, begin)
        rows = lambda v: np.asarray(v.params["domains"]["classifier"]["domains"])
        moved = np.abs(rows(after) - rows(begin)).max(axis=1) > 0
        alone = [False, False, True, False]
        assert moved.tolist() == (alone if start == "identity" else [True] * 4)


def test_a_uniform_graph_knows_no_domains():
    """All rows of V^ are the same, whatever the teacher says."""
    p = problem(start="uniform")
    a, b = (one_round(p, with_teacher(p.variables, bias), graph="fixed")
            for bias in ([9, 0, 0, 0], [0, 0, 0, 9]))
    taught = lambda name: "/student/" in name
    assert_close(parts.without(a, taught).params, parts.without(b, taught).params, 1e-6)
    student = lambda v: v.params["domains"]["student"]["classifier"]["bias"]
    assert float(jnp.abs(student(a) - student(b)).max()) > 1e-2


@pytest.mark.parametrize(("every", "changes"), [(0, []), (1, [1, 2, 3, 4]), (2, [2, 4])])
def test_when_the_student_becomes_the_teacher(every, changes):
    settings = {"domains": 6, "classifier": "linear"} if every == 1 else {}
    first = run(every=every, **settings)
    found = []
    for t, (old, new) in enumerate(zip(first.states, first.states[1:], strict=False), 1):
        before, now = (s.server.model.stats["domains"]["teacher"] for s in (old, new))
        same = jax.tree.all(jax.tree.map(lambda x, y: bool((x == y).all()), before, now))
        if not same:
            found.append(t)
            assert_same_bits(now, new.server.model.params["domains"]["student"])
    assert found == changes


# ---- The contract --------------------------------------------------------------------------------


def test_the_contract():
    testing.check_method("fedcg", {"algorithm.fedcg.every": 2, "algorithm.fedcg.rank": 7})


def test_a_step_lowers_for_cuda_and_tpu():
    first = run()
    step = ff.round_step(first.algorithm, ff.uniform(7, 4), ff.cohort_map("vmap"),
                         task=first.problem.task)
    state = jax.eval_shape(lambda: first.states[0])
    made = export.export(jax.jit(step), platforms=("cuda", "tpu"))(state, first.data)
    assert "callback" not in made.mlir_module()


@pytest.mark.slow
def test_the_contract_with_statistics():
    first = run("batch")
    testing.check_resume(first)
    testing.check_padding(first)
    assert bool(first.infos[-1].finite)
    moved = lambda i: first.states[i].server.model.stats["batch_stats"]["BatchNorm_0"]["mean"]
    assert float(jnp.abs(moved(-1) - moved(0)).max()) > 0


def test_the_graph_and_the_teacher_travel_down_only():
    first = run()
    sent = traffic(first.algorithm, first.states[0], first.data)
    model = first.states[0].server.model
    size = lambda tree: sum(x.size for x in jax.tree.leaves(tree))
    plain = size(Problem().params)
    q, student = 5 * 3 + 3, (16 * 64 + 64) + (64 * 4 + 4)
    assert size(model.params) == plain + 4 * q + 2 * 7 * q + 1 + student
    up = 32 * size(model.params)
    assert sent == (up + 32 * (4 * 4 + student), up)


# ---- From settings, and what cannot work ---------------------------------------------------------


def config_of(**more):
    return small_config(**{"algorithm__name": "fedcg", "rounds": 2, "eval__every": 2,
                           "eval__window": 1, "algorithm__fedcg__rank": 8, **more})


def test_the_model_that_is_tested_has_domains():
    """The experiment's own evaluation is the reference's prediction, of digits."""
    built = ff.build(config_of())
    state, _ = built.step(built.init(), built.data)
    model = built.models(state)["global"]
    test = built.split("test")
    count = len(test.labels)
    stored = ff.data.Batch(test.inputs, test.labels, jnp.ones(count, bool))
    x = np.asarray(built.task.prepare(stored, None).inputs, float).reshape(count, -1)
    expected = ref.predict(state_of(model), x)
    near(built.predict(model, test, range(count)), expected)
    sums = built.evaluate(model, test)
    right = (expected.argmax(1) == np.asarray(test.labels)).sum()
    assert float(built.task.report(sums)["accuracy"]) == pytest.approx(right / count, abs=2 / count)


@pytest.mark.slow
@pytest.mark.parametrize("more", [
    {"algorithm__name": "fedcg+moon"}, {"algorithm__name": "fedcg+fedmlb"},
    {"client__sharpness": "sam"}, {"server__optimizer": "adam"}, {"wire__up": "8bit"},
    {"model__norm": "batch", "model__statistics": "layers"}, {"data__features": True},
    {"server__average": "wima"}, {"model__precision": "bfloat16"}, {"debug": True},
    {"client__frozen": "features"},
])
def test_it_goes_with_others(more):
    built = ff.build(config_of(**more))
    state = built.init()
    for _ in range(2):
        state, info = built.step(state, built.data)
    assert bool(info.finite)
    for model in built.models(state).values():
        sums = built.evaluate(model, built.split("test"))
        assert np.isfinite(float(sums["loss"]))


@pytest.mark.slow
def test_on_faces_as_leaf_has_them(tmp_path):
    """The config's CelebA, of twelve celebrities."""
    folder, random = tmp_path / "celeba/data", np.random.default_rng(0)
    (folder / "raw/img_align_celeba").mkdir(parents=True)
    for i in range(48):
        pixels = random.integers(0, 255, (218, 178, 3), np.uint8)
        Image.fromarray(pixels).save(folder / f"raw/img_align_celeba/{i:06d}.jpg")
    for part, first in (("train", 0), ("test", 24)):
        own = {f"{k}": {"x": [f"{first + 2 * k + i:06d}.jpg" for i in range(2)], "y": [0, 1]}
               for k in range(12)}
        (folder / part).mkdir()
        (folder / part / "all.json").write_text(json.dumps({"user_data": own}))
    make = runpy.run_path(str(pathlib.Path(__file__).parents[1] / "configs/fedcg.py"))
    config = make["get_config"]("celeba,rounds=2")
    with config.unlocked():
        config.data.side, config.model.name = 32, "lenet"
    result = ff.train(ff.only_used(config), tmp_path / "run", data_dir=tmp_path, progress=False)
    assert [r["round"] for r in result.records if r["split"] == "test"][-1] == 2
    run = ff.load_run(tmp_path / "run", tmp_path)
    assert run.experiment.data.num_clients == 12
    assert run.model().params["domains"]["classifier"]["mix"].shape == (84 * 2 + 2,) * 2


@pytest.mark.parametrize(("settings", "message"), [
    ({"algorithm__fedcg__domains": 0}, "config.algorithm.fedcg.domains = 0: expected .*1"),
    ({"algorithm__fedcg__every": -1}, "config.algorithm.fedcg.every = -1: expected .*0"),
    ({"algorithm__fedcg__beta": 1.5}, "config.algorithm.fedcg.beta = 1.5: expected"),
    ({"algorithm__fedcg__by": "pupil"}, "algorithm.fedcg.by = 'pupil': expected one of student"),
    ({"algorithm__fedcg__mixing": "full"}, "rank = 8 would change nothing"),
    ({"algorithm__fedcg__graph": "fixed", "algorithm__fedcg__beta": 0.2}, "beta .* nothing"),
    ({"algorithm__fedcg__classifier": "cnn"}, "model 'cnn' cannot read inputs of shape"),
    ({"model__norm": "batch", "model__statistics": "own"},
     "model.statistics = own does not go with fedcg: what it adds to the network"),
    ({"submodel__tiers": (0.5,)}, "submodel.tiers = .* does not go with fedcg: what it adds"),
])
def test_wrong_settings(settings, message):
    with pytest.raises(ff.UsageError, match=message):
        ff.build(config_of(**settings)).init()


def test_wrong_inputs():
    p = problem()
    make = lambda **more: fedcg(p.client(), optax.sgd(1.0), **more)
    with pytest.raises(ff.UsageError, match=r"every = -1: expected 0 or more"):
        make(every=-1)
    with pytest.raises(ff.UsageError, match=r"beta = 1.5: expected 0 to 1"):
        make(beta=1.5)
    with pytest.raises(ff.UsageError, match=r"unknown graph 'moving'"):
        make(graph="moving")
    with pytest.raises(ff.UsageError, match=r"fedcg of a network without domains: expected one"):
        make().init(Problem().variables, 7)
    with pytest.raises(ff.UsageError, match=r"domains = 0: expected 1 or more"):
        network(p.model, {**DEFAULTS, "domains": 0})
    with pytest.raises(ff.UsageError, match=r"rank = 0: expected 1 or more"):
        network(Problem().model, {**DEFAULTS, "rank": 0})
    pixels = lambda v, x, *rest: models.Outputs(jnp.zeros((1, 4, 4, 3)), jnp.zeros((1, 4, 4, 8)))
    nameless = lambda v, x, *rest: models.Outputs(jnp.zeros((1, 3)))
    for apply, shape in ((pixels, r"\(1, 4, 4, 3\) of \(1, 4, 4, 8\)"), (nameless, r"\(1, 3\) of")):
        plain = models.Model(lambda key: Variables({}), apply, Problem().model.inputs)
        with pytest.raises(ff.UsageError, match=f"a network whose classifier makes {shape}"):
            network(plain, DEFAULTS)
