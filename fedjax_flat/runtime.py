"""Settings of the machine below us, in one place: XLA's flags for CPU, libtpu without a TPU, and
where compiled programs are kept.

XLA reads its flags when jax starts a backend, so `import fedjax_flat` sets them; where jax has
started one before, they come too late and change nothing. A flag that the user set in XLA_FLAGS is
left alone, and FEDJAX_FLAT_XLA_FLAGS=0 turns all of this off. Unknown flags abort the process, so
each is set only for the versions of jaxlib in which it was seen to exist and to help.

| flag | versions | why |
|---|---|---|
| --xla_cpu_experimental_ynn_fusion_type= | 0.10.2 | (empty: none) YNNPACK convolutions run at a \
fifth of the rate of Eigen's |
"""

import hashlib
import importlib.metadata
import importlib.util
import os
import pathlib
import platform
import re
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
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",  # several plans at once: no chip is theirs alone
}


def libtpu_without_tpu(environment: Mapping[str, str], devices: pathlib.Path) -> bool:
    """Whether jax would look for TPUs in vain, for seconds and with many lines of warnings.

    It does where libtpu is installed (extra `plan`). Nothing else says that this is a TPU host, the
    user has not chosen a platform, and no plugin knows of other devices.
    """
    if environment.get(SWITCH, "1") == "0" or importlib.util.find_spec("libtpu") is None:
        return False
    said = "JAX_PLATFORMS" in environment or any(n.startswith("TPU_") for n in environment)
    chips = [*devices.glob("accel[0-9]*"), *devices.glob("vfio/[0-9]*")]
    return not (said or chips or importlib.metadata.entry_points(group="jax_plugins"))


def compile_for_absent_tpus() -> None:
    """Lets libtpu compile here; jax itself stays on the CPU."""
    for name, value in NO_TPU_HERE.items():
        os.environ.setdefault(name, value)


KEEP = "FEDJAX_FLAT_COMPILE_CACHE"
JAX_FOLDER = "JAX_COMPILATION_CACHE_DIR"
LARGEST = 2_000_000_000  # bytes that are kept


def keep_compiled(largest: int = LARGEST) -> None:
    """Lets jax, which is yet to be imported, keep what takes over a second to compile.

    In ~/.cache/fedjax_flat/compiled, in a folder for each kind of CPU, as homes are shared by
    machines; from there the oldest go when there is too much. A folder of the user's in
    JAX_COMPILATION_CACHE_DIR is taken as it is; FEDJAX_FLAT_COMPILE_CACHE=0 keeps nothing, and
    neither does a home that cannot be written.
    """
    if os.environ.get(KEEP, "1") == "0" or JAX_FOLDER in os.environ:
        return
    folder = _folder()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        kept = 0
        files = [(file.stat().st_mtime, file.stat().st_size, file) for file in folder.iterdir()]
        for _, size, file in sorted(files, reverse=True):
            kept += size
            if kept > largest:
                file.unlink()
    except OSError:  # also when another process has just deleted one
        pass
    if os.access(folder, os.W_OK):
        os.environ[JAX_FOLDER] = str(folder)


def forget_damaged(warning: str) -> bool:
    """Deletes the entry that jax says it cannot read, if we keep it; jax then writes it anew.

    A kill in the moment of writing leaves such an entry, because jax writes it where it stays.
    """
    found = re.match(r"Error reading persistent compilation cache entry for '([\w.-]+)'", warning)
    if not found or os.environ.get(JAX_FOLDER) != str(_folder()):
        return False
    for file in _folder().glob(f"{found[1]}-*"):
        file.unlink(missing_ok=True)
    return True


def _folder() -> pathlib.Path:
    home = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    return pathlib.Path(home, "fedjax_flat", "compiled", _kind_of_cpu())


def _kind_of_cpu() -> str:
    """A name for what a compiler may use here."""
    try:
        lines = pathlib.Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    known = [line for line in lines if line.startswith(("model name", "flags", "Features"))]
    text = "\n".join([platform.machine(), *sorted(set(known))])
    return hashlib.sha256(text.encode()).hexdigest()[:12]


def apply() -> None:
    """Sets XLA_FLAGS, and JAX_PLATFORMS if need be, for the backend that jax has yet to start."""
    flags = xla_flags(os.environ, jaxlib.version.__version__)
    if flags:
        os.environ["XLA_FLAGS"] = flags
    if libtpu_without_tpu(os.environ, pathlib.Path("/dev")):
        os.environ["JAX_PLATFORMS"] = "cpu"
