"""OLL, only local labels: each client's classifier has its own classes only.

Fani's thesis (2025), section 4.3, algorithm 7. C_k are the classes of client k's train examples.

    theta_k^head <- the columns {theta^c : c in C_k};   softmax and prediction over C_k

It goes with any method and changes what clients train on and are tested with: as `fp+oll` it is
OLL(...) + FP(.) of the thesis, and the evaluation before its first round is OLL without FP. A
client's tests must be of classes that it trains on (the closed set; data.closed makes them so); one
without examples has no labels and is refused. Nothing is sent for it. The thesis's client rate is a
tenth of what it would be (configs/personal.py).

Shapes stay as they are: the logits of absent classes are masked, in training and in evaluation, so
that their columns have no gradient and cannot win, which gives the bits of a head that has C_k
columns up to the order of sums. A real client would hold d C_k numbers instead of d C, and that is
what the metric `head_floats` of personal models counts.
"""

from fedjax_flat import errors
from fedjax_flat.algorithms.addition import Addition
from fedjax_flat.algorithms.base import Algorithm
from fedjax_flat.algorithms.method import Method
from fedjax_flat.client import Client
from fedjax_flat.tasks import Task, restricted


def oll() -> Addition:
    """Losses and accuracies over the client's own classes."""

    def change(client: Client) -> Client:
        def train(variables, data, key, **rest):
            if data.classes is None:
                raise errors.UsageError(
                    "oll with data that do not say which classes each client has: expected "
                    "fedjax_flat.data.federate(..., classes=...), clients by classes."
                )
            task = restricted(client.task, data.classes)
            return client.on(task).train(variables, data, key, **rest)

        return client._replace(train=train, on=lambda task: change(client.on(task)))

    return Addition(change, _with_personal_models, innermost=True)


def _with_personal_models(algorithm: Algorithm, task: Task) -> Algorithm:
    """A pruned copy of the global model is a client's own."""
    del task
    if algorithm.personal:
        return algorithm
    return algorithm._replace(personal=lambda server, state: algorithm.models(server)["global"])


METHOD = Method(
    "oll", "Fani 2025", "heads pruned to each client's labels", add=lambda settings: oll()
)
