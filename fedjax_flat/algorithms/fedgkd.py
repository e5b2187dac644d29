"""FedGKD: former global models teach clients, as one mean or each by itself (FedGKD-VOTE).

Yao et al., "Local-global knowledge distillation in heterogeneous federated learning with non-IID
data" (2021; FedGKD). M is the number of models, w_t the one that was received, p softmax.

    FedGKD         local loss   f_k(w) + gamma / 2 KL(p_T || p),          mean over the batch
                   p_T: of the mean of the parameters of w_t, w_{t-1}, ..., w_{t-M+1}
    FedGKD-VOTE    local loss   f_k(w) + gamma / 2 mean over i of KL(p_i || p)
                   p_i: of w_{t-i}, i = 0 .. M - 1

Before round M there are fewer. With M = 1 both are the same and nothing more than w_t is sent; else
FedGKD sends the mean too, 2 models, and FedGKD-VOTE M models. The paper weighs the voters by how
they do on validation examples, which a server without any cannot: here they count alike. The
newest voter is the model that a client received, also where a method sends another than the global
one. With gamma = 0 it is FedAvg.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from fedjax_flat import errors, parts
from fedjax_flat.algorithms.addition import Addition, Beside, beside, with_term
from fedjax_flat.algorithms.method import Method
from fedjax_flat.client import Term, terms
from fedjax_flat.models import Variables
from fedjax_flat.settings import Setting


class Former(NamedTuple):
    """Models before the current one, the i-th ever in row i mod rows; those to come are zero."""

    models: Any
    pushed: jax.Array

    @property
    def there(self) -> jax.Array:
        """Which rows hold a model."""
        rows = jax.tree.leaves(self.models)[0].shape[0]
        return jnp.arange(rows) < self.pushed

    def push(self, model: Variables) -> "Former":
        """With one more model, in the place of the oldest."""
        row = self.pushed % self.there.shape[0]
        write = lambda rows, w: jax.lax.dynamic_update_index_in_dim(rows, w, row, 0)
        return Former(jax.tree.map(write, self.models, model), self.pushed + 1)

    def mean_with(self, model: Variables) -> Variables:
        """The mean of all of them and the current one."""
        n = 1 + jnp.sum(self.there.astype(jnp.float32))
        return jax.tree.map(
            lambda rows, w: (jnp.sum(rows, axis=0) + w) / n.astype(w.dtype), self.models, model
        )


def fedgkd(*, gamma: float = 0.2, models: int = 5, vote: bool = False) -> Addition:
    """Distillation from the last `models` global models."""
    name = "fedgkd_vote" if vote else "fedgkd"
    errors.at_least("gamma", gamma, 0)
    errors.at_least("models", models, 1)

    def teach(client, anchor, data):
        sent = _teachers(anchor, data.brought.get(name), vote)
        teachers = [(parts.put(model, data.own), weight) for model, weight in sent]

        def loss(outputs, batch, taught):
            terms.check_classes(name, outputs, batch, mixed=True)
            votes = [w * terms.divergence(t, outputs.logits)
                     for (_, w), t in zip(teachers, taught, strict=True)]
            return gamma / 2 * terms.batch_mean(sum(votes), batch)

        def context(batch):
            return [client.task.forward(model, batch, None).logits for model, _ in teachers]

        return Term(loss, context)

    def start(variables):
        rows = lambda w: jnp.zeros((models - 1, *w.shape), w.dtype)
        return Former(jax.tree.map(rows, variables), jnp.int32(0))

    what = Beside(
        server=start,
        send=lambda former, model: former if vote else former.mean_with(model),
        learn=lambda former, model, each, present: former.push(model),
    )
    around = lambda algorithm, task: beside(algorithm, name, what)
    return Addition(with_term(teach), around) if models > 1 else Addition(with_term(teach))


def _teachers(anchor: Variables, brought: Any, vote: bool) -> list[tuple[Variables, Any]]:
    """(model, weight): the model that was received, the mean that was sent, or all voters."""
    if brought is None:
        return [(anchor, 1.0)]
    if not vote:
        return [(brought, 1.0)]
    there = brought.there.astype(jnp.float32)
    weight = 1 / (1 + jnp.sum(there))
    former = [(jax.tree.map(lambda rows, i=i: rows[i], brought.models), weight * there[i])
              for i in range(there.shape[0])]
    return [(anchor, weight), *former]


_SETTINGS = {
    "gamma": Setting(0.2, "weight of the distillation", at_least=0),
    "models": Setting(5, "the last so many global models teach", at_least=1),
}
METHOD = (
    Method(
        "fedgkd", "Yao 2021", "the mean of former models teaches",
        add=lambda settings: fedgkd(**settings), settings=_SETTINGS,
    ),
    Method(
        "fedgkd_vote", "Yao 2021", "former global models teach one by one",
        add=lambda settings: fedgkd(vote=True, **settings), settings=_SETTINGS, group="fedgkd",
    ),
)
