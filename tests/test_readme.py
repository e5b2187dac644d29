"""README stays true: its Python example runs, its commands exist."""

import pathlib
import re

ROOT = pathlib.Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()


def test_python_example(capsys):
    (example,) = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    assert len([line for line in example.splitlines() if line.strip()]) <= 15
    exec(compile(example, "README.md", "exec"), {})
    loss, accuracy = map(float, re.findall(r"\d\.\d+", capsys.readouterr().out))
    assert loss < 0.5
    assert accuracy > 0.85


def test_make_targets_exist():
    makefile = (ROOT / "Makefile").read_text()
    targets = set(re.findall(r"(?:^    |`)make ([a-z-]+)", README, re.MULTILINE))
    assert {"demo", "test"} <= targets
    for target in targets:
        assert re.search(rf"^{target}:", makefile, re.MULTILINE), target


def test_files_that_readme_names_exist():
    for path in re.findall(r"(?:configs|docs|benchmarks)/[\w./-]+\.\w+", README):
        assert (ROOT / path).exists(), path
