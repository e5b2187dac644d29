"""Shells complete commands, flags and names of configs."""

import shutil
import subprocess

import pytest

from fedjax_flat import cli
from fedjax_flat.examples import EXAMPLES


@pytest.fixture(scope="module")
def scripts(tmp_path_factory):
    folder = tmp_path_factory.mktemp("completion")
    found = {}
    for shell in ("bash", "zsh"):
        with pytest.MonkeyPatch.context() as patch:
            said = []
            patch.setattr("builtins.print", said.append)
            assert cli.main(["completion", shell]) == 0
        found[shell] = folder / shell
        found[shell].write_text("\n".join(said))
    return found


def complete(script, folder, *words):
    """What bash offers for the last word."""
    quoted = " ".join(f"'{w}'" for w in words)
    program = f"""source {script}
COMP_WORDS=({quoted}); COMP_CWORD={len(words) - 1}
$(complete -p fedjax-flat | sed 's/.*-F \\([^ ]*\\).*/\\1/') fedjax-flat '{words[-1]}' '{words[-2]}'
printf '%s\\n' "${{COMPREPLY[@]}}"
"""
    done = subprocess.run(["bash", "-c", program], cwd=folder, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return set(done.stdout.split())


@pytest.mark.skipif(not shutil.which("bash"), reason="no bash here")
def test_bash(scripts, tmp_path):
    (tmp_path / "mine.py").touch()
    first = complete(scripts["bash"], tmp_path, "fedjax-flat", "")
    assert set(EXAMPLES) <= first
    assert complete(scripts["bash"], tmp_path, "fedjax-flat", "exp") == {"export"}
    assert "--init" in complete(scripts["bash"], tmp_path, "fedjax-flat", "train", "--i")
    assert complete(scripts["bash"], tmp_path, "fedjax-flat", "train", "--config", "fedsa") == {
        "fedsam"}
    assert "mine.py" in complete(scripts["bash"], tmp_path, "fedjax-flat", "train", "--config", "m")
    assert complete(scripts["bash"], tmp_path, "fedjax-flat", "report", "mi") == {"mine.py"}


@pytest.mark.skipif(not shutil.which("zsh"), reason="no zsh here")
def test_zsh_parses(scripts):
    subprocess.run(["zsh", "-n", str(scripts["zsh"])], check=True)


def test_zsh_knows_them(scripts):
    text = scripts["zsh"].read_text()
    assert text.startswith("#compdef fedjax-flat")
    assert all(f"\n    {name}:'" in text for name in EXAMPLES)
    assert "fedsam" in text


def test_another_shell(capsys):
    assert cli.main(["completion", "bsh"]) == cli.EXIT_USAGE
    assert "unknown shell 'bsh': expected one of bash, zsh. Did you mean 'bash'?" in (
        capsys.readouterr().err)
