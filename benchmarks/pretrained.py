"""Are the pretrained networks what they say? Ridge regression on their features of CIFAR-100.

    python benchmarks/pretrained.py --data DIR --mobilenetv2 FILE.npz --lite FILE.pth

Features (1280) of the first 5,000 train images, resized to 96 pixels, give a linear classifier in
closed form, W = (X^T X + l I)^-1 X^T Y, where Y is one-hot, features and Y are centred and l is a
tenth of the mean eigenvalue of X^T X; printed is its accuracy on the first 1,000 test images. Where
torch is installed, EfficientNet-Lite0 is written in it too, from the same file, and the largest
difference of its features is printed.
"""

import argparse
import functools
import pathlib
import time

import jax
import jax.numpy as jnp
import numpy as np

import fedjax_flat as ff
from fedjax_flat import models
from fedjax_flat.models import mobile

INPUTS = {"mobilenetv2": (127.5, 127.5), "efficientnet_lite0": (127.0, 128.0)}  # centre, scale
NORM = {"mobilenetv2": "none", "efficientnet_lite0": "batch"}


def main() -> None:
    """Prints a line per network."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", required=True, help="the folder with cifar-100-python")
    parser.add_argument("--mobilenetv2", default="", help="mobilenetv2-imagenet-int8.npz")
    parser.add_argument("--lite", default="", help="efficientnet-lite0-57934424.pth")
    parser.add_argument("--size", type=int, default=96)
    parser.add_argument("--method", default="bilinear", choices=("bilinear", "bicubic"))
    options = parser.parse_args()
    files = {"mobilenetv2": options.mobilenetv2, "efficientnet_lite0": options.lite}
    data = ff.data.load("cifar100", options.data)
    for name, file in files.items():
        if not file:
            continue
        model = models.build(
            name, num_classes=100, inputs=(options.size, options.size, 3), norm=NORM[name],
            pretrained=str(pathlib.Path(file)),
        )
        variables = jax.jit(model.init)(jax.random.key(0))
        prepare = functools.partial(resized, name=name, size=options.size, method=options.method)
        extract = jax.jit(lambda v, x, m=model, p=prepare: m.apply(v, p(x)).features)
        start = time.perf_counter()
        train = in_batches(extract, variables, data.train.inputs[:5000])
        test = in_batches(extract, variables, data.test.inputs[:1000])
        seconds = time.perf_counter() - start
        share = ridge(train, data.train.labels[:5000], test, data.test.labels[:1000])
        print(f"{name}: ridge on {options.size} px features {share:.1%}, "
              f"{len(train) + len(test)} images in {seconds:.0f} s", flush=True)
        if name == "efficientnet_lite0":
            compare_with_torch(file, variables, model, prepare(data.test.inputs[:16]))


def resized(images, *, name, size, method):
    """uint8 images at another size, as the network's file wants them."""
    centre, scale = INPUTS[name]
    shape = (images.shape[0], size, size, images.shape[3])
    images = jax.image.resize(jnp.asarray(images, jnp.float32), shape, method)
    return (jnp.clip(images, 0, 255) - centre) / scale


def in_batches(extract, variables, images, size=250):
    """Features of all images."""
    parts = [extract(variables, images[i : i + size]) for i in range(0, len(images), size)]
    return np.concatenate([np.asarray(p) for p in parts]).astype(np.float64)


def ridge(train, labels, test, expected, classes=100):
    """The share of test images whose class the linear classifier finds."""
    mean, target = train.mean(0), np.eye(classes)[np.asarray(labels)]
    train, test = train - mean, test - mean
    gram, share = train.T @ train, target.mean(0)
    strength = 0.1 * np.trace(gram) / len(gram)
    w = np.linalg.solve(gram + strength * np.eye(len(gram)), train.T @ (target - share))
    return float(np.mean(np.argmax(test @ w + share, axis=1) == np.asarray(expected)))


def compare_with_torch(file, variables, model, inputs):
    """The largest difference between our features and torch's."""
    try:
        import torch
    except ImportError:
        print("  torch is not here: nothing to compare with")
        return
    ours = np.asarray(jax.jit(model.apply)(variables, inputs).features)
    state = torch.load(file, map_location="cpu", weights_only=True)
    with torch.no_grad():
        theirs = torch_lite0(state, torch.tensor(np.array(inputs)).permute(0, 3, 1, 2)).numpy()
    gap = np.abs(ours - theirs).max()
    print(f"  torch: largest difference of {theirs.size} features {gap:.1e}, largest feature "
          f"{np.abs(theirs).max():.2f}", flush=True)


def torch_lite0(state, x):
    """Features of EfficientNet-Lite0 in torch's functions, from the file's own names."""
    from torch.nn import functional as F

    def layer(x, conv, norm, stride=1, groups=1, active=True):
        w = state[f"{conv}.weight"]
        total = [max((-(-n // stride) - 1) * stride + w.shape[-1] - n, 0) for n in x.shape[2:]]
        (top, left), (bottom, right) = [t // 2 for t in total], [t - t // 2 for t in total]
        x = F.conv2d(F.pad(x, (left, right, top, bottom)), w, stride=stride, groups=groups)
        mean, var, scale, bias = (
            state[f"{norm}.{n}"] for n in ("running_mean", "running_var", "weight", "bias")
        )
        x = F.batch_norm(x, mean, var, scale, bias, eps=1e-3)
        return F.relu6(x) if active else x

    x, i = layer(x, "_conv_stem", "_bn0", 2), 0
    for stage in mobile.EFFICIENTNET_LITE0:
        for first in [True] + [False] * (stage.blocks - 1):
            block, y = f"_blocks.{i}.", x
            if stage.ratio > 1:
                y = layer(y, f"{block}_expand_conv", f"{block}_bn0")
            y = layer(y, f"{block}_depthwise_conv", f"{block}_bn1", stage.stride if first else 1,
                      y.shape[1])
            y = layer(y, f"{block}_project_conv", f"{block}_bn2", active=False)
            x, i = (x + y if x.shape == y.shape else y), i + 1
    return layer(x, "_conv_head", "_bn1").mean((2, 3))


if __name__ == "__main__":
    main()
