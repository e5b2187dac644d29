"""Convolutions by oneDNN: right, the same bits twice; where it is not, pure JAX with a reason."""

import importlib.metadata
import json
import logging
import os
import pathlib
import subprocess
import sys

import pytest
from conftest import small_config

import fedjax_flat as ff
from fedjax_flat.ops import kernels

ROOT = pathlib.Path(__file__).parents[1]


@pytest.fixture(scope="module")
def onednn():
    """Skips, with the reason, where there are no compiled kernels."""
    try:
        return kernels._compiled(kernels._find())
    except kernels.Unavailable as e:
        pytest.skip(f"no oneDNN here: {e}")


CHECK = r'''
import itertools
import jax, jax.numpy as jnp, numpy as np
from fedjax_flat import ops
from fedjax_flat.ops import kernels

assert kernels.name().startswith("onednn"), kernels.name()
jax.config.update("jax_enable_x64", True)
cases = [  # image, channels, filter, features, stride, padding, dilation, groups, examples
    (12, 8, 3, 16, 1, "SAME", 1, 1, 7), (14, 16, 5, 32, 1, "VALID", 1, 1, 10),
    (9, 8, 3, 8, 2, ((1, 1), (1, 1)), 1, 1, 3), (11, 8, 3, 16, 1, ((2, 1), (0, 3)), 2, 2, 4),
    (8, 3, 5, 64, 1, "VALID", 1, 1, 1), (8, 8, 1, 16, 2, "VALID", 1, 8, 5),
    (6, 40, 3, 150, 1, "SAME", 1, 1, 3),
]
for image, c, k, o, stride, padding, dilation, groups, n in cases:
    keys = jax.random.split(jax.random.key(image), 4)
    x = jax.random.normal(keys[0], (n, image, image, c), jnp.float32)
    w = jax.random.normal(keys[1], (k, k, c // groups, o), jnp.float32)
    conv = lambda x, w: ops.conv(
        x, w, strides=stride, padding=padding, dilation=dilation, groups=groups)
    loss = lambda x, w: jnp.sum(jnp.sin(conv(x, w)))
    both = jax.jit(jax.grad(loss, (0, 1)))
    hessian = jax.jit(lambda x, w, u, v: jax.jvp(jax.grad(loss, (0, 1)), (x, w), (u, v))[1])
    u, v = (jax.random.normal(q, a.shape, jnp.float32) for q, a in zip(keys[2:], (x, w)))
    narrow = (jax.jit(conv)(x, w), *both(x, w), *hessian(x, w, u, v))
    wide = [a.astype(jnp.float64) for a in (x, w, u, v)]
    exact = (jax.jit(conv)(*wide[:2]), *both(*wide[:2]), *hessian(*wide))
    for a, b in zip(narrow, exact):
        assert a.dtype == jnp.float32
        np.testing.assert_allclose(a, b, atol=2e-5 * float(jnp.abs(b).max()))
    for a, b in zip(narrow, (jax.jit(conv)(x, w), *both(x, w), *hessian(x, w, u, v))):
        np.testing.assert_array_equal(a, b)
    # bfloat16: of the same rounded operands; filters' gradients are rounded once, at their end.
    x, w, u, v = (a.astype(jnp.bfloat16) for a in (x, w, u, v))
    wide = [a.astype(jnp.float64) for a in (x, w, u, v)]
    linear = lambda x, w, g: jax.vjp(conv, x, w)[1](g)
    g = jnp.cos(jax.jit(conv)(x, w))
    half = (jax.jit(conv)(x, w), *jax.jit(linear)(x, w, g))
    exact = (jax.jit(conv)(*wide[:2]), *jax.jit(linear)(*wide[:2], g.astype(jnp.float64)))
    for a, b in zip(half, exact):
        assert a.dtype == jnp.bfloat16
        np.testing.assert_allclose(a.astype(jnp.float64), b, atol=5e-3 * float(jnp.abs(b).max()))
    for a, b in zip(half, (jax.jit(conv)(x, w), *jax.jit(linear)(x, w, g))):
        np.testing.assert_array_equal(a, b)
    x, w = x.astype(jnp.float32), w.astype(jnp.float32)
    narrow = (jax.jit(conv)(x, w),)
    many = jnp.stack([w, 2 * w])
    each = jax.vmap(conv)(jnp.stack([x, x]), many)  # one model per client
    np.testing.assert_allclose(each[1], 2 * narrow[0], rtol=1e-4, atol=1e-4)

mesh = jax.sharding.Mesh(np.array(jax.devices()), ("clients",))
spec = jax.sharding.PartitionSpec
split = jax.shard_map(lambda x, w: ops.conv(x, w), mesh=mesh, in_specs=(spec("clients"), spec()),
                      out_specs=spec("clients"), check_vma=False)
x = jax.random.normal(jax.random.key(0), (8 * len(jax.devices()), 8, 8, 8), jnp.float32)
w = jax.random.normal(jax.random.key(1), (3, 3, 8, 8), jnp.float32)
np.testing.assert_allclose(jax.jit(split)(x, w), jax.jit(ops.conv)(x, w), rtol=1e-5, atol=1e-5)
assert len(jax.devices()) == 8
shapes = (3, 5, 4, 7), (2, 9, 9, 64), (1, 7, 6, 150), (4, 1, 1, 81), (0, 3, 3, 5), (2, 0, 3, 20)
for shape in shapes:
    draw = lambda i: jax.random.normal(jax.random.key(i), shape, jnp.float32)
    a, b, da, db = map(draw, range(4))
    loss = lambda a, b: jnp.sum(jnp.sin(ops.total(a)) + jnp.cos(ops.inner(a, b)))
    grad = jax.grad(loss, (0, 1))
    both = lambda a, b, da, db: (
        ops.total(a), ops.inner(a, b), grad(a, b), jax.jvp(grad, (a, b), (da, db))
    )
    found = jax.jit(both)(a, b, da, db)
    exact = jax.jit(both)(*(x.astype(jnp.float64) for x in (a, b, da, db)))
    for x, y in zip(jax.tree.leaves(found), jax.tree.leaves(exact)):
        np.testing.assert_allclose(x, y, rtol=1e-4, atol=2e-4)
    for x, y in zip(jax.tree.leaves(found), jax.tree.leaves(jax.jit(both)(a, b, da, db))):
        np.testing.assert_array_equal(x, y)
    several = jax.jit(jax.vmap(ops.inner))(jnp.stack([a, da]), jnp.stack([b, db]))
    np.testing.assert_array_equal(several[1], jax.jit(ops.inner)(da, db))
    assert "fedjax_flat_image_inner" in jax.jit(ops.inner).lower(a, b).as_text()
x = jax.random.normal(jax.random.key(0), (64, 8, 8, 8), jnp.float32)
w = jax.random.normal(jax.random.key(1), (3, 3, 8, 8), jnp.float32)
x, w = x.astype(jnp.bfloat16), w.astype(jnp.bfloat16)
fast = kernels._has(kernels.HALF)
assert ("fedjax_flat_conv" in jax.jit(ops.conv).lower(x, w).as_text()) == fast
print("right")
'''


def in_process(code, **environment):
    return subprocess.run(
        [sys.executable, "-c", code], text=True, capture_output=True, check=False,
        env={**os.environ, "PYTHONPATH": str(ROOT), kernels.SWITCH: "onednn", **environment},
    )


def test_every_map_and_its_derivatives_against_float64(onednn):
    out = in_process(CHECK, XLA_FLAGS="--xla_force_host_platform_device_count=8")
    assert out.stdout.strip() == "right", out.stderr[-2000:]


@pytest.mark.slow
def test_the_property_tests_of_convolutions(onednn):
    out = subprocess.run(
        [sys.executable, "-m", "pytest", "-n", "0", "tests/test_ops.py"], cwd=ROOT, text=True,
        capture_output=True, check=False, env={**os.environ, kernels.SWITCH: "onednn"},
    )
    assert out.returncode == 0, out.stdout[-3000:]


def test_wheels_that_are_not_there(monkeypatch):
    def missing(name):
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "files", missing)
    with pytest.raises(kernels.Unavailable, match=r"not installed .pip install 'fedjax-flat\[one"):
        kernels._find()


@pytest.fixture
def undecided(monkeypatch):
    """As in a new process."""
    kernels.name.cache_clear()
    yield monkeypatch
    kernels.name.cache_clear()


@pytest.mark.parametrize(
    ("compiler", "message"),
    [("false", "false failed: no message"), ("nowhere-to-be-found", "could not be compiled")],
)
def test_a_compiler_that_fails_is_said_and_jax_is_used(
    onednn, undecided, tmp_path, caplog, compiler, message
):
    undecided.setenv("XDG_CACHE_HOME", str(tmp_path))
    undecided.setenv("CXX", compiler)
    undecided.setenv(kernels.SWITCH, "auto")
    with caplog.at_level(logging.INFO, "fedjax_flat"):
        assert kernels.name() == "jax"
        assert kernels.name() == "jax"
    assert caplog.text.count(message) == 1
    assert not list(tmp_path.rglob("*.so")), "nothing half-made"
    undecided.setenv(kernels.SWITCH, "onednn")
    kernels.name.cache_clear()
    with pytest.raises(ff.UsageError, match=message):
        kernels.name()


def test_the_compilers_last_line_is_shown(onednn, tmp_path, monkeypatch):
    broken = tmp_path / "broken.cpp"
    broken.write_text("#error no such thing\n")
    monkeypatch.setattr(kernels, "SOURCES", (broken,))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    with pytest.raises(kernels.Unavailable, match=r"g\+\+ failed: .+"):
        kernels._compiled(kernels._find())


def test_a_broken_library(onednn, tmp_path, monkeypatch):
    bad = tmp_path / "libdnnl.so.3"
    bad.write_bytes(b"not a library")
    found = kernels._find()._replace(library=bad)
    monkeypatch.setattr(kernels, "_find", lambda: found)
    with pytest.raises(kernels.Unavailable, match=r"libdnnl\.so\.3 cannot be loaded"):
        kernels._register()


def test_wrong_switch(undecided):
    undecided.setenv(kernels.SWITCH, "onednm")
    with pytest.raises(ff.UsageError, match="Did you mean 'onednn'"):
        kernels.name()


def test_a_run_remembers_its_kernels(tmp_path, undecided):
    undecided.setenv(kernels.SWITCH, "jax")
    ff.train(small_config(rounds=1), tmp_path, progress=False)
    file = tmp_path / "environment.json"
    environment = json.loads(file.read_text())
    assert environment["kernels"] == "jax"
    file.write_text(json.dumps({**environment, "kernels": "onednn 1.0"}))
    with pytest.raises(ff.UsageError, match=r"of onednn 1.0.*are jax.*--allow-other-kernels"):
        ff.train(small_config(rounds=2), tmp_path, progress=False)
    result = ff.train(
        small_config(rounds=2), tmp_path, progress=False, allow_other_kernels=True
    )
    assert int(result.state.round) == 2
    assert json.loads(file.read_text())["kernels"] == "jax"
