"""The package's ResNet-18 with GroupNorm (2 groups) in torch."""

STAGES = ((64, 1), (128, 2), (256, 2), (512, 2))


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
