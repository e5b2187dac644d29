"""Full personalisation: each client trains a copy of the model by itself, and nothing is sent.

Phase 4 of Fani's thesis (2025), section 4.2; with a pull to where it began, Li et al., "Ditto: fair
and robust federated learning through personalization" (ICML 2021).

    theta_k <- E epochs of the client optimiser from theta_k on f_k + lambda ||theta_k - theta_0||^2

lambda is `ditto`, 0 for plain SGD; Ditto's paper has lambda / 2, `half`. `part` is what is trained:
FP(f) of the thesis is `all`, FP(psi) `head`, FP(phi) `features`; the rest stays as it was, and so
does the global model. theta_0 is the model with which the client began; the released program takes
the server's even where the client began with a part of its own, `anchor = "server"`.

Whoever begins with own parts of a phase before (personal heads, say) names them in `keep`. A
client's turn may come several times: it goes on from where it was. With cohort.sampling=once all
clients have had E epochs after ceil(K / cohort) rounds. Ditto as in its paper trains the global
model beside; here it was trained before.
"""

from fedjax_flat import errors, parts
from fedjax_flat.algorithms.base import Algorithm, Exchange, replies, without_traffic
from fedjax_flat.algorithms.method import Method, Parts
from fedjax_flat.algorithms.personal import personal
from fedjax_flat.client import Client, drift
from fedjax_flat.settings import Setting


def fp(
    client: Client,
    *,
    part: parts.Part | None = None,
    keep: parts.Part | None = None,
    ditto: float = 0.0,
    half: bool = False,
    anchor: str = "start",
) -> Algorithm:
    """Each client trains `part` of its model, None for all; beside it, `keep` is its own."""
    errors.at_least("ditto", ditto, 0)
    from_start = errors.lookup("anchor", anchor, {"start": True, "server": False})
    trained = part or everything
    rest = lambda name: not trained(name)
    own = parts.either(trained, keep)
    assert own
    reply = replies("uniform")

    def init(variables, num_clients):
        del num_clients
        if keep and not parts.take(variables, keep):
            raise errors.UsageError(
                "a part to keep that is empty: the predicate holds for none of "
                f"{', '.join(parts.take(variables, everything))}."
            )
        # What is not kept, all clients began with alike: the server has it.
        began = parts.take(variables, keep) if keep and ditto and from_start else {}
        return variables, began

    def local(message, began, data, round, key):
        near = None
        if ditto:
            theta_0 = parts.put(message, began).params
            near = drift.toward(theta_0, ditto if half else 2 * ditto)
        still = rest if parts.take(message, rest) else None
        _, info, _ = client.train(message, data, key, round=round, drift=near, frozen=still)
        return reply(data, began, info)

    exchange = Exchange(
        lambda model, round: model, local, lambda model, uploads, round: (model, {})
    )
    algorithm = Algorithm(init, (exchange,), lambda model: {"global": model})
    return without_traffic(personal(algorithm, own), everything)


def everything(name: str) -> bool:
    """All of a model."""
    del name
    return True


def _make(p: Parts) -> Algorithm:
    given = dict(p.settings)
    part, keep = (parts.named(given.pop(name)) for name in ("part", "keep"))
    pull = given["ditto"] * (1 if given["half"] else 2)
    if not callable(p.learning_rate) and p.learning_rate * pull >= 2:
        raise errors.UsageError(
            f"algorithm.fp.ditto = {given['ditto']:g} with client.learning_rate = "
            f"{p.learning_rate:g}: steps towards the anchor overshoot it by ever more. Expected a "
            f"rate below {2 / pull:g}."
        )
    return fp(p.client, part=part, keep=keep, **given)


METHOD = Method(
    "fp", "Fani 2025", "each client trains on by itself", _make,
    settings={
        "part": Setting("all", "what is trained: all, head, features, or patterns of names"),
        "keep": Setting("none", "what else is clients' own from a phase before: head, features"),
        "ditto": Setting(0.0, "lambda, the pull to where it began; 0 is none", at_least=0),
        "half": Setting(False, "lambda / 2, as in Ditto's paper"),
        "anchor": Setting("start", "where that is", choices=("start", "server")),
    },
    optimizer="own", weighs=False,
)
