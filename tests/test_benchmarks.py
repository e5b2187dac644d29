"""The benchmark measures what it says."""

import dataclasses
import pathlib
import subprocess
import sys

import numpy as np
import pytest

HERE = pathlib.Path(__file__).parents[1] / "benchmarks"


@pytest.fixture
def benchmarks(monkeypatch):
    monkeypatch.syspath_prepend(str(HERE))
    import systems
    import workloads

    return systems, workloads


def test_flops_of_the_papers_cnn(benchmarks):
    """81 MFLOP per image, counted by hand in perf notes; W2 is dominated by its second layer."""
    w1, w2 = benchmarks[1].W1, benchmarks[1].W2
    conv1, conv2 = 2 * 28 * 28 * 75 * 64, 2 * 10 * 10 * 1600 * 64
    dense = 2 * (1600 * 384 + 384 * 192 + 192 * 10)
    assert w1.flops_per_image() == 2 * conv1 + 3 * conv2 + 3 * dense
    assert w2.flops_per_image() == pytest.approx(71.6e6, rel=0.01)


@pytest.mark.parametrize("system", ["ours", "jitted_step"])
def test_systems_learn_the_same_problem(benchmarks, system):
    systems, workloads = benchmarks
    tiny = dataclasses.replace(
        workloads.W2, image=(8, 8, 1), clients=12, examples=20, cohort=4, hidden=(16,)
    )
    round, loss = getattr(systems, system)(tiny)
    before = loss()
    for _ in range(25):
        round()
    assert before == pytest.approx(np.log(10), abs=0.5)
    assert loss() < 0.8 * before


def test_clients_of_unequal_sizes(benchmarks):
    """A round visits every image of its client, and no other."""
    systems, workloads = benchmarks
    w2 = workloads.WORKLOADS["W2 unequal"]
    assert (w2.sizes.min(), w2.sizes.max()) == (25, 75)
    assert w2.sizes.mean() == pytest.approx(50, abs=0.5)
    tiny = dataclasses.replace(
        w2, image=(8, 8, 1), clients=6, examples=20, cohort=1, hidden=(16,), convs=()
    )
    round, loss = systems.ours(tiny)
    assert {round() for _ in range(20)} == set(tiny.sizes)
    assert np.isfinite(loss())


def test_unknown_names_are_refused():
    out = subprocess.run(
        [sys.executable, str(HERE / "run.py"), "--only", "torhc"],
        capture_output=True, text=True, check=False,
    )
    assert out.returncode == 2
    assert "unknown 'torhc'; expected ours" in out.stderr


def test_products_are_of_a_network_that_was_trained_on_images_that_are_there(benchmarks, cifar_dir):
    """What benchmarks/curvature.py and costs.py set up, on CIFAR-10 and on noise."""
    import argparse

    import costs
    import curvature
    import jax

    args = argparse.Namespace(data=str(cifar_dir), examples=50)
    task, params, images, labels = curvature.problem(args)
    assert images.shape == (50, 32, 32, 3)
    assert images.std() > 40
    pixels = jax.numpy.asarray(images, jax.numpy.float32) / 255
    batch = curvature.ff.data.Batch(pixels, labels, np.ones(50, bool))
    logits = task.forward(curvature.ff.models.Variables(params), batch, None).logits
    assert logits.shape == (50, 10)
    assert bool(jax.numpy.isfinite(logits).all())
    loss, params, batches = costs.paper_cnn(64)
    first = jax.tree.map(lambda x: x[0], batches)
    assert float(loss(params, first)) == pytest.approx(np.log(10), abs=0.5)
