"""Language models of the federated papers: the next token at every position.

| model | layers | parameters |
|---|---|---|
| shakespeare_lstm | embedding 8, LSTM 100, LSTM 100, classifier | 134,610 for 90 characters |
| stackoverflow_lstm | embedding 96, LSTM 670, dense 96, classifier | 4,053,428 for 10,004 words |

The first is LEAF's (Caldas et al., 2018), the second that of "Adaptive federated optimization"
(Reddi et al., 2021). Inputs are whole numbers (batch, time), logits (batch, time, vocabulary); as
many classes as tokens. Embeddings are N(0, 1); weights and biases of an LSTM of width H are
U(-1/sqrt(H), 1/sqrt(H)), with both of PyTorch's biases, of inputs and of states: one could do the
work of two, but would learn at half the rate. (Keras has one: 4,050,748 for the second model.)
The equations are in ops/lstm.py.
"""

from collections.abc import Sequence

import flax.linen as nn
import jax
import jax.numpy as jnp

from fedjax_flat import errors, ops
from fedjax_flat.models.layers import Dense, uniform


class Embedding(nn.Module):
    """A row of a table per token; NaN for a token that the table lacks."""

    tokens: int
    features: int

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        if not jnp.issubdtype(x.dtype, jnp.integer):
            raise errors.UsageError(
                f"tokens are {x.dtype}; expected whole numbers, e.g. "
                "inputs=jax.ShapeDtypeStruct((1, 80), jax.numpy.int32)"
            )
        table = self.param("embedding", nn.initializers.normal(1.0), (self.tokens, self.features))
        return jnp.take(table, x, axis=0)


class LSTM(nn.Module):
    """Sequences (batch, time, features) to the states after every step; the first is zero."""

    features: int

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        init, gates = uniform(self.features), 4 * self.features
        kernel = self.param("kernel", init, (x.shape[-1], gates))
        recurrent = self.param("recurrent_kernel", init, (self.features, gates))
        bias = self.param("bias", init, (gates,)) + self.param("recurrent_bias", init, (gates,))
        x = ops.product(jnp.swapaxes(x, 0, 1), kernel)
        x = ops.add_bias(x[None], bias)[0]  # as to an image of time and batch
        return jnp.swapaxes(ops.lstm(x, recurrent), 0, 1)


class _Recurrent(nn.Module):
    num_classes: int

    embedding: int = 8
    layers: Sequence[int] = (100, 100)
    dense: Sequence[int] = ()

    @nn.compact
    def __call__(self, x: jax.Array, *, train: bool = False) -> jax.Array:
        del train
        x = Embedding(self.num_classes, self.embedding)(x)
        for width in self.layers:
            x = LSTM(width)(x)
        for width in self.dense:
            x = Dense(width)(x)
        return Dense(self.num_classes, name="classifier")(x)


class ShakespeareLSTM(_Recurrent):
    """Two LSTM layers of 100 over characters."""


class StackOverflowLSTM(_Recurrent):
    """One LSTM layer of 670 over words, with narrow layers around it."""

    embedding: int = 96
    layers: Sequence[int] = (670,)
    dense: Sequence[int] = (96,)
