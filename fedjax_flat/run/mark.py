"""Which folders are ours, and which files in them.

A run folder carries a mark, a hidden file, from the moment it is made. Without it nothing is
deleted; with it, what this program writes there, by name. The mark also keeps a second copy of the
settings and the hash of the partition, with a checksum, from which damaged files are made again.
"""

import hashlib
import json
import pathlib
import re
import shutil
from typing import Any

from fedjax_flat import disk, errors
from fedjax_flat.version import __version__

MARK = ".fedjax_flat_run.json"
LOCK = ".lock"
_PARTIAL = r"|\.partial-.+"
_DRAWN = r"(png|pdf|svg|eps|ps|jpe?g|tiff?|webp|svgz|pgf)"
# folder: what in it is ours
_OURS = {
    ".": r"((config|environment|origin|features|init|groups)\.json|(partition|groups)\.npz|"
         r"(metrics|clients)\.jsonl|metrics\.csv)(\.damaged|\.partial)?|traceback-.+\.txt|"
         + re.escape(MARK) + _PARTIAL,
    "checkpoints": r"\d+|\d+\.orbax-checkpoint-tmp.*",
    "export": r".+_round\d+\.(safetensors|msgpack|npz)" + _PARTIAL,
    "curvature": r"(.+_(lanczos|power)\d+(_float64)?(_seed\d+)?|clients\d+_(round\d+_)?train\d+)"
                 rf"\.(npz|json|{_DRAWN})|\.lock-.+" + _PARTIAL,
    "figures": r"(score|curvature|temperature|growth|distances|similarity|clients_.+)"
               rf"\.{_DRAWN}" + _PARTIAL,
    "imports": r"\d+_.+" + _PARTIAL,
    "landscape": rf"(surface|plane|line)s?_.+\.(npz|json|html|{_DRAWN})|\.lock-.+" + _PARTIAL,
    "masks": rf".+_round\d+(_.+)?\.(json|{_DRAWN})" + _PARTIAL,
    "probe": r".+_ridge.+\.json" + _PARTIAL,
    "recovery": rf".+_round\d+_client\d+(_[0-9a-f]{{8}})?\.(json|{_DRAWN})" + _PARTIAL,
    "robustness": r".+_severity\d_test\d+(_[0-9a-f]{8})?\.(json|" + _DRAWN + ")" + _PARTIAL,
    "tensorboard": r"events\.out\..+",
    "wandb": r"(offline-)?run-.+|latest-run|.+\.log",
}
_WHOLE = ("checkpoints", "wandb")  # whose folders are ours with all that is inside
# A phase's folder, which is a run folder of its own, with a mark of its own: 2_fedavg_head.
_PHASE = r"\d+_[\w.+-]+"


def phase_name(number: int, name: str) -> str:
    """The folder of a phase, as a shell takes it without quotes."""
    return f"{number}_{re.sub(r'[^A-Za-z0-9.+-]+', '_', name).strip('_')}"


def phases(folder: pathlib.Path) -> list[pathlib.Path]:
    """The folders of phases in a marked folder, in their order."""
    if not is_marked(folder):
        return []
    found = [p for p in folder.iterdir() if re.fullmatch(_PHASE, p.name) and is_marked(p)
             and not p.is_symlink()]
    return sorted(found, key=lambda p: int(p.name.split("_")[0]))


def is_marked(folder: pathlib.Path) -> bool:
    """Whether this program made the run that is here."""
    return (folder / MARK).is_file() and not (folder / MARK).is_symlink()


def write(folder: pathlib.Path, **kept: Any) -> None:
    """Marks the folder; `kept` is what `read` gives back."""
    content = {"made by": f"fedjax_flat {__version__}; --fresh may delete this run", **kept}
    content["sha256"] = _digest(content)
    disk.write_atomically(folder / MARK, json.dumps(content, indent=2) + "\n")


def read(folder: pathlib.Path) -> dict[str, Any]:
    """What was kept in the mark; nothing if there is none, or a damaged one."""
    try:
        content = disk.read_json(folder / MARK)
        sound = content.pop("sha256") == _digest(content)
    except (OSError, ValueError, KeyError, AttributeError, TypeError):
        return {}
    return content if sound else {}


def _digest(content: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def ours(folder: pathlib.Path) -> list[pathlib.Path]:
    """Every file, and every checkpoint's folder, that this program writes here."""
    found = []
    for name, pattern in _OURS.items():
        inside = folder / name
        if name != "." and inside.is_symlink():
            found.append(inside)  # the link; where it leads is not ours
        elif inside.is_dir():
            named = [p for p in inside.iterdir() if re.fullmatch(pattern, p.name)]
            found += [p for p in named if name in _WHOLE or p.is_symlink() or p.is_file()]
    return sorted(found)


def check(folder: pathlib.Path) -> bool:
    """Whether there is a run to delete; refuses a folder with anything else."""
    if not folder.exists() or all(p.name == LOCK for p in folder.iterdir()):
        return False
    if not is_marked(folder):
        raise errors.UsageError(
            f"{folder} was not made by this program (it has no {MARK}): refused to delete it. A "
            "run of an earlier version is marked when it is resumed; anything else, delete "
            "yourself, or choose another folder with --run."
        )
    return True


def delete(folder: pathlib.Path) -> list[str]:
    """Removes this program's files of a marked folder; the names of what is left."""
    if not check(folder):
        return []
    paths = ours(folder)
    for path in sorted(paths, key=lambda p: p.name == MARK):  # the mark last: a stop can go on
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink()
    for name in _OURS:
        inside = folder / name
        if name != "." and inside.is_dir() and not any(inside.iterdir()):
            inside.rmdir()
    return sorted(str(p.relative_to(folder)) for p in folder.iterdir() if p.name != LOCK)
