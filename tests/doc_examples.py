"""Commands and Python on pages of the documentation: found, checked, run.

    python .../tests/doc_examples.py .../docs/index.md      runs a page's, in an empty folder

A block of code is

- Python, fenced as such and run, all of a page in one namespace; with a `title` it is a file, which
  is written and compiled;
- commands, if a line begins with `fedjax-flat`: bash expands them, `fedjax-flat` is called;
- settings, if every line begins with `--config.`: their names and values are checked;
- text otherwise.

`<!-- parsed: why -->` before a block says that it is not run, but checked: commands, files of
configs and settings as far as they go without data and training.
"""

import os
import pathlib
import re
import shlex
import shutil
import subprocess
import sys
import types
from typing import NamedTuple

from markdown_it import MarkdownIt

ROOT = pathlib.Path(__file__).parents[1]
_RECORD = r"""
command_not_found_handle() { printf '%s\0' "$@" $'\n'; }
enable -n source . test command exec
"""


class Block(NamedTuple):
    """One block of code and where its page has it."""

    kind: str
    text: str
    line: int
    title: str
    parsed: str  # why it is not run


def blocks(path: pathlib.Path) -> list[Block]:
    """Those of a page, in its order."""
    found, why = [], ""
    for token in MarkdownIt().enable("table").parse(path.read_text()):
        if token.type == "html_block":
            mark = re.match(r"<!-- parsed: (.+?) -->", token.content, re.DOTALL)
            why = mark[1] if mark else why
        elif token.type in ("code_block", "fence"):
            language, _, options = token.info.partition(" ")
            title = re.search(r'title="(.+?)"', options)
            kind = "python" if language == "python" else _kind(token.content)
            found.append(
                Block(kind, token.content, token.map[0] + 1, title[1] if title else "", why)
            )
            why = ""
        elif token.type in ("heading_open", "paragraph_open"):
            why = ""
    return found


def _kind(text: str) -> str:
    lines = [line for line in text.splitlines() if line.strip()]
    if any(re.match(r"\s*fedjax-flat ", line) for line in lines):
        return "commands"
    joined = re.sub(r"\\\n", " ", text).splitlines()
    if all(line.startswith("--config.") for line in joined if line.strip()):
        return "settings"
    return "text"


def calls(text: str) -> list[list[str]]:
    """The arguments of every command of a block, as bash reads them."""
    out = subprocess.run(
        [shutil.which("bash") or "bash", "--norc", "-c", _RECORD + text], check=False, cwd="/",
        capture_output=True, text=True, env={"PATH": "/nonexistent", "HOME": "/home"},
    )
    return [c.split("\0")[:-1] for c in out.stdout.split("\n\0") if c]


def settings(text: str) -> list[str]:
    """The arguments of a block of settings, without comments."""
    joined = re.sub(r"\\\n", " ", text).splitlines()
    return [a for line in joined for a in shlex.split(re.sub(r"\s#.*", "", line))]


def run(path: pathlib.Path) -> int:
    """All of a page's blocks that are not marked, in this folder; how many."""
    from fedjax_flat import cli

    page, done = types.ModuleType("page"), 0
    for block in blocks(path):
        where = f"{path.name}, line {block.line}"
        if block.kind == "python" and block.title:
            pathlib.Path(block.title).write_text(block.text)
            compile(block.text, block.title, "exec")
        elif block.parsed:
            continue
        elif block.kind == "python":
            exec(compile("\n" * block.line + block.text, str(path), "exec"), page.__dict__)
        elif block.kind == "commands":
            for program, *arguments in calls(block.text):
                print(f"{where}: {program} {' '.join(arguments)}", flush=True)
                if program != "fedjax-flat":
                    raise AssertionError(f"{where}: {program} cannot be run here. Mark the block.")
                code = cli.main(arguments)
                if code:
                    raise AssertionError(f"{where}: exit code {code}.")
        else:
            continue
        done += 1
    return done


if __name__ == "__main__":
    os.environ.setdefault("MPLBACKEND", "agg")
    shutil.copytree(ROOT / "configs", "configs")
    print(run(pathlib.Path(sys.argv[1])), "blocks run")
