"""Config files, and what the command line changes in them."""

import ast
import pathlib
import runpy
import traceback

from fedjax_flat import errors

_OF_PHASE = "--config.phases."


def load_config(path: str | None, overrides: list[str], folder, imports=()):
    """The config of a file, of the run folder or the default, with `--config.NAME=VALUE`.

    `--config.phases.PHASE.NAME=VALUE` is for one phase, by its name or number.
    """
    from fedjax_flat import plugins

    refuse_unknown([a for a in overrides if a.startswith("-") and not a.startswith("--config.")])
    imported = [plugins.load(file) for file in imports]
    of_phases = [a for a in overrides if a.startswith(_OF_PHASE)]
    common = [a for a in overrides if not a.startswith(_OF_PHASE)]
    try:
        config = _first_config(path, folder)
        named = [plugins.load(file) for file in config.imports]
        config.imports = tuple(dict.fromkeys((*named, *imported)))
    except errors.UsageError:
        raise
    except (AttributeError, KeyError, OSError, TypeError, ValueError) as e:
        raise errors.UsageError(_one_line(e)) from e
    config = _overridden(config, common)
    for argument in of_phases:
        config.phases = _with_setting(config, argument)
    return config


def _with_setting(config, argument: str) -> tuple[dict, ...]:
    """The phases, one of them with another setting."""
    from fedjax_flat.experiment import config as config_lib
    from fedjax_flat.experiment import phases

    place, given, value = argument.removeprefix(_OF_PHASE).partition("=")
    phase, dot, setting = place.partition(".")
    if not (given and dot):
        raise errors.UsageError(
            f"{argument}: expected {_OF_PHASE}PHASE.NAME=VALUE, e.g. {_OF_PHASE}2.rounds=100."
        )
    found, chosen = list(config.phases), phases.entry(config, phase)
    if setting == "phases" or setting.startswith("phases."):
        raise errors.UsageError(f"{argument}: a phase has no phases.")
    each = _overridden(
        config_lib.of_phase(config, found[chosen]), [f"--config.{setting}={value}"]
    )
    found[chosen] = {**found[chosen], setting: config_lib.flatten(each)[setting]}
    return tuple(found)


def _overridden(config, overrides: list[str]):
    """The config as absl's flags change it."""
    from absl import flags
    from ml_collections import config_flags

    values, argv = flags.FlagValues(), ["fedjax-flat", *overrides]
    try:
        config_flags.DEFINE_config_dict("config", config, flag_values=values, sys_argv=argv)
        refuse_unknown(values(argv)[1:])
        return values["config"].value
    except errors.UsageError:
        raise
    except (AttributeError, KeyError) as e:
        raise errors.UsageError(_unknown_setting(overrides, e)) from e
    except (flags.Error, OSError, TypeError, ValueError) as e:
        raise errors.UsageError(str(e)) from e


def _first_config(path: str | None, folder):
    from fedjax_flat.experiment import default_config
    from fedjax_flat.run.run_folder import RunFolder

    if path is not None and pathlib.Path(path).is_dir() and path not in shipped():  # a run's
        return RunFolder(path).config()
    if path is not None:
        return _run_config_file(path)
    return default_config() if folder is None else folder.config()


def _run_config_file(path: str):
    import ml_collections

    config = run_file(path, "get_config", "config file")
    if not isinstance(config, ml_collections.ConfigDict) or not hasattr(config, "algorithm"):
        raise errors.UsageError(
            f"get_config() of {path.split(':', 1)[0]} returns {type(config).__name__}: expected "
            "the config of fedjax_flat.default_config(), changed."
        )
    return config


def run_file(path: str, function: str, what: str):
    """What `function()` of FILE returns, or `function("OPTIONS")` of FILE:OPTIONS.

    FILE may be the name of one that comes with the package (`shipped`).
    """
    file, *options = path.split(":", 1)
    ours = shipped("sweeps" if what == "sweep file" else "")
    file = str(ours.get(file, file))
    if not pathlib.Path(file).is_file():
        raise errors.UsageError(
            f"no {what} {file}; `fedjax-flat configs` lists those that come with the package."
            + errors.did_you_mean(pathlib.Path(file).stem, ours)
        )
    try:
        get = runpy.run_path(file).get(function)
        if not callable(get):
            raise errors.UsageError(f"{what} {file} defines no {function}().")
        return get(*options)
    except errors.UsageError:
        raise
    except SystemExit as e:
        raise errors.UsageError(f"{what} {file} ends the program (exit {e.code}).") from e
    except SyntaxError as e:
        raise errors.UsageError(f"{what} {file}, line {e.lineno}: {e.msg}.") from e
    except Exception as e:  # whatever a user's file does
        line = next((f.lineno for f in reversed(traceback.extract_tb(e.__traceback__))
                     if f.filename == file), "?")
        raise errors.UsageError(
            f"{what} {file}, line {line}: {type(e).__name__}: {_one_line(e)}"
        ) from e


def shipped(kind: str = "") -> dict[str, pathlib.Path]:
    """The config files of the package by name, or those of a `kind`: sweeps."""
    folder = pathlib.Path(__file__).parent / "configs" / kind
    return {path.stem: path for path in sorted(folder.glob("*.py"))}


def summary(path: pathlib.Path) -> str:
    """The first paragraph of what a config file says of itself."""
    return " ".join(about(path).split("\n\n")[0].split())


def about(path: pathlib.Path) -> str:
    """What a config file says of itself; it is not run."""
    return ast.get_docstring(ast.parse(path.read_text())) or ""


def _unknown_setting(overrides: list[str], error: Exception) -> str:
    """Names the first override that is no setting; else whatever a config file did wrong."""
    from fedjax_flat.experiment import config as config_lib

    settings = config_lib.all_settings()
    for argument in overrides:
        name = argument.removeprefix("--config.").split("=")[0]
        if argument.startswith("--config.") and name not in settings:
            return config_lib.unknown(name)
    return _one_line(error)


def _one_line(error: Exception) -> str:
    text = error.args[0] if isinstance(error, KeyError) and error.args else error
    return " ".join(str(text).split())


def refuse_unknown(arguments: list[str]) -> None:
    """Raises for the first argument that nobody asked for."""
    if arguments:
        raise errors.UsageError(
            f"unknown argument {arguments[0]!r}; see fedjax-flat --help."
        )
