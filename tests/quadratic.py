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
from fedjax_flat.models import Outputs, Variables
from fedjax_flat.tasks import Task

CLIENTS, SIZE, LR, STEPS = 5, 4, 0.1, 5
_rng = np.random.default_rng(0)
A = _rng.uniform(0.5, 4.0, (CLIENTS, SIZE))
CENTRES = _rng.normal(0, 2, (CLIENTS, SIZE))
OPTIMUM = (A * CENTRES).sum(0) / A.sum(0)


def task() -> Task:
    def losses(outputs, batch):
        a, centre = batch.inputs[:, 0], batch.inputs[:, 1]
        return 0.5 * jnp.sum(a * jnp.square(outputs.logits[None] - centre), axis=1), batch.mask

    return Task(
        init=lambda key: Variables({"w": jnp.zeros(SIZE)}),
        prepare=lambda batch, key: batch,
        forward=lambda variables, batch, key: Outputs(variables.params["w"]),
        losses=losses,
        sums=lambda outputs, batch: {},
        report=lambda sums: {},
        score="loss",
    )


def solve(name, rounds=400, **settings) -> np.ndarray:
    """Where the method ends, all clients taking part."""
    examples = Examples(np.stack([A, CENTRES], axis=1), np.zeros(CLIENTS, np.int32))
    data = ff.data.federate(examples, ff.data.Partition.of([[k] for k in range(CLIENTS)]))
    options = {"client__learning_rate": LR, "client__batch_size": 1, "client__steps": STEPS}
    if name == "fedsgd":
        options = {}
    algorithm = algorithm_of(name, task(), **(options | settings))
    over = ff.cohort_map("vmap")
    step = ff.round_step(algorithm, ff.uniform(CLIENTS, CLIENTS), over, task=task())
    variables = Variables({"w": jnp.zeros(SIZE)})
    state = ff.init_state(algorithm, variables, CLIENTS, jax.random.key(0))
    state, _ = jax.jit(ff.many_rounds(step, rounds))(state, data, rounds)
    return np.asarray(algorithm.models(state.server)["global"].params["w"], float)


def biased_point(mu: float = 0.0) -> np.ndarray:
    """Where FedAvg stops, or FedProx: x = mean over k of the local map's end from x.

    The local iteration contracts by n = (1 - lr (A + mu))^steps towards (A a + mu x) / (A + mu).
    """
    n = (1 - LR * (A + mu)) ** STEPS
    # mean_k [(1 - n) (A a + mu x) / (A + mu) + n x] = x, linear in x
    slope = ((1 - n) * mu / (A + mu) + n).mean(0)
    offset = ((1 - n) * A * CENTRES / (A + mu)).mean(0)
    return offset / (1 - slope)
