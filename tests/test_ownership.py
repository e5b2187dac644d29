"""`fedjax-flat data`: who owns what, in numbers and pictures."""

import numpy as np
import pytest

import fedjax_flat as ff
from fedjax_flat.cli import main
from fedjax_flat.report import ownership


def lines(text):
    return {line[:21].strip(): line[21:].strip() for line in text.splitlines()}


def test_numbers_and_figures(tmp_path, capsys):
    out = tmp_path / "figures"
    asked = ["--config.partition.alpha=0.0", "--config.partition.clients=20"]
    assert main(["data", "digits", *asked, "--out", str(out)]) == 0
    found = lines(capsys.readouterr().out)
    assert found["train examples"] == "1442"
    assert found["classes per client"].startswith("1 / 1.00 / 1")
    assert found["clients per class"].startswith("2 / 2.00 / 2")
    assert float(found["mean Jaccard index"]) == pytest.approx(0.1), "2 of 20 share a class"
    for name in ("ownership.png", "examples.png"):
        assert (out / name).stat().st_size > 5000


def test_many_clients_are_a_heat_map(tmp_path):
    dataset = ff.data.load("digits")
    partition = ff.data.iid(dataset.train.labels, 40, seed=0)
    counts = ownership.class_counts(dataset, partition)
    assert counts.sum() == 1442
    assert ownership.draw_counts(counts, dataset, tmp_path / "a.png").exists()


def test_natural_clients_are_shown_unless_others_are_asked_for(tmp_path, capsys):
    rng = np.random.default_rng(0)
    table = ff.data.from_arrays(
        rng.normal(size=(30, 4)).astype(np.float32), rng.integers(0, 3, 30),
        owners=np.repeat(["anna", "bo", "cy"], 10),
    )
    ff.register.source("people", lambda: table)
    try:
        assert main(["data", "people", "--out", str(tmp_path)]) == 0
        found = lines(capsys.readouterr().out)
        assert found["clients"] == "3"
        assert not (tmp_path / "examples.png").exists(), "rows of a table are no pictures"
        assert main(["data", "people", "--config.partition.clients=5", "--out", str(tmp_path)]) == 0
        assert lines(capsys.readouterr().out)["clients"] == "5"
    finally:
        ff.data.SOURCES.remove("people")


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ([], "needs a NAME"),
        (["digit"], "Did you mean 'digits'"),
        (["digits:8"], "takes nothing after a colon"),
        (["digits", "--config.partition.clients=5000"], "5000 clients for 1442 examples"),
        (["digits", "--config.partition.alphas=1"], "Did you mean 'partition.alpha'"),
        (["digits", "--config.partition.name=natural"], "has no owners"),
    ],
)
def test_wrong_inputs(arguments, sentence, tmp_path, capsys):
    assert main(["data", *arguments, "--out", str(tmp_path)]) == 2
    assert sentence in capsys.readouterr().err
