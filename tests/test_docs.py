"""The documentation stays true: commands, settings, Python and links of every page."""

import os
import pathlib
import re
import subprocess
import sys

import doc_examples
import pytest
import yaml

import fedjax_flat as ff
from fedjax_flat import cli, config_files
from fedjax_flat.algorithms import METHODS
from fedjax_flat.experiment import config as config_lib

ROOT = pathlib.Path(__file__).parents[1]
PAGES = sorted((ROOT / "docs").glob("*.md"))
TEXTS = [*PAGES, ROOT / "README.md"]
BLOCKS = {path: doc_examples.blocks(path) for path in TEXTS}
CALLS = [
    (f"{path.name}:{block.line}", call)
    for path in TEXTS for block in BLOCKS[path] if block.kind == "commands"
    for call in doc_examples.calls(block.text)
]
TAKE_CONFIGS = ("train", "plan", "data")
sys.path.insert(0, str(ROOT / "docs" / "site"))


def run_program(folder, *arguments):
    return subprocess.run(
        [sys.executable, *map(str, arguments)], cwd=folder, text=True, capture_output=True,
        env={**os.environ, "PYTHONPATH": str(ROOT), "NO_MKDOCS_2_WARNING": "1"}, check=False,
    )


def check_call(call):
    """Arguments, config file and settings of one command, without data and training."""
    args, rest = cli.parser().parse_known_args(call[1:])
    if call[1] not in TAKE_CONFIGS or getattr(args, "imports", []):
        config_files.refuse_unknown([a for a in rest if not a.startswith("--config.")])
        return
    file = args.config if args.config and args.config.startswith("configs/") else None
    if file is None:  # of a run folder, which is not here: settings alone, but for phases'
        rest = [a for a in rest if not a.startswith("--config.phases.")]
    config = config_files.load_config(file, rest, None)
    if file and not args.data and not getattr(args, "init", None):
        ff.validate(config)


def test_commands_are_understood(monkeypatch):
    monkeypatch.chdir(ROOT)
    assert len(CALLS) > 60
    for where, call in CALLS:
        if call[0] == "fedjax-flat" and "..." not in call:
            try:
                check_call(call)
            except (SystemExit, ff.UsageError) as e:
                pytest.fail(f"{where}: {' '.join(call)}: {e}")


def test_commands_that_are_wrong_are_seen(monkeypatch):
    monkeypatch.chdir(ROOT)
    train = ["fedjax-flat", "train", "--config", "configs/digits_fedavg.py", "--run", "a"]
    for wrong in (["--config.round=3"], ["--rounds=3"], ["--config.client.rho=0.3"],
                  ["--config.algorithm.name=fedsma"]):
        with pytest.raises(ff.UsageError):
            check_call([*train, *wrong])
    with pytest.raises(SystemExit):
        check_call(["fedjax-flat", "curvature"])


def test_settings_exist_and_may_be_what_they_are():
    found = {
        f"{path.name}:{block.line}": doc_examples.settings(block.text) for path in TEXTS
        for block in BLOCKS[path] if block.kind == "settings"
    }
    assert sum(map(len, found.values())) > 20
    for where, arguments in found.items():
        try:
            config_files.load_config(None, arguments, None)
        except ff.UsageError as e:
            pytest.fail(f"{where}: {e}")


def test_settings_that_tables_name_exist():
    names = config_lib.all_settings()
    sections = {n.split(".")[0] for n in names if "." in n}
    quoted = re.compile(rf"`((?:{'|'.join(sections)})\.[a-z_0-9.]+)(?:=[^`]*)?`")
    for path in TEXTS:
        for name in quoted.findall(path.read_text()):
            known = name in names or any(n.startswith(f"{name}.") for n in names)
            assert known or (ROOT / "fedjax_flat" / name.replace(".", "/")).exists() or (
                name.endswith((".py", ".json", ".npz", ".jsonl", ".csv", ".png"))
            ), f"{path.name}: {name}"


def test_python_is_python():
    for path in PAGES:
        for block in BLOCKS[path]:
            if block.kind == "python":
                compile(block.text, f"{path.name}:{block.line}", "exec")
            elif block.kind == "text" and not block.parsed:
                assert "ff." not in block.text, f"{path.name}:{block.line} is Python: fence it so"


def test_links_lead_somewhere():
    import made

    generated = {path for path, _ in made_paths(made)}
    for path in TEXTS:
        for target in re.findall(r"\]\(([^)#\s]+)[^)]*\)", path.read_text()):
            if not re.match(r"[a-z]+:", target):
                there = (path.parent / target).resolve()
                assert there.exists() or target in generated, f"{path.name}: {target}"


def made_paths(made):
    yield from ((p, "") for p in made.method_paths())
    yield "methods/index.md", ""
    for entry in made.reference_paths():
        yield from ((p, "") for p in ([entry] if isinstance(entry, str) else entry["Modules"]))


def test_the_citation_is_of_this_version():
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert str(citation["version"]) == ff.__version__
    assert {"cff-version", "message", "title", "authors"} <= set(citation)


def test_a_page_of_a_method():
    import made

    text = made.method_page("fedgloss")
    assert "h_k <- h_k - (w_k - x~) / beta" in text
    assert "| `algorithm.fedgloss.beta` | `10.0` | 0 &lt; x |" in text
    assert re.search(r"\| fedgloss \| \d\.\de-\d\d \| feddyn", text)
    assert set(made.method_paths()) == {f"methods/{name}.md" for name in METHODS}


def test_docstrings_become_markdown():
    import made

    text = made.prose("A * b and `c * d`:\n\n    x <- x - y\n      z\n\nlist\n- one\n- two")
    assert text == (
        "A \\* b and `c * d`:\n\n\n```text\nx <- x - y\n  z\n```\n\nlist\n\n- one\n- two"
    )


@pytest.mark.slow
@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.name)
def test_examples_run(page, tmp_path):
    """Every block of the page that is not marked as `parsed`."""
    out = run_program(tmp_path, ROOT / "tests" / "doc_examples.py", page)
    assert out.returncode == 0, out.stdout[-2000:] + out.stderr[-2000:]
    assert re.search(r"\d+ blocks run$", out.stdout.strip())


@pytest.mark.slow
def test_the_site_builds_without_a_warning(tmp_path):
    """And asks nothing of a network."""
    pytest.importorskip("mkdocs", reason="needs the extra docs")
    site = tmp_path / "site"
    out = run_program(ROOT, "-m", "mkdocs", "build", "--strict", "--site-dir", site)
    assert out.returncode == 0, out.stderr[-2000:]
    assert "WARNING" not in out.stderr
    pages = list(site.rglob("*.html"))
    assert len(pages) > len(METHODS) + len(PAGES)
    for page in pages:
        loaded = re.findall(
            r"<(?:script|img|iframe)[^>]*?src=\"?(?:https?:)?//|<link[^>]*?href=\"?(?:https?:)?//",
            page.read_text(),
        )
        assert not loaded, page.name
