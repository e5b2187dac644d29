"""Nothing imports upwards: the order is that of CONTRIBUTING's map, which is complete."""

import ast
import pathlib
import re

ROOT = pathlib.Path(__file__).parents[1]
PACKAGE = ROOT / "fedjax_flat"


def layers():
    """Names of the map's first column, `data/`, `errors.py`, with the row in which they stand."""
    text = (ROOT / "CONTRIBUTING.md").read_text()
    table = text.split("## The map")[1].split("## ")[0]
    rows = [line.split("|")[1] for line in table.splitlines() if line.startswith("| `")]
    return {name: i for i, row in enumerate(rows) for name in re.findall(r"`([\w/.]+)`", row)}


def layer_of(module, found):
    """The row of `fedjax_flat.data.sources`: of its file if the map has it, else of its folder."""
    parts = module.split(".")[1:]
    for i in range(len(parts), 0, -1):
        for name in (f"{'/'.join(parts[:i])}.py", f"{'/'.join(parts[:i])}/"):
            if name in found:
                return found[name]
    return None


def modules():
    for path in sorted(PACKAGE.rglob("*.py")):
        parts = path.relative_to(ROOT).with_suffix("").parts
        if parts != ("fedjax_flat", "__init__"):
            yield ".".join(p for p in parts if p != "__init__"), path


def imports(path):
    """Every module of ours that a file imports, at the top or inside a function."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("fedjax_flat"):
            for alias in node.names:
                whole = f"{node.module}.{alias.name}"
                as_file = PACKAGE.parent / pathlib.Path(*whole.split("."))
                is_module = as_file.with_suffix(".py").exists() or as_file.is_dir()
                yield whole if is_module else node.module
        elif isinstance(node, ast.Import):
            yield from (a.name for a in node.names if a.name.startswith("fedjax_flat"))


def test_the_map_is_complete():
    found = layers()
    missing = [module for module, _ in modules() if layer_of(module, found) is None]
    assert not missing
    stale = [name for name in found if not (PACKAGE / name).exists()]
    assert not stale


def test_nothing_imports_upwards():
    found, wrong = layers(), []
    for module, path in modules():
        here = layer_of(module, found)
        for other in imports(path):
            if other in ("fedjax_flat", module):
                continue
            there = layer_of(other, found)
            if there is not None and there > here:
                wrong.append(f"{module} imports {other}, which is below it in the map")
    assert not wrong, "\n".join(wrong)


def test_the_engine_knows_nothing_of_files():
    for path in (PACKAGE / "engine").glob("*.py"):
        names = {n.id for n in ast.walk(ast.parse(path.read_text())) if isinstance(n, ast.Name)}
        tops = {a.name.split(".")[0] for n in ast.walk(ast.parse(path.read_text()))
                if isinstance(n, ast.Import) for a in n.names}
        assert not names & {"open"}, path
        assert not tops & {"os", "pathlib", "json", "orbax", "ml_collections"}, path
