"""FixBN: statistics move in the first rounds, and then normalise as they are.

Zhong, Chen, Chao, "Making batch normalization great in federated deep learning" (2023):

    round t < T*   clients normalise by their batches, and the statistics are averaged (FedAvg)
    round t >= T*  clients normalise by the global statistics, which move no more

so that in the second phase no client's gradient depends on what else is in its batch. Scale and
shift are trained in both. The paper's momentum that is kept between rounds is left out.
"""

import jax

from fedjax_flat import errors
from fedjax_flat.client.local import Client
from fedjax_flat.tasks import Task


def fixed_after(client: Client, fixed: Task, rounds: int) -> Client:
    """`client`, which trains on `fixed` (the same task, statistics as they are) after `rounds`."""
    errors.at_least("rounds", rounds, 1)
    task, later = client.task, client.on(fixed)

    def train(variables, data, key, *, round, **rest):
        now = lambda variables: client.train(variables, data, key, round=round, **rest)
        then = lambda variables: later.train(variables, data, key, round=round, **rest)
        return jax.lax.cond(round >= rounds, then, now, variables)

    def on(other: Task) -> Client:
        if other.forward is not task.forward:
            raise errors.UsageError(
                "model.fix_after does not go with a method that runs the network in a way of its "
                "own: leave one out."
            )
        return fixed_after(client.on(other), other._replace(forward=fixed.forward), rounds)

    return client._replace(train=train, on=on)
