"""XLA flags: only where they exist, never over the user's own."""

import os
import pathlib
import subprocess
import sys

import jaxlib.version
import pytest

from fedjax_flat import cli, runtime

NAME = "--xla_cpu_experimental_ynn_fusion_type"


@pytest.mark.parametrize(
    ("environment", "version", "expected"),
    [
        ({}, "0.10.2", f"{NAME}="),
        ({"XLA_FLAGS": "--a=1"}, "0.10.2", f"--a=1 {NAME}="),
        ({"XLA_FLAGS": f"{NAME}=individual_dot"}, "0.10.2", f"{NAME}=individual_dot"),
        ({}, "0.99.0", ""),
        ({"XLA_FLAGS": "--a=1"}, "0.4.30", "--a=1"),
        ({runtime.SWITCH: "0"}, "0.10.2", ""),
        ({runtime.SWITCH: "0", "XLA_FLAGS": "--a=1"}, "0.10.2", "--a=1"),
    ],
)
def test_xla_flags(environment, version, expected):
    assert runtime.xla_flags(environment, version) == expected


def test_the_flag_is_accepted_by_the_backend():
    """An unknown flag would abort this process when the backend starts."""
    environment = {k: v for k, v in os.environ.items() if k != "XLA_FLAGS"}
    code = "import fedjax_flat, jax, os; print(jax.numpy.ones(3).sum(), os.environ['XLA_FLAGS'])"
    out = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False
    )
    if jaxlib.version.__version__ not in runtime.FLAGS[NAME][1]:
        pytest.skip("this version of jaxlib gets no flag")
    assert out.stdout.strip() == f"3.0 {NAME}=", out.stderr


@pytest.mark.parametrize(("environment", "devices", "installed", "plugins", "expected"), [
    ({}, (), True, (), True),
    ({}, (), False, (), False),
    ({}, ("accel0",), True, (), False),
    ({}, ("vfio/0",), True, (), False),
    ({}, ("vfio/vfio",), True, (), True),
    ({"TPU_WORKER_ID": "0"}, (), True, (), False),
    ({"JAX_PLATFORMS": "tpu"}, (), True, (), False),
    ({}, (), True, ("xla_cuda12",), False),
    ({runtime.SWITCH: "0"}, (), True, (), False),
])
def test_tpus_are_not_looked_for_in_vain(
    environment, devices, installed, plugins, expected, tmp_path, monkeypatch
):
    for name in devices:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
    monkeypatch.setattr(runtime.importlib.util, "find_spec", lambda name: installed or None)
    monkeypatch.setattr(runtime.importlib.metadata, "entry_points", lambda group: plugins)
    assert runtime.libtpu_without_tpu(environment, tmp_path) == expected


@pytest.fixture
def home(tmp_path, monkeypatch):
    """Nothing is set that says where compiled programs go, but the home."""
    for name in (runtime.KEEP, runtime.JAX_FOLDER):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path


def test_compiled_programs_are_kept_at_home(home, monkeypatch):
    runtime.keep_compiled()
    folder = pathlib.Path(os.environ.pop(runtime.JAX_FOLDER))
    assert folder.is_dir()
    assert folder.parent == home / "fedjax_flat" / "compiled"
    for age, name in enumerate(("new-cache", "old-cache", "oldest-cache")):
        (folder / name).write_bytes(bytes(100))
        os.utime(folder / name, (1e9 - age, 1e9 - age))
    runtime.keep_compiled(largest=250)
    assert sorted(p.name for p in folder.iterdir()) == ["new-cache", "old-cache"]
    monkeypatch.delenv(runtime.JAX_FOLDER)
    monkeypatch.setenv("XDG_CACHE_HOME", "")
    monkeypatch.setenv("HOME", str(home / "other"))
    runtime.keep_compiled()
    assert os.environ.pop(runtime.JAX_FOLDER).startswith(str(home / "other" / ".cache"))


def test_compiled_programs_go_where_the_user_says_or_nowhere(home, monkeypatch):
    monkeypatch.setenv(runtime.JAX_FOLDER, "mine")
    runtime.keep_compiled()
    assert os.environ[runtime.JAX_FOLDER] == "mine"
    monkeypatch.delenv(runtime.JAX_FOLDER)
    monkeypatch.setenv(runtime.KEEP, "0")
    runtime.keep_compiled()
    assert runtime.JAX_FOLDER not in os.environ
    monkeypatch.delenv(runtime.KEEP)
    (home / "fedjax_flat").write_text("no folder")
    runtime.keep_compiled()
    assert runtime.JAX_FOLDER not in os.environ
    assert list(home.iterdir()) == [home / "fedjax_flat"]


def test_a_damaged_entry_is_forgotten(home, monkeypatch, capsys):
    """In our folder only; jax names the program, not the file."""
    said = "Error reading persistent compilation cache entry for 'jit_run': error: Error -5"
    runtime.keep_compiled()
    folder = pathlib.Path(os.environ.pop(runtime.JAX_FOLDER))
    for name in ("jit_run-12-cache", "jit_run_all-3-cache", "jit_init-5-cache"):
        (folder / name).write_bytes(b"cut")
    monkeypatch.setenv(runtime.JAX_FOLDER, str(folder))
    cli._show_warning(said, UserWarning, "file", 1)
    assert sorted(f.name for f in folder.iterdir()) == ["jit_init-5-cache", "jit_run_all-3-cache"]
    assert "is damaged; it is compiled again" in capsys.readouterr().err
    assert not runtime.forget_damaged("another warning")
    monkeypatch.setenv(runtime.JAX_FOLDER, str(home / "mine"))
    assert not runtime.forget_damaged(said.replace("run", "init"))
    assert (folder / "jit_init-5-cache").exists()
