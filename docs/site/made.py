"""Pages made of the code: one per method, settings, commands, data sets, Python.

A docstring's text is escaped, its indented lines (equations, examples) stay as they are.
"""

import argparse
import functools
import importlib
import inspect
import pathlib
import re
from collections.abc import Iterator
from typing import Any

import fedjax_flat as ff
from fedjax_flat import cli
from fedjax_flat.algorithms import METHODS
from fedjax_flat.experiment import config as config_lib
from fedjax_flat.report import datasets
from fedjax_flat.report import methods as described

CHECKED = pathlib.Path(__file__).parents[1] / "methods.md"
_MARKS = re.compile(r"([*_<\[\]#|~])")
_MODULES = ("algorithms", "client", "server", "wire", "data", "models", "tasks", "groups",
            "curvature", "landscape", "plot", "parts", "rng", "register", "plugins", "testing",
            "runtime")


def pages() -> Iterator[tuple[str, str]]:
    """Path and text of each."""
    yield "methods/index.md", methods_page()
    for name in METHODS:
        yield f"methods/{name}.md", method_page(name)
    yield "reference/commands.md", commands_page()
    yield "reference/settings.md", settings_page()
    yield "reference/datasets.md", datasets_page()
    yield "reference/python.md", python_page()
    for name in _MODULES:
        yield f"reference/{name}.md", module_page(name)


def method_paths() -> list[str]:
    """Alphabetically."""
    return [f"methods/{name}.md" for name in sorted(METHODS)]


def reference_paths() -> list[Any]:
    """What is to be looked up, not read."""
    return [f"reference/{name}.md" for name in ("commands", "settings", "datasets", "python")] + [
        {"Modules": [f"reference/{name}.md" for name in _MODULES]}
    ]


# Methods


def methods_page() -> str:
    """All of them in two tables."""
    whole = [n for n, m in METHODS.items() if m.make]
    added = [n for n, m in METHODS.items() if not m.make]
    return f"""# Methods

`--config.algorithm.name` takes any of these. **Sent** counts models down and up, per client and
round; **kept** counts models between rounds, per client and on the server; **gradients** are those
of one local step. SAM or ASAM on clients (`client.sharpness`) double the gradients and go with all
whose page does not say otherwise; so do the averaged models SWA and WIMA (`+swa`, `+wima`).

How closely each agrees with an independent version of its equations is on its page, and for all of
them in [one table](../methods.md).

{_table(("method", "what it is", "paper", "sent", "kept", "gradients"), _rows(whole))}

## With any of them

These are additions: `fedavg+fedntd` is FedAvg with FedNTD's term, `feddyn+fedmlb` FedDyn with
FedMLB's; by itself, the name means the addition to FedAvg.

{_table(("method", "what it is", "paper", "sent", "kept", "gradients"), _rows(added))}
"""


def _rows(names: list[str]) -> Iterator[tuple[str, ...]]:
    for name in names:
        d = _described(name)
        yield (
            f"[{name}]({name}.md)", _plain(d["summary"]), d["paper"],
            f"{d['models_down']:.3g}, {d['models_up']:.3g}",
            f"{d['client_state']:.3g}, {d['server_state']:.3g}", str(d["gradients_per_step"]),
        )


@functools.cache
def _described(name: str) -> dict[str, Any]:
    return described.describe(name)


def method_page(name: str) -> str:
    """Equations, settings, cost, how it was checked."""
    d, method = _described(name), METHODS[name]
    own = {n: (repr(s["default"]), s["range"], s["doc"]) for n, s in d["settings"].items()}
    facts = described.facts(name, d)
    train = f"--config.algorithm.name={name}"
    return f"""---
hide: [toc]
---

# {name}

{_sentence(d["summary"])} ({d["paper"]})

    {train}

## Equations

{prose(method.equations)}

## Settings

{_settings(own) if own else "None of its own."}

## Cost and what it goes with

{_table(("", ""), [(key, _plain(text)) for key, text in facts.items()])}

## Agreement with its reference

{agreement(name)}
"""


def agreement(name: str) -> str:
    """Its rows of the table of docs/methods.md."""
    header, rows = _checked()
    own = [r for r in rows if r[0] == name or r[0].startswith(f"{name} ")]
    if not own:
        elsewhere = re.search(rf"^\|[^|]*`{name}`[^|]*\| ([^|]+) \|", CHECKED.read_text(), re.M)
        where = f": it is held to it in {elsewhere[1]} of `tests/`" if elsewhere else ""
        return ("Not in the [table of methods](../methods.md), whose small network it is not "
                f"for{where}.")
    filled = [i for i in range(len(header)) if any(r[i] for r in own)]
    table = _table([header[i] for i in filled], [[_plain(r[i]) for i in filled] for r in own])
    return (f"{table}\n\n**difference** is the largest to an independent version in NumPy, "
            "relative to the largest parameter, after 5 rounds; the other columns are explained "
            "with the [whole table](../methods.md).")


@functools.cache
def _checked() -> tuple[list[str], list[list[str]]]:
    """Header and rows of the table: columns are where its rule has dashes."""
    lines = CHECKED.read_text().split("```")[1].strip("\n").split("\n")
    spans = [m.span() for m in re.finditer("-+", lines[1])]
    cut = lambda line: [line[a:b].strip() for a, b in spans]
    return cut(lines[0]), [cut(line) for line in lines[2:]]


# Things to look up


def commands_page() -> str:
    """Every command's help."""
    parser = cli.parser()
    (subparsers,) = [a for a in parser._actions if isinstance(a, argparse._SubParsersAction)]
    parts = ["# Commands\n\nWhat `fedjax-flat COMMAND --help` prints. Every command that takes a "
             "config takes `--config.NAME=VALUE`, too: [settings](settings.md)."]
    for name, command in subparsers.choices.items():
        command.formatter_class = functools.partial(command.formatter_class, width=88)
        parts.append(f"## {name}\n\n```text\n{command.format_help().strip()}\n```")
    return "\n\n".join(parts) + "\n"


def settings_page() -> str:
    """All settings but the methods' own."""
    groups: dict[str, dict[str, tuple[str, str, str]]] = {}
    methods = {f"algorithm.{m.section}" for m in METHODS.values()}
    for name, s in config_lib.all_settings().items():
        if any(name.startswith(f"{m}.") for m in methods):
            continue
        group = name.split(".")[0] if "." in name else "run"
        groups.setdefault(group, {})[name] = (repr(s.default), s.range, s.doc)
    parts = ["# Settings\n\nAll settings of an experiment with their defaults; those of a method "
             "are on [its page](../methods/index.md). On the command line "
             "`--config.NAME=VALUE`, in a config file `c.NAME = VALUE`. A name that does not exist "
             "is refused and the nearest one named; so is a setting that would have no effect."]
    for group, settings in groups.items():
        parts.append(f"## {group}\n\n{_settings(settings)}")
    return "\n\n".join(parts) + "\n"


def datasets_page() -> str:
    """What `fedjax-flat datasets` prints, as sections."""
    parts = ["# Data sets\n\nWhat `fedjax-flat datasets` prints. How to bring your own is under "
             "[Data](../data.md)."]
    for name in datasets.names():
        d = datasets.describe(name, None)
        rows = [(k, _plain(d[k])) for k in ("size", "licence", "files") if d[k]]
        own = {n: (repr(s["default"]), s["range"], s["doc"]) for n, s in d["settings"].items()}
        title = name + (f":{d['argument']}" if d["argument"] else "")
        parts.append(f"## {title}\n\n{_sentence(d['about'])}\n\n{_table(('', ''), rows)}"
                     + (f"\n\n{_settings(own)}" if own else ""))
    return "\n\n".join(parts) + "\n"


def python_page() -> str:
    """The names of `ff` itself."""
    import fedjax_flat

    parts = ["# Python\n\n`import fedjax_flat as ff`. Modules: "
             + ", ".join(f"[`ff.{m}`]({m}.md)" for m in _MODULES) + ". Names of `ff` itself:"]
    parts += [_member(f"ff.{name}", getattr(ff, name)) for name in fedjax_flat._NAMES]
    return "\n\n".join(parts) + "\n"


def module_page(name: str) -> str:
    """A module's docstring and those of its public names."""
    module = importlib.import_module(f"fedjax_flat.{name}")
    parts = [f"# ff.{name}", prose(inspect.cleandoc(module.__doc__ or ""))]
    for public in getattr(module, "__all__", None) or _defined(module):
        found = getattr(module, public)
        if inspect.ismodule(found):
            parts.append(f"## ff.{name}.{public}\n\n{prose(inspect.cleandoc(found.__doc__ or ''))}")
            parts += [_member(f"ff.{name}.{public}.{n}", getattr(found, n), "###")
                      for n in _defined(found)]
        else:
            parts.append(_member(f"ff.{name}.{public}", found))
    return "\n\n".join(parts) + "\n"


def _defined(module: Any) -> list[str]:
    return [n for n, found in vars(module).items()
            if not n.startswith("_") and callable(found)
            and getattr(found, "__module__", None) == module.__name__]


def _member(name: str, found: Any, level: str = "##") -> str:
    own = found.__doc__ if inspect.isclass(found) or inspect.isroutine(found) else None
    if not callable(found):
        return f"{level} {name}\n\n```python\n{name} = {_shortly(found)}\n```"
    text = prose(inspect.cleandoc(own or ""))
    if inspect.isclass(found) and own and own.startswith(f"{found.__name__}("):
        text = ""  # what NamedTuple and dataclass write
    return f"{level} {name}\n\n```python\n{_signature(name, found)}\n```\n\n{text}"


def _signature(name: str, found: Any) -> str:
    try:
        signature = inspect.signature(found)
    except (TypeError, ValueError):
        return name
    line = name + _clean(str(signature))
    if len(line) <= 92:
        return line
    arguments, starred = [], False
    for p in signature.parameters.values():
        if p.kind is p.KEYWORD_ONLY and not starred:
            arguments.append("    *,")
        starred |= p.kind in (p.KEYWORD_ONLY, p.VAR_POSITIONAL)
        arguments.append(f"    {_clean(str(p))},")
    returns = signature.return_annotation
    arrow = "" if returns is signature.empty else (
        f" -> {_clean(inspect.formatannotation(returns))}")
    return "\n".join([f"{name}(", *arguments, f"){arrow}"])


def _clean(annotation: str) -> str:
    """Without the modules that types are in, and where functions are in memory."""
    text = re.sub(r"<(?:function|class) '?([\w.<>]+)'?(?: at 0x\w+)?>", r"\1", annotation)
    text = re.sub(r"<object object at 0x\w+>|<[\w.]+ object at 0x\w+>", "...", text)
    return re.sub(r"\b(?:[a-z_]\w*\.)+(?=[A-Z])", "", text)


def _shortly(value: Any) -> str:
    if isinstance(value, (list, tuple)):
        return repr(value)
    try:
        return "{" + ", ".join(sorted(value)) + "}"
    except TypeError:
        return repr(value)


# Text


def prose(docstring: str) -> str:
    """A docstring as Markdown: paragraphs, lists, and blocks that are indented."""
    out: list[str] = []
    block: list[str] = []

    def close():
        if block:
            text = inspect.cleandoc("\n".join(["", *block]))
            out.extend(["", "```text", *text.split("\n"), "```", ""])
            block.clear()

    for line in docstring.split("\n"):
        if line.startswith("    ") or (block and not line.strip()):
            block.append(line)
            continue
        close()
        if re.match(r"- |\d+\. ", line) and out and out[-1] and not re.match(r"- |  ", out[-1]):
            out.append("")
        out.append(_plain(line))
    close()
    return "\n".join(out)


def _plain(text: str) -> str:
    """Marks of Markdown are characters here, but for code."""
    parts = re.split(r"(`[^`]*`)", text)
    return "".join(p if p.startswith("`") else _MARKS.sub(r"\\\1", p).replace("\\<", "&lt;")
                   for p in parts)


def _sentence(text: str) -> str:
    text = _plain(text)
    return text[:1].upper() + text[1:] + ("" if text.endswith(".") else ".")


def _settings(settings: dict[str, tuple[str, str, str]]) -> str:
    rows = [(f"`{name}`", f"`{default}`", _plain(range_), _plain(doc))
            for name, (default, range_, doc) in settings.items()]
    return _table(("setting", "default", "range", "what it is"), rows)


def _table(header, rows) -> str:
    lines = [f"| {' | '.join(header)} |", "|" + " --- |" * len(header)]
    lines += [f"| {' | '.join(row)} |" for row in rows]
    return "\n".join(lines)
