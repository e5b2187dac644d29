"""environment.json: with what a run was trained. Informational: a damaged one is written anew."""

import contextlib
import datetime
import importlib.metadata
import json
import os
import pathlib
import platform
import shlex
import subprocess
import sys
from typing import Any

import jax

from fedjax_flat import disk, plugins
from fedjax_flat.ops import kernels
from fedjax_flat.version import __version__

LIBRARIES = ("jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "numpy", "scikit-learn")


def read(path: pathlib.Path) -> dict[str, Any]:
    """What was recorded; nothing of a file that is not there or is damaged."""
    with contextlib.suppress(OSError, ValueError):
        found = disk.read_json(path)
        if isinstance(found, dict) and isinstance(found.get("commands"), list):
            return found
    return {}


def record(path: pathlib.Path, partition: str, imports: tuple[str, ...]) -> None:
    """Writes versions, devices and the command that runs now, after those before it."""
    before = read(path)
    if path.exists() and not before:
        disk.set_aside(path, "cannot be read and is written anew, without earlier commands")
    program = pathlib.Path(sys.argv[0]).name.replace("__main__.py", "python -m fedjax_flat")
    command = {
        "time": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "command": shlex.join([*program.split(), *sys.argv[1:]]),
    }
    environment = {
        **now(),
        "partition": partition,
        "imports": {file: plugins.digest(pathlib.Path(file)) for file in imports},
        "commands": [*before.get("commands", ()), command],
    }
    disk.write_atomically(path, json.dumps(environment, indent=2) + "\n")


def now() -> dict[str, Any]:
    """With what this process would train."""
    return {
        "versions": {
            "fedjax_flat": __version__,
            "python": platform.python_version(),
            **{name: importlib.metadata.version(name) for name in LIBRARIES},
        },
        "devices": [f"{d.platform}:{d.device_kind}" for d in jax.devices()],
        "xla_flags": os.environ.get("XLA_FLAGS", ""),
        "kernels": kernels.name(),
        "git": git_revision(),
    }


def changes(recorded: dict[str, Any]) -> list[str]:
    """What is not as it was recorded: 'kernels: onednn, now jax'."""
    flat = lambda found: {**found, **found.get("versions", {}), "versions": ""}
    before, here = flat(recorded), flat(now())
    shown = lambda value: " ".join(value) if isinstance(value, list) else str(value) or "none"
    return [f"{name}: {shown(before[name])}, now {shown(value)}"
            for name, value in here.items() if before.get(name, value) != value]


def git_revision() -> str:
    """The revision of the source, with '+' when it was changed; '' outside a checkout."""
    here = pathlib.Path(__file__).parent

    def git(*args):
        out = subprocess.run(["git", "-C", here, *args], capture_output=True, text=True, check=True)
        return out.stdout.strip()

    try:
        return git("rev-parse", "HEAD") + ("+" if git("status", "--porcelain", "-uno") else "")
    except (OSError, subprocess.CalledProcessError):
        return ""
