"""SWA and WIMA: what they hold, when, and that training does not notice."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from conftest import Problem, assert_close, assert_same_bits, small_config

import fedjax_flat as ff
from fedjax_flat import UsageError, experiment
from fedjax_flat.engine import round as round_lib
from fedjax_flat.run.checkpoint import Checkpoints

ROUNDS, START, CYCLE = 40, 30, 5  # 75 % of 40
CAPTURED = {"lowest": (30, 35, 40), "released": (36,)}


def trajectory(average, rounds, params=None):
    """States of `average` after each round t = 1, 2, ... of models w^{t+1} = (t, t^2)."""
    update = jax.jit(average.update)
    models = [{"w": jnp.array([t, t**2], jnp.float32)} for t in range(1, rounds + 1)]
    state, states = average.init(models[0]), []
    for r, model in enumerate(models):
        state = update(state, model, jnp.int32(r))
        states.append(state)
    return models, states


@pytest.mark.parametrize("capture", ["lowest", "released"])
def test_swa_is_the_mean_of_the_captured_models(capture):
    average = ff.server.swa(START, CYCLE, capture=capture)
    models, states = trajectory(average, ROUNDS)
    counts = [int(s.models) for s in states]
    captured = [t for t in range(1, ROUNDS + 1) if counts[t - 1] > ([0, *counts])[t - 1]]
    assert tuple(captured) == CAPTURED[capture]
    assert average.first == captured[0]
    for n, t in enumerate(captured, 1):
        expected = np.mean([models[s - 1]["w"] for s in captured[:n]], axis=0)
        np.testing.assert_allclose(average.model(states[t - 1], None)["w"], expected, rtol=1e-6)


def test_swa_of_one_model_is_that_model_bit_for_bit():
    average = ff.server.swa(1, 1)
    params = {"w": jnp.array([0.1, -3.7e-9, 123.456])}
    state = average.update(average.init(params), params, jnp.int32(0))
    assert_same_bits(state.mean, params)


@pytest.mark.parametrize("capture", ["lowest", "released"])
def test_rate_of_every_round(capture):
    """Equations (2.36) and (2.37), in plain Python; captures at the lowest or the highest rate."""
    gamma_1, gamma_2 = 0.01, 1e-4
    factor = ff.server.swa_cycle(START, CYCLE, gamma_2 / gamma_1, capture=capture)
    rates = []
    for t in range(1, ROUNDS + 1):
        began = t >= START if capture == "lowest" else t - 1 >= START
        tau = ((t - 1) % CYCLE + 1) / CYCLE
        expected = (1 - tau) * gamma_1 + tau * gamma_2 if began else gamma_1
        rates.append(gamma_1 * float(factor(jnp.int32(t - 1))))
        assert rates[-1] == pytest.approx(expected, rel=1e-5)
    extreme = min if capture == "lowest" else max
    for t in CAPTURED[capture]:
        cycle = rates[START:]
        assert rates[t - 1] == pytest.approx(extreme(cycle), rel=1e-6)


def test_a_cycle_of_one_round_keeps_the_rate_and_captures_every_round():
    factor = ff.server.swa_cycle(3, 1, 0.01)
    assert [float(factor(jnp.int32(r))) for r in range(5)] == [1.0] * 5
    _, states = trajectory(ff.server.swa(3, 1), 5)
    assert [int(s.models) for s in states] == [0, 0, 1, 2, 3]


@pytest.mark.parametrize("window", [1, 3, 7, 20])
def test_wima_is_the_mean_of_the_last_models(window):
    average = ff.server.wima(window)
    models, states = trajectory(average, 12)
    for t, state in enumerate(states, 1):
        expected = np.mean([m["w"] for m in models[max(0, t - window) : t]], axis=0)
        got = average.model(state, models[t - 1])["w"]
        np.testing.assert_allclose(got, expected, rtol=1e-6)
        if window == 1:
            assert_same_bits(got, models[t - 1]["w"])


def test_wima_agrees_with_its_closed_form():
    """(4.14): w^{t'} - eta_g sum over the window of ((t' + W - tau) / W) Delta^tau."""
    window, rate, rounds = 4, 0.5, 9
    problem = Problem((6, 6, 6))
    algorithm = problem.fedavg(server=optax.sgd(rate))
    averages = {"wima": ff.server.wima(window)}
    state, trail = run(problem, algorithm, averages, rounds)
    w = [problem.params, *(s.server.model.params for s in trail)]  # w[t - 1] is w^t
    first = rounds - window + 1  # t'
    expected = w[first - 1]
    for tau in range(first, rounds + 1):
        delta = jax.tree.map(lambda a, b: (a - b) / rate, w[tau - 1], w[tau])
        share = rate * (first + window - tau) / window
        expected = jax.tree.map(lambda a, d, s=share: a - s * d, expected, delta)
    assert_close(round_lib.models(algorithm, state, averages)["wima"].params, expected, 1e-6)


def run(problem, algorithm, averages, rounds):
    clients = problem.data.num_clients
    over = ff.cohort_map("map")
    step = jax.jit(
        ff.round_step(algorithm, ff.uniform(clients, 2), over, averages, task=problem.task)
    )
    state = ff.init_state(algorithm, problem.variables, clients, jax.random.key(0), averages)
    trail = []
    for _ in range(rounds):
        state, _ = step(state, problem.data)
        trail.append(state)
    return state, trail


def test_averages_hold_the_trained_models_and_do_not_change_them():
    problem = Problem((6, 5, 6, 3))
    algorithm = problem.fedavg()
    averages = {"swa": ff.server.swa(2, 2), "wima": ff.server.wima(3)}
    state, trail = run(problem, algorithm, averages, 5)
    plain, _ = run(problem, algorithm, {}, 5)
    assert_same_bits(state.server, plain.server)
    models = round_lib.models(algorithm, state, averages)
    mean = lambda rounds: jax.tree.map(
        lambda *w: np.mean(w, axis=0), *(trail[t - 1].server.model.params for t in rounds)
    )
    assert_close(models["swa"].params, mean((2, 4)), 1e-6)
    assert_close(models["wima"].params, mean((3, 4, 5)), 1e-6)
    assert sorted(round_lib.models(algorithm, trail[0], averages)) == ["global", "wima"]


@pytest.mark.parametrize("part", ["classifier", "features"])
@pytest.mark.slow
def test_wima_of_a_part_leaves_the_rest_alone(part):
    problem = Problem((6, 6))
    algorithm, averages = problem.fedavg(), {"wima": ff.server.wima(3, parameters=part)}
    state, _ = run(problem, algorithm, averages, 3)
    model = round_lib.models(algorithm, state, averages)["wima"].params
    whole, _ = run(problem, algorithm, {"wima": ff.server.wima(3)}, 3)
    mean = ff.server.wima(3).model(whole.averages["wima"], whole.server.model).params
    assert sorted(model) == sorted(problem.params)
    for name in model:
        averaged = (name == "classifier") == (part == "classifier")
        assert_same_bits(model[name], (mean if averaged else state.server.model.params)[name])
    assert (sorted(state.averages["wima"].window) == ["classifier"]) == (part == "classifier")


def test_the_window_lives_in_host_memory_and_survives_a_checkpoint_there(tmp_path):
    problem = Problem((6, 6))
    algorithm, averages = problem.fedavg(), {"wima": ff.server.wima(4)}
    state, _ = run(problem, algorithm, averages, 2)
    checkpoints = Checkpoints(tmp_path)
    checkpoints.save(2, state)
    like = ff.init_state(algorithm, problem.variables, 2, jax.random.key(0), averages)
    restored = checkpoints.restore(like)[1]
    checkpoints.close()
    for one in (like, state, restored):
        kinds = {x.sharding.memory_kind for x in jax.tree.leaves(one.averages["wima"].window)}
        assert kinds == {"pinned_host"}
    assert_same_bits(restored, state)


@pytest.mark.parametrize(
    "settings",
    [
        {"server__average": "swa", "server__swa__start": 3.0, "server__swa__cycle": 3},
        pytest.param(
            {"server__average": "swa+wima", "server__swa__cycle": 1, "server__wima__window": 4},
            marks=pytest.mark.slow,
        ),
    ],
    ids=["inside a cycle", "inside a window"],
)
def test_resumed_is_the_same_bits(tmp_path, settings):
    config = small_config(rounds=7, client__sharpness="sam", **settings)
    whole = ff.train(config, tmp_path / "whole", progress=False)
    config.rounds, rounds = 5, config.rounds
    if config.server.swa.start < 1:
        config.server.swa.start = 5.0  # what 0.75 of all rounds means
    ff.train(config, tmp_path / "parts", progress=False)
    config.rounds = rounds
    parts = ff.train(config, tmp_path / "parts", progress=False)
    assert_same_bits(whole.state, parts.state)
    assert_same_bits(whole.models, parts.models)
    evaluated = lambda result: [r for r in result.records if r["split"] == "test"][-4:]
    assert evaluated(whole) == evaluated(parts)
    names = {r["model"] for r in parts.records if r["split"] == "test"}
    assert names == {"global", *config.server.average.split("+")}


def test_a_fraction_of_other_rounds_is_another_start(tmp_path):
    config = small_config(rounds=4, server__average="swa", server__swa__cycle=1)
    ff.train(config, tmp_path, progress=False)
    config.rounds = 8
    with pytest.raises(UsageError, match=r"server\.swa\.start: 3 -> 6"):
        ff.train(config, tmp_path, progress=False)


@pytest.mark.slow
def test_cycle_without_averaging_trains_the_same_and_keeps_no_model(tmp_path):
    settings = {"server__average": "swa", "server__swa__start": 2.0, "server__swa__cycle": 2}
    on = ff.train(small_config(**settings), tmp_path / "on", progress=False)
    off = small_config(**settings, server__swa__averaging=False)
    off = ff.train(off, tmp_path / "off", progress=False)
    assert_same_bits(on.models["global"], off.models["global"])
    assert list(off.models) == ["global"]
    assert list(on.models) == ["global", "swa"]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"client__rho": -0.1}, r"client\.rho = -0\.1"),
        ({"client__eta": -0.1}, r"client\.eta = -0\.1"),
        ({"client__sharpness": "asan"}, "Did you mean 'asam'"),
        ({"server__average": "swa", "server__swa__start": 7.0, "server__swa__cycle": 1},
         "round 7 .* after the last of 6"),
        ({"server__average": "swa", "server__swa__start": 5.0, "server__swa__cycle": 10},
         "round 10 .* after the last of 6"),
        ({"server__swa__cycle": 0}, r"server\.swa\.cycle = 0"),
        ({"server__average": "swa", "server__swa__capture": "highest"}, "lowest, released"),
        ({"server__wima__window": 0}, r"server\.wima\.window = 0"),
        ({"server__average": "swaa"}, "Did you mean 'swa'"),
        ({"server__average": "wima", "server__wima__parameters": "clasifier"}, "'classifier'"),
        ({"data__cutout": 9}, "cutout of 9 pixels in images of 8x8"),
        ({"data__mixup": -1.0}, r"data\.mixup = -1\.0"),
    ],
)
def test_impossible_settings_are_refused(settings, message):
    with pytest.raises(UsageError, match=message):
        experiment.build(small_config(**settings))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: ff.server.wima(0), "window = 0"),
        (lambda: ff.server.swa(5, 0), "cycle = 0"),
        (lambda: ff.server.swa_cycle(0, 3, 0.1), "start = 0"),
    ],
)
def test_impossible_averages_are_refused(make, message):
    with pytest.raises(UsageError, match=message):
        make()


def test_a_part_the_model_does_not_have():
    model = ff.models.Variables({"head": jnp.zeros(2)})
    with pytest.raises(UsageError, match="no module 'classifier', only head"):
        ff.server.wima(2, parameters="features").init(model)
