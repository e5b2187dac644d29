"""The round of every kind, lowered for devices that are not here, and plans for TPUs."""

import importlib.util
import os
import subprocess
import sys

import jax
import pytest
from jax import export
from methods import algorithm_of, problem

import fedjax_flat as ff
from fedjax_flat.algorithms import METHODS
from fedjax_flat.report import plan as plans
from fedjax_flat.report.plan import Compiled, Plan

GB = 10**9


def lowered(algorithm, strategy="vmap"):
    """One round for CUDA and TPU: refused by jax where something would call back to the host."""
    p = problem()
    step = ff.round_step(algorithm, ff.uniform(7, 4), ff.cohort_map(strategy), task=p.task)
    state = jax.eval_shape(
        lambda: ff.init_state(algorithm, p.task.init(jax.random.key(0)), 7, jax.random.key(1))
    )
    return export.export(jax.jit(step), platforms=("cuda", "tpu"))(state, p.data)


# Of networks with normalisation, images or domains, or with examples on the server.
ELSEWHERE = ("fedbn", "silobn", "fedfa", "feddf", "mcd", "fedcg", "oll")


@pytest.mark.parametrize("name", [n for n in METHODS if n not in ELSEWHERE])
def test_every_method_lowers_for_cuda_and_tpu(name):
    made = lowered(algorithm_of(name))
    assert made.platforms == ("cuda", "tpu")
    assert "callback" not in made.mlir_module()


@pytest.mark.parametrize("strategy", ["map", "chunked"])
def test_every_strategy_lowers(strategy):
    assert lowered(algorithm_of("scaffold"), strategy).platforms == ("cuda", "tpu")


@pytest.mark.parametrize(("name", "shape"), [
    ("cnn", (32, 32, 3)), ("resnet20", (8, 8, 3)), ("mobilenetv2", (32, 32, 3)),
])
def test_every_kind_of_layer_lowers_with_its_gradient(name, shape):
    model = ff.models.build(name, num_classes=5, inputs=shape)
    variables = jax.eval_shape(model.init, jax.random.key(0))

    def gradient(params, x):
        value = lambda p: model.apply(variables._replace(params=p), x).logits.sum()
        return jax.grad(value)(params)

    x = jax.ShapeDtypeStruct((2, *shape), jax.numpy.float32)
    made = export.export(jax.jit(gradient), platforms=("cuda", "tpu"))(variables.params, x)
    assert "callback" not in made.mlir_module()


def test_lstms_lower_with_their_gradient_of_one_model_or_several():
    grad = jax.grad(lambda x, w: ff.ops.lstm(x, w).sum(), (0, 1))
    x, w = (jax.ShapeDtypeStruct(shape, "float32") for shape in ((2, 5, 3, 64), (2, 16, 64)))
    made = export.export(jax.jit(jax.vmap(grad)), platforms=("cuda", "tpu"))(x, w)
    assert "fedjax_flat_lstm" not in made.mlir_module()


def made_up(as_asked, other, cohort=32, at_once=(8, 1)):
    of = lambda memory, n: Compiled(
        "s", n, memory - GB // 10, GB // 10, 1e9, 1e9, {"all-reduce": 2}, 1
    )
    programs = of(as_asked, at_once[0]), of(other, at_once[1])
    return Plan("tpu:v5e:2x2", 4, 16e9, cohort, *programs)


def test_advice():
    """8 clients on a chip take 9 GB, one takes 2: 1 GB each, so 15 fit into 16."""
    fits = made_up(9 * GB, 2 * GB)
    assert fits.per_client == GB
    assert fits.largest_chunk == 15
    assert "cohort of 60 without chunks" in plans.advice(fits)
    too_many = made_up(30 * GB, 2 * GB)
    assert too_many.largest_chunk == 4
    assert "14,000 MB too much" in plans.advice(too_many)
    assert "cohort.chunk=4" in plans.advice(too_many)
    assert "2,000 MB more than a chip has" in plans.advice(made_up(30 * GB, 18 * GB))
    alone = made_up(2 * GB, 2 * GB, cohort=4, at_once=(1, 1))
    assert alone.largest_chunk == 1
    assert "the one client that a chip has" in plans.advice(alone)
    for at_once, programs in (((4, 1), (5, 2)), ((1, 2), (2, 3))):  # a chunk that was asked for
        asked, other = (n * GB for n in programs)
        assert made_up(asked, other, at_once=at_once).largest_chunk == 15
    assert "2 all-reduce" in plans.page(fits)


@pytest.mark.parametrize(("target", "message"), [
    ("v5e:2x2", "expected tpu:KIND:TOPOLOGY"),
    ("gpu:a100:1", "expected tpu:KIND:TOPOLOGY"),
    ("tpu:v5:2x2", "unknown TPU 'v5'.*Did you mean"),
])
def test_wrong_targets(target, message):
    with pytest.raises(ff.UsageError, match=message):
        plans.devices_of(target)


def command(*arguments):
    run = [sys.executable, "-m", "fedjax_flat", "plan", "--config", "configs/digits_fedavg.py"]
    root = os.path.dirname(os.path.dirname(__file__))
    # libtpu ends the process at flags that it does not know, such as those of conftest.py
    environment = {k: v for k, v in os.environ.items() if k != "XLA_FLAGS"}
    return subprocess.run(
        [*run, *arguments], cwd=root, env=environment, capture_output=True, text=True
    )


@pytest.mark.skipif(importlib.util.find_spec("libtpu") is not None, reason="libtpu is here")
def test_without_libtpu():
    done = command()
    assert done.returncode == 2
    assert "pip install 'fedjax-flat[plan]'" in done.stderr


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("libtpu") is None, reason="needs the extra plan")
@pytest.mark.parametrize(("target", "settings", "said"), [
    ("tpu:v5e:2x2", ("algorithm.name=scaffold", "client.sharpness=asam"), "fits"),
    ("tpu:v5e:4x4", ("cohort.size=20",), "16 chips"),
    ("tpu:v5e:3x7", (), "no such topology"),
])
def test_compiled_for_tpus(target, settings, said):
    done = command("--target", target, *(f"--config.{s}" for s in settings))
    assert said in done.stdout + done.stderr, done.stderr
    assert "Traceback" not in done.stderr


def test_collectives_of_several_arrays_are_counted():
    """As XLA writes them: combined ones have a tuple for a type, asynchronous ones a start."""
    program = """
      %all-reduce.19 = (f32[1]{0:T(128)}, /*index=1*/f32[64]{0}) all-reduce(%a.1, %b), channel_id=1
      %get-tuple-element.2 = f32[64]{0} get-tuple-element(%all-reduce.19), index=1
      %ag = f32[8]{0} all-gather(%get-tuple-element.2), dimensions={0}
      %all-gather-start.1 = (f32[2]{0}, f32[8]{0}) all-gather-start(%c), dimensions={0}
      %all-gather-done.1 = f32[8]{0} all-gather-done(%all-gather-start.1)
    """
    found = plans.collectives_in(program)
    assert {c: n for c, n in found.items() if n} == {"all-reduce": 1, "all-gather": 2}
