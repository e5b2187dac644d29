"""Models averaged beside the trained one. Clients never see them and training never uses them.

SWA: Izmailov et al., "Averaging weights leads to wider optima and better generalization" (UAI
2018), on the server: Caldarola et al., "Improving generalization in federated learning by seeking
flat minima" (ECCV 2022). WIMA: Caldarola, PhD thesis (Politecnico di Torino, 2024), the mean of a
window of global models, from the first round on.

Rounds count from 1; w^{t+1} is the model after round t, c the cycle length, t_s the start.

    capture = "lowest"     SWA averages w^{t+1} at t >= t_s with t mod c = 0, where the rate of the
                           cycle is lowest (the papers' equations)
    capture = "released"   at t = t_s + 1 + c, t_s + 1 + 2c, ..., where it is highest (the released
                           code)

Both start with no model in the mean: the count n = t / c of the thesis's Algorithm 4, and the copy
of w^{t_s} that it mixes in, are not followed (they would hold the mean near that copy).
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from fedjax_flat import errors, memory
from fedjax_flat.client.optimizer import Schedule
from fedjax_flat.models import CLASSIFIER, Variables
from fedjax_flat.settings import COUNTABLE


class Average(NamedTuple):
    """`model(state, trained)` is the averaged model, once `first` rounds are done."""

    first: int
    init: Callable[[Any], Any]
    update: Callable[[Any, Any, jax.Array], Any]
    model: Callable[[Any, Any], Any]


class SWAState(NamedTuple):
    """The mean of `models` captured models."""

    mean: Any
    models: jax.Array


class WIMAState(NamedTuple):
    """The last W models, row t mod W for round t, and how many of the rows hold one."""

    window: Any
    filled: jax.Array


def swa(start: int, cycle: int, *, capture: str = "lowest") -> Average:
    """The mean of one model per cycle of `cycle` rounds, from round `start` on."""
    captures = errors.lookup("capture", capture, _CAPTURES)
    _check_cycle(start, cycle)

    def init(params):
        return SWAState(optax.tree.zeros_like(params), jnp.zeros((), jnp.float32))

    def update(state, params, round):
        n = state.models
        now = captures(round + 1, start, cycle)
        mean = jax.tree.map(
            lambda m, w: jnp.where(now, (n * m + w) / (n + 1), m), state.mean, params
        )
        return SWAState(mean, n + now.astype(jnp.float32))

    first = -(-start // cycle) * cycle if capture == "lowest" else start + 1 + cycle
    return Average(first, init, update, lambda state, params: state.mean)


_CAPTURES: dict[str, Callable[[Any, int, int], Any]] = {
    "lowest": lambda t, start, cycle: (t >= start) & (t % cycle == 0),
    "released": lambda t, start, cycle: (t - 1 > start) & ((t - 1 - start) % cycle == 0),
}
# The released code starts its cycle at round index t_s from 0, which is round t_s + 1.
_CYCLE_STARTS = {"lowest": 0, "released": 1}


def swa_cycle(start: int, cycle: int, ratio: float, *, capture: str = "lowest") -> Schedule:
    """The factor on the client rate: 1, then from round `start` on a cycle down to `ratio`.

    The rate is (1 - tau) gamma_1 + tau gamma_2, tau = (mod(t - 1, c) + 1) / c, with ratio =
    gamma_2 / gamma_1 (Caldarola, thesis 2024, equations 2.36 and 2.37). A cycle of one round leaves
    the rate constant.
    """
    shift = errors.lookup("capture", capture, _CYCLE_STARTS)
    _check_cycle(start, cycle)

    def factor(round):
        tau = (round % cycle + 1).astype(jnp.float32) / cycle
        active = (round + 1 >= start + shift) & (cycle > 1)
        return jnp.where(active, (1 - tau) + tau * ratio, 1.0)

    return factor


def _check_cycle(start: int, cycle: int) -> None:
    if start < 1 or cycle < 1 or start + cycle >= COUNTABLE:
        raise errors.UsageError(
            f"SWA with start = {start}, cycle = {cycle}: expected round 1 or later, a cycle of 1 "
            f"round or more, and both together below {COUNTABLE}."
        )


def wima(window: int, *, parameters: str = "all") -> Average:
    """The mean of the last `window` models (thesis, 4.12), or of as many as there are yet.

    `parameters`: all | classifier | features; the others are those of the trained model. The
    window is part of the state but lives in host memory: a round copies one model there, and the
    mean brings one model at a time back.
    """
    if window < 1:
        raise errors.UsageError(f"WIMA with window = {window}: expected 1 or more.")
    chosen = errors.lookup("parameters", parameters, _PARAMETERS)
    host, device = jax.memory.Space.Host, jax.memory.Space.Device

    def init(trained):
        memory.place(
            "window", "host", window * memory.size_of(chosen(trained)), memory.free(),
            what=f"WIMA's window of {window} models", advice="Lower server.wima.window."
        )
        # From NumPy: nothing of this size is ever on the device.
        rows = lambda w: jax.device_put(np.zeros((window, *w.shape), w.dtype), host)
        return WIMAState(jax.tree.map(rows, chosen(trained)), jnp.zeros((), jnp.int32))

    def update(state, trained, round):
        row = round % window
        write = lambda rows, w: jax.lax.dynamic_update_index_in_dim(
            rows, jax.device_put(w, host), row, 0
        )
        rows = jax.tree.map(write, state.window, chosen(trained))
        return WIMAState(rows, jnp.minimum(state.filled + 1, window))

    @jax.jit
    def model(state, trained):
        read = lambda rows, i: jax.device_put(
            jax.lax.dynamic_index_in_dim(rows, i, keepdims=False), device
        )
        add = lambda i, total: jax.tree.map(lambda s, rows: s + read(rows, i), total, state.window)
        zero = optax.tree.zeros_like(chosen(trained))
        total = jax.lax.fori_loop(0, state.filled, add, zero)
        n = state.filled.astype(jnp.float32)
        mean = jax.tree.map(lambda s: s / n.astype(s.dtype), total)
        return mean if parameters == "all" else Variables({**trained.params, **mean}, trained.stats)

    return Average(1, init, update, model)


def _split(model: Variables, wanted: bool) -> dict[str, Any]:
    params = model.params
    if CLASSIFIER not in params:
        raise errors.UsageError(
            f"the model has no module {CLASSIFIER!r}, only {', '.join(sorted(params))}: name its "
            f"last module {CLASSIFIER!r}, or average all parameters."
        )
    return {name: w for name, w in params.items() if (name == CLASSIFIER) == wanted}


_PARAMETERS: dict[str, Callable[[Any], Any]] = {
    "all": lambda model: model,
    "classifier": lambda model: _split(model, True),
    "features": lambda model: _split(model, False),
}
