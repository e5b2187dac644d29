"""Every notebook runs from its first cell to its last, in a kernel of its own."""

import json
import pathlib

import nbformat
import pytest
from nbclient import NotebookClient

FOLDER = pathlib.Path(__file__).parents[1] / "notebooks"
NOTEBOOKS = sorted(FOLDER.glob("*.ipynb"))
QUICK = "heterogeneity"


CASES = [
    pytest.param(p, marks=() if p.stem == QUICK else (pytest.mark.slow,), id=p.stem)
    for p in NOTEBOOKS
]


# Sockets and event loops of the kernel's client, which it leaves to the garbage collector.
@pytest.mark.filterwarnings("default::ResourceWarning", "default::DeprecationWarning")
@pytest.mark.parametrize("path", CASES)
def test_it_runs(path, tmp_path):
    notebook = nbformat.read(path, as_version=4)
    NotebookClient(
        notebook, timeout=600, resources={"metadata": {"path": str(tmp_path)}}
    ).execute()
    outputs = [o for cell in notebook.cells for o in cell.get("outputs", ())]
    assert any("image/png" in o.get("data", {}) for o in outputs)
    assert not [o for o in outputs if o.get("name") == "stderr" and "Warning" in o["text"]]


def test_they_are_stored_without_outputs():
    assert QUICK in {path.stem for path in NOTEBOOKS}
    for path in NOTEBOOKS:
        code = [c for c in json.loads(path.read_text())["cells"] if c["cell_type"] == "code"]
        assert code
        assert not any(c["outputs"] or c["execution_count"] for c in code), path.name
        assert path.stat().st_size < 20_000, path.name
