"""Sweeps: cells and configs before anything starts, drivers and workers that die, tables."""

import functools
import json
import os
import pathlib
import signal
import socket
import subprocess
import sys
import threading
import time

import pytest

import fedjax_flat as ff
from fedjax_flat import cli
from fedjax_flat.sweep import book as books
from fedjax_flat.sweep import driver, engines, plan, results

FILE = pathlib.Path(__file__).parents[1] / "configs" / "sweeps" / "digits.py"


def sweep(**options):
    chosen = {
        "rows": {"FedAvg": {}, "<b> & co": {"algorithm.name": "fedprox"}},
        "tune": {"client.learning_rate": (0.1, 0.01)}, "seeds": 2,
        "config": {"rounds": 4, "eval.splits": ("validation", "test"), "data.validation": 0.2},
    }
    return ff.Sweep(**{**chosen, **options})


def test_cells_have_whole_configs_and_names_of_folders():
    found = plan.cells(sweep())
    assert [c.name for c in found][:3] == [
        "FedAvg/learning_rate=0.1/seed0", "FedAvg/learning_rate=0.1/seed1",
        "FedAvg/learning_rate=0.01/seed0",
    ]
    assert found[-1].name == "_b_co/learning_rate=0.01/seed1"
    assert found[-1].config.algorithm.name == "fedprox"
    assert (found[-1].config.client.learning_rate, found[-1].config.seed) == (0.01, 1)
    assert found[0].group == found[1].group != found[2].group


@pytest.mark.parametrize(("options", "message"), [
    ({"rows": {}}, "a sweep without rows"),
    ({"rows": {"a": {"client.rat": 1}}}, r"row 'a': config has no setting 'client.rat'"),
    ({"rows": {"a": {"client.momentum": -1.0}}}, r"row 'a': config.client.momentum = -1"),
    ({"rows": {"a": {"rounds": "many"}}}, r"row 'a': rounds = 'many'"),
    ({"rows": {"a&": {}, "a|": {}}, "tune": {}}, "two cells of the sweep would be"),
    ({"tune": {"client.learning_rate": ()}}, "expected a list of values"),
    ({"seeds": 0}, "seeds = 0"),
    ({"stop": "mediam"}, "unknown stop rule 'mediam'.*median"),
    ({"rows": {"a": "configs/no.py"}}, r"no config file configs/no.py"),
])
def test_refused_before_any_cell_starts(options, message):
    with pytest.raises(ff.UsageError, match=message):
        plan.cells(sweep(**options))


def test_settings_are_chosen_on_a_split_that_is_evaluated():
    lacking = plan.cells(sweep(config={"rounds": 4}))
    with pytest.raises(ff.UsageError, match=r"chosen on validation, and eval.splits = \('test',\)"):
        results.check_choice(lacking, "validation", True)
    results.check_choice(lacking, "validation", False)
    results.check_choice(plan.cells(sweep()), "validation", True)


class Scripted:
    """An engine whose cells write metrics at once, or die as told; one more call per attempt."""

    workers = 2

    def __init__(self, book, scores, dies=()):
        self.book, self.scores, self.dies, self.calls = book, scores, list(dies), []

    def submit(self, name):
        self.calls.append(name)
        if name in self.dies:
            self.dies.remove(name)
            self.book.path(name, "log").write_text("killed\n")
        else:
            write_run(self.book, name, self.scores(name))
            self.book.write_entry(name, "finished", round=4)
        return self

    def done(self):
        return True

    def close(self):
        self.closed = True


def write_run(book, name, score):
    folder = book.run_folder(name)
    folder.mkdir(parents=True, exist_ok=True)
    config = json.dumps(book.plan()["cells"][name]["config"])
    (folder / "config.json").write_text(config)
    lines = [
        {"round": t, "split": split, "model": model, "accuracy": value, "loss": 1.0}
        for t in (0, 2, 4) for model in ("global", "swa")
        for split, value in (("validation", score), ("test", score / 2 if t else 0.9))
    ]
    text = "".join(json.dumps({"kind": "evaluation", **line}) + "\n" for line in lines)
    (folder / "metrics.jsonl").write_text(text)


def score(name):
    """Best: the smaller rate; seeds differ by 0.1."""
    return 0.4 + 0.2 * ("0.01" in name) + 0.1 * name.endswith("1")


def test_a_sweep_skips_what_ended_retries_what_died_and_tells_the_best(tmp_path):
    book = books.Book(tmp_path)
    dies = ["FedAvg/learning_rate=0.1/seed0", *["_b_co/learning_rate=0.1/seed0"] * 2]
    engine = Scripted(book, score, dies)
    outcome = driver.run(sweep(), book, lambda: engine)
    assert (outcome.finished, outcome.failed) == (7, {"_b_co/learning_rate=0.1/seed0": "killed"})
    assert engine.calls.count("FedAvg/learning_rate=0.1/seed0") == 2, "tried again"
    assert engine.calls[0].endswith("seed0")
    assert engine.calls[3].endswith("seed0")
    assert engine.closed

    again = Scripted(book, score)
    assert driver.run(sweep(), book, lambda: again).finished == 8
    assert again.calls == ["_b_co/learning_rate=0.1/seed0"], "the rest had ended"

    found = results.results(book)
    first = found[0]
    assert (first["row"], first["model"], first["seeds"]) == ("FedAvg", "global", 2)
    assert first["chosen"] == "client.learning_rate = 0.01"
    assert first["mean"] == pytest.approx(0.325)
    assert first["deviation"] == pytest.approx(0.025)
    latex = results.table(found, "latex")
    assert r"<b> \& co & swa & client.learning\_rate = 0.01 & 2 & $32.50 \pm 2.50$ \\" in latex
    assert "| FedAvg | global | client.learning_rate = 0.01 | 2 | 32.50 ± 2.50 |" in results.table(
        found, "markdown")
    assert results.table(found, "csv").splitlines()[1].startswith("FedAvg,global,")
    with pytest.raises(ff.UsageError, match="unknown form of table 'latx'"):
        results.table(found, "latx")


def test_a_cell_that_is_planned_otherwise_is_refused(tmp_path):
    book = books.Book(tmp_path)
    driver.run(sweep(), book, lambda: Scripted(book, score))
    changed = sweep(config={**sweep().config, "client.batch_size": 7})
    with pytest.raises(ff.UsageError, match=r"was planned otherwise: client.batch_size: 16 -> 7"):
        driver.run(changed, book, lambda: Scripted(book, score))
    more = sweep(seeds=3)
    engine = Scripted(book, score)
    driver.run(more, book, lambda: engine)
    assert len(engine.calls) == 4, "only the new seed"


def test_two_drivers_on_one_folder(tmp_path):
    book = books.Book(tmp_path)
    with book.in_use(), pytest.raises(ff.UsageError, match="in use by another sweep"):
        driver.run(sweep(), book, lambda: Scripted(book, score))


def test_a_folder_without_a_sweep(tmp_path):
    with pytest.raises(ff.UsageError, match="holds no sweep"):
        results.results(books.Book(tmp_path))


def line(*scores, every=5):
    return [(every * (i + 1), s) for i, s in enumerate(scores)]


def test_the_median_rule():
    behind = functools.partial(driver.behind, sweep(stop="median", stop_after=10))
    others = [line(0.5, 0.6, 0.7), line(0.3, 0.4, 0.5), line(0.4, 0.5, 0.6)]
    assert behind(line(0.1, 0.44), others), "0.45 is the median of their means so far"
    assert not behind(line(0.1, 0.46), others)
    assert not behind(line(0.1), others), "too early"
    assert not behind(line(0.1, 0.2), [line(0.9)]), "nobody else got there"
    assert behind(line(0.1, 0.2), [line(0.9, 0.9), []])


def test_successive_halving():
    behind = functools.partial(driver.behind, sweep(stop="halving", stop_after=5, eta=2))
    others = [line(0.5), line(0.3), line(0.4)]
    assert not behind(line(0.45), others), "second of four"
    assert behind(line(0.35), others), "third of four"
    assert not behind(line(0.1), []), "alone"
    # at round 10, the second rung, only those that got there count
    assert not behind(line(0.35, 0.2), [*others, line(0.9, 0.1)])
    assert behind(line(0.35, 0.2), [*others, line(0.9, 0.3)])


@pytest.mark.parametrize(("argv", "message"), [
    (["sweep", str(FILE), "--run", "X", "--engine", "slrm"], "unknown engine 'slrm'"),
    (["sweep", "nothing.py", "--run", "X"], "no sweep file nothing.py"),
    (["sweep", f"{FILE}:rounds=x", "--run", "X"], "expected int"),
    (["table", "X"], "holds no sweep"),
    (["sweep", str(FILE), "--run", "X", "--engine", "local=here"], "it has no address"),
    (["sweep", str(FILE), "--run", "X", "--workers", "-1"], "--workers = -1"),
])
def test_wrong_commands(argv, message, tmp_path, capsys):
    argv = [str(tmp_path / "x") if word == "X" else word for word in argv]
    assert cli.main(argv) == 2
    assert message in capsys.readouterr().err


def test_ray_that_does_not_answer(tmp_path):
    pytest.importorskip("ray", reason="ray is not here: pip install 'fedjax-flat[ray]'")
    with pytest.raises(ff.UsageError, match="cannot be reached within"):
        engines.Ray(books.Book(tmp_path), None, 1, "127.0.0.1:1")


def test_an_address_where_something_listens_and_never_answers():
    with socket.create_server(("127.0.0.1", 0)) as silent:
        address = f"127.0.0.1:{silent.getsockname()[1]}"
        with pytest.raises(ff.UsageError, match=r"cannot be reached within 0.1 s \(timed out\)"):
            engines._check_reachable(address, 0.1)
        silent.accept()[0].close()

        def answer():
            with silent.accept()[0] as there:
                there.sendall(b"\0")

        answers = threading.Thread(target=answer)
        answers.start()
        engines._check_reachable(address, 60)
        answers.join()


def wait_for_a_worker(folder):
    """The process of a cell."""
    while True:
        found = subprocess.run(
            ["pgrep", "-f", f"sweep.worker {folder}"], capture_output=True, text=True, check=False,
        ).stdout.split()
        if found:
            return int(found[-1])
        time.sleep(0.2)


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["local", "ray"])
def test_driver_and_worker_killed(engine, tmp_path, monkeypatch):
    """No cell is lost or run twice, whoever dies; the same table as undisturbed."""
    if engine == "ray":
        pytest.importorskip("ray", reason="ray is not here: pip install 'fedjax-flat[ray]'")
    argv = [sys.executable, "-m", "fedjax_flat", "sweep", f"{FILE}:rounds=10,seeds=1", "--workers",
            "2", "--quiet", "--run"]
    whole = subprocess.run([*argv, str(tmp_path / "whole")], capture_output=True, check=True)
    argv[-1:-1] = ["--engine", engine]
    monkeypatch.setenv("RAY_worker_niceness", "0")  # where others compute too, 15 is for ever
    process = subprocess.Popen([*argv, str(tmp_path / "cut")])
    wait_for_a_worker(tmp_path / "cut")
    time.sleep(3)
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    process = subprocess.Popen([*argv, str(tmp_path / "cut")], stdout=subprocess.PIPE)
    os.kill(wait_for_a_worker(tmp_path / "cut"), signal.SIGKILL)
    out, _ = process.communicate(timeout=300)
    assert process.returncode == 0
    assert out == whole.stdout
    for folder in (tmp_path / "cut/cells").glob("*/*/*"):
        records = [json.loads(x) for x in (folder / "metrics.jsonl").read_text().splitlines()]
        rounds = [r["round"] for r in records if r["split"] == "cohort"]
        assert rounds == list(range(1, 11))


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["slurm=local", "ray"])
def test_the_same_table_from_every_engine(engine, tmp_path, monkeypatch):
    monkeypatch.setenv("RAY_worker_niceness", "0")
    pytest.importorskip({"slurm=local": "submitit", "ray": "ray"}[engine])
    tables = []
    for name in ("local", engine):
        argv = [sys.executable, "-m", "fedjax_flat", "sweep", f"{FILE}:rounds=4,seeds=1", "--run",
                str(tmp_path / name[:5]), "--engine", name, "--workers", "2", "--quiet"]
        done = subprocess.run(argv, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        tables.append(done.stdout)
    assert "FedASAM" in tables[0]
    assert tables[0] == tables[1]
