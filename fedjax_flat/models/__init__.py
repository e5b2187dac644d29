"""Networks by name, as pairs of pure functions; no training logic here."""

from typing import Any

import jax

from fedjax_flat import errors
from fedjax_flat.models.base import (
    CLASSIFIER,
    STATISTICS,
    Clusters,
    Model,
    Outputs,
    Variables,
    from_linen,
    num_parameters,
)
from fedjax_flat.models.bisenet import BiSeNetV2
from fedjax_flat.models.cnn import CNN
from fedjax_flat.models.deeplab import DeepLabV3
from fedjax_flat.models.femnist import VARIANTS, FemnistCNN
from fedjax_flat.models.gem import GeM, MobileNetV2GeM, ResNet18GeM
from fedjax_flat.models.lenet import LeNet
from fedjax_flat.models.linear import Linear
from fedjax_flat.models.lstm import ShakespeareLSTM, StackOverflowLSTM
from fedjax_flat.models.mlp import MLP
from fedjax_flat.models.mobile import EfficientNetLite0, MobileNetV2
from fedjax_flat.models.pretrained import fitting, start_from
from fedjax_flat.models.random_features import LAWS, with_random_features
from fedjax_flat.models.resnet import ResNet18, ResNet20
from fedjax_flat.models.units import Units
from fedjax_flat.models.weights import load_weights
from fedjax_flat.registry import Entry, Registry, entry
from fedjax_flat.settings import Setting, Settings, check_options

# make(num_classes=..., **settings) -> flax module
MODELS: Registry[Entry] = Registry("model")
_PROJECTION = {"projection": Setting(
    0, "width of a head of two layers before the classifier; 0 is none", at_least=0
)}
MODELS.add("cnn", entry(CNN, _PROJECTION))
MODELS.add("mlp", entry(MLP, {
    "hidden": Setting((64,), "widths of the hidden layers"),
    "norm": Setting("none", "after each hidden layer", choices=("none", "batch")),
    **_PROJECTION,
}))
MODELS.add("lenet", entry(LeNet, _PROJECTION))
MODELS.add("linear", entry(Linear))
MODELS.add("femnist_cnn", entry(FemnistCNN, {
    "variant": Setting("mora", "whose network", choices=VARIANTS),
    **_PROJECTION,
}))
_RESNET = {
    "norm": Setting("group", "after each convolution", choices=("group", "batch")),
    "groups": Setting(2, "of each GroupNorm", at_least=1),
    **_PROJECTION,
}
MODELS.add("resnet18", entry(ResNet18, _RESNET))
MODELS.add("resnet20", entry(ResNet20, _RESNET))


def _mobile(norm: str) -> Settings:
    choices = ("group", "batch", "none")
    return {
        "norm": Setting(norm, "after each convolution; none: it has a bias", choices=choices),
        "groups": Setting(8, "of each GroupNorm", at_least=1),
        "dropout": Setting(0.0, "of what the classifier reads", at_least=0.0, below=1.0),
        "pretrained": Setting("", "a file of weights to start from (models/pretrained.py)"),
    }


MODELS.add("mobilenetv2", entry(MobileNetV2, _mobile("group")))
MODELS.add("efficientnet_lite0", entry(EfficientNetLite0, _mobile("batch")))
_GEM = {
    "embedding": Setting(0, "width of a linear layer after GeM; 0 is none", at_least=0),
    "p": Setting(3.0, "of GeM, where it starts", above=0),
}
MODELS.add("resnet18_gem", entry(ResNet18GeM, {
    "norm": Setting("group", "after each convolution", choices=("group", "batch")),
    "groups": Setting(2, "of each GroupNorm", at_least=1),
    "channels": Setting(64, "of the first of three stages", at_least=1),
    "stem": Setting("small", "of small images, or of photographs", choices=("small", "large")),
    **_GEM,
}))
MODELS.add("mobilenetv2_gem", entry(MobileNetV2GeM, {
    **{name: s for name, s in _mobile("group").items() if name != "dropout"}, **_GEM,
}))
MODELS.add("bisenetv2", entry(BiSeNetV2, {
    "width": Setting(1.0, "of every layer, times the paper's", above=0),
    "auxiliary": Setting(True, "four heads beside the classifier, while training"),
    "dropout": Setting(0.1, "of what classifiers read", at_least=0.0, below=1.0),
}))
MODELS.add("deeplabv3", entry(DeepLabV3, {
    **_mobile("batch"),
    "dropout": Setting(0.1, "of the joined branches", at_least=0.0, below=1.0),
    "features": Setting(256, "of each branch", at_least=1),
}))
MODELS.add("shakespeare_lstm", entry(ShakespeareLSTM))
MODELS.add("stackoverflow_lstm", entry(StackOverflowLSTM))


def build(
    name: str,
    *,
    num_classes: int,
    inputs: Any,
    precision: str = "float32",
    frozen_stats: bool = False,
    by_batch: bool = False,
    pretrained: str = "",
    **options,
) -> Model:
    """A registered network for this many classes and these inputs (see `from_linen`).

    With `pretrained` it starts from the weights of that file (see `pretrained.py`).
    """
    found = MODELS.find(name)
    check_options(f"model {name}", found.settings, options)
    model = from_linen(
        found.make(num_classes=num_classes, **options), inputs, precision,
        frozen_stats=frozen_stats, by_batch=by_batch,
    )
    try:
        jax.eval_shape(model.init, jax.random.key(0))
    except Exception as e:  # whatever a network does with inputs it was not written for
        shape = jax.tree.map(lambda s: s.shape[1:] if hasattr(s, "shape") else s, inputs)
        reason = str(e).strip().splitlines() or [type(e).__name__]
        raise errors.UsageError(
            f"model {name!r} cannot read inputs of shape {shape}: {reason[0][:200]}"
        ) from e
    return start_from(model, pretrained) if pretrained else model


__all__ = [
    "CLASSIFIER", "CNN", "LAWS", "MLP", "MODELS", "STATISTICS", "BiSeNetV2", "Clusters",
    "DeepLabV3", "EfficientNetLite0", "FemnistCNN", "GeM", "LeNet", "Linear", "MobileNetV2",
    "MobileNetV2GeM", "Model", "Outputs", "ResNet18", "ResNet18GeM", "ResNet20", "Units",
    "Variables", "build", "fitting", "from_linen", "load_weights", "num_parameters",
    "with_random_features",
]
