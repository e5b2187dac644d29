"""The GAN attack: the Frechet distance, what is trained, and the command on the digits."""

import json
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.linalg
from conftest import small_config

import fedjax_flat as ff
from fedjax_flat.attacks import frechet, gan
from fedjax_flat.models import Outputs, Variables
from fedjax_flat.report.recovery import recovery


class TestFrechet:
    @pytest.mark.parametrize(("a", "b"), [(40, 30), (5, 30), (40, 4)])
    def test_by_the_root_of_the_product(self, a, b):
        rng = np.random.default_rng(0)
        x, y = rng.normal(size=(a, 6)), 1 + 2 * rng.normal(size=(b, 6))
        s, t = np.cov(x.T), np.cov(y.T)
        # tr (S T)^(1/2) = tr (S^(1/2) T S^(1/2))^(1/2), and the inner matrix is symmetric
        half = np.real(scipy.linalg.sqrtm(s))
        root = np.sqrt(np.clip(np.linalg.eigvalsh(half @ t @ half), 0, None)).sum()
        wanted = np.sum((x.mean(0) - y.mean(0)) ** 2) + np.trace(s + t) - 2 * root
        assert frechet(x, y) == pytest.approx(wanted, rel=1e-5)

    def test_limits(self):
        x = np.random.default_rng(0).normal(size=(20, 3))
        assert frechet(x, x) == pytest.approx(0, abs=1e-9)
        assert frechet(x, x[::-1]) == pytest.approx(0, abs=1e-9)
        assert frechet(x, x + 2) == pytest.approx(12, rel=1e-9), "only the means differ"
        assert frechet(x, np.zeros((2, 3)) + x.mean(0)) == pytest.approx(x.var(0, ddof=1).sum())

    def test_refused(self):
        with pytest.raises(ff.UsageError, match=r"the first set has shape \(1, 3\)"):
            frechet(np.zeros((1, 3)), np.zeros((4, 3)))


def look(variables, images):
    """Features: the image's mean colour; classes: dark and bright."""
    features = jnp.mean(images.astype(jnp.float32), axis=(1, 2)) / 255 * variables.params["w"]
    bright = jnp.sum(features, axis=1, keepdims=True)
    return Outputs(jnp.concatenate([-bright, bright], axis=1), features)


def attack(**options):
    images = np.full((6, 8, 8, 3), 200, np.uint8)
    images[..., 0] = 20
    received = Variables({"w": jnp.ones((1, 3), jnp.float32)})
    chosen = {"steps": 300, "batch_size": 8, "width": 4, "guided": 0.0, "learning_rate": 5e-3}
    return gan.recover(look, received, images, key=jax.random.key(0), **{**chosen, **options})


def test_what_the_discriminator_tells_apart_is_recovered():
    """Green and blue, no red: as the attacker's own images, which is all that D can teach G."""
    found = attack()
    made = found.images(20)
    assert made.shape == (20, 8, 8, 3)
    assert made.min() >= 0
    assert made.max() <= 255
    red, green, blue = made.mean((0, 1, 2))
    assert red < 60
    assert min(green, blue) > 180
    np.testing.assert_array_equal(made, attack().images(20))


@pytest.mark.slow
def test_the_received_model_stays_or_is_trained():
    one, other = attack(steps=5), attack(steps=5, train="all")
    assert one.discriminator[0] == other.discriminator[0]
    assert one.discriminator[-1] != other.discriminator[-1]


@pytest.mark.slow
def test_guided_images_look_like_their_class():
    """The weight of the class pulls bright and dark apart."""
    spread = lambda found: found.images(40).mean((1, 2, 3)).std()
    assert spread(attack(guided=20.0)) > spread(attack())


@pytest.mark.parametrize(("options", "message"), [
    ({"steps": 0}, "steps = 0"), ({"guided": -1.0}, "guided = -1"), ({"train": "al"}, "mean 'all'"),
])
def test_refused(options, message):
    with pytest.raises(ff.UsageError, match=message):
        attack(**options)


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    path = tmp_path_factory.mktemp("recovery") / "run"
    config = small_config(rounds=2, model__name="mlp", partition__clients=20)
    ff.train(config, path, progress=False)
    return str(path)


@pytest.mark.slow
def test_on_a_run(run):
    found = recovery(run, by=run, client=3, steps=3, count=40)
    assert found["frechet"] > found["frechet_of_others"] > 0
    saved = json.loads(pathlib.Path(found["figure"]).with_suffix(".json").read_text())
    assert pathlib.Path(found["figure"]).name.startswith("global_round2_client3_")
    assert saved["network"] == f"mlp of {run}"
    assert saved["frechet"] == found["frechet"]
    with pytest.raises(ff.UsageError, match=r"--client 20 of 20: expected 0 to 19"):
        recovery(run, by=run, client=20)
