"""A client that makes images like the others' from the model it receives, with a GAN.

Hitaj et al., "Deep models under the GAN: information leakage from collaborative deep learning" (CCS
2017), in the form of Caldarola's thesis (eq. 5.8): the received model w_t is the discriminator,
with one more dense layer that says real or fake instead of a class "fake".

    D(x) = sigmoid(v . h_w(x) + b),   h_w the features that w's classifier reads
    max over D   E[log D(x)] + E[log(1 - D(G(z)))],   x the attacker's own images, z ~ N(0, I)
    min over G   -E[log D(G(z))] - c E[log p_w(y | G(z))]

Where the text is silent: by default w stays as it was received and only v, b are trained (`train` =
"layer"; "all" trains w too, with its statistics as they are); y is a class drawn for every image,
which G is told and w should see in it (weight c = `guided`; 0 is the pure objective, where G knows
no class either); both are trained by Adam(2e-4, 0.5), one step each in turn. G is a dense layer to
a quarter of the image's sides, then twice an enlargement by repetition and a 5x5 convolution, with
tanh at the end, in the range of stored pixels.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax

from fedjax_flat import errors, rng
from fedjax_flat.models import Outputs, Variables
from fedjax_flat.models.layers import Conv, Dense

NOISE = 100
TRAINED = ("layer", "all")

# (variables, stored images) -> what the network says of them
Look = Callable[[Variables, jax.Array], Outputs]


class Generator(nn.Module):
    """Images of `shape` with pixels from 0 to `largest`, of noise and a class."""

    shape: tuple[int, int, int]
    largest: float
    width: int = 64

    @nn.compact
    def __call__(self, z: jax.Array) -> jax.Array:
        height, width, channels = self.shape
        rows, columns = -(-height // 4), -(-width // 4)
        x = nn.relu(Dense(rows * columns * 2 * self.width)(z))
        x = x.reshape(-1, rows, columns, 2 * self.width)
        for features in (self.width, channels):
            x = nn.LayerNorm(use_bias=True, reduction_axes=(1, 2, 3))(x)
            x = jnp.repeat(jnp.repeat(nn.relu(x), 2, axis=1), 2, axis=2)
            x = Conv(features, (5, 5), padding="SAME")(x)
        return (jnp.tanh(x[:, :height, :width]) + 1) * (self.largest / 2)


class Recovery(NamedTuple):
    """`images(count)`: what the trained generator makes; the losses of every step."""

    images: Callable[[int], np.ndarray]
    discriminator: np.ndarray
    generator: np.ndarray


class _Rival(NamedTuple):
    """What the attacker adds to the model, and trains of it."""

    kernel: jax.Array
    bias: jax.Array
    model: Any  # its parameters, or () if they stay as they are


def recover(
    look: Look, received: Variables, images: np.ndarray, *, steps: int, key: jax.Array,
    largest: float = 255.0, batch_size: int = 64, train: str = "layer", guided: float = 1.0,
    learning_rate: float = 2e-4, width: int = 64,
) -> Recovery:
    """Trains a generator against the received model, with the attacker's own images."""
    errors.at_least("steps", steps, 1)
    errors.at_least("guided", guided, 0)
    errors.positive("learning_rate", learning_rate)
    errors.lookup("train", train, dict.fromkeys(TRAINED))
    if np.ndim(images) != 4 or len(images) < 1:
        raise errors.UsageError(
            f"recovery with images of shape {np.shape(images)}: expected (count, height, width, "
            "channels), at least one. Choose an attacker that has examples."
        )
    shape = jax.eval_shape(look, received, jnp.asarray(images[:1]))
    classes, wide = shape.logits.shape[-1], shape.features.shape[-1]
    generator = Generator(tuple(images.shape[1:]), largest, width)
    noise = NOISE + (classes if guided else 0)
    made = generator.init(rng.fold(key, "generator"), jnp.zeros((1, noise), jnp.float32))
    bound = 1 / np.sqrt(wide)
    rival = _Rival(
        jax.random.uniform(rng.fold(key, "layer"), (wide,), jnp.float32, -bound, bound),
        jnp.zeros((), jnp.float32), received.params if train == "all" else (),
    )
    optimizer = optax.adam(learning_rate, b1=0.5)

    def drawn(key, count):
        z = jax.random.normal(rng.fold(key, "noise"), (count, NOISE), jnp.float32)
        y = jax.random.randint(rng.fold(key, "class"), (count,), 0, classes, jnp.int32)
        told = jax.nn.one_hot(y, classes, dtype=jnp.float32)
        return (jnp.concatenate([z, told], axis=1) if guided else z), y

    def judged(rival, x):
        variables = received if rival.model == () else received._replace(params=rival.model)
        outputs = look(variables, x)
        return outputs.features @ rival.kernel + rival.bias, outputs.logits

    def against(rival, made, real, key):
        fake = generator.apply(made, drawn(key, batch_size)[0])
        says = lambda x: judged(rival, x)[0]
        right = optax.sigmoid_binary_cross_entropy
        ones = jnp.ones(batch_size, jnp.float32)
        return jnp.mean(right(says(real), ones)) + jnp.mean(right(says(fake), 0 * ones))

    def deceived(made, rival, key):
        z, y = drawn(key, batch_size)
        says, logits = judged(rival, generator.apply(made, z))
        loss = jnp.mean(optax.sigmoid_binary_cross_entropy(says, jnp.ones_like(says)))
        seen = optax.softmax_cross_entropy_with_integer_labels(logits, y)
        return loss + guided * jnp.mean(seen)

    def adam(gradient, state, params):
        with jax.numpy_dtype_promotion("standard"):  # optax raises decay to a whole number
            return optimizer.update(gradient, state, params)

    own = jnp.asarray(images)

    def step(carry, t):
        rival, made, of_rival, of_made = carry
        at = rng.fold(key, "step", t)
        chosen = jax.random.randint(rng.fold(at, "real"), (batch_size,), 0, len(own), jnp.int32)
        real = own[chosen].astype(jnp.float32)
        first, gradient = jax.value_and_grad(against)(rival, made, real, rng.fold(at, "rival"))
        updates, of_rival = adam(gradient, of_rival, rival)
        rival = optax.apply_updates(rival, updates)
        second, gradient = jax.value_and_grad(deceived)(made, rival, rng.fold(at, "made"))
        updates, of_made = adam(gradient, of_made, made)
        made = optax.apply_updates(made, updates)
        return (rival, made, of_rival, of_made), (first, second)

    start = rival, made, optimizer.init(rival), optimizer.init(made)
    (_, made, _, _), losses = jax.jit(lambda c: jax.lax.scan(step, c, jnp.arange(steps)))(start)

    @jax.jit
    def pictures(made, key):
        return generator.apply(made, drawn(key, batch_size)[0])

    def several(count):
        found = [
            np.asarray(pictures(made, rng.fold(key, "pictures", i)))
            for i in range(-(-count // batch_size))
        ]
        return np.concatenate(found)[:count]

    return Recovery(several, *map(np.asarray, losses))
