"""FedMLB: what the client's first layers say is also judged by the global model's last ones.

Kim et al., "Multi-level branched regularization for federated learning" (ICML 2022). A network of
blocks 1 .. L + 1; z are the local model's logits, z_i those of path i: local blocks 1 .. i, then
blocks i + 1 .. L + 1 of the model that was received, frozen.

    local loss   CE(z, y) + lambda1 / L sum over i = 1 .. L of CE(z_i, y)
                          + lambda2 / L sum over i of KL(softmax(z_i) || softmax(z))

Gradients flow through the frozen blocks into the local ones, and through z_i in the divergence too,
as in the released code. Frozen blocks are in evaluation mode. Where blocks end is a network's own
(`models.layers.EndOfBlock`): five paths of ResNet-18, after the stem and after each stage. With
lambda1 = lambda2 = 0 it is FedAvg.
"""

import jax.numpy as jnp

from fedjax_flat import errors
from fedjax_flat.algorithms.addition import Addition, with_term
from fedjax_flat.algorithms.method import Method
from fedjax_flat.client import Term, terms
from fedjax_flat.settings import Setting


def fedmlb(*, lambda1: float = 1.0, lambda2: float = 1.0) -> Addition:
    """Hybrid paths of local and frozen global blocks."""
    errors.at_least("lambda1", lambda1, 0)
    errors.at_least("lambda2", lambda2, 0)

    def branch(client, anchor, data):
        del data
        task = client.task

        def loss(outputs, batch, context):
            del context
            terms.check_classes("fedmlb", outputs, batch, mixed=True)
            if not outputs.blocks:
                raise errors.UsageError(
                    "fedmlb with a network that is one block: expected models.layers.EndOfBlock() "
                    "where its blocks end. Those that have them: cnn, femnist_cnn, lenet, mlp, "
                    "resnet18, resnet20, mobilenetv2, efficientnet_lite0."
                )
            total = jnp.zeros(())
            for i, local in enumerate(outputs.blocks):
                goes_on = lambda j, value, i=i, local=local: local if j == i else value
                path = task.forward(anchor, batch, None, at_blocks=goes_on)
                cross_entropy, _ = task.losses(path, batch)
                agreement = terms.divergence(path.logits, outputs.logits)
                total += terms.batch_mean(lambda1 * cross_entropy + lambda2 * agreement, batch)
            return total / len(outputs.blocks)

        return Term(loss)

    return Addition(with_term(branch))


METHOD = Method(
    "fedmlb", "Kim 2022", "local blocks judged by frozen ones",
    add=lambda settings: fedmlb(**settings),
    settings={
        "lambda1": Setting(1.0, "weight of the paths' cross-entropy", at_least=0),
        "lambda2": Setting(1.0, "weight of the divergence from the paths", at_least=0),
    },
)
