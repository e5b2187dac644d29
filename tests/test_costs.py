"""What methods cost: the thesis's formulas and tables, what runs count; how long draws take."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import small_config

import fedjax_flat as ff
from fedjax_flat import cli, models
from fedjax_flat.engine import coverage, sampling
from fedjax_flat.experiment import costs
from fedjax_flat.ops.work import multiply_adds
from fedjax_flat.report import costs as report
from fedjax_flat.run import metrics

INATURALIST = costs.Sizes(1280, 1203, 2_223_872, 332.9e6)
LANDMARKS = costs.Sizes(1280, 2028, 2_223_872, 332.9e6)


@pytest.mark.parametrize(
    ("sizes", "clients", "gigabytes"),
    [(INATURALIST, 9275, 57.1), (INATURALIST, 368, 2.3), (INATURALIST, 135, 0.8315),
     (LANDMARKS, 1262, 13.1)],
)
def test_fedncm_in_table_3_7(sizes, clients, gigabytes):
    """Exactly, to the printed digits."""
    down, up = costs.floats("fedncm", sizes)
    assert down == 0
    digits = 4 if gigabytes < 1 else 1
    assert round(4 * clients * up / 1e9, digits) == gigabytes


@pytest.mark.parametrize(
    ("method", "sizes", "options", "clients", "total"),
    [
        ("fed3r", INATURALIST, {"classes": 6}, 9275, 30.7e9),
        ("fed3r", INATURALIST, {"classes": 103}, 368, 1.4e9),
        ("fed3r", INATURALIST, {"classes": 198}, 135, 579.6e6),
        ("fed3r", LANDMARKS, {"classes": 40}, 1262, 4.4e9),
        ("fed3r", INATURALIST, {"sync": True}, 9275, 87.5e9),
        ("fed3r", LANDMARKS, {"sync": True}, 1262, 17.2e9),
        ("fedavg", INATURALIST, {}, 10 * 5000, 1.5e12),
        ("scaffold", INATURALIST, {}, 10 * 1000, 602e9),
        ("fedavg", INATURALIST, {"part": "head"}, 10 * 5000, 616e9),
        ("fedavgm", LANDMARKS, {"part": "head"}, 10 * 3000, 623e9),
        ("scaffold", LANDMARKS, {}, 10 * 3000, 2.3e12),
        ("fedavg", LANDMARKS, {"part": "features"}, 10 * 3000, 533.7e9),
    ],
)
def test_bytes_of_table_3_7(method, sizes, options, clients, total):
    """To the two digits that the table and the derived numbers of classes have."""
    assert 4 * clients * sum(costs.floats(method, sizes, **options)) == pytest.approx(total, 0.02)


@pytest.mark.parametrize(
    ("method", "sizes", "options", "visits", "total"),
    [
        ("fed3r", INATURALIST, {"classes": 103}, 326.9, 108.9e9),
        ("fed3r", INATURALIST, {"classes": 198}, 889.7, 297.6e9),
        ("fed3r", LANDMARKS, {"classes": 40}, 119.9, 40.0e9),
        ("fedncm", INATURALIST, {}, 326.9, 108.5e9),
        ("fedavg", INATURALIST, {"part": "head"}, 5 * 326.9, 550.2e9),
        ("scaffold", INATURALIST, {"part": "features"}, 5 * 326.9, 1.6e12),
        ("fedavg", INATURALIST, {}, 5 * 889.7, 4.5e12),
        ("fedavg", LANDMARKS, {}, 5 * 119.9 * 3000 * 10 / 1262, 14.1e12),
    ],
)
def test_flops_of_table_3_7(method, sizes, options, visits, total):
    assert visits * costs.work(method, sizes, **options) == pytest.approx(total, rel=0.03)


def test_what_the_thesis_prints_and_does_not_use():
    random = LANDMARKS._replace(random=5000)
    assert costs.work("fedavg", LANDMARKS, part="head", printed=True) == pytest.approx(
        3 * costs.work("fedavg", LANDMARKS, part="head")
    )
    triangle = 5000 * 5001 / 2
    assert costs.floats("fed3r_rf", random, classes=40)[1] == triangle + 5000 * 40
    assert costs.work("fed3r_rf", random, classes=40) == 332.9e6 + triangle + 5000 * 40
    assert costs.work("fed3r_rf", random, classes=40, printed=True) == 332.9e6 + triangle + 51200
    for wrong in ({"method": "fedprox"}, {"part": "haed"}):
        with pytest.raises(ff.UsageError, match="unknown"):
            costs.work(**{"method": "fedavg", "sizes": LANDMARKS, **wrong})


def test_multiply_adds_are_those_of_the_layers():
    x, w = jnp.zeros((2, 6, 6, 4)), jnp.zeros((3, 3, 4, 5))
    plain = lambda x, w: jax.lax.conv_general_dilated(
        x, w, (1, 1), "VALID", dimension_numbers=("NHWC", "HWIO", "NHWC")
    )
    expected = 2 * 4 * 4 * 5 * 3 * 3 * 4
    assert multiply_adds(plain, x, w) == expected
    assert multiply_adds(lambda x, w: ff.models.layers.ops.conv(x, w), x, w) == expected
    assert multiply_adds(lambda a, b: jax.jit(jnp.matmul)(a, b), jnp.zeros((3, 4)),
                         jnp.zeros((4, 5))) == 60
    loop = lambda a: jax.lax.scan(lambda c, _: (c @ c, None), a, length=7)[0]
    assert multiply_adds(loop, jnp.zeros((2, 2))) == 7 * 8
    assert multiply_adds(ff.ops.lstm, jnp.zeros((5, 2, 12)), jnp.zeros((3, 12))) == 5 * 2 * 3 * 12


@pytest.mark.slow
def test_mobilenetv2_is_the_thesiss():
    """300.8 M multiply-adds with 1,000 classes; table 3.4 has 332.9 M, for more than products."""
    network = models.build("mobilenetv2", num_classes=1203, inputs=(224, 224, 3))
    inputs = jax.ShapeDtypeStruct((1, 224, 224, 3), jnp.float32)
    sizes = costs.sizes_of(ff.data.Preprocess(None, None, inputs=inputs), network)
    assert (sizes.features, sizes.classes, sizes.extractor) == (1280, 1203, 2_223_872)
    assert sizes.forward + 1280 * 1000 == pytest.approx(300.8e6, rel=1e-3)


def test_runs_count_both(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("FEDJAX_FLAT_CACHE", str(tmp_path / "cache"))
    common = {"model__hidden": (24,), "rounds": 2, "cohort__size": 10, "eval__every": 1,
              "eval__window": 1}
    first = ff.train(small_config(
        algorithm__name="fed3r", cohort__sampling="once", data__features=True,
        client__batch_size=100, **common,
    ), tmp_path / "a", progress=False)
    clients = [r for r in first.records if r["split"] == "cohort"]
    examples, network = 1442, 64 * 24
    assert sum(r["examples"] for r in clients) == examples
    partition = ff.data.Partition.load(tmp_path / "a/partition.npz")
    labels = ff.data.load("digits").train.labels
    own = np.mean([len(np.unique(labels[partition.client(k)])) for k in range(20)])
    each = network + 24 * 25 / 2 + 24 * own
    assert metrics.flops_until(first.records) == pytest.approx(examples * each, rel=1e-6)
    then = ff.train(small_config(client__frozen="head", client__epochs=2, **common),
                    tmp_path / "b", init=tmp_path / "a", progress=False)
    visits = sum(r["examples"] for r in then.records if r["split"] == "cohort")
    both = examples * each + visits * 3 * (network + 240)
    sent, flops = report.spent(str(tmp_path / "b"))
    assert flops == pytest.approx(both / 20, rel=1e-6)
    assert sent == metrics.bytes_until(first.records) + 2 * 2 * 10 * 4 * (network + 24)

    runs = [str(tmp_path / "a"), str(tmp_path / "b")]
    assert cli.main(["costs", *runs, "--target", "50"]) == 0
    a, b = capsys.readouterr().out.splitlines()[2:]
    assert a.split()[2] in ("1", "2")
    assert b.split()[2] == "0", "it starts above"
    assert cli.main(["costs", *runs, "--target", "100"]) == 0
    assert capsys.readouterr().out.count("N/A") == 6
    assert cli.main(["costs", *runs, "--target", "0"]) == 2
    assert "--target 0: expected a score in percent" in capsys.readouterr().err
    assert cli.main(["costs", *runs, "--model", "swa"]) == 2
    assert metrics.flops_until([{"split": "cohort", "round": 1}]) is None
    assert report.amount(57.13e9, "B") == "57.1 GB"


TABLE_3_6 = {  # (clients, cohort): rounds to see 25, 50, 75 and 100 %
    (9275, 10): (267, 643, 1286, 9020), (9275, 20): (134, 322, 643, 4494),
    (9275, 50): (54, 129, 257, 1809), (1262, 10): (37, 88, 175, 970),
    (1262, 20): (19, 44, 87, 483), (1262, 50): (8, 18, 35, 191), (100, 10): (3, 7, 14, 50),
    (100, 20): (2, 4, 7, 24), (100, 50): (1, 1, 3, 8),
}


@pytest.mark.parametrize(("case", "expected"), TABLE_3_6.items(), ids=str)
def test_table_3_6(case, expected):
    runs = 100
    found = coverage.rounds_to_see(*case, runs=runs)
    for rounds, printed in zip(found.values(), expected, strict=True):
        error = math.sqrt(1 / runs + 1 / 1000) * rounds.deviation  # ours, and the table's
        assert abs(rounds.mean - printed) < 0.6 + 4 * error


def test_coverage_is_that_of_our_cohorts():
    """The same numbers from the sampler itself, client by client."""
    draw = jax.jit(jax.vmap(lambda seed, t: sampling.draw(
        ff.uniform(12, 3), jax.random.key(seed), t).clients, (None, 0)))
    rounds = []
    for seed in range(200):
        cohorts = np.asarray(draw(seed, jnp.arange(60)))
        first = [int(np.argmax((cohorts == k).any(1))) for k in range(12)]
        assert all((cohorts == k).any() for k in range(12))
        rounds.append(1 + max(first))
    found = coverage.rounds_to_see(12, 3, (1.0,), runs=4000)[1.0]
    assert abs(np.mean(rounds) - found.mean) < 4 * found.deviation / math.sqrt(200)
    assert coverage.rounds_to_see(7, 7, runs=3)[1.0] == (1.0, 0.0)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [((10, 11), "expected between 1 and 10"), ((10, 2, (1.5,)), "a share of 1.5"),
     ((10, 2, (0.0,)), "a share of 0.0")],
)
def test_impossible_draws(arguments, message):
    with pytest.raises(ff.UsageError, match=message):
        coverage.rounds_to_see(*arguments)
