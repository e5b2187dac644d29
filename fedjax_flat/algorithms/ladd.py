"""LADD: clients without labels adapt a model that was trained on others' labels, style by style.

Shenaj et al., "Learning across domains and devices: style-driven source-free domain adaptation in
clustered federated learning" (WACV 2023); Fani's thesis, section 5.3; Caldarola's, algorithm 8.
Clients are in clusters of like styles (groups/by_style.py). A cluster s has its own v_s, all share
u, and w_s = (u, v_s); g_s is its teacher, w^0 the model with which all begin.

    w_k <- local training of w_s on    L_self(w; g_s) + kd L_KD,      L_KD = KL(p || p of w^0)
    u   <- sum_k n_k u_k / sum_k n_k                    over all clients of the round
    v_s <- sum_k n_k v_k / sum_k n_k                    over those of cluster s; else as it was
    every `every` rounds t:  g_s <- w_s,   from round `start` on the mean
                             g_s <- (tau g_s + w_s) / (tau + 1),   tau = (t - start) / every

L_self is that of self_training.py. `own` says what v is: cls, the classifier; all, bn (parameters
and statistics of normalisation layers), backbone, or none. Rounds count from 1, `start` = 0 is
never. `distilled` = released: L_KD is - mean over units and classes of p^0 log p, p^0 of half the
logits of w^0, where w^0's own pseudo-labels are trusted. With one cluster, kd = 0, every = 1 and
start = 0 it is FedAvg + self-training.

`global` is the mean of w_s over the clusters; `clusters` are all w_s: a test image is given to that
of the nearest style, after it has taken on that style (`restyle`; the released program
leaves it as it is). A client receives w_s and g_s in every round, and w^0 once, if kd > 0: Fani's
thesis does not count it. It sends w_k.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from fedjax_flat import errors, parts
from fedjax_flat.algorithms.base import Algorithm, Exchange, difference, replies
from fedjax_flat.algorithms.method import Method
from fedjax_flat.client import Client, Term, terms
from fedjax_flat.client import unlabelled as ul
from fedjax_flat.models import Clusters, Variables
from fedjax_flat.server import aggregate
from fedjax_flat.settings import Setting
from fedjax_flat.wire import bits_of, models_in

OWN: dict[str, parts.Part] = {
    "cls": parts.head,
    "all": lambda name: True,
    "bn": parts.normalisation,
    "backbone": lambda name: not parts.head(name),
    "none": lambda name: False,
}


class LaddState(NamedTuple):
    """Of all clusters, stacked: what is trained and what teaches; and w^0."""

    models: Variables
    teachers: Variables
    begin: Variables


class Message(NamedTuple):
    """The same, as it is sent; () where it is not needed."""

    models: Any
    teachers: Any
    begin: Any


class Trained(NamedTuple):
    """What a client sends, and its cluster."""

    delta: Variables
    cluster: jax.Array


def ladd(
    client: Client, clusters: int = 1, *, own: str = "cls", kd: float = 10.0,
    distilled: str = "printed", every: int = 1, start: int = 0, weighting: str = "examples",
    **training: Any,
) -> Algorithm:
    """LADD with so many clusters; `training` are the settings of self_training.py."""
    reply = replies(weighting)
    errors.at_least("clusters", clusters, 1)
    of_cluster = errors.lookup("own part of clusters", own, OWN)
    worker = ul.unlabelled(client)
    taught = bool(training["teacher"]) or training["labels"] == "teacher"

    def init(variables, num_clients):
        del num_clients
        copies = jax.tree.map(lambda x: jnp.repeat(x[None], clusters, axis=0), variables)
        return LaddState(copies, copies, variables), jnp.zeros((), jnp.int32) if kd else ()

    def broadcast(server, round):
        del round
        return Message(
            server.models, server.teachers if taught else (), server.begin if kd else ()
        )

    def local(message, state, data, round, key):
        s = jnp.minimum(jnp.asarray(data.cluster, jnp.int32), clusters - 1)
        pick = lambda tree: jax.tree.map(lambda x: x[s], tree)
        model, teacher = pick(message.models), pick(message.teachers)

        def context(batch):
            logits = lambda w: ul.logits_of(worker.task, w)(batch)
            return logits(teacher) if taught else (), logits(message.begin) if kd else ()

        def loss(outputs, batch, context):
            by_teacher, by_begin = context
            found = ul.loss(outputs.logits, by_teacher, batch.mask, training)
            if not kd:
                return found
            by_first = _distillation(outputs.logits, by_begin, batch.mask, distilled, training)
            return found + kd * by_first

        trained, info, _ = worker.train(
            model, data, key, round=round, terms=(Term(loss, context),)
        )
        again = (state > 0).astype(jnp.int32) if kd else 0
        seen = state + 1 if kd else ()  # how often it took part
        sent = Trained(difference(model, trained), s)
        return reply(data, seen, info, each=sent)._replace(kind=again)

    def update(server, uploads, round):
        models = _aggregated(server.models, uploads, clusters, of_cluster)
        t = round + 1
        averaged = (t >= start) if start else jnp.zeros((), bool)
        tau = jnp.where(averaged, (t - start).astype(jnp.float32) / every, 0.0)

        def learned(g, w):
            mean = (tau.astype(w.dtype) * g + w) / (tau.astype(w.dtype) + 1)
            return jnp.where(t % every == 0, mean, g)

        return server._replace(
            models=models, teachers=jax.tree.map(learned, server.teachers, models)
        ), {}

    def models(server):
        found = {"global": jax.tree.map(lambda x: jnp.mean(x, axis=0), server.models)}
        return found | ({"clusters": Clusters(server.models)} if clusters > 1 else {})

    return Algorithm(
        init=init,
        exchanges=(Exchange(broadcast, local, update, bits=(_weigh(True), _weigh(False))),),
        models=models,
    )


def _distillation(logits, begin, mask, distilled, training):
    """From the first model, as the documents print it or as the program has it."""
    if distilled == "printed":
        return ul.unit_mean(terms.divergence(logits, begin), mask)
    _, kept = ul.pseudo_labels(
        begin, mask, training["rule"], training["threshold"], training["share"]
    )
    log_p = jax.nn.log_softmax(logits, axis=-1)
    each = -jnp.mean(jax.nn.softmax(0.5 * begin, axis=-1) * log_p, axis=-1)
    return ul.unit_mean(jnp.where(kept, each, 0.0), mask)


def _aggregated(models, uploads, clusters, of_cluster):
    """The models of all clusters: their own part from their own clients, the rest from all."""
    delta, who = uploads.each
    weights = uploads.weights
    of_clusters = lambda x: jax.ops.segment_sum(x, who, clusters)

    def moved(path, w, d):
        weighted = weights.reshape(-1, *(1,) * (d.ndim - 1)).astype(d.dtype) * d
        if of_cluster(parts.name_of(path)):
            total = of_clusters(weights).reshape(-1, *(1,) * (d.ndim - 1))
            return w - aggregate.mean(of_clusters(weighted), total)
        return w - aggregate.mean(jnp.sum(weighted, axis=0), jnp.sum(weights))[None]

    return jax.tree_util.tree_map_with_path(moved, models, delta)


def _weigh(first):
    """Bits down and up, of a client that takes part for the first time or again."""

    def bits(message, upload, own):
        one = lambda tree: jax.tree.map(
            lambda x: jax.ShapeDtypeStruct(x.shape[1:], x.dtype), tree
        )
        sent = [one(message.models), one(message.teachers)] + [message.begin] * first
        down = sum(bits_of(models_in(x, own)) for x in sent)
        return down, bits_of(models_in(upload, own))

    return bits


CLUSTERING = {  # by experiment/by_style.py
    "window": Setting(3, "side of the window that is a client's style, odd", at_least=1),
    "clusters": Setting(0, "how many; 0: as many as have the best silhouette", at_least=0),
    "least": Setting(4, "of the numbers that are tried", at_least=2),
    "most": Setting(19, "of the numbers that are tried", at_least=2),
    "starts": Setting(10, "of k-means, for each", at_least=1),
    "kept": Setting("distance", "of these, that of the smallest sum of mean distances, or "
                    "of squares", choices=("distance", "inertia")),
    "restyle": Setting(True, "test images take on the style of their cluster"),
}
METHOD = Method(
    "ladd", "Shenaj 2023", "clients without labels, by style",
    lambda p: ladd(p.client, p.clusters, weighting=p.weighting, **{
        n: v for n, v in p.settings.items() if n not in CLUSTERING
    }),
    optimizer="own", styles=True,
    settings={
        **ul.SETTINGS,
        "own": Setting("cls", "what clusters have of their own", choices=tuple(OWN)),
        "kd": Setting(10.0, "weight of the distillation from the first model", at_least=0),
        "distilled": Setting("printed", "how it is meant", choices=("printed", "released")),
        "every": Setting(1, "omega: rounds between teachers", at_least=1),
        "start": Setting(0, "round from which teachers are means; 0 is never", at_least=0),
        **CLUSTERING,
    },
)
