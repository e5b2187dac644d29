"""Blocks of networks: what stands at their ends, and networks that go on with something else."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import assert_close, assert_same_bits

import fedjax_flat as ff
from fedjax_flat.models import Variables

# name, shape of an input, parameters of each block but the last
NETWORKS = {
    "mlp": ((4, 4, 1), [["Dense_0"]]),
    "lenet": ((28, 28, 1), [["Conv_0"], ["Conv_1"], ["Dense_0"], ["Dense_1"]]),
    "femnist_cnn": ((28, 28, 1), [["Conv_0"], ["Conv_1"], ["Dense_0"]]),
    "cnn": ((32, 32, 3), [["Conv_0"], ["Conv_1"], ["Dense_0"], ["Dense_1"]]),
    "resnet20": (
        (8, 8, 3),
        [["Conv_0", "GroupNorm_0"], *([f"Block_{3 * s + i}" for i in range(3)] for s in range(3))],
    ),
}


def build(name):
    shape, blocks = NETWORKS[name]
    model = ff.models.build(name, num_classes=5, inputs=shape)
    a, b = (model.init(jax.random.key(i)) for i in (0, 1))
    return model, a, b, jax.random.normal(jax.random.key(2), (3, *shape)), blocks


@pytest.mark.parametrize("name", NETWORKS)
def test_a_network_that_goes_on_with_another_ones_values(name):
    """Local blocks up to i, then the other network's: as one network of both's parameters."""
    model, a, b, x, blocks = build(name)
    ours = model.apply(a, x)
    assert len(ours.blocks) == len(blocks)
    for i in range(len(blocks)):
        first = [module for block in blocks[: i + 1] for module in block]
        mixed = {m: (a if m in first else b).params[m] for m in b.params}
        goes_on = lambda j, value, i=i: ours.blocks[i] if j == i else value
        hybrid = model.apply(b, x, at_blocks=goes_on)
        assert_close(hybrid.logits, model.apply(Variables(mixed), x).logits, 1e-5)


@pytest.mark.slow
def test_gradients_flow_through_the_frozen_end_and_skip_what_was_replaced():
    model, a, b, x, _ = build("lenet")

    def loss(first, rest):
        value = model.apply(first, x).blocks[1]
        return jnp.sum(model.apply(rest, x, at_blocks=lambda j, v: value if j == 1 else v).logits)

    to_first, to_rest = jax.grad(loss, (0, 1))(a, b)
    norms = lambda tree: {k: float(jnp.abs(v["kernel"]).max()) for k, v in tree.params.items()}
    assert {k for k, v in norms(to_first).items() if v} == {"Conv_0", "Conv_1"}
    assert {k for k, v in norms(to_rest).items() if v} == {"Dense_0", "Dense_1", "classifier"}


def test_nothing_changes_without():
    model, a, _, x, _ = build("cnn")
    plain, same = model.apply(a, x), model.apply(a, x, at_blocks=lambda i, v: v)
    assert_same_bits(plain.logits, same.logits)
    assert [v.shape[0] for v in plain.blocks] == [3] * 4
    np.testing.assert_array_equal(plain.blocks[-1], plain.features)
