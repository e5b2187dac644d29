"""FedCG: examples find their domains by themselves, and the classifier has a part for each.

Caldarola, Mancini, Galasso, Ciccone, Rodola, Caputo, "Cluster-driven graph federated learning over
multiple domains" (CVPR workshops 2021); Caldarola's thesis, section 5.4. A teacher and a student
sort images x into D domains, both drawn at random. f_a is the network's last layer, f_{s,d} that of
domain d, row d of V its parameters, A a graph of domains, lambda and W learned (models/domains.py):

    d^     =  argmax teacher(x)
    client    CE(z, y) + CE(student(x), d^)                                       (5.11)
    z      =  f_a(h) + lambda sum_d w_d f_{s,d}(h),   w_d = 1 for d = d^, else 0  (5.12)
              (in tests, w = softmax of student(x))
    f_s    =  rows of V^ = ReLU(A V W)                                            (5.13)
    server    all that is learned <- SERVEROPT, FedAvg's mean, V, W, lambda and student included
              A_ii = beta,  A_ij = (1 - beta) h_ij / sum_{d != i} h_id            (5.14)
              h_ij = 1 / ||v_i - v_j||
              teacher <- student, after every `every`-th round

Both losses are of the same step; they share no parameter, but SAM's radius and clipping by norm are
of all. Clients receive A and the teacher beside the model, and send neither back. A is the identity
before the first average, or `uniform`, 1 / D, and stays so where the graph is `fixed`. Of domains
with equal parameters, see models/domains.py. A domain without examples moves through A.

The papers give no network for the classifiers of domains, no `every`, no initial lambda and no law
of V and W. Ours: one layer, 10 rounds, 1, and those of the classifier's layer and of LeCun. Deeper
networks, as they are drawn, say nearly the same of all images, and all then are of one domain. The
papers have q x q numbers in W, or a bottleneck where q is large; `mixing` = bottleneck has 2 q
`rank`. Teacher and student read what the network reads, so after augmentation.

Left out: branches at all layers (rows "All" of Table 5.10; the final configuration is the last
layer), k-means in place of the classifiers, networks of f_{s,d} alone (rows "GCN" of Table 5.9),
domains that are given by attributes and their Hamming graph, and averages of V by domain.

V^ is made anew in every step, also of tests, which is cheap beside a network. An averaged model
(SWA, WIMA) has the mean of the graphs and teachers.
"""

from collections.abc import Mapping
from typing import Any

import optax

from fedjax_flat import errors, models
from fedjax_flat.algorithms.addition import with_term
from fedjax_flat.algorithms.base import Algorithm
from fedjax_flat.algorithms.fedavg import fedavg
from fedjax_flat.algorithms.method import Method, Parts
from fedjax_flat.client import Client, Term, terms
from fedjax_flat.models import Model, domains
from fedjax_flat.settings import Setting

GRAPHS = ("learned", "fixed")
CLASSIFIERS = ("linear", "mlp", "lenet", "cnn")


def fedcg(
    client: Client, server_optimizer: optax.GradientTransformation, *, every: int = 10,
    beta: float = 0.5, graph: str = "learned", weighting: str = "examples",
) -> Algorithm:
    """FedCG of clients whose network has domains (`network`)."""
    errors.at_least("every", every, 0)
    if not 0 <= beta <= 1:
        raise errors.UsageError(f"beta = {beta}: expected 0 to 1.")
    learned = errors.lookup("graph", graph, {"learned": True, "fixed": False})
    base = fedavg(with_term(_taught)(client), server_optimizer, weighting=weighting)
    (exchange,) = base.exchanges

    def init(variables, num_clients):
        if domains.COLLECTION not in variables.params:
            raise errors.UsageError(
                "fedcg of a network without domains: expected one of algorithms.fedcg.network."
            )
        return base.init(variables, num_clients)

    def local(message, state, data, round, key):
        reply = exchange.local(message, state, data, round, key)
        return reply._replace(mean=_without(reply.mean))

    def update(server, uploads, round):
        stats = server.model.stats[domains.COLLECTION]
        own = server._replace(model=_without(server.model))
        server, metrics = exchange.update(own, uploads, round)
        params = server.model.params[domains.COLLECTION]
        if learned:
            parts = params[models.CLASSIFIER]["domains"]
            stats = stats | {"graph": domains.similarity(parts, beta)}
        if every:
            now = (round + 1) % every == 0
            teacher = optax.tree.where(now, params["student"], stats["teacher"])
            stats = stats | {"teacher": teacher}
        whole = {**dict(server.model.stats or {}), domains.COLLECTION: stats}
        return server._replace(model=server.model._replace(stats=whole)), metrics

    made = exchange._replace(local=local, update=update)
    return base._replace(init=init, exchanges=(made,))


def _taught(client, anchor, data) -> Term:
    """The student's loss (5.11)."""
    del client, anchor, data

    def loss(outputs, batch, context):
        del context
        experts = outputs.auxiliary[-1]
        labels = experts.teacher.argmax(-1)
        each = optax.softmax_cross_entropy_with_integer_labels(experts.student, labels)
        return terms.batch_mean(each, batch)

    return Term(loss)


def _without(model: models.Variables) -> models.Variables:
    """What the server's optimiser and uploads know of: no graph, no teacher."""
    return model._replace(stats=domains.plain(model).stats)


def network(model: Model, settings: Mapping[str, Any]) -> Model:
    """The network with a part of its classifier for every domain."""
    count, name = settings["domains"], settings["classifier"]
    errors.at_least("domains", count, 1)
    expert = models.build(name, num_classes=count, inputs=model.inputs)
    return domains.with_domains(
        model, expert, domains.Form(**{n: settings[n] for n in domains.Form._fields})
    )


def _make(p: Parts) -> Algorithm:
    given: dict[str, Any] = {n: p.settings[n] for n in ("every", "beta", "graph")}
    return fedcg(p.client, p.server_optimizer, weighting=p.weighting, **given)


METHOD = Method(
    "fedcg", "Caldarola 2021", "a head with parts for found domains", _make,
    settings={
        "domains": Setting(4, "D, how many", at_least=1),
        "classifier": Setting("linear", "the network of teacher and student", choices=CLASSIFIERS),
        "every": Setting(10, "rounds after which the student becomes the teacher; 0 is never",
                         at_least=0),
        "soft": Setting(True, "probabilities of domains in tests, or the most probable one"),
        "by": Setting("student", "who says the domains in tests", choices=domains.EXPERTS),
        "graph": Setting("learned", "by the server, after every average, or as it starts",
                         choices=GRAPHS),
        "start": Setting("identity", "the graph before the first average",
                         choices=domains.STARTS),
        "beta": Setting(0.5, "A_ii of a learned graph", at_least=0, at_most=1),
        "mixing": Setting("bottleneck", "W, two matrices of `rank`; full: q x q",
                          choices=domains.MIXINGS),
        "rank": Setting(64, "of the bottleneck", at_least=1),
        "relu": Setting(True, "of V^"),
        "scale": Setting(1.0, "lambda at the start"),
    },
    network=network,
)
