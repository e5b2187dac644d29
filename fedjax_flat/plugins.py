"""Users' files that register what a config names: run once, and only when asked for.

A file is Python and is executed: `--import FILE` says so, and so does a run folder that was trained
with one, of which every command logs the import.
"""

import hashlib
import importlib.util
import logging
import pathlib
import sys
import traceback

from fedjax_flat import errors, register

logger = logging.getLogger("fedjax_flat")
_loaded: dict[str, str] = {}  # SHA-256 -> the file that was run


def load(path: str) -> str:
    """Runs the file, unless it was run before; its absolute path."""
    file = pathlib.Path(path).absolute()
    if not file.is_file():
        raise errors.UsageError(f"--import {path}: no such file.")
    content = digest(file)
    if content in _loaded:  # this file, or a copy of it
        return str(file)
    if str(file) in _loaded.values():
        raise errors.UsageError(f"{file} changed since it was imported. Start Python again.")
    name = f"fedjax_flat_import_{file.stem}_{content[:8]}"
    spec = importlib.util.spec_from_file_location(name, file)
    if spec is None or spec.loader is None:
        raise errors.UsageError(f"--import {path}: expected a Python file, NAME.py.")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    before = [set(table) for table in register.REGISTRIES]
    sys.path.insert(0, str(file.parent))  # it may import its neighbours
    try:
        spec.loader.exec_module(module)
    except SystemExit as e:
        _undo(before, name)
        raise errors.UsageError(f"{file} ends the program (exit {e.code}).") from e
    except errors.UsageError as e:
        _undo(before, name)
        raise errors.UsageError(f"{file}: {e}") from e
    except SyntaxError as e:
        _undo(before, name)
        raise errors.UsageError(f"{file}, line {e.lineno}: {e.msg}.") from e
    except Exception as e:  # whatever a user's file does
        _undo(before, name)
        line = next((f.lineno for f in reversed(traceback.extract_tb(e.__traceback__))
                     if f.filename == str(file)), "?")
        raise errors.UsageError(f"{file}, line {line}: {type(e).__name__}: {e}") from e
    finally:
        sys.path.remove(str(file.parent))
    new = [f"{t.kind} {n}" for t, b in zip(register.REGISTRIES, before, strict=True)
           for n in t if n not in b]
    if not new:
        del sys.modules[name]
        raise errors.UsageError(
            f"{file} registers nothing: expected a line such as "
            "fedjax_flat.register.method(METHOD)."
        )
    logger.info("imported %s: %s", file, ", ".join(new))
    _loaded[content] = str(file)
    return str(file)


def loaded(content: str) -> str | None:
    """The file of this SHA-256 that was run, if one was."""
    return _loaded.get(content)


def _undo(before: list[set[str]], name: str) -> None:
    """A file that failed has registered nothing."""
    del sys.modules[name]
    for table, names in zip(register.REGISTRIES, before, strict=True):
        for added in [n for n in table if n not in names]:
            table.remove(added)


def digest(file: pathlib.Path) -> str:
    """SHA-256 of a file."""
    return hashlib.sha256(file.read_bytes()).hexdigest()
