"""pFedMe: clients' models near the shared one, which descends on Moreau envelopes.

T. Dinh, Tran and Nguyen, "Personalized federated learning with Moreau envelopes" (NeurIPS 2020);
in parts, phase 3 of Fani's thesis (2025), section 4.2. lambda is `prox`, S `steps`.

    for each batch  theta <- w;  S times: theta <- theta - eta_p (g(theta) + lambda (theta - w))
                    w     <- w - eta lambda (w - theta)
    server          w     <- (1 - beta) w + beta sum_k (n_k / n) w_k,   beta = server.learning_rate

theta is about argmin f + lambda / 2 ||theta - w||^2, so that w takes a step on the envelope of f.
eta is the client's rate, eta_p = `rate`, or eta where that is 0. A client's model is the theta it
ended its last turn with, kept whole. Of w, the `own` part stays with the client and only the rest
travels: pFedMe(psi) of the thesis is `head`, the paper's method is `none`. With `start = "theta"`
theta goes on from batch to batch, as in the program of pFedMe's authors (the paper asks for an
approximate minimum, from wherever). `variant = "released"` is the thesis's program: its inner steps
lack the pull to w, and clients are tested with w (own part and newest shared part): no theta
is kept.
"""

from typing import Any

import jax
import jax.numpy as jnp
import optax

from fedjax_flat import errors, parts
from fedjax_flat.algorithms.base import Algorithm, Exchange, difference, replies
from fedjax_flat.algorithms.fedavg import fedavg
from fedjax_flat.algorithms.fedsim import OWN
from fedjax_flat.algorithms.method import Method, Parts
from fedjax_flat.algorithms.personal import personal
from fedjax_flat.client import Client
from fedjax_flat.client.optimizer import Schedule, rate_of
from fedjax_flat.models import Variables
from fedjax_flat.settings import Setting


def pfedme(
    client: Client,
    server_optimizer: optax.GradientTransformation,
    *,
    rate: float | Schedule,
    prox: float = 1.0,
    steps: int = 3,
    start: str = "w",
    own: parts.Part | None = None,
    variant: str = "paper",
    weighting: str = "examples",
) -> Algorithm:
    """pFedMe of clients that step with SGD; `rate` is that of the inner steps."""
    errors.positive("prox", prox)
    errors.at_least("steps", steps, 1)
    paper = errors.lookup("variant", variant, {"paper": True, "released": False})
    warm = errors.lookup("start", start, {"w": False, "theta": True})
    envelope = moreau(prox, rate, steps, warm=warm, pull=paper)
    reply = replies(weighting)
    base = fedavg(client, server_optimizer, weighting=weighting)
    (averaged,) = base.exchanges

    def init(variables, num_clients):
        return base.init(variables, num_clients)[0], variables if paper else ()

    def local(message, state, data, round, key):
        trained, info, theta = client.train(message, data, key, round=round, sharpness=envelope)
        state = Variables(theta, info.model.stats) if paper else state
        return reply(data, state, info, mean=difference(message, trained))

    exchange = Exchange(averaged.broadcast, local, averaged.update)
    algorithm = base._replace(init=init, exchanges=(exchange,))
    if own:
        algorithm = personal(algorithm, own)
    if paper:
        theta_of = lambda server, state: state.inner if own else state
        algorithm = algorithm._replace(personal=theta_of)
    return algorithm


def moreau(
    prox: float, rate: float | Schedule, steps: int, *, warm: bool = False, pull: bool = True
) -> optax.GradientTransformationExtraArgs:
    """Replaces the gradient by that of the Moreau envelope at w: prox (w - theta).

    Its state is theta; `warm`, theta goes on from there. Without `pull`, inner steps are SGD's.
    """

    def update(grads, theta, params, *, grad_fn, round=0, **extra: Any):
        del extra
        inner = jnp.asarray(rate_of(rate, round), jnp.float32)

        def step(theta, grads):
            def leaf(t, g, w):
                return t - inner.astype(t.dtype) * (g + prox * (t - w) if pull else g)

            return jax.tree.map(leaf, theta, grads, params)

        theta = step(theta, grad_fn(theta)) if warm else step(params, grads)
        theta = jax.lax.fori_loop(1, steps, lambda i, t: step(t, grad_fn(t)), theta)
        return jax.tree.map(lambda w, t: prox * (w - t), params, theta), theta

    return optax.GradientTransformationExtraArgs(lambda params: params, update)


def _make(p: Parts) -> Algorithm:
    given = dict(p.settings)
    own, rate = parts.named(given.pop("own")), given.pop("rate") or p.learning_rate
    for name, value in (("client.learning_rate", p.learning_rate), ("its inner rate", rate)):
        if not callable(value) and value * given["prox"] >= 2:
            raise errors.UsageError(
                f"algorithm.pfedme.prox = {given['prox']:g} with {name} = {value:g}: steps towards "
                f"the minimum overshoot it by ever more. Expected a rate below "
                f"{2 / given['prox']:g}."
            )
    return pfedme(
        p.client, p.server_optimizer, rate=rate, own=own, weighting=p.weighting, **given
    )


METHOD = Method(
    "pfedme", "T. Dinh 2020", "own models near a shared one", _make,
    settings={
        "own": OWN,
        "prox": Setting(1.0, "lambda; 15 in the paper, with rates of 0.005", above=0),
        "steps": Setting(3, "inner steps on a batch", at_least=1),
        "rate": Setting(0.0, "of the inner steps; 0 is the client's", at_least=0),
        "start": Setting("w", "of the inner steps", choices=("w", "theta")),
        "variant": Setting(
            "paper", "released: inner steps are not pulled to w, which is what is tested",
            choices=("paper", "released"),
        ),
    },
    gradients=3, client_optimizer="sgd", sharpness="none",
)
