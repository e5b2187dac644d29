"""LADD and self-training: losses, clusters, rounds and tests by nearest style, against NumPy."""

import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import reference_styles as ref
from conftest import Problem, assert_close, small_config
from methods import algorithm_of
from test_styles import pictures

import fedjax_flat as ff
from fedjax_flat.algorithms import base, ladd
from fedjax_flat.algorithms.ladd import LaddState, Trained
from fedjax_flat.client import terms, unlabelled
from fedjax_flat.engine.round import traffic
from fedjax_flat.experiment import by_style as tested
from fedjax_flat.groups import by_style
from fedjax_flat.models import Clusters, Variables

REAL = np.array([True, True, False])
DEFAULTS = {n: s.default for n, s in unlabelled.SETTINGS.items()}


def logits(seed, spread=3.0):
    """Of three images, the last of which is padding."""
    return spread * np.random.default_rng(seed).normal(size=(3, 5, 4, 3))


single = lambda x: jnp.asarray(x, jnp.float32)


@pytest.mark.parametrize("rule", unlabelled.RULES)
@pytest.mark.parametrize("spread", [0.5, 3.0])
def test_pseudo_labels(rule, spread):
    z = logits(0, spread)
    guess, kept = unlabelled.pseudo_labels(single(z), jnp.asarray(REAL), rule, 0.9, 0.66)
    expected = ref.pseudo_labels(single(z), rule, 0.9, 0.66, real=REAL)
    np.testing.assert_array_equal(np.where(kept, guess, ref.IGNORE), expected)
    assert 0 < kept.sum() < kept[REAL].size or rule == "threshold"


@pytest.mark.parametrize(("rule", "labels", "pseudo"), [
    ("printed", "student", "fda"), ("printed", "teacher", "threshold"),
    ("caldarola", "teacher", "released"),
])
def test_local_losses(rule, labels, pseudo):
    z, teacher, begin = logits(1), logits(2), logits(3)
    expected, parts = ref.local_loss(z, teacher, begin, 0.0, rule, labels, pseudo, REAL)
    weight = 1.0 if rule == "printed" else 0.0
    own = {**DEFAULTS, "entropy": weight, "teacher": weight, "labels": labels, "rule": pseudo}
    of = lambda z: unlabelled.loss(z, single(teacher), jnp.asarray(REAL), own)
    found, slope = jax.value_and_grad(of)(single(z))
    np.testing.assert_allclose(found, expected, rtol=1e-5)
    constant = ref.pseudo_labels(z if labels == "student" else teacher, pseudo, real=REAL)

    def with_labels(z):
        total = ref.self_training(z, constant, real=REAL)
        if rule == "printed":
            total += ref.entropy(z, REAL) + ref.kl(z, teacher, REAL)
        return total

    np.testing.assert_allclose(slope, ref.slope(with_labels, z), atol=1e-5)
    kd = unlabelled.unit_mean(
        terms.divergence(single(z), single(begin)), jnp.asarray(REAL)
    )
    np.testing.assert_allclose(kd, parts["kd"], rtol=1e-5)


@pytest.mark.parametrize("kept", ["distance", "inertia"])
def test_clusters_are_those_of_scikit_learn_s_silhouette(kept):
    from sklearn.metrics import silhouette_samples, silhouette_score

    random = np.random.default_rng(0)
    truth = np.repeat([0, 1, 2], [4, 5, 3])
    styles = 20.0 * truth[:, None, None, None] + random.normal(size=(12, 3, 3, 3))
    labels, scores = by_style.clusters_of(styles, range(2, 6), starts=3, kept=kept)
    expected, theirs = ref.cluster(
        styles, range(2, 6), range(3), "delta" if kept == "distance" else "inertia"
    )
    assert ref.same_partition(labels.tolist(), expected)
    assert ref.same_partition(labels.tolist(), truth.tolist())
    np.testing.assert_allclose(list(scores.values()), list(theirs.values()), atol=1e-9)
    flat = styles.reshape(12, -1)
    assert scores[3] == pytest.approx(silhouette_score(flat, labels))
    apart, uneven = ref.distances(styles), np.array([0] * 5 + [1] * 6 + [2])
    np.testing.assert_allclose(
        by_style.silhouettes(apart, uneven), silhouette_samples(flat, uneven), atol=1e-9
    )
    np.testing.assert_allclose(by_style.centroids(styles, labels), ref.centroids(styles, labels))
    assert by_style.nearest(styles, by_style.centroids(styles, labels)).tolist() == labels.tolist()


def test_more_clusters_than_clients():
    with pytest.raises(ff.UsageError, match=r"5 clusters of 4 clients: expected 1 to 4\. Lower"):
        by_style.clusters_of(np.zeros((4, 27)), [5])


@pytest.mark.parametrize("own", ["cls", "bn", "none"])
@pytest.mark.parametrize("t", [1, 2, 4])
def test_aggregation_and_teachers(own, t):
    """Of three clusters one sends nothing: it keeps its own part, and takes the rest."""
    random = np.random.default_rng(t)
    names = ("classifier/kernel", "classifier/bias", "BatchNorm_0/scale", "Conv_0/kernel")
    tags = dict(zip(names, (("head", "weight"), ("head", "weight"), ("backbone", "scale"),
                            ("backbone", "weight")), strict=True))
    draw = lambda *count: {n: random.normal(size=(*count, 2, 3)) for n in names}
    nest = lambda flat: Variables({
        m: {leaf: single(flat[f"{m}/{leaf}"]) for mm, leaf in (n.split("/") for n in names)
            if mm == m} for m in ("classifier", "BatchNorm_0", "Conv_0")
    })
    of_v = ref.specific(tags, own)
    begin = draw()
    models = [{n: random.normal(size=(2, 3)) if n in of_v else begin[n] for n in names}
              for _ in range(3)]
    teachers = [draw() for _ in range(3)]
    cluster_of, sizes = {0: 0, 1: 2, 2: 0, 3: 2, 4: 1}, {0: 3, 1: 4, 2: 0, 3: 2, 4: 5}
    trained = {k: draw() for k in (0, 1, 2, 3)}
    expected, _ = ref.aggregate(models, begin, trained, sizes, cluster_of, of_v)
    teach = [ref.next_teacher(g, w, t, 2, 2)
             for g, w in zip(teachers, expected, strict=True)]
    stack = lambda trees: jax.tree.map(lambda *x: jnp.stack(x), *map(nest, trees))
    client = Problem().client()
    made = ladd(client, 3, own=own, every=2, start=2, **DEFAULTS)
    deltas = [{n: models[cluster_of[k]][n] - w[n] for n in names} for k, w in trained.items()]
    sent = Trained(stack(deltas), jnp.array([cluster_of[k] for k in trained]))
    weights = jnp.array([float(sizes[k]) for k in trained])
    state = LaddState(stack(models), stack(teachers), nest(begin))
    uploads = base.Uploads((), (), sent, weights, jnp.float32(3))
    found, _ = made.exchanges[0].update(state, uploads, jnp.int32(t - 1))
    assert_close(found.models, stack(expected), 1e-5)
    assert_close(found.teachers, stack(teach), 1e-5)
    shown = made.models(found)
    assert isinstance(shown["clusters"], Clusters)
    assert_close(shown["global"], jax.tree.map(lambda x: x.mean(0), stack(expected)), 1e-5)


def test_one_cluster_without_distillation_is_fedavg_with_self_training():
    problem = Problem()
    a = problem.run(algorithm_of("self_training"), 2, cohort=3)[0]
    one = algorithm_of("ladd", **{"algorithm__ladd__kd": 0.0, "algorithm__ladd__clusters": 1})
    b = problem.run(one, 2, cohort=3)[0]
    started = problem.variables.params
    models = one.models(b.server)
    assert set(models) == {"global"}
    assert_close(models["global"].params, a.server.model.params, 1e-6)
    moved = jax.tree.map(lambda x, y: float(jnp.abs(x - y).max()), models["global"].params, started)
    assert max(jax.tree.leaves(moved)) > 1e-3


@pytest.mark.parametrize(("settings", "first", "again"), [
    ({}, 3, 2), ({"kd": 0.0}, 2, 2), ({"kd": 0.0, "teacher": 0.0}, 1, 1),
])
def test_the_first_model_is_received_once_and_the_teacher_if_it_teaches(settings, first, again):
    """Also with three clusters, of which a client receives its own."""
    problem = Problem()
    size = 32 * sum(x.size for x in jax.tree.leaves(problem.variables))
    made = ladd(problem.client(), 3, **{**DEFAULTS, **settings})
    state = ff.init_state(
        made, problem.variables, problem.data.num_clients, jax.random.key(0)
    )
    sent = [traffic(made, state, problem.data, kind) for kind in (0, 1)]
    assert [x.down / size for x in sent] == [first, again]
    assert [x.up / size for x in sent] == [1, 1]


def test_labels_are_not_trained_on():
    problem, algorithm = Problem(), algorithm_of("self_training")
    state, info = problem.run(algorithm, 1)
    examples = problem.data.examples
    problem.data = problem.data.replace(
        examples=examples._replace(labels=(examples.labels + 1) % 3)
    )
    other, told = problem.run(algorithm, 1)
    jax.tree.map(np.testing.assert_array_equal, state.server, other.server)
    assert info.report["loss"] != told.report["loss"]


def test_test_images_go_to_the_nearest_style():
    dataset, random = pictures(10), np.random.default_rng(0)
    dark = np.array([i % 3 == 0 for i in range(10)])
    images = np.where(dark[:, None, None, None], dataset.test.inputs // 4, dataset.test.inputs)
    centres = np.stack([
        np.mean([ref.style(x.astype(float)).transpose(1, 2, 0) for x in images[which]], 0)
        for which in (~dark, dark)
    ]).astype(np.float32)
    clusters = tested.StyleClusters(
        np.array([0, 1]), centres, {}, 0, ff.data.spectra.square(12, 9, 3), True
    )
    seen = []

    def evaluate(variables, examples):
        seen.append((float(variables.params), np.asarray(examples.inputs, float)))
        return {"images": jnp.float32(len(examples.labels)) * variables.params}

    def predict(variables, examples, positions):
        which = np.asarray(positions)
        return variables.params * jnp.asarray(examples.inputs, jnp.float32)[which].sum((1, 2, 3))

    both, shown = tested.by_nearest(clusters, dataset, evaluate, predict)
    examples = ff.data.Examples(images, np.asarray(dataset.test.labels))
    models = Clusters(Variables(jnp.array([1.0, 100.0])))
    assert float(both(models, examples)["images"]) == (~dark).sum() + 100 * dark.sum()
    for s, which in enumerate((~dark, dark)):
        expected = [ref.with_style(x.astype(float), centres[s].transpose(2, 0, 1), finish="round")
                    for x in images[which]]
        assert np.abs(seen[s][1] - expected).max() <= 1
    order = random.permutation(10)[:6]
    found = np.asarray(shown(models, examples, order))
    assert [bool(x > 1e5) for x in found] == dark[order].tolist()
    one = Variables(jnp.float32(2.0))
    assert float(both(one, examples)["images"]) == 20


def owned():
    """Four natural clients of pictures, brighter from one to the next."""
    count = 48
    found = pictures(count)
    owners = np.arange(count) % 4
    images = (found.train.inputs // 4 + 40 * owners[:, None, None, None]).astype(np.uint8)
    examples = found.train._replace(inputs=images)
    return ff.data.Dataset(
        "owned", examples, examples, 3, 255.0, found.mean, found.std, owners=owners,
        test_owners=owners, clients=("a", "b", "c", "d"),
    )


@pytest.fixture
def source():
    ff.register.source("owned", owned)
    yield
    ff.data.SOURCES.remove("owned")


def config_of(**more):
    return small_config(
        data__name="owned", data__labelled="b", partition__name="natural",
        partition__resize_to=8, cohort__size=3, client__batch_size=4, rounds=1,
        eval__splits=("target",), **more,
    )


def test_who_trains_on_what(source):
    built = ff.build(config_of(algorithm__name="ladd", algorithm__ladd__least=2))
    owners = owned().owners
    assert built.partition.num_clients == 6
    assert set(owners[built.partition.indices]) == {0, 2, 3}
    assert len(built.splits["target"].labels) == 36
    of_client = np.asarray(built.data.clusters)
    drive = owners[built.partition.indices[built.partition.offsets[:-1]]]
    assert ref.same_partition(of_client.tolist(), drive.tolist())
    assert built.styled == (0, 6 * 27 * 4)
    config = config_of(data__trains="server", data__style__name="fda", data__style__donors="all")
    config.cohort.size = 1
    server = ff.build(config)
    assert set(owners[server.partition.indices]) == {1}
    assert server.data.bank.size == 6


@pytest.mark.parametrize(("settings", "message"), [
    ({"data__labelled": "bb"}, "natural client of owned"),
    ({"algorithm__name": "ladd", "algorithm__ladd__clusters": 9}, "9 clusters of 6 clients"),
    ({"algorithm__name": "ladd", "algorithm__ladd__least": 6}, "least = 6 and most = 19"),
    ({"algorithm__name": "ladd", "algorithm__ladd__window": 11}, "11x11 frequencies"),
    ({"algorithm__name": "ladd", "data__trains": "server"}, "its clusters are of clients"),
    ({"algorithm__name": "ladd", "algorithm__ladd__kd": 0.0,
      "algorithm__ladd__distilled": "released"}, "would change nothing"),
])
def test_wrong_settings(source, settings, message):
    config = config_of()
    for name, value in settings.items():
        *path, last = name.split("__")
        node = config
        for part in path:
            node = node[part]
        node[last] = value
    with pytest.raises(ff.UsageError, match=message):
        ff.build(config)


@pytest.mark.slow
def test_models_of_clusters_are_for_tests_and_masks_alone(source, tmp_path):
    config = config_of(algorithm__name="ladd", algorithm__ladd__least=2, eval__clients=True)
    result = ff.train(config, tmp_path, progress=False)
    tested = {r["model"] for r in result.records if r["split"] == "target"}
    assert tested == {"global", "clusters"}
    assert {r["model"] for r in result.records if r["split"] == "own"} == {"global"}
    cohort = next(r for r in result.records if r["split"] == "cohort")
    size = 4 * sum(x.size for x in jax.tree.leaves(result.models["global"]))
    assert (cohort["bytes_down"], cohort["bytes_up"]) == (9 * size, 3 * size + 6 * 27 * 4)
    trained = ff.load_run(tmp_path)
    built, clusters = trained.experiment, trained.model("clusters", clusters=True)
    some = built.predict(clusters, built.splits["target"], [0, 5, 7])
    assert some.shape == (3, 3)
    with pytest.raises(ff.UsageError, match="one for each cluster"):
        trained.model("clusters")


def test_the_clusters_are_shown(source, tmp_path, capsys):
    import json

    from fedjax_flat import cli

    file = tmp_path / "config.py"
    settings = json.dumps({
        "data.name": "owned", "data.labelled": "b", "partition.name": "natural",
        "partition.resize_to": 8, "algorithm.name": "ladd", "algorithm.ladd.least": 2,
        "cohort.size": 3,
    })
    file.write_text(
        "import json\nfrom fedjax_flat.experiment.config import from_flat\n"
        f"def get_config(): return from_flat(json.loads('''{settings}'''))\n"
    )
    assert cli.main(["data", "--config", str(file), "--out", str(tmp_path)]) == 0
    printed = [line.split() for line in capsys.readouterr().out.splitlines()]
    table = {line[0]: sorted(line[1:]) for line in printed if line and line[0] in ("a", "c", "d")}
    assert table == {name: ["0", "0", "2"] for name in "acd"}
    assert any(line[:3] == ["mean", "silhouette", "of"] for line in printed)


@pytest.mark.slow
def test_samples_of_styles_are_drawn(source, tmp_path):
    from fedjax_flat.report.ownership import ownership

    config = config_of(data__style__name="lab")
    assert "styles.png" in ownership(config, str(tmp_path))
    assert (tmp_path / "styles.png").stat().st_size > 5000


def test_styles_that_are_alike_are_near_on_the_map(source, tmp_path):
    """Owners are of four brightnesses, so the nearest neighbour of a style is of the same owner."""
    from fedjax_flat.report import by_style, client_sections

    dataset = owned()
    everyone = np.argsort(dataset.owners, kind="stable")
    partition = ff.data.Partition.of(np.split(everyone, [5, 24]))  # not by owners
    config = config_of(data__style__name="lab")
    found = by_style.map_of(config, dataset, partition)
    assert found.names == ("a", "b", "c", "d")
    np.testing.assert_array_equal(found.owners, dataset.owners[everyone])
    apart = np.linalg.norm(found.points[:, None] - found.points[None], axis=-1)
    np.fill_diagonal(apart, np.inf)
    assert np.mean(found.owners[apart.argmin(1)] == found.owners) > 0.6  # by chance a quarter
    assert by_style.draw_map(found, tmp_path / "map.png").stat().st_size > 5000
    chart = client_sections._style_map(found)
    assert [trace["name"] for trace in chart.data] == ["a", "b", "c", "d"]
    assert [len(trace["x"]) for trace in chart.data] == [12] * 4
    plain = small_config(data__name="owned")
    assert by_style.map_of(plain, dataset, partition) is None
    # On the page it is that of the last phase, where the clients are.
    partition.save(tmp_path / "partition.npz")
    phase = lambda config: types.SimpleNamespace(
        config=lambda: config, partition_file=tmp_path / "partition.npz", phases=None
    )
    several = types.SimpleNamespace(phases=[phase(plain), phase(config)])
    (chart,) = client_sections._style_maps(several, None)
    assert [len(trace["x"]) for trace in chart.data] == [12] * 4
    assert client_sections._style_maps(phase(plain), None) == []
    few = ff.data.Partition.of([everyone[:4]])
    assert by_style.map_of(config, dataset, few) is None
