"""Heterogeneous strongly convex quadratics, f_k(w) = 1/2 sum_i A_ki (w_i - a_ki)^2.

Each client holds one "image", its rows A_k and a_k; every local step is a full gradient. All fixed
points are known in closed form, coordinate by coordinate.
"""

import jax
import jax.numpy as jnp
import numpy as np
from methods import algorithm_of

import fedjax_flat as ff
from fedjax_flat.data import Examples
from fedjax_flat.objective import Objective, Totals

CLIENTS, SIZE, LR, STEPS = 5, 4, 0.1, 5
_rng = np.random.default_rng(0)
A = _rng.uniform(0.5, 4.0, (CLIENTS, SIZE))
CENTRES = _rng.normal(0, 2, (CLIENTS, SIZE))
OPTIMUM = (A * CENTRES).sum(0) / A.sum(0)


def objective() -> Objective:
    def totals(params, batch, key=None):
        del key
        a, centre = batch.images[:, 0], batch.images[:, 1]
        losses = 0.5 * jnp.sum(a * jnp.square(params["w"][None] - centre), axis=1)
        n = jnp.sum(batch.mask.astype(jnp.float32))
        return Totals(jnp.sum(jnp.where(batch.mask, losses, 0.0)), n, n)

    return Objective(lambda batch, key: batch, lambda batch: batch, totals)


def solve(name, rounds=400, **settings) -> np.ndarray:
    """Where the method ends, all clients taking part."""
    images = np.stack([A, CENTRES], axis=1)
    examples = Examples(images, np.zeros(CLIENTS, np.int32))
    data = ff.data.federate(examples, ff.data.Partition.of([[k] for k in range(CLIENTS)]))
    # Stored examples are uint8; these are not.
    data = data.replace(examples=data.examples._replace(images=jnp.asarray(images, jnp.float32)))
    options = {"client__learning_rate": LR, "client__batch_size": 1, "client__steps": STEPS}
    algorithm = algorithm_of(name, objective(), **(options | settings))
    step = ff.round_step(algorithm, ff.uniform(CLIENTS, CLIENTS), ff.cohort_map("vmap"))
    state = ff.init_state(algorithm, {"w": jnp.zeros(SIZE)}, CLIENTS, jax.random.key(0))
    state, _ = jax.jit(ff.many_rounds(step, rounds))(state, data, rounds)
    return np.asarray(algorithm.models(state.server)["global"]["w"], float)


def biased_point(mu: float = 0.0) -> np.ndarray:
    """Where FedAvg stops, or FedProx: x = mean over k of the local map's end from x.

    The local iteration contracts by n = (1 - lr (A + mu))^steps towards (A a + mu x) / (A + mu).
    """
    n = (1 - LR * (A + mu)) ** STEPS
    # mean_k [(1 - n) (A a + mu x) / (A + mu) + n x] = x, linear in x
    slope = ((1 - n) * mu / (A + mu) + n).mean(0)
    offset = ((1 - n) * A * CENTRES / (A + mu)).mean(0)
    return offset / (1 - slope)
