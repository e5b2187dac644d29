"""FedRDN: whose statistics normalise which image, in training and in evaluation."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import assert_close, small_config
from test_shift import coloured, make

import fedjax_flat as ff
from fedjax_flat.testing import partition_of

SIZES = (4, 3, 0, 5, 2)


def seen_by(dataset, shift, client):
    """A client's images as it sees them, from 0 to 1, of `test_shift`'s clients in order."""
    start = sum(SIZES[:client])
    index = np.arange(start, start + SIZES[client])
    batch = ff.data.Batch(jnp.asarray(dataset.train.inputs[index]), jnp.zeros(len(index), int),
                          jnp.ones(len(index), bool))
    return np.asarray(shift.see(batch, jnp.int32(client), jnp.asarray(index)).inputs, float) / 255


@pytest.mark.parametrize("groups", [0, 3])
def test_statistics_are_of_what_clients_see(groups):
    dataset = coloured()
    shift = make("rgb", dataset, delta=1.5)
    found = ff.data.normals(dataset, partition_of(SIZES), shift, groups)
    images = {k: seen_by(dataset, shift, k) for k in range(5) if SIZES[k]}
    together = {g: [k for k in images if k % (groups or 5) == g] for g in range(groups or 5)}
    for group, members in together.items():
        pixels = [images[k].reshape(-1, 3) for k in members or images]  # of all, if nobody's
        pixels = np.concatenate(pixels)
        np.testing.assert_allclose(found.mean[group], pixels.mean(0), atol=1e-5)
        np.testing.assert_allclose(found.std[group], pixels.std(0), atol=1e-4)
    assert found.groups == (groups or 5)


def test_training_draws_a_client_for_every_image_and_evaluation_takes_its_own():
    dataset = coloured(40)
    sizes = (14, 13, 13)
    shift = make("rgb", dataset, 3, delta=2.0)
    found = ff.data.normals(dataset, partition_of(sizes), shift)
    preprocess = ff.data.preprocess(dataset, normals=found)
    data = ff.data.federate(dataset.train, partition_of(sizes), shift=found.tagged(shift))
    batch = ff.data.federated.client_batch(data.client(jnp.int32(1)), jnp.arange(13))
    images = np.asarray(batch.inputs["image"], float) / 255
    by = lambda k: (images - found.mean[k]) / found.std[k]
    assert_close(np.asarray(preprocess.apply(batch, None).inputs), by(1), 1e-4)
    train = jax.jit(lambda batch, key: preprocess.apply(batch, key).inputs)
    used = []
    for seed in range(20):
        ours = np.asarray(train(batch, jax.random.key(seed)))
        gaps = np.stack([np.abs(ours - by(k)).max(axis=(1, 2, 3)) for k in range(3)])
        assert gaps.min(axis=0).max() < 1e-4, "every image by somebody's statistics"
        used.append(gaps.argmin(axis=0))
    share = np.bincount(np.ravel(used), minlength=3) / np.size(used)
    np.testing.assert_allclose(share, 1 / 3, atol=4 * np.sqrt(2 / 9 / np.size(used)))
    assert any(len(set(row.tolist())) > 1 for row in used), "not one client for the whole batch"
    plain = preprocess.apply(ff.data.Batch(batch.inputs["image"], (), batch.mask), None).inputs
    assert_close(np.asarray(plain), by(3), 1e-4)  # of all clients: nobody says who sees them


def test_an_experiment_evaluates_test_images_by_their_clients(monkeypatch):
    """Example i of a test set is seen by client i mod K."""
    ff.register.source("coloured", lambda: coloured(60))
    try:
        config = small_config(
            data__name="coloured", data__shift__name="rgb", data__rdn=True, data__rdn_groups=3,
            partition__name="iid", partition__clients=6, cohort__size=3,
        )
        built = ff.build(config)
        test = built.splits["test"].inputs
        np.testing.assert_array_equal(test["group"], np.arange(60) % 6 % 3)
        assert test["image"].shape == (60, 6, 6, 3)
        state, info = jax.jit(built.step)(built.init(), built.data)
        assert bool(info.finite)
        means = built.task.means(built.evaluate(state.server.model, built.splits["test"]))
        assert np.isfinite(float(means["loss"]))
    finally:
        ff.data.SOURCES.remove("coloured")


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"data__rdn_groups": 3}, "data.rdn is False"),
        ({"data__rdn": True, "data__mean": (0.5,), "data__std": (0.5,)}, "by clients' statistics"),
        ({"data__rdn": True, "data__features": True}, "does not go with data.rdn"),
    ],
)
def test_settings_that_do_not_go_together(settings, message):
    with pytest.raises(ff.UsageError, match=message):
        ff.validate(small_config(**settings))


def test_what_it_cannot_normalise():
    table = ff.data.Dataset("t", *[ff.data.Examples(np.zeros((4, 3)), np.zeros(4, int))] * 2, 2)
    with pytest.raises(ff.UsageError, match=r"data.rdn of inputs of shape \(3,\)"):
        ff.data.normals(table, partition_of((2, 2)), None)
    dataset = coloured()
    with pytest.raises(ff.UsageError, match="evaluation does not see"):
        ff.data.normals(dataset, partition_of(SIZES), make("flip_labels", dataset))
