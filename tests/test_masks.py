"""Predicted labels beside the truth: the command, its numbers and its pictures."""

import json

import numpy as np
import pytest
import reference_segmentation as ref
from conftest import small_config
from test_statistics import CLASSES, Small, scenes

import fedjax_flat as ff
from fedjax_flat import cli
from fedjax_flat.report import client_sections, groups, masks, ownership, pixels


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """SiloBN for two rounds on three domains, evaluated by the statistics of the test data."""
    data, domain = scenes()
    tested = ff.data.Dataset(
        "three_domains", data.train, data.test, CLASSES, task="segmentation", owners=data.owners,
        test_owners=domain.astype(np.int32), clients=data.clients,
        classes=("a", "b", "c"), parts={"last": np.flatnonzero(domain == 2)},
        colours=((255, 0, 0), (0, 255, 0), (0, 0, 255)),
    )
    ff.register.source("three_domains", lambda: tested)
    ff.register.model("small_pixels", Small)
    path = tmp_path_factory.mktemp("masks") / "run"
    config = small_config(
        data__name="three_domains", partition__name="natural", model__name="small_pixels",
        algorithm__name="silobn", rounds=2, cohort__size=3, client__batch_size=2,
        eval__splits=("test", "last"), eval__statistics="split", eval__window=1,
    )
    result = ff.train(config, path, progress=False)
    yield path, result
    ff.data.SOURCES.remove("three_domains")
    ff.models.MODELS.remove("small_pixels")


def test_masks_of_a_run(run, capsys):
    path, result = run
    assert cli.main(["masks", str(path), "--examples", "2", "--split", "last"]) == 0
    printed = capsys.readouterr().out
    done = f"global_round{int(result.state.round)}"
    stored = json.loads((path / "masks" / f"{done}.json").read_text())
    last = [r for r in result.records if (r["split"], r["model"]) == ("last", "global")][-1]
    assert stored["scores"]["last"]["miou"] == pytest.approx(last["miou"], rel=1e-6)
    for c, name in enumerate("abc"):
        assert stored["scores"]["last"]["classes"][c] == pytest.approx(last[f"iou.{name}"], 1e-6)
    assert f"{100 * last['miou']:.2f}" in printed
    for name in (f"{done}_last2.png", f"{done}_classes.png"):
        assert (path / "masks" / name).stat().st_size > 5000
    by_class = masks.of_records(result.records)
    assert "global last" in by_class
    assert f"{100 * last['iou.b']:.2f}" in by_class
    assert masks.of_records([r | {"split": "cohort"} for r in result.records]) == ""
    personal = [r for r in result.records if r["model"] == "personal"]
    assert {r["split"] for r in personal} == {"own", "local_test"}


def test_predictions_are_those_that_are_scored(run):
    """By the statistics of the whole split, also where few of its images are drawn."""
    path, _ = run
    trained = ff.load_run(path)
    built, model = trained.experiment, trained.model()
    examples = built.splits["last"]
    count = len(examples.labels)
    logits = np.asarray(built.predict(model, examples, np.arange(count)))
    matrix = ref.confusion(np.asarray(examples.labels), logits.argmax(-1), CLASSES)
    np.testing.assert_array_equal(built.evaluate(model, examples)["confusion"], matrix)
    some = np.asarray(built.predict(model, examples, [1]))
    np.testing.assert_allclose(some[0], logits[1], rtol=1e-4, atol=1e-4)


def test_labels_in_colours(run):
    labels = np.array([[0, 2], [255, 1]])
    data = ff.data.load("three_domains")
    expected = [[[255, 0, 0], [0, 0, 255]], [[0, 0, 0], [0, 255, 0]]]
    np.testing.assert_array_equal(masks.coloured(labels, data), expected)


def test_masks_of_a_run_without_labels_of_pixels(tmp_path, capsys):
    ff.train(small_config(rounds=1, eval__window=1, eval__every=1), tmp_path / "a", progress=False)
    assert cli.main(["masks", str(tmp_path / "a")]) == 2
    assert "expected a run on labels of pixels" in capsys.readouterr().err


def test_pixels_of_clients(run, tmp_path):
    data = ff.data.load("three_domains")
    partition = ff.data.Partition.of([np.array([0, 5]), np.array([], int), np.array([7])])
    counts = pixels.pixel_counts(data, partition)
    for k, own in enumerate(([0, 5], [], [7])):
        labels = np.asarray(data.train.labels)[np.array(own, int)]
        np.testing.assert_array_equal(counts[k], [(labels == c).sum() for c in range(CLASSES)])
    shares = pixels.shares(counts)
    assert shares.shape == (2, CLASSES)  # one client has none
    np.testing.assert_allclose(shares.sum(1), 1)
    assert counts[0].sum() < 2 * data.train.labels[0].size  # ignored ones are in none
    plain = ff.data.from_arrays(np.zeros((4, 2)), np.arange(4))
    assert pixels.pixel_counts(plain, ff.data.Partition.of([np.arange(4)])) is None
    config = small_config(data__name="three_domains", partition__name="natural")
    text = ownership.ownership(config, str(tmp_path))
    assert "clients per class" in text
    assert (tmp_path / "pixels.png").stat().st_size > 5000


def test_pixels_of_clients_on_the_page(run):
    """One box for every class, of the shares that each of the three clients has."""
    path, _ = run
    (group,) = groups.grouped([groups.read(path)])
    chart = client_sections.ownership([group], None).charts[0]
    partition = ff.load_run(path).experiment.partition
    counts = pixels.pixel_counts(ff.data.load("three_domains"), partition)
    assert [box["name"] for box in chart.data] == ["a (3)", "b (3)", "c (3)"]
    np.testing.assert_allclose([box["y"] for box in chart.data], 100 * pixels.shares(counts).T,
                               rtol=1e-4)
