"""A disk that is full or may not be written: one sentence, what is kept, the same bits later."""

import contextlib
import errno
import functools
import os
import subprocess

import pytest
from conftest import assert_same_bits, small_config

import fedjax_flat as ff
from fedjax_flat import cli, disk
from fedjax_flat.data import data_folder
from fedjax_flat.report import pictures
from fedjax_flat.run import environment, metrics
from fedjax_flat.run.checkpoint import Checkpoints
from fedjax_flat.run.run_folder import RunFolder

TENSORSTORE = ValueError(
    "RESOURCE_EXHAUSTED: Error writing \"clients.dual/0.0\" in OCDBT database: Failed to write "
    "9231 bytes to file 14: No space left on device [os_error_code='28']"
)


@pytest.mark.parametrize(("error", "said"), [
    (TENSORSTORE, "No space left on device"),
    (OSError(errno.ENOSPC, "x"), "No space left on device"),
    (OSError(errno.EDQUOT, "x"), "Disk quota exceeded"),
    (OSError(errno.EROFS, "x", "/elsewhere/file"), "Read-only file system"),
    (OSError(errno.EACCES, "x", "/runs/a/config.json"), "Permission denied"),
    (OSError(errno.EACCES, "x", "/runs"), "Permission denied"),
    (OSError(errno.EACCES, "x", "/data/cifar.npz"), None),
    (ValueError("shapes differ"), None),
])
def test_what_the_disk_said(error, said):
    assert disk.refusal(error, "/runs/a") == said


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs") / "a"
    ff.train(small_config(rounds=2), folder, progress=False)
    return folder


def refuse(error):
    def refusing(*args, **options):
        raise error

    return refusing


FULL = OSError(errno.ENOSPC, "No space left on device")


@pytest.mark.parametrize(("owner", "name", "error"), [
    (environment, "record", FULL),
    (metrics.Writer, "flush", FULL),
    (metrics.Writer, "write", OSError(errno.EROFS, "Read-only file system")),
    (Checkpoints, "save", TENSORSTORE),
])
def test_training_on_a_full_disk(run, monkeypatch, capsys, owner, name, error):
    before = sorted(p.name for p in (run / "checkpoints").iterdir())
    with monkeypatch.context() as patch:
        patch.setattr(owner, name, refuse(error))
        command = ["train", "--run", str(run), "--config.rounds=3", "--quiet"]
        assert cli.main(command) == cli.EXIT_USAGE
    said = capsys.readouterr().err.strip()
    assert said.count("\n") == 0, said
    assert said.startswith(f"fedjax-flat: cannot write to run folder {run}: ")
    assert "The checkpoint of round 2 and the metrics up to it are kept. Free some space" in said
    assert "(a checkpoint takes 0.1 MB)" in said
    assert sorted(p.name for p in (run / "checkpoints").iterdir()) == before


def test_figures_on_a_full_disk(run, monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(pictures, "save", refuse(FULL))
    assert cli.main(["compare", str(run), "--figure", str(tmp_path / "a.png")]) == cli.EXIT_USAGE
    said = capsys.readouterr().err
    assert "cannot write: No space left on device. What was finished before is kept." in said


def test_a_checkpoint_that_does_not_fit_leaves_nothing(tmp_path, monkeypatch):
    checkpoints = Checkpoints(tmp_path)

    def fill(round, **options):
        (tmp_path / "1.orbax-checkpoint-tmp").mkdir()
        raise TENSORSTORE

    monkeypatch.setattr(checkpoints._manager, "save", fill)
    with pytest.raises(ValueError, match="RESOURCE_EXHAUSTED"):
        checkpoints.save(1, {})
    checkpoints.close()
    assert not list(tmp_path.iterdir())


@pytest.fixture
def small_disk(tmp_path):
    """A disk of 2 MB, or a skip where this process may not make one."""
    folder = tmp_path / "disk"
    folder.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=2m", "tmpfs", str(folder)]
    if os.geteuid() != 0 or subprocess.run(command, capture_output=True).returncode:
        pytest.skip("no right to mount a small disk")
    yield folder
    subprocess.run(["umount", str(folder)], check=True)


@pytest.mark.slow
def test_a_real_full_disk(small_disk, tmp_path, capsys):
    train = lambda rounds: cli.main(
        ["train", "--run", str(small_disk / "a"), "--quiet", f"--config.rounds={rounds}"]
    )
    ff.train(small_config(rounds=2), small_disk / "a", progress=False)
    filler = small_disk / "filler"
    with contextlib.suppress(OSError), open(filler, "wb", buffering=0) as file:
        while True:
            file.write(bytes(4096))
    size = filler.stat().st_size
    for pages in (0, 6):  # the settings do not fit, the checkpoint does not
        os.truncate(filler, size - 4096 * pages)
        assert train(4) == cli.EXIT_USAGE
        said = capsys.readouterr().err.strip()
        assert "No space left on device. The checkpoint of round 2 and" in said
        assert said.count("\n") == 0, said
    filler.unlink()
    subprocess.run(["mount", "-o", "remount,ro", str(small_disk)], check=True)
    assert train(4) == cli.EXIT_USAGE
    assert "Read-only file system. The checkpoint of round 2 and" in capsys.readouterr().err
    subprocess.run(["mount", "-o", "remount,rw", str(small_disk)], check=True)
    assert train(4) == 0
    whole = ff.train(small_config(rounds=4), tmp_path / "whole", progress=False)
    assert_same_bits(ff.load_run(small_disk / "a").state, whole.state)


@pytest.mark.parametrize("url", ["gs://bucket/run", "s3://bucket/run"])
def test_object_stores_are_refused_before_anything_is_made(url, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for use in (RunFolder, data_folder, functools.partial(disk.folder, "folder")):
        with pytest.raises(ff.UsageError, match=rf"folder {url}: expected a folder of this m"):
            use(url)
    assert list(tmp_path.iterdir()) == []
    assert disk.folder("folder", "a:b//c").name == "c"
