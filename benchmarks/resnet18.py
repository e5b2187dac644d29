"""ResNet-18 with GroupNorm (2 groups) for 32x32 images, bare, in our layers and in torch."""

import flax.linen as nn

from fedjax_flat.models.layers import Conv, Dense

STAGES = ((64, 1), (128, 2), (256, 2), (512, 2))


class Block(nn.Module):
    """Two 3x3 convolutions with GroupNorm and a shortcut."""

    features: int
    stride: int

    @nn.compact
    def __call__(self, x):
        strides, norm = (self.stride, self.stride), lambda: nn.GroupNorm(2)
        conv = lambda s: Conv(self.features, (3, 3), strides=s, padding="SAME", use_bias=False)
        y = nn.relu(norm()(conv(strides)(x)))
        y = norm()(conv((1, 1))(y))
        if x.shape != y.shape:
            x = norm()(Conv(self.features, (1, 1), strides=strides, use_bias=False)(x))
        return nn.relu(x + y)


class ResNet18(nn.Module):
    """3x3 stem, four stages of two blocks, mean over the image, classifier."""

    @nn.compact
    def __call__(self, x):
        x = Conv(64, (3, 3), padding="SAME", use_bias=False)(x)
        x = nn.relu(nn.GroupNorm(2)(x))
        for features, stride in STAGES:
            x = Block(features, 1)(Block(features, stride)(x))
        return Dense(10)(x.mean(axis=(1, 2)))


def torch_resnet18():
    """The same network in torch."""
    import torch
    from torch import nn as tnn

    class TorchBlock(tnn.Module):
        def __init__(self, inputs, features, stride):
            super().__init__()
            conv = lambda i, k, s: tnn.Conv2d(i, features, k, s, k // 2, bias=False)
            self.body = tnn.Sequential(
                conv(inputs, 3, stride), tnn.GroupNorm(2, features), tnn.ReLU(),
                conv(features, 3, 1), tnn.GroupNorm(2, features),
            )
            self.shortcut = tnn.Sequential() if (inputs, stride) == (features, 1) else (
                tnn.Sequential(conv(inputs, 1, stride), tnn.GroupNorm(2, features))
            )

        def forward(self, x):
            return torch.relu(self.shortcut(x) + self.body(x))

    layers: list = [tnn.Conv2d(3, 64, 3, 1, 1, bias=False), tnn.GroupNorm(2, 64), tnn.ReLU()]
    inputs = 64
    for features, stride in STAGES:
        layers += [TorchBlock(inputs, features, stride), TorchBlock(features, features, 1)]
        inputs = features
    return tnn.Sequential(*layers, tnn.AdaptiveAvgPool2d(1), tnn.Flatten(), tnn.Linear(512, 10))
