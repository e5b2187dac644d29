"""Images in the style of others: FDA, CFSI and LAB against NumPy, their banks, in experiments."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import reference_styles as ref
from conftest import small_config

import fedjax_flat as ff
from fedjax_flat.data import colour, spectra, styles
from fedjax_flat.data.federated import client_batch
from fedjax_flat.testing import partition_of

H, W = 12, 9
SIZES = (4, 0, 3, 5)


def pictures(count=12, seed=0, shape=(H, W, 3)):
    """Of a size whose sides differ, one odd and one even."""
    images = np.random.default_rng(seed).integers(0, 256, (count, *shape)).astype(np.uint8)
    labels = np.arange(count, dtype=np.int32) % 3
    examples = ff.data.Examples(images, labels)
    half = (0.5,) * shape[-1]
    return ff.data.Dataset("pictures", examples, examples, 3, 255.0, half, half)


def made(name, dataset=None, **options):
    found = ff.data.STYLES.find(name)
    defaults = {n: s.default for n, s in found.settings.items()}
    return found.make(dataset or pictures(), **{**defaults, **options})


@pytest.mark.parametrize(
    ("rule", "share"), [("half", 0.2), ("printed", 0.4), ("square", 0.2), ("printed", 1.0)]
)
@pytest.mark.parametrize("shape", [(12, 9), (8, 10)])
def test_fda_is_that_of_numpy(shape, rule, share):
    content, style = np.random.default_rng(1).uniform(0, 255, (2, *shape, 3))
    low = spectra.window(*shape, share, rule)
    single = lambda x: jnp.asarray(x, jnp.float32)
    other = spectra.amplitudes(single(style), low)
    for strength in (0.0, 0.7, 1.0):
        found = spectra.restyled(single(content), other, low, jnp.float32(strength))
        expected = ref.fda(content, style, share, rule, lam=strength)
        np.testing.assert_allclose(found, expected, atol=1e-3)


def test_fda_keeps_the_phase_and_swaps_exactly_the_band():
    content, style = np.random.default_rng(2).uniform(50, 200, (2, H, W, 3))
    low = spectra.square(H, W, 3)
    single = lambda x: jnp.asarray(x, jnp.float32)
    other = spectra.amplitudes(single(style), low)
    found = np.asarray(spectra.restyled(single(content), other, low, jnp.float32(1)))
    (own, phase), (theirs, _) = ref.spectrum(content), ref.spectrum(style)
    amplitude, after = ref.spectrum(found)
    band = np.zeros((H, W, 1), bool)
    band[H // 2 - 1 : H // 2 + 2, W // 2 - 1 : W // 2 + 2] = True
    np.testing.assert_allclose(amplitude, np.where(band, theirs, own), rtol=1e-3, atol=0.02)
    turned = np.abs(np.angle(np.exp(1j * (after - phase))))
    assert turned[amplitude > 1].max() < 1e-3
    assert np.abs(amplitude - own)[np.broadcast_to(band, own.shape)].max() > 100


def test_lab_there_and_back():
    levels = np.array([0, 1, 2, 9, 10, 11, 64, 127, 200, 254, 255])
    rgb = np.stack(np.meshgrid(levels, levels, levels), -1).reshape(-1, 3)
    lab = colour.lab_of(jnp.asarray(rgb / 255, jnp.float32))
    np.testing.assert_allclose(lab, ref.rgb_to_lab(rgb), atol=1e-3)
    np.testing.assert_allclose(colour.rgb_of(lab), rgb / 255, atol=0.05 / 255)


def test_lab_takes_mean_and_deviation():
    content, style = np.random.default_rng(3).uniform(0, 255, (2, H, W, 3))
    unit = lambda x: jnp.asarray(x / 255, jnp.float32)
    spread = colour.spread(unit(style))
    np.testing.assert_allclose(
        np.concatenate(spread), np.concatenate(ref.lab_statistics(style)), atol=1e-3
    )
    expected = ref.lab_transfer(content, ref.lab_statistics(style))
    np.testing.assert_allclose(255 * colour.moved(unit(content), spread), expected, atol=0.01)
    same = colour.moved(unit(content), colour.spread(unit(content)))
    np.testing.assert_allclose(255 * same, content, atol=0.01)
    flat = np.full((H, W, 3), 70.0)  # a channel without spread takes the mean
    expected = np.broadcast_to(ref.lab_to_rgb(ref.lab_statistics(style)[0]), flat.shape)
    np.testing.assert_allclose(255 * colour.moved(unit(flat), spread), expected, atol=0.05)


ENTRIES = {
    "lab": lambda x: np.concatenate(ref.lab_statistics(x)),
    "cfsi": lambda x: ref.spectrum(x)[0][5:8, 4:5],
}


@pytest.mark.parametrize(("name", "sent"), [("lab", "all"), ("cfsi", "all"), ("cfsi", "even")])
def test_banks_have_every_client_s_images(name, sent):
    dataset = pictures()
    bank = styles.bank(made(name, sent=sent, **({"band": 0.1} if name == "cfsi" else {})),
                       dataset, partition_of(SIZES))
    starts = np.cumsum((0, *SIZES))
    clients = {k: dataset.train.inputs[starts[k] : starts[k + 1]] for k in range(len(SIZES))}
    expected = ref.bank_of(clients, ENTRIES[name], sent)
    rows = np.concatenate([x.reshape(bank.size, -1) for x in bank.styles], 1) if (
        name == "lab") else np.asarray(bank.styles)
    np.testing.assert_allclose(rows, np.stack([x for _, x in expected]), rtol=1e-3, atol=1e-2)
    owners = np.repeat(np.arange(len(SIZES)), bank.counts)
    assert owners.tolist() == [k for k, _ in expected]
    np.testing.assert_array_equal(bank.first, np.cumsum(bank.counts) - bank.counts)


def test_a_client_s_style_is_the_mean_of_its_images():
    dataset = pictures()
    bank = styles.bank(made("fda"), dataset, partition_of(SIZES))
    assert bank.counts.tolist() == [1, 0, 1, 1]
    for row, own in zip(bank.styles, np.split(dataset.train.inputs, [4, 7]), strict=True):
        expected = ref.client_style(own.astype(float)).transpose(1, 2, 0)
        np.testing.assert_allclose(row, expected, rtol=1e-4)


@pytest.mark.parametrize(
    "donors", ["others", pytest.param("all", marks=pytest.mark.slow)]
)
@pytest.mark.parametrize("name", ["lab", "cfsi", "fda"])
def test_half_of_the_images_take_a_style_that_may_be_drawn(name, donors):
    """Every image is what NumPy makes of it with one of the allowed entries, for some strength."""
    dataset, partition = pictures(), partition_of(SIZES)
    options = {"strength": (0.5, 0.5)} if name == "cfsi" else {}
    style = made(name, dataset, donors=donors, **options)
    bank = styles.bank(style, dataset, partition)
    data = ff.data.federate(dataset.train, partition).replace(bank=bank)
    batch = client_batch(data.client(jnp.int32(2)), jnp.array([2, 1, 0, 3]))
    images = dataset.train.inputs[[6, 5, 4]].astype(float)
    starts, allowed = np.cumsum((0, *SIZES)), [0, 3] if donors == "others" else [0, 2, 3]
    of_client = lambda k: dataset.train.inputs[starts[k] : starts[k + 1]].astype(float)
    if name == "fda":
        entries = [ref.client_style(of_client(k)) for k in allowed]
        become = lambda x, a: ref.with_style(x, a, finish="round")
    elif name == "lab":
        entries = [ref.lab_statistics(x) for k in allowed for x in of_client(k)]
        become = ref.lab_transfer
    else:
        entries = [ref.spectrum(x)[0] for k in allowed for x in of_client(k)]
        where = ref.band(H, W, 0.05, "half")
        become = lambda x, a: ref.swap(x, a, where, 0.5, finish="round")
    run, used = jax.jit(lambda key: styles.apply(style, key, batch.inputs)), set()
    for seed in range(12):
        found = np.asarray(run(jax.random.key(seed)), float)
        np.testing.assert_array_equal(found[1], images[1])  # position 1 stays as it is
        for i in (0, 2):
            gaps = [np.abs(found[i] - become(images[i], a)).max() for a in entries]
            assert min(gaps) <= 1, "by none of the styles that may be drawn"
            used.add(int(np.argmin(gaps)))
    assert len(used) >= min(len(entries), 5)


def test_every_donor_has_the_same_chance():
    bank = styles.Bank(jnp.zeros((12, 6)), *map(jnp.int32, ([0, 4, 4, 7], SIZES)))
    keys = jax.random.split(jax.random.key(0), 3000)
    others = jax.vmap(lambda k: styles.drawn(k, bank, jnp.int32(2), "others"))(keys)
    share = np.bincount(others, minlength=12) / 3000
    expected = np.where((np.arange(12) >= 4) & (np.arange(12) < 7), 0, 1 / 9)
    np.testing.assert_allclose(share, expected, atol=5 * np.sqrt(1 / 9 / 3000))


def test_what_travels():
    dataset, partition = pictures(), partition_of(SIZES)
    style = made("lab")
    found = styles.traffic(styles.bank(style, dataset, partition), style)
    assert found.up == 12 * 24
    assert found.down == sum(12 - n for n in SIZES) * 24
    style = made("fda", donors="all")
    assert styles.traffic(styles.bank(style, dataset, partition), style) == (4 * 324, 324)


@pytest.fixture
def source():
    ff.register.source("pictures", lambda: pictures(40))
    yield
    ff.data.SOURCES.remove("pictures")


def config_of(**more):
    return small_config(
        data__name="pictures", partition__name="iid", partition__clients=5, cohort__size=3,
        client__batch_size=4, rounds=2, **more,
    )


@pytest.mark.slow
def test_experiments_count_the_styles_once_and_placement_changes_no_bit(source, tmp_path):
    config = config_of(data__style__name="cfsi", eval__every=2)
    plain = ff.train(config_of(eval__every=2), tmp_path / "plain", progress=False)
    here = ff.train(config, tmp_path / "device", progress=False)
    config.data.placement = "host"
    there = ff.train(config, tmp_path / "host", progress=False)
    jax.tree.map(np.testing.assert_array_equal, here.models, there.models)
    differs = jax.tree.map(lambda a, b: bool((a != b).any()), here.models, plain.models)
    assert any(jax.tree.leaves(differs))
    sent = lambda result: [r["bytes_up"] for r in result.records if r["split"] == "cohort"]
    assert sent(here)[0] - sent(plain)[0] == 40 * 3 * 4  # a window of one frequency, three channels
    assert sent(here)[1] == sent(plain)[1]


@pytest.mark.slow
def test_strength_zero_changes_no_bit(source):
    run = lambda config: (lambda b: b.step(b.init(), b.data)[0].server)(ff.build(config))
    styled = run(config_of(data__style__name="cfsi", data__style__strength=(0.0, 0.0)))
    jax.tree.map(np.testing.assert_array_equal, styled, run(config_of()))


@pytest.mark.parametrize(("settings", "message"), [
    ({"name": "fda", "window": 11}, "11x11 frequencies in images of 12x9: expected 1x1 to 12x9"),
    ({"name": "fda", "window": 4}, "window = 4: expected an odd number"),
    ({"name": "cfsi", "band": 0.6}, "band = 0.6: a window of 15x11"),
    ({"name": "cfsi", "strength": (0.5, 0.2)}, "expected .low, high."),
    ({"name": "lab", "strength": (0.5, 0.2)}, "lab has no strength"),
    ({"name": "labb"}, "Did you mean 'lab'"),
])
def test_wrong_settings(source, settings, message):
    config = config_of(**{f"data__style__{n}": v for n, v in settings.items()})
    with pytest.raises(ff.UsageError, match=message):
        ff.build(config)


def test_what_does_not_go_together(source):
    lab = {"data__style__name": "lab"}
    with pytest.raises(ff.UsageError, match=r"data\.rdn does not go with data\.style"):
        ff.validate(config_of(data__rdn=True, **lab))
    with pytest.raises(ff.UsageError, match="would change nothing"):
        ff.validate(config_of(data__features=True, **lab))
    with pytest.raises(ff.UsageError, match="expected three channels"):
        made("lab", pictures(shape=(H, W, 1)))
    table = ff.data.Dataset("t", *[ff.data.Examples(np.zeros((4, 3)), np.zeros(4, int))] * 2, 2)
    with pytest.raises(ff.UsageError, match=r"data.style fda of inputs of shape \(3,\)"):
        made("fda", table)
    with pytest.raises(ff.UsageError, match="nobody whose styles"):
        styles.bank(made("lab"), pictures(), partition_of((12, 0)))
