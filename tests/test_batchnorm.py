"""Statistics of models: moved once per step, without padding; averaged, kept or frozen."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import reference_open as ref
from conftest import Problem, assert_close, assert_same_bits, small_config

import fedjax_flat as ff
from fedjax_flat import testing
from fedjax_flat.data.federated import client_batch
from fedjax_flat.engine.round import traffic
from fedjax_flat.models import Variables

SIZES = (7, 3, 0, 12, 1, 9, 5)


def problem(sizes=SIZES, **options):
    return Problem(sizes, norm="batch", **options)


def unpacked(model):
    """(parameters, statistics) by the reference's names."""
    p, s = model.params, model.stats["batch_stats"]["BatchNorm_0"]
    dense, norm, last = p["Dense_0"], p["BatchNorm_0"], p["classifier"]
    params = {"W1": dense["kernel"], "b1": dense["bias"], "gamma": norm["scale"],
              "beta": norm["bias"], "W2": last["kernel"], "b2": last["bias"]}
    to_double = lambda tree: {k: np.asarray(v, float) for k, v in tree.items()}
    return to_double(params), to_double(s)


def assert_close_to(ours, theirs, tolerance=1e-5):
    for name, value in theirs.items():
        np.testing.assert_allclose(ours[name], value, rtol=tolerance, atol=tolerance, err_msg=name)


@pytest.mark.parametrize("rho", [0.0, 0.1], ids=["plain", "SAM"])
def test_three_local_steps_with_a_ragged_batch(rho):
    """10 examples in batches of 4: 4, 4 and 2; under SAM the statistics move as often."""
    p = problem((10,))
    sharpness = ff.client.sam(rho) if rho else None
    client = p.client(lr=0.1, sharpness=sharpness)
    data = p.data.client(jnp.int32(0))
    result = jax.jit(client.train)(p.variables, data, jax.random.key(3), round=jnp.int32(0))
    key = ff.rng.fold(jax.random.key(3), "shuffle", 0)
    order = np.asarray(ff.data.federated.shuffled_positions(key, 10, 12))[:10]
    drawn = testing.drawn(p, rounds=0, cohort=1)
    batches = [order[:4], order[4:8], order[8:]]
    params, stats = ref.bn_local(*unpacked(p.variables), drawn.x, drawn.y, batches, 0.1, rho=rho)
    found = unpacked(result.variables)
    assert_close_to(found[0], params)
    assert_close_to(found[1], stats)
    assert np.abs(stats["mean"]).max() > 0.01


def test_padding_is_in_no_statistic():
    p = problem((5,))
    apply = lambda mask, images: p.model.apply(p.variables, images, jax.random.key(0), mask)
    images = jax.random.normal(jax.random.key(1), (8, 4, 4, 1))
    mask = jnp.arange(8) < 5
    padded, alone = apply(mask, images), apply(None, images[:5])
    assert_close(padded.stats, alone.stats, 1e-6)
    np.testing.assert_allclose(padded.logits[:5], alone.logits, rtol=1e-5, atol=1e-6)
    noise = jnp.where(mask[:, None, None, None], images, 1e6)
    assert_same_bits(apply(mask, noise).stats, padded.stats)


def test_evaluation_uses_and_keeps_the_running_statistics():
    p = problem((6,))
    stats = jax.tree.map(lambda x: x + 0.5, p.variables.stats)
    model = Variables(p.params, stats)
    stored = client_batch(p.data.client(jnp.int32(0)), jnp.arange(6))
    outputs = p.task.forward(model, p.task.prepare(stored, None), None)
    expected = ref.bn_evaluate(*unpacked(model), testing.drawn(p, rounds=0, cohort=1).x)
    np.testing.assert_allclose(outputs.logits, expected, rtol=1e-5, atol=1e-5)
    assert_same_bits(outputs.stats, stats)


def rounds_of(p):
    d = testing.drawn(p)
    drawn = [{k: b for k, b in r.items() if len(d.members[k])} for r in d.rounds]
    return d, drawn


def test_averaged_statistics_against_numpy():
    p = problem()
    run = testing.Run(testing.algorithm_of("fedavg", p.task), p)
    d, drawn = rounds_of(p)
    params, stats = ref.fedavg_bn(*unpacked(p.variables), d.x, d.y, d.members, drawn, d.rate)
    found = unpacked(run.model)
    assert_close_to(found[0], params)
    assert_close_to(found[1], stats)


def own_of(run, k):
    kept = {name.split("/")[-2:][1]: v[k] for name, v in run.states[-1].clients.own.items()}
    names = {"scale": "gamma", "bias": "beta"}
    return {names.get(n, n): np.asarray(v, float) for n, v in kept.items()}


@pytest.mark.parametrize("name", ["fedbn", "silobn"])
def test_normalisation_that_stays_against_numpy(name):
    p = problem()
    run = testing.Run(testing.algorithm_of(name, p.task), p)
    d, drawn = rounds_of(p)
    reference = getattr(ref, name)
    shared, own = reference(*unpacked(p.variables), d.x, d.y, d.members, drawn, d.rate)
    assert_close_to(unpacked(run.model)[0], shared)
    for k in range(len(SIZES)):
        assert_close_to(own_of(run, k), own[k])


@pytest.mark.parametrize("name", ["fedbn", "silobn"])
class TestContract:
    @pytest.fixture
    def run(self, name):
        p = problem()
        return testing.Run(testing.algorithm_of(name, p.task), p)

    def test_contract(self, name, run):
        testing.check_resume(run)
        testing.check_members(run)
        testing.check_padding(run)
        testing.check_strategies(run)
        before = run.problem.variables
        server = run.algorithm.models(run.states[-1].server)["global"]
        own = ff.parts.normalisation if name == "fedbn" else ff.parts.statistics
        assert_same_bits(ff.parts.take(server, own), ff.parts.take(before, own))

    def test_absent_clients_keep_theirs_bit_for_bit(self, name, run):
        before, after = run.states[-2].clients, run.states[-1].clients
        key = ff.rng.fold(jax.random.key(0), "cohort", len(run.infos) - 1)
        absent = sorted(set(range(7)) - set(np.asarray(run.sample(key).clients).tolist()))
        rows = lambda tree: jax.tree.map(lambda x: x[np.array(absent)], tree)
        assert_same_bits(rows(before), rows(after))

    def test_what_stays_is_not_sent(self, name, run):
        sent = traffic(run.algorithm, run.states[0], run.data)
        model = run.problem.variables
        own = ff.parts.normalisation if name == "fedbn" else ff.parts.statistics
        kept = sum(x.size for x in ff.parts.take(model, own).values())
        whole = sum(x.size for x in jax.tree.leaves(model))
        assert sent == (32 * (whole - kept), 32 * (whole - kept))
        assert kept == (20 if name == "fedbn" else 10)


def test_fedbn_as_a_run_has_personal_models(tmp_path):
    config = small_config(algorithm__name="fedbn", model__norm="batch", rounds=2, eval__window=1)
    result = ff.train(config, tmp_path / "a", progress=False)
    last = [r for r in result.records if r["model"] == "personal"][-1]
    assert (last["split"], last["round"]) == ("own", 2)
    assert 0 < last["accuracy"] <= 1
    again = ff.load_run(tmp_path / "a")
    assert_same_bits(again.state, result.state)


@pytest.mark.parametrize("statistics", ["own", "frozen"])
def test_statistics_by_a_setting(tmp_path, statistics):
    config = small_config(model__norm="batch", model__statistics=statistics, rounds=2)
    result = ff.train(config, tmp_path, progress=False)
    start = ff.build(config).init()
    assert_same_bits(result.models["global"].stats, start.server.model.stats)
    if statistics == "own":
        moved = [np.abs(x).max() for x in jax.tree.leaves(result.state.clients.own)]
        assert min(moved) > 0


def test_statistics_of_a_model_without_any():
    with pytest.raises(ff.UsageError, match="model mlp has no statistics"):
        ff.build(small_config(model__statistics="own"))


def test_statistics_meet_no_adaptive_server_optimiser():
    """Under Adam the statistics are the clients' mean, as under SGD."""
    p = problem((6, 6))
    ends = {}
    for name, server in (("sgd", optax.sgd(1.0)), ("adam", ff.server.adaptive("adam", 0.01))):
        state, _ = p.run(p.fedavg(server=server), 1)
        ends[name] = state.server.model
    assert_close(ends["sgd"].stats, ends["adam"].stats, 1e-6)
    gap = jax.tree.map(lambda a, b: float(jnp.abs(a - b).max()), ends["sgd"].params,
                       ends["adam"].params)
    assert max(jax.tree.leaves(gap)) > 1e-3


def test_a_part_that_is_none():
    p = problem((4,))
    algorithm = ff.algorithms.personal(p.fedavg(), lambda name: False)
    with pytest.raises(ff.UsageError, match=r"owns nothing.*It has params/"):
        algorithm.init(p.variables, 1)


def test_a_personal_head_with_scaffold():
    """Any algorithm: the shared part's control variates move, the own part's stay zero."""
    p = Problem(SIZES)
    scaffold = testing.algorithm_of("scaffold", p.task)
    run = testing.Run(ff.algorithms.personal(scaffold, lambda name: "classifier" in name), p)
    testing.check_members(run)
    control = run.states[-1].server.control
    assert max(float(jnp.abs(x).max()) for x in jax.tree.leaves(control["classifier"])) == 0
    assert float(jnp.abs(control["Dense_0"]["kernel"]).max()) > 0
    models = [run.algorithm.personal(run.states[-1].server, jax.tree.map(
        lambda x, k=k: x[k], run.states[-1].clients)) for k in (0, 3)]
    heads = [np.asarray(m.params["classifier"]["kernel"]) for m in models]
    assert np.abs(heads[0] - heads[1]).max() > 1e-3
    assert_same_bits(models[0].params["Dense_0"], models[1].params["Dense_0"])


def test_two_parts_that_stay():
    """A personal head inside personal statistics: both stay, and both are of the personal model."""
    p = problem()
    head = lambda name: "classifier" in name
    base = testing.algorithm_of("fedavg", p.task)
    both = ff.algorithms.personal(ff.algorithms.personal(base, head), ff.parts.statistics)
    at_once = ff.algorithms.personal(base, lambda n: head(n) or ff.parts.statistics(n))
    ends = [testing.Run(a, p, rounds=3) for a in (both, at_once)]
    assert_same_bits(ends[0].model, ends[1].model)
    assert_same_bits(ff.parts.take(ends[0].model, head), ff.parts.take(p.variables, head))
    row = lambda run: jax.tree.map(lambda x: x[3], run.states[-1].clients)
    models = [r.algorithm.personal(r.states[-1].server, row(r)) for r in ends]
    assert_same_bits(*models)
    sent = [traffic(r.algorithm, r.states[0], r.data) for r in ends]
    assert sent[0] == sent[1]


@pytest.mark.parametrize("name", ["fedsgd", "mime", "scaffold"])
def test_no_full_gradient_in_what_stays(name):
    """Methods that send gradients send none of the part that is not shared."""
    p = problem()
    settings = {"algorithm.scaffold.option": 1} if name == "scaffold" else {}
    inner = testing.algorithm_of(name, p.task, settings)
    run = testing.Run(ff.algorithms.personal(inner, ff.parts.normalisation), p, rounds=2)
    before, after = (ff.parts.take(m, ff.parts.normalisation) for m in (p.variables, run.model))
    assert_same_bits(before, after)


def test_traffic_by_the_documented_names():
    p = Problem(SIZES)
    own = lambda name: name.startswith("params/classifier")
    size = sum(x.size for x in ff.parts.take(p.variables, lambda n: not own(n)).values())
    for name, models in (("fedavg", 1), ("scaffold", 2)):
        algorithm = ff.algorithms.personal(testing.algorithm_of(name, p.task), own)
        run = testing.Run(algorithm, p, rounds=0)
        assert traffic(algorithm, run.states[0], run.data) == (32 * models * size,) * 2


def test_whole_numbers_are_counted_too():
    p = Problem((4, 4))
    base = p.fedavg()
    (part,) = base.exchanges

    def signs(message, state, data, round, key):
        reply = part.local(message, state, data, round, key)
        return reply._replace(sum=jnp.ones(10, jnp.int8))

    algorithm = base._replace(exchanges=(part._replace(local=signs),))
    run = testing.Run(base, p, rounds=0)
    plain, more = (traffic(a, run.states[0], run.data).up for a in (base, algorithm))
    assert more - plain == 80


def test_frozen_statistics_stay_too():
    p = problem((8,))
    client = p.client(lr=0.1)
    train = lambda frozen: client.train(
        p.variables, p.data.client(jnp.int32(0)), jax.random.key(0), round=jnp.int32(0),
        frozen=frozen,
    ).variables
    still = train(ff.parts.normalisation)
    part = lambda m: ff.parts.take(m, ff.parts.normalisation)
    assert_same_bits(part(still), part(p.variables))
    with pytest.raises(ff.UsageError, match="a frozen part that is empty"):
        train(lambda name: "nowhere" in name)


def test_personal_models_from_host_memory(tmp_path):
    config = small_config(algorithm__name="fedbn", model__norm="batch", rounds=1,
                          cohort__client_state="host", eval__window=1)
    result = ff.train(config, tmp_path, progress=False)
    assert any(r["model"] == "personal" for r in result.records)


def test_flaxs_own_batchnorm_must_see_the_mask():
    import flax.linen as nn

    class Theirs(nn.Module):
        @nn.compact
        def __call__(self, x, *, train=False):
            return nn.BatchNorm(use_running_average=not train)(x)

    model = ff.models.from_linen(Theirs(), (4,))
    variables = model.init(jax.random.key(0))
    with jax.numpy_rank_promotion("allow"):
        assert model.apply(variables, jnp.ones((2, 4))).logits.shape == (2, 4)
        with pytest.raises(ff.UsageError, match="Theirs has BatchNorm but takes no mask="):
            model.apply(variables, jnp.ones((2, 4)), jax.random.key(0), jnp.ones(2, bool))
