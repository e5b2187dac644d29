"""MCD: two classifiers find where the generator's features of the target are unlike the source's.

Saito et al., "Maximum classifier discrepancy for unsupervised domain adaptation" (CVPR 2018); the
baseline of LADD with source data (Fani's thesis, section 5.3; Caldarola's, section 6.3). G is the
network without its classifier, C1 and C2 two classifiers; on a batch (x, y) of the labelled source
and one x' of the unlabelled target, L the sum of both classifiers' losses and p their softmaxes,

    A    G, C1, C2 <- descend on  L(x, y)
    B    C1, C2    <- descend on  L(x, y) - d(x')
    C    G         <- descend on  d(x'),  `n` times            d = mean |p1 - p2|

d is a mean over classes and units; padding and pixels labelled `ignored` count nowhere, and where
nothing counts there are no B and C. Without those it is supervised training of two classifiers.

`form` = central: source and target are in one place, which is the only client, and nothing
travels. Every step of it has the next batch of the source and takes A, B and C.

`form` = federated: the server has the source, clients have the target, as in the federated task of
Yao et al., "Federated multi-target domain adaptation" (WACV 2022). The theses say that MCD is
federated as there and no more, so this is our choice: in a round

    k:       for every batch of the target:  B and C, where B is  C1, C2 <- descend on -d(x')
    server   G, C1, C2 <- SERVEROPT, weighted mean of clients' pseudo-gradients
             A on `steps` batches of the source

The half of B that needs labels is left to A, which follows; the first round starts without. The
server steps with the clients' optimiser and rate, afresh in every round. LADD's program gives every
client the source instead, and its d is of source images in B and C.

C2 is drawn anew, from another key than the model's: a copy of C1 would stay one, at d = 0. Both
travel and are averaged as everything else. `global` has the mean of both classifiers: as they are
affine, its logits are the mean of theirs, and so its classes those of the authors' sum.
"""

from typing import Any

import jax
import jax.numpy as jnp
import optax

from fedjax_flat import errors, parts, rng
from fedjax_flat.algorithms.base import Algorithm
from fedjax_flat.algorithms.fedavg import fedavg
from fedjax_flat.algorithms.method import Method, Parts
from fedjax_flat.client import Client
from fedjax_flat.client.discrepancy import Steps, in_turn, merged
from fedjax_flat.models import CLASSIFIER, Variables
from fedjax_flat.settings import Setting

FORMS = ("federated", "central")


def mcd(
    client: Client, server_optimizer: optax.GradientTransformation, *, form: str = "federated",
    n: int = 4, steps: int = 10, ignored: int = 255, seed: int = 0, weighting: str = "examples",
) -> Algorithm:
    """MCD of clients with the target, or of one that has the source too."""
    errors.at_least("n", n, 0)
    errors.at_least("steps", steps, 0)
    central = errors.lookup("form", form, {"federated": False, "central": True})
    if client.task.search:
        raise errors.UsageError(
            "mcd with clients that learn to search: expected a task with classes, task.name = "
            "'classification' or 'segmentation'."
        )
    task, optimizer = client.task, client.optimizer
    # Of a pair, the loop needs no more than to evaluate it, for the shapes of its sums.
    worker = client.on(task._replace(
        forward=lambda pair, *rest: task.forward(merged(pair), *rest)
    ))
    key = rng.fold(jax.random.key(seed), "mcd")

    def init(variables, num_clients):
        if central and num_clients != 1:
            raise errors.UsageError(
                f"mcd in one place with {num_clients} clients: expected one that has all the "
                "target's examples, e.g. partition.name = iid, partition.clients = 1 and "
                "cohort.size = 1; or algorithm.mcd.form = federated."
            )
        fresh = jax.jit(task.init)(rng.fold(key, "second"))
        return base.init(paired(variables, fresh), num_clients)

    def batches(examples, first):
        if examples is None:
            raise errors.UsageError(
                "mcd without labelled examples: expected those of the server, of a natural client "
                "or a share of the train examples, e.g. data.labelled = 0.1."
            )
        return in_turn(examples, client.batch_size, rng.fold(key, "source"), first)

    def train(pair, data, key, *, round, **rest):
        source = None
        if central:
            source = batches(data.labelled, round * client.steps(data).astype(jnp.int32))
        step = Steps(task, optimizer, round, ignored=ignored)
        trained = worker.train(
            pair, data, key, round=round, stepper=step.stepper(repeats=n, source=source), **rest
        )
        model = merged(trained.info.model)  # who looks at local models knows one classifier
        return trained._replace(info=trained.info._replace(model=model))

    base = fedavg(worker._replace(train=train), server_optimizer, weighting=weighting)
    (exchange,) = base.exchanges

    def update(server, uploads, round):
        server, metrics = exchange.update(server, uploads, round)
        if central:
            return server, metrics
        source, step = batches(uploads.labelled, round * steps), Steps(task, optimizer, round)

        def one(i, carry):
            pair, states, _ = carry
            place = rng.fold(key, "step", round, i)
            batch = task.prepare(source(i), rng.fold(place, "augment"))
            return step.a(pair, states, batch, rng.fold(place, "a"))

        pair, _, loss = jax.lax.fori_loop(
            0, steps, one, (server.model, step.init(server.model.params), jnp.zeros(()))
        )
        return server._replace(model=pair), metrics | {"source_loss": loss}

    made = exchange._replace(update=update)
    if central:
        made = made._replace(bits=(lambda message, upload, own: (0, 0),))
    return Algorithm(
        init=init, exchanges=(made,), models=lambda server: {"global": merged(server.model)}
    )


def paired(variables: Variables, other: Variables) -> Variables:
    """The model with the classifier of another one beside its own."""
    head = parts.take(variables.params, parts.head)
    deep = [name for name in head if name.split("/")[-2] != CLASSIFIER]
    if not head or deep or len(head) == len(parts.take(variables.params, lambda name: True)):
        every = ", ".join(parts.take(variables.params, lambda name: True))
        raise errors.UsageError(
            f"mcd of a model with the parameters {every}: expected features, and one layer named "
            f"{CLASSIFIER!r} that reads them and is its last. Name it so."
        )
    second = parts.take(other.params, parts.head)
    same = [jnp.array_equal(head[name], second[name]) for name in head]
    if not any(isinstance(x, jax.core.Tracer) for x in same) and all(map(bool, same)):
        raise errors.UsageError(
            "mcd of two classifiers with the same weights, which would stay the same: expected "
            "classifiers that are drawn. Leave the classifier out of the weights that are read."
        )
    return Variables({"model": variables.params, "second": second}, variables.stats)


def _make(p: Parts) -> Algorithm:
    given: dict[str, Any] = dict(p.settings)
    return mcd(
        p.client, p.server_optimizer, weighting=p.weighting, seed=p.config.seed,
        ignored=p.config.task.ignored, **given,
    )


METHOD = Method(
    "mcd", "Saito 2018", "two classifiers, unlabelled clients", _make,
    settings={
        "form": Setting("federated", "or central: of one client, with the source beside it",
                        choices=FORMS),
        "n": Setting(4, "steps C after every B", at_least=0),
        "steps": Setting(10, "A's on the server, in a round of the federated form", at_least=0),
    },
    labelled=True, sharpness="none", gradients=5,
)
