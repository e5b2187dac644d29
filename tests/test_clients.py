"""Models on each client's examples: scores, their spread, output norms, local test parts."""

import json

import jax
import numpy as np
import pytest
from conftest import small_config

import fedjax_flat as ff
from fedjax_flat.data import Partition
from fedjax_flat.data.partition import follow_owners
from fedjax_flat.report.clients import clients
from fedjax_flat.report.compare import compare
from fedjax_flat.run import metrics
from fedjax_flat.run.evaluation import summary
from fedjax_flat.run.loop import train


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("clients") / "run"
    config = small_config(
        rounds=4, eval__clients=True, data__local_test=0.3, partition__size_sigma=0.8
    )
    return folder, train(config, folder, progress=False)


def test_scores_of_clients_are_those_of_their_examples(run):
    """Against a plain loop over clients, with the network's outputs in NumPy."""
    folder, result = run
    trained = ff.load_run(folder)
    built, model = trained.experiment, trained.models["global"]
    dataset = ff.data.load("digits")
    last = {r["split"]: r for r in metrics.read(folder / "clients.jsonl") if r["round"] == 4}
    assert set(last) == {"own", "local_test"}
    seen = []
    for split, record in last.items():
        whose = {"own": built.data, "local_test": built.local_test}[split]
        scores, hits, total = [], 0, 0
        for k in range(whose.num_clients):
            one = whose.client(jax.numpy.int32(k))
            own = np.asarray(whose.indices)[int(one.offset) : int(one.offset) + int(one.size)]
            seen.append(own)
            batch = ff.data.Batch(
                dataset.train.inputs[own], dataset.train.labels[own], np.ones(len(own), bool)
            )
            prepared = built.task.prepare(batch, None)
            logits = np.asarray(built.task.forward(model, prepared, None).logits, float)
            right = logits.argmax(1) == batch.labels
            scores.append(right.mean())
            hits, total = hits + right.sum(), total + len(own)
            norm = np.sqrt((logits**2).sum(1)).mean()
            assert record["output_norm"][k] == pytest.approx(norm, rel=1e-5)
        np.testing.assert_allclose(record["score"], scores, atol=1e-6)
        (whole,) = [r for r in result.records if r["split"] == split and r["round"] == 4]
        assert whole["accuracy"] == pytest.approx(hits / total)
        assert whole["fairness.worst"] == pytest.approx(min(scores))
        assert whole["fairness.p10"] == pytest.approx(np.quantile(scores, 0.1))
        assert whole["fairness.median"] == pytest.approx(np.median(scores))
        assert whole["fairness.p90"] == pytest.approx(np.quantile(scores, 0.9))
        assert whole["fairness.deviation"] == pytest.approx(np.std(scores), abs=1e-7)
    everything = np.concatenate(seen)
    assert len(np.unique(everything)) == len(everything), "no test example is trained on"


def test_table_and_figure(run):
    folder, _ = run
    text = clients(str(folder))
    assert "worst" in text
    assert (folder / "figures" / "clients_own_global.png").stat().st_size > 5000
    with pytest.raises(ff.UsageError, match=r"it has .*--split own --model global"):
        clients(str(folder), "own", "swa")


def test_a_run_without_clients_scores(tmp_path):
    train(small_config(rounds=1), tmp_path / "a", progress=False)
    assert not (tmp_path / "a" / "clients.jsonl").exists()
    with pytest.raises(ff.UsageError, match=r"eval\.clients=True"):
        clients(str(tmp_path / "a"))


def test_resume_repeats_no_round(tmp_path):
    settings = {"eval__clients": True, "eval__window": 1, "eval__every": 1}
    for rounds in (2, 3):
        train(small_config(rounds=rounds, **settings), tmp_path / "a", progress=False)
    lines = (tmp_path / "a" / "clients.jsonl").read_text().splitlines()
    assert [json.loads(line)["round"] for line in lines] == [0, 1, 2, 3]


def test_test_examples_follow_their_owners():
    owners = np.array([0, 0, 0, 1, 1, 2, 2, 2])
    partition = Partition.of([[0, 1, 3], [2, 4, 5], [6, 7]])
    # owner 0 is mostly client 0's, 1 half and half (the later client), 2 mostly client 2's
    test = follow_owners(partition, owners, np.array([2, 0, -1, 1, 0, 3]))
    assert [list(test.client(k)) for k in range(3)] == [[1, 4], [3], [0]]


def test_clients_without_examples_have_no_score(tmp_path):
    """Imbalance D may leave a client of one class with little; an empty one counts nowhere."""
    sums = {"loss": np.array([2.0, 0.0]), "units": np.array([4.0, 0.0]),
            "examples": np.array([4.0, 0.0]), "correct": np.array([3.0, 0.0])}
    dataset = ff.data.load("digits")
    model = ff.models.build("mlp", num_classes=10, inputs=dataset.inputs)
    task = ff.tasks.classification(model, ff.data.preprocess(dataset))
    sums = jax.tree.map(lambda x: jax.numpy.asarray(x, jax.numpy.float32), sums)
    whole, each = summary(task, sums)
    assert each["score"] == [0.75, None]
    assert whole["fairness.worst"] == 0.75


def test_imbalance_and_few_examples(tmp_path):
    config = small_config(rounds=1, data__imbalance="D", partition__alpha=0.0)
    built = ff.build(config)
    labels = ff.data.load("digits").train.labels
    left = np.bincount(labels[built.partition.indices], minlength=10) / np.bincount(labels)
    np.testing.assert_allclose(np.sort(left), np.arange(0.05, 1, 0.1), atol=0.01)


def test_rounds_to_a_target_on_smoothed_curves(run):
    folder, _ = run
    accuracies = [0.0, 0.5, 0.4, 0.6]
    records = [{"round": i, "split": "test", "model": "global", "loss": 1.0, "accuracy": a}
               for i, a in enumerate(accuracies)]
    assert metrics.rounds_to(records, 0.4) == 1
    # 0, 0.25, 0.325, 0.4625
    assert metrics.rounds_to(records, 0.4, smooth=0.5) == 3
    np.testing.assert_allclose(metrics.smoothed(accuracies, 0.5), [0, 0.25, 0.325, 0.4625])
    assert "rounds to 10.00 %" in compare([str(folder)], target=0.1, smooth=0.9)
    with pytest.raises(ff.UsageError, match="--smooth = 1"):
        compare([str(folder)], smooth=1.0)
