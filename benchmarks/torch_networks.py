"""The package's ResNet-18, ResNet-20 and MobileNetV2, with GroupNorm, in torch."""

import torch
from torch import nn


def _conv(inputs, features, kernel=3, stride=1, groups=1):
    return nn.Conv2d(inputs, features, kernel, stride, kernel // 2, groups=groups, bias=False)


class _Padded(nn.Module):
    """Every second pixel, and zeros for the channels that the input lacks."""

    def __init__(self, lacks):
        super().__init__()
        self.pads = (0, 0, 0, 0, lacks // 2, lacks - lacks // 2)

    def forward(self, x):
        return nn.functional.pad(x[:, :, ::2, ::2], self.pads)


class _Block(nn.Module):
    def __init__(self, inputs, features, stride, shortcut):
        super().__init__()
        norm = lambda: nn.GroupNorm(2, features)
        self.body = nn.Sequential(
            _conv(inputs, features, 3, stride), norm(), nn.ReLU(), _conv(features, features),
            norm(),
        )
        self.shortcut: nn.Module = nn.Identity()
        if inputs != features and shortcut == "conv":
            self.shortcut = nn.Sequential(_conv(inputs, features, 1, stride), norm())
        elif inputs != features:
            self.shortcut = _Padded(features - inputs)

    def forward(self, x):
        return torch.relu(self.shortcut(x) + self.body(x))


def _resnet(classes, widths, blocks, shortcut):
    layers: list = [_conv(3, widths[0]), nn.GroupNorm(2, widths[0]), nn.ReLU()]
    inputs = widths[0]
    for stage, features in enumerate(widths):
        for i in range(blocks):
            stride = 2 if stage and i == 0 else 1
            layers.append(_Block(inputs, features, stride, shortcut))
            inputs = features
    return _ended(layers, inputs, classes)


def _ended(layers, features, classes):
    return nn.Sequential(
        *layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(features, classes)
    )


class _Inverted(nn.Module):
    def __init__(self, inputs, ratio, features, stride):
        super().__init__()
        wide = ratio * inputs
        layers = _normed(inputs, wide, 1) if ratio > 1 else []
        layers += _normed(wide, wide, 3, stride, wide)
        self.body = nn.Sequential(*layers, *_normed(wide, features, 1)[:-1])
        self.same = stride == 1 and inputs == features

    def forward(self, x):
        return x + self.body(x) if self.same else self.body(x)


def _normed(inputs, features, kernel=3, stride=1, groups=1):
    norm = nn.GroupNorm(8, features, eps=1e-6)
    return [_conv(inputs, features, kernel, stride, groups), norm, nn.ReLU6()]


def _mobilenetv2(classes):
    layers, inputs = _normed(3, 32, 3, 2), 32
    for ratio, features, blocks, stride in (
        (1, 16, 1, 1), (6, 24, 2, 2), (6, 32, 3, 2), (6, 64, 4, 2), (6, 96, 3, 1), (6, 160, 3, 2),
        (6, 320, 1, 1),
    ):
        for i in range(blocks):
            layers.append(_Inverted(inputs, ratio, features, 1 if i else stride))
            inputs = features
    return _ended([*layers, *_normed(inputs, 1280, 1)], 1280, classes)


NETWORKS = {
    "resnet18": lambda w: _resnet(w.classes, (64, 128, 256, 512), 2, "conv"),
    "resnet20": lambda w: _resnet(w.classes, (16, 32, 64), 3, "pad"),
    "mobilenetv2": lambda w: _mobilenetv2(w.classes),
}
