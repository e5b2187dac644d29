"""Whole sequences to clients: proximity, clustering, random; and the map of clients."""

import dataclasses
import itertools

import numpy as np
import pytest

import fedjax_flat as ff
from fedjax_flat.cli import main
from fedjax_flat.data import PARTITIONS, Examples
from fedjax_flat.data.partition.clustering import thumbnails
from fedjax_flat.report import ownership


def city(name, corners, pictures=3):
    """Sequences (name, is query, positions): at each corner two of queries, two of the database."""
    for i, (x, y) in enumerate(corners):
        for j, query in enumerate((True, True, False, False)):
            at = np.array([[x + 10 * k, y + j] for k in range(pictures)], np.float32)
            yield f"{name}/{i}{'q' if query else 'd'}{j}", query, at


def dataset(*sequences, name="made_up"):
    names, query, positions = zip(*sequences, strict=True)
    order = np.argsort(names)
    sizes = np.array([len(p) for p in positions])
    number = np.empty(len(names), int)
    number[order] = np.arange(len(names))
    random = np.random.default_rng(0)
    labels = np.concatenate(positions)
    images = random.integers(0, 256, (len(labels), 4, 4, 3)).astype(np.uint8)
    examples = Examples(images, labels)
    half = len(labels) // 2
    return ff.data.Dataset(
        name, examples, examples, 0, 255.0, task="retrieval", owners=np.repeat(number, sizes),
        clients=tuple(sorted(names)), queries=np.repeat(query, sizes),
        parts={"database": np.arange(half), "queries": np.arange(half, len(labels))},
    )


CORNERS = [(0, 0), (500, 0), (5000, 0), (5000, 800)]
MADE_UP = dataset(*city("ard", CORNERS), *city("bel", CORNERS[:1]))


def made(law, found=MADE_UP, data_dir=None, **options):
    known = PARTITIONS[law]
    defaults = {n: s.default for n, s in known.settings.items()}
    return known.make(found, data_dir, **{**defaults, **options})


LAWS = [("proximity", {"radius": 300.0}), ("clustering", {"clients": 4}),
        ("random_places", {"clients": 4})]


@pytest.mark.parametrize(("law", "options"), LAWS)
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_every_sequence_is_in_one_client_or_none(law, options, seed):
    partition = made(law, seed=seed, **options)
    partition.check(len(MADE_UP.owners))
    client = np.full(len(MADE_UP.owners), -1)
    client[partition.indices] = partition.client_of
    for sequence in range(len(MADE_UP.clients)):
        assert len(np.unique(client[MADE_UP.owners == sequence])) == 1
    assert partition.content_hash == made(law, seed=seed, **options).content_hash


@pytest.mark.parametrize(("law", "options"), LAWS[:2])
def test_every_client_is_valid_and_of_one_city(law, options):
    for seed in range(4):
        partition = made(law, seed=seed, **options)
        for k in range(partition.num_clients):
            own = np.unique(MADE_UP.owners[partition.client(k)])
            names = [MADE_UP.clients[s] for s in own]
            assert len({n.split("/")[0] for n in names}) == 1
            assert sum("q" in n for n in names) >= 2
            assert sum("/" in n and "d" in n.split("/")[1] for n in names) >= 2


@pytest.mark.parametrize(
    ("radius", "clients"),
    [(100.0, 5), (600.0, 4), (900.0, 3), (6000.0, 2)],
)
def test_counts_of_a_made_up_city(radius, clients):
    """Four corners 500, 4500 and 800 m apart, and another city of one: all is owned."""
    for seed in range(5):
        partition = made("proximity", radius=radius, seed=seed)
        assert partition.num_clients == clients
        assert partition.sizes.sum() == len(MADE_UP.owners)


def test_all_of_a_client_is_within_the_radius_of_one_of_its_queries():
    partition = made("proximity", radius=600.0)
    for k in range(partition.num_clients):
        own = partition.client(k)
        centres = own[MADE_UP.queries[own]]
        gaps = np.linalg.norm(
            MADE_UP.train.labels[centres][:, None] - MADE_UP.train.labels[own], axis=2
        )
        sequences = MADE_UP.owners[own]
        reached = [all((g[sequences == s] <= 600).any() for s in set(sequences)) for g in gaps]
        assert any(reached)


def test_what_is_taken_stays_taken():
    """Three corners in a row: drawn from an end, the first client has two, the next one."""
    row = dataset(*city("ard", [(0, 0), (500, 0), (1000, 0)]))
    found = {tuple(made("proximity", row, radius=550.0, seed=s).sizes.tolist()) for s in range(8)}
    assert found == {(36,), (24, 12)}


def test_clients_that_are_not_valid_are_nobodys():
    """At the second corner one of two database sequences is missing."""
    rows = [s for s in city("ard", CORNERS[:3]) if s[0] != "ard/1d3"]
    partition = made("proximity", dataset(*rows), radius=100.0)
    assert partition.num_clients == 2
    assert partition.sizes.sum() == 24
    wide = made("proximity", dataset(*rows), radius=600.0)
    assert sorted(wide.sizes.tolist()) == [12, 21]
    with pytest.raises(ff.UsageError, match=r"no client has 2 sequences of queries.*Raise radius"):
        made("proximity", dataset(*rows[4:7]), radius=100.0)


def test_without_roles_two_sequences_make_a_client():
    plain = dataclasses.replace(MADE_UP, queries=None)
    assert made("proximity", plain, radius=100.0).num_clients == 5
    pairs = dataset(*[s for s in city("ard", CORNERS) if s[0][-1] in "02"])
    plain = dataclasses.replace(pairs, queries=None)
    assert made("proximity", plain, radius=100.0).num_clients == 4
    with pytest.raises(ff.UsageError, match="no client has"):
        made("proximity", pairs, radius=100.0)


@pytest.mark.parametrize(("law", "options"), [LAWS[0], ("clustering", {"clients": 2}), LAWS[2]])
def test_validation_clients_are_held_out(law, options):
    whole = made(law, **options)
    less = made(law, **options, validation_clients=1)
    assert less.num_clients == whole.num_clients - 1
    kept = {tuple(less.client(k).tolist()) for k in range(less.num_clients)}
    assert kept < {tuple(whole.client(k).tolist()) for k in range(whole.num_clients)}
    message = f"validation_clients = 9 of {whole.num_clients} clients"
    with pytest.raises(ff.UsageError, match=message):
        made(law, **options, validation_clients=9)


def test_clusters_are_sequences_that_look_alike(tmp_path):
    """Features that tell corners apart give the corners back; the file decides."""
    corner = np.array([int(n.split("/")[1][0]) for n in MADE_UP.clients])[MADE_UP.owners]
    np.save(tmp_path / "features.npy", np.eye(4)[corner].astype(np.float32))
    partition = made("clustering", data_dir=tmp_path, clients=5, features="features.npy")
    assert partition.num_clients == 5
    towns = [MADE_UP.clients[s].split("/")[0] for s in MADE_UP.owners]
    alike = {frozenset(zip(np.array(towns)[partition.client(k)], corner[partition.client(k)],
                           strict=True)) for k in range(5)}
    assert all(len(one) == 1 for one in alike)
    assert len(alike) == 5


def test_thumbnails_do_not_see_light():
    images = np.random.default_rng(0).integers(0, 100, (3, 17, 24, 3))
    rows = thumbnails(images)
    np.testing.assert_allclose(np.linalg.norm(rows, axis=1), 1)
    np.testing.assert_allclose(thumbnails(2 * images + 50), rows, atol=1e-12)
    by_hand = images[1][:2, :3].mean((0, 1)) - np.mean(
        [images[1][2 * i : 2 * i + 2, 3 * j : 3 * j + 3].mean((0, 1))
         for i, j in itertools.product(range(8), repeat=2)])
    np.testing.assert_allclose(rows[1][:3] / rows[1][0], by_hand / by_hand[0])
    assert thumbnails(np.ones((4, 7))).shape == (4, 7)


def test_random_clients_have_every_city():
    partition = made("random_places", clients=4)
    for k in range(4):
        own = np.unique(MADE_UP.owners[partition.client(k)])
        towns = [MADE_UP.clients[s].split("/")[0] for s in own]
        assert (towns.count("ard"), towns.count("bel")) == (4, 1)


IDENTITIES = dataclasses.replace(
    MADE_UP, num_classes=2,
    train=MADE_UP.train._replace(labels=(np.arange(len(MADE_UP.owners)) % 2).astype(np.int32)),
    test=MADE_UP.test._replace(labels=(np.arange(len(MADE_UP.owners)) % 2).astype(np.int32)),
)


@pytest.mark.parametrize(
    ("law", "found", "options", "sentence"),
    [
        ("proximity", MADE_UP, {"radius": 0.0}, "radius = 0.0: expected a number of metres"),
        ("proximity", IDENTITIES, {}, "needs a position of every example, in metres; made_up has"),
        ("proximity", dataclasses.replace(MADE_UP, owners=None), {}, "made_up has no owners"),
        ("clustering", dataclasses.replace(MADE_UP, clients=()), {}, "made_up has no owners"),
        ("clustering", MADE_UP, {"clients": 1}, "expected between 2 and 20"),
        ("clustering", MADE_UP, {"clients": 21}, "21 clusters of 20 sequences in 2 cities"),
        ("clustering", MADE_UP, {"clients": 20}, "Lower clients = 20"),
        ("clustering", MADE_UP, {"clients": 4, "features": "f.npy"}, r"no .*f\.npy"),
        ("random_places", MADE_UP, {"clients": 30}, "30 clients for 20"),
        ("dirichlet", MADE_UP, {}, r"needs one class per example.*natural or proximity"),
    ],
)
def test_what_splits_refuse(law, found, options, sentence, tmp_path):
    with pytest.raises(ff.UsageError, match=sentence):
        made(law, found, tmp_path, **options)


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        (np.zeros((3, 2)), r"holds ndarray of shape \(3, 2\): expected finite numbers, \(60, F"),
        (np.full((60, 2), np.inf), "expected finite numbers"),
        (b"no array", r"is no \.npy file of numbers"),
    ],
)
def test_features_that_are_wrong(content, sentence, tmp_path):
    path = tmp_path / "f.npy"
    if isinstance(content, bytes):
        path.write_bytes(content)
    else:
        np.save(path, content)
    with pytest.raises(ff.UsageError, match=sentence):
        made("clustering", data_dir=tmp_path, clients=4, features="f.npy")


# ---- pictures ----------------------------------------------------------------------------------


def test_the_map_of_clients(tmp_path, capsys):
    asked = ["--config.data.cities=2", "--config.data.streets=2", "--config.data.side=8",
             "--config.partition.name=proximity", "--config.partition.radius=100.0"]
    assert main(["data", "synthetic_streets", *asked, "--out", str(tmp_path)]) == 0
    found = {line[:22].strip(): line[22:].strip() for line in capsys.readouterr().out.splitlines()}
    assert found["labels"] == "positions, in metres"
    assert found["database, queries"] == "96, 96"
    assert found["clients"] == "4"
    assert found["sequences per client"].startswith("4 / 4.00 / 4")
    assert found["cities per client"].startswith("1 / 1.00 / 1")
    assert (tmp_path / "map.png").stat().st_size > 5000
    assert not (tmp_path / "ownership.png").exists(), "positions are no classes"


def test_what_is_nobodys_is_drawn_too(tmp_path):
    drawn = []
    for held_out in (0, 1, 0):
        partition = made("proximity", radius=100.0, validation_clients=held_out)
        drawn.append(ownership.draw_map(MADE_UP, partition, tmp_path / "map.png").read_bytes())
    assert drawn[0] == drawn[2] != drawn[1]


def test_identities_are_counted_as_classes_are(tmp_path, capsys):
    ff.register.source("people_to_find", lambda: IDENTITIES)
    try:
        assert main(["data", "people_to_find", "--out", str(tmp_path)]) == 0
    finally:
        ff.data.SOURCES.remove("people_to_find")
    said = capsys.readouterr().out
    assert "2 identities" in said
    assert "identities per client" in said
    assert (tmp_path / "ownership.png").exists()
    assert not (tmp_path / "map.png").exists()


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--config.partition.name=proximity", "--config.partition.radius=0.0"],
         "partition.radius = 0.0: expected more than 0"),
        (["--config.partition.name=dirichlet", "--config.partition.alpha=1.0"],
         "needs one class per example"),
        (["--config.partition.name=proximity", "--config.partition.radius=1.0"], "no client has"),
    ],
)
def test_wrong_inputs_end_in_a_sentence(arguments, sentence, tmp_path, capsys):
    small = ["--config.data.cities=1", "--config.data.streets=1", "--config.data.side=8"]
    assert main(["data", "synthetic_streets", *small, *arguments, "--out", str(tmp_path)]) == 2
    assert sentence in capsys.readouterr().err
