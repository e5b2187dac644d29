"""Convolutions and LSTMs compiled for CPU, where they can be: `pip install 'fedjax-flat[onednn]'`.

Convolutions are oneDNN's (onednn.cpp), of float32 or, where the processor multiplies it, bfloat16.
The LSTM's loops over time (lstm.cpp), of float32 and at least 16 units, and sums over images
(sums.cpp), of float32, are our own. All are one library, compiled when the first is needed (12 s on
a busy core, then cached by versions and processor) against the one that the extra installs. Without
it, compiler, AVX2 or these types the operations are those of ops/conv.py, ops/lstm.py and
ops/sums.py, in pure JAX, and the log says why, once.

FEDJAX_FLAT_KERNELS=auto | onednn | jax: what is there; oneDNN or an error; never oneDNN. Results of
the two differ in their last bits, so a run folder records which it was trained with.
"""

import ctypes
import functools
import hashlib
import importlib.metadata
import logging
import os
import pathlib
import platform
import shutil
import subprocess
import tempfile
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import jaxlib.version
import numpy as np

from fedjax_flat import errors

logger = logging.getLogger("fedjax_flat")
SWITCH = "FEDJAX_FLAT_KERNELS"
FOLDER = pathlib.Path(__file__).parent
SOURCES, INCLUDED = ("onednn.cpp", "lstm.cpp", "sums.cpp"), ("threads.h",)
LIBRARY, HEADERS = "onednn-cpu-gomp", "onednn-devel-cpu-gomp"
HALF = "avx512_bf16"  # instructions without which bfloat16 is slower than float32
HANDLERS = (
    "conv_output", "conv_input_grad", "conv_filter_grad", "lstm_forward", "lstm_linear",
    "lstm_reverse", "image_total", "image_inner",
)


class Unavailable(Exception):
    """Why there are no compiled kernels here."""


class _OneDNN(NamedTuple):
    version: str
    include: pathlib.Path
    library: pathlib.Path


@functools.cache
def name() -> str:
    """`onednn 2023.2.0`, or `jax` where convolutions are pure JAX; decided once per process."""
    choice = os.environ.get(SWITCH, "auto")
    errors.lookup(SWITCH, choice, dict.fromkeys(("auto", "onednn", "jax")))
    if choice == "jax" or jax.default_backend() != "cpu":
        return "jax"
    try:
        return _register()
    except Unavailable as e:
        if choice == "onednn":
            raise errors.UsageError(f"{SWITCH}=onednn: {e}") from e
        logger.info("convolutions and LSTMs in pure JAX: %s", e)
        return "jax"


def takes(which: str, a: Any, b: Any, geometry: Any) -> bool:
    """Whether oneDNN computes this map: it is here, knows the type, and is the faster one.

    Slower, on every machine it was measured on: input gradients of images with few channels, and
    filter gradients from 256 or more channels with a stride, which hardly have pixels left.
    """
    half = a.dtype == jnp.bfloat16 and _has(HALF)
    if not (a.dtype == np.float32 or half) or min(*a.shape, *b.shape) == 0 or name() == "jax":
        return False
    if which == "input_grad":
        return b.shape[2] * geometry.groups > 4
    return not (which == "filter_grad" and max(geometry.strides) > 1 and a.shape[3] >= 256)


def call(which: str, a: jax.Array, b: jax.Array, geometry: Any) -> jax.Array:
    """One of the three maps of ops/conv.py."""
    shape = {
        "output": lambda: (a.shape[0], *geometry.out, b.shape[3]),
        "input_grad": lambda: (a.shape[0], *geometry.image, b.shape[2] * geometry.groups),
        "filter_grad": lambda: (*geometry.kernel, a.shape[3] // geometry.groups, b.shape[3]),
    }[which]()
    numbers = lambda values: np.asarray(values, np.int64)
    # Gradients of filters are sums over examples, which stay float32 until they are whole.
    dtype = jnp.float32 if which == "filter_grad" else a.dtype
    out = handler(f"conv_{which}", jax.ShapeDtypeStruct(shape, dtype))(
        a, b, image=numbers(geometry.image), kernel=numbers(geometry.kernel),
        strides=numbers(geometry.strides), padding=numbers(sum(geometry.padding, ())),
        dilation=numbers(geometry.dilation), groups=np.int64(geometry.groups),
    )
    return out.astype(a.dtype)


def handler(which: str, out: jax.ShapeDtypeStruct) -> Callable[..., jax.Array]:
    """One of `HANDLERS`, a function of arrays and attributes; where `name` is not jax."""
    return jax.ffi.ffi_call(_target(which), out)


def _target(which: str) -> str:
    return f"fedjax_flat_{which}"


def _register() -> str:
    """Loads the handlers, compiled if need be."""
    if not _has("avx2"):
        raise Unavailable("this processor has no AVX2")
    found = _find()
    try:
        ctypes.CDLL(str(found.library), mode=ctypes.RTLD_GLOBAL)
        handlers = ctypes.CDLL(str(_compiled(found)))
    except OSError as e:
        raise Unavailable(f"{found.library.name} cannot be loaded ({e})") from e
    for which in HANDLERS:
        capsule = jax.ffi.pycapsule(getattr(handlers, which))
        jax.ffi.register_ffi_target(_target(which), capsule, platform="cpu")
    return f"onednn {found.version}"


def _find() -> _OneDNN:
    """The library and headers that the extra installed."""
    files = {}
    for package, wanted in ((LIBRARY, "/libdnnl.so.3"), (HEADERS, "oneapi/dnnl/dnnl.hpp")):
        try:
            listed = importlib.metadata.files(package) or []
        except importlib.metadata.PackageNotFoundError:
            raise Unavailable(
                f"{package} is not installed (pip install 'fedjax-flat[onednn]')"
            ) from None
        paths = [pathlib.Path(str(p.locate())).resolve() for p in listed
                 if str(p).endswith(wanted)]
        if not paths or not paths[0].is_file():
            raise Unavailable(f"{package} lacks {wanted}: install it again")
        files[package] = paths[0]
    return _OneDNN(importlib.metadata.version(LIBRARY), files[HEADERS].parents[2], files[LIBRARY])


def _compiled(found: _OneDNN) -> pathlib.Path:
    """The handlers' library, from the cache or by the compiler."""
    key = "\0".join([
        *((FOLDER / f).read_text() for f in (*SOURCES, *INCLUDED)), jaxlib.version.__version__,
        found.version, platform.machine(), _instructions(), str(found.library),
    ])
    cache = pathlib.Path(os.environ.get("XDG_CACHE_HOME", pathlib.Path.home() / ".cache"))
    target = cache / "fedjax_flat" / f"onednn-{hashlib.sha256(key.encode()).hexdigest()[:16]}.so"
    if target.exists():
        return target
    compiler = os.environ.get("CXX") or shutil.which("g++")
    if not compiler:
        raise Unavailable("there is no C++ compiler, g++ or $CXX")
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=target.parent) as folder:
            partial = pathlib.Path(folder) / "handlers.so"
            done = subprocess.run(
                [compiler, "-std=c++17", "-O2", "-march=native", "-fPIC", "-shared", "-fopenmp",
                 f"-I{jax.ffi.include_dir()}", f"-I{found.include}",
                 *(str(FOLDER / f) for f in SOURCES), "-o", str(partial), str(found.library),
                 f"-Wl,-rpath,{found.library.parent}"],
                capture_output=True, text=True, check=False,
            )
            if done.returncode:
                last = (done.stderr.strip().splitlines() or ["no message"])[-1]
                raise Unavailable(f"{compiler} failed: {last[:200]}")
            os.replace(partial, target)
    except OSError as e:
        raise Unavailable(f"the handlers could not be compiled into {target.parent} ({e})") from e
    return target


@functools.cache
def _instructions() -> str:
    """Those of the processor, with a space on either side of each."""
    info = pathlib.Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    return next((f"{line} " for line in lines if line.startswith("flags")), "")


def _has(instructions: str) -> bool:
    return f" {instructions} " in _instructions()
