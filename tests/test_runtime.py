"""XLA flags: only where they exist, never over the user's own."""

import os
import subprocess
import sys

import jaxlib.version
import pytest

from fedjax_flat import runtime

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
