"""Encoded uploads and messages: what is decoded, what the server does with it, what it weighs."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import reference
import reference_methods as ref
import reference_open as open_ref
from conftest import Problem, assert_close, small_config
from methods import algorithm_of, clients, problem

import fedjax_flat as ff
from fedjax_flat import testing
from fedjax_flat.engine.round import traffic

KEY = jax.random.key(0)


def through(codec, tree):
    packet, _ = codec.encode(tree, codec.init(tree), KEY)
    return packet, codec.decode(packet)


@pytest.mark.parametrize("scale", [1e-6, 1.0, 1e4])
def test_eight_bits_against_numpy(scale):
    values = scale * np.random.default_rng(0).normal(size=(40, 7)).astype(np.float32)
    packet, decoded = through(ff.wire.eight_bit(), {"a": jnp.asarray(values)})
    assert packet["a"].levels.values.dtype == jnp.uint8
    step = (values.max() - values.min()) / 255
    # A value between two levels may fall to either in float32.
    np.testing.assert_allclose(decoded["a"], open_ref.quantise8(values), atol=1.01 * step)
    assert np.abs(np.asarray(decoded["a"]) - values).max() <= 0.501 * step
    ends = [float(decoded["a"].min()), float(decoded["a"].max())]
    np.testing.assert_allclose(ends, [values.min(), values.max()], rtol=1e-5)


def test_a_constant_tensor_survives():
    _, decoded = through(ff.wire.eight_bit(), {"a": jnp.full((3,), 0.7), "b": jnp.zeros(2)})
    np.testing.assert_array_equal(decoded["a"], np.float32(0.7))
    np.testing.assert_array_equal(decoded["b"], 0)


def test_fedavg_with_eight_bit_uploads_against_numpy():
    run = testing.Run(algorithm_of("fedavg", wire__up="8bit"), problem())
    c = clients()
    ours = ref.Clients.flat(reference.unpack(run.model.params))
    exact = ref.fedopt(c, ref.plain)
    theirs = open_ref.fedavg_8bit(c)
    # Rounding to a level may go the other way in float32: a few steps of 1/255 of a difference.
    assert np.abs(ours - theirs).max() < 0.2 * np.abs(exact - c.w0).max() / 255 * 10
    assert 1e-5 < np.abs(ours - exact).max() < 0.01


@pytest.mark.parametrize(
    "name",
    ["feddyn", "fedgh", *(pytest.param(n, marks=pytest.mark.slow)
                          for n in ("fedavg", "scaffold", "naivefedgloss"))],
)
@pytest.mark.slow
def test_any_algorithm_with_eight_bits_both_ways(name):
    p = problem()
    run = testing.Run(algorithm_of(name, wire__up="8bit", wire__down="8bit"), p)
    plain = testing.Run(algorithm_of(name), p)
    testing.check_members(run)
    testing.check_padding(run)
    gap = jax.tree.map(lambda a, b: float(jnp.abs(a - b).max()), run.model, plain.model)
    assert 0 < max(jax.tree.leaves(gap)) < 0.1
    size, tensors = sum(w.size for w in jax.tree.leaves(p.params)), 4
    sent, before = (traffic(r.algorithm, r.states[0], r.data) for r in (run, plain))
    for ours, theirs in zip(sent, before, strict=True):
        models = theirs / 32 / size
        assert ours == models * (8 * size + 64 * tensors)
    assert sent.up == open_ref.bits8([w.shape for w in jax.tree.leaves(p.params)]) * (
        before.up // 32 // size
    )


def test_statistics_travel_too():
    p = Problem((4, 4), norm="batch")
    algorithm = testing.algorithm_of("fedavg", p.task, {"wire.up": "8bit"})
    run = testing.Run(algorithm, p, rounds=1)
    leaves = jax.tree.leaves(p.variables)
    up = traffic(algorithm, run.states[0], run.data).up
    assert up == sum(8 * x.size + 64 for x in leaves)


def test_personal_and_compressed_together():
    p = Problem(testing.SIZES, norm="batch")
    run = testing.Run(testing.algorithm_of("fedbn", p.task, {"wire.up": "8bit"}), p)
    testing.check_resume(run)
    testing.check_members(run)
    shared = [x for n, x in ff.parts.take(p.variables, lambda n: True).items()
              if not ff.parts.normalisation(n)]
    up = traffic(run.algorithm, run.states[0], run.data).up
    assert up == sum(8 * x.size + 64 for x in shared)
    model = run.algorithm.personal(
        run.states[-1].server, jax.tree.map(lambda x: x[0], run.states[-1].clients)
    )
    assert_close(model.params["Dense_0"], run.model.params["Dense_0"])


def test_bytes_of_a_run(tmp_path):
    plain = ff.train(small_config(rounds=1), tmp_path / "a", progress=False)
    coded = ff.train(small_config(rounds=1, wire__up="8bit"), tmp_path / "b", progress=False)
    of = lambda result: next(r for r in result.records if r["split"] == "cohort")
    assert of(plain)["bytes_down"] == of(coded)["bytes_down"]
    assert 3.9 < of(plain)["bytes_up"] / of(coded)["bytes_up"] < 4


def test_wrong_codec():
    with pytest.raises(ff.UsageError, match=r"unknown codec '8bits'.*Did you mean '8bit'"):
        ff.build(small_config(wire__up="8bits"))
