"""Settings of the machine below us, in one place: XLA's flags for CPU, libtpu without a TPU.

XLA reads its flags when jax starts a backend, so `import fedjax_flat` sets them; where jax has
started one before, they come too late and change nothing. A flag that the user set in XLA_FLAGS is
left alone, and FEDJAX_FLAT_XLA_FLAGS=0 turns all of this off. Unknown flags abort the process, so
each is set only for the versions of jaxlib in which it was seen to exist and to help.

| flag | versions | why |
|---|---|---|
| --xla_cpu_experimental_ynn_fusion_type= | 0.10.2 | (empty: none) YNNPACK convolutions run at a \
fifth of the rate of Eigen's |
"""

import os
from collections.abc import Mapping

import jaxlib.version

SWITCH = "FEDJAX_FLAT_XLA_FLAGS"
FLAGS = {"--xla_cpu_experimental_ynn_fusion_type": ("", {"0.10.2"})}


def xla_flags(environment: Mapping[str, str], jaxlib_version: str) -> str:
    """What XLA_FLAGS should be, given the environment and the version."""
    flags = environment.get("XLA_FLAGS", "")
    if environment.get(SWITCH, "1") == "0":
        return flags
    for name, (value, versions) in FLAGS.items():
        if jaxlib_version in versions and name not in flags:
            flags = f"{flags} {name}={value}".strip()
    return flags


# What libtpu asks of a machine that is no TPU host, before jax is imported.
NO_TPU_HERE = {
    "JAX_PLATFORMS": "cpu", "TPU_SKIP_MDS_QUERY": "1", "TPU_ACCELERATOR_TYPE": "v5litepod-4",
    "TPU_WORKER_HOSTNAMES": "localhost",
}


def compile_for_absent_tpus() -> None:
    """Lets libtpu compile here; jax itself stays on the CPU."""
    for name, value in NO_TPU_HERE.items():
        os.environ.setdefault(name, value)


def apply() -> None:
    """Sets XLA_FLAGS for the backend that jax has yet to start."""
    flags = xla_flags(os.environ, jaxlib.version.__version__)
    if flags:
        os.environ["XLA_FLAGS"] = flags
