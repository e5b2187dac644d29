"""Simulated time: how long clients take, and who is heard of when.

    seconds of a dispatch = examples that the client visits x its seconds per example + a delay

Every client has a speed of its own, drawn once; every dispatch has a delay of its own (the way down
and up, and waiting). Both follow a law, written as text:

    constant(2)   uniform(1, 3)   exponential(2), its mean   lognormal(2, 0.5), median and sigma

In synchronous rounds a round lasts as long as its slowest client (`duration`). Without them
(`flights`) `slots` clients train at any time, one more is sent out whenever one comes back, and the
server steps at every so many arrivals. Who comes when does not depend on what is learned, so the
whole order of events is known before training: arrays, of the seed alone. Times are whole
microseconds and equal ones go by the order of dispatch, so the order is the same everywhere, and a
run with more rounds begins like one with fewer.
"""

import heapq
import itertools
import re
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import scipy.special

from fedjax_flat import errors, rng
from fedjax_flat.algorithms.asynchronous import Flights
from fedjax_flat.engine.sampling import Cohort, Schedule

MICRO = 1_000_000
_BLOCK = 4096  # random numbers drawn at once

# name: (what its numbers are, quantile(numbers, u, a module of functions))
_LAWS: dict[str, tuple[tuple[str, ...], Callable[..., Any]]] = {
    "constant": (("seconds",), lambda p, u, f: p[0] + 0 * u),
    "uniform": (("least", "most"), lambda p, u, f: p[0] + (p[1] - p[0]) * u),
    "exponential": (("mean",), lambda p, u, f: -p[0] * f.log1p(-u)),
    "lognormal": (("median", "sigma"), lambda p, u, f: p[0] * f.exp(p[1] * f.ndtri(u))),
}


class Law(NamedTuple):
    """A distribution of seconds; `at` is its quantile function, of arrays in [0, 1)."""

    text: str
    name: str
    numbers: tuple[float, ...]

    def at(self, u: Any) -> Any:
        """Seconds, of NumPy arrays in float64, of traced ones in float32."""
        here = _Traced if isinstance(u, jax.Array) else _Host
        return _LAWS[self.name][1](self.numbers, u, here)


class _Host:
    log1p, exp, ndtri = np.log1p, np.exp, scipy.special.ndtri


class _Traced:
    log1p, exp, ndtri = jnp.log1p, jnp.exp, jax.scipy.special.ndtri


def law(setting: str, text: str) -> Law:
    """`lognormal(2, 0.5)` as a law; `setting` is whose it is, for messages."""
    found = re.fullmatch(r"\s*(\w+)\s*\(([^()]*)\)\s*", text)
    forms = ", ".join(f"{name}({', '.join(numbers)})" for name, (numbers, _) in _LAWS.items())
    wrong = errors.UsageError(f"{setting} = {text!r}: expected one of {forms}, in seconds.")
    if not found:
        raise wrong
    name = found[1]
    errors.lookup(setting, name, _LAWS)
    try:
        numbers = tuple(float(x) for x in found[2].split(","))
    except ValueError:
        raise wrong from None
    if len(numbers) != len(_LAWS[name][0]):
        raise wrong
    if not all(0 <= x < float("inf") for x in numbers):
        raise errors.UsageError(
            f"{setting} = {text!r}: expected numbers of seconds, 0 or more; time does not run back."
        )
    if name == "uniform" and numbers[0] > numbers[1]:
        raise errors.UsageError(f"{setting} = {text!r}: expected the least seconds first.")
    return Law(text, name, numbers)


class Clock(NamedTuple):
    """How long clients take."""

    examples: np.ndarray  # that each client visits when it takes part
    work: np.ndarray  # the seconds that it computes
    delay: Law
    seed: int

    def duration(self, round: jax.Array, clients: jax.Array) -> jax.Array:
        """Seconds that these clients take if they are sent out in a round; traced."""
        key = rng.fold(jax.random.key(self.seed), "clock", "round", round)
        # With a key of its own, a client takes the same time in whatever cohort.
        draw = lambda k: jax.random.uniform(rng.fold(key, k), (), jnp.float32)
        delay = self.delay.at(jax.vmap(draw)(clients))
        return jnp.asarray(self.work, jnp.float32)[clients] + delay


def clock(speed: Law, delay: Law, examples: np.ndarray, seed: int) -> Clock:
    """Of clients that visit so many `examples` when they take part."""
    draws = _uniform(seed, "speed")
    u = np.array([next(draws) for _ in range(len(examples))])
    return Clock(examples, np.asarray(examples, np.float64) * speed.at(u), delay, seed)


def arrivals(flights: Flights) -> Schedule:
    """The clients that come back, as the cohorts of rounds."""
    clients = jnp.asarray(flights.clients)
    return Schedule(lambda key, round: Cohort(clients[round], None))


def flights(clock: Clock, *, slots: int, arrivals: int, rounds: int) -> Flights:
    """Who comes back when, if `slots` clients are out at any time.

    Whoever goes out is drawn from the clients that have examples, are not out, and have not been
    heard of since the last step, so that nobody counts twice in one.
    """
    able = np.flatnonzero(clock.examples)
    for name, value in (("in_flight", slots), ("cohort.size", arrivals)):
        errors.at_least(name, value, 1)
    if len(able) < slots + arrivals:
        raise errors.UsageError(
            f"{slots} clients in flight and {arrivals} heard of in a step, of {len(able)} with "
            f"examples: expected at least {slots + arrivals} clients, since nobody is out twice. "
            "Lower in_flight or cohort.size, or raise partition.clients."
        )
    delays, choices = _uniform(clock.seed, "delay"), _uniform(clock.seed, "choice")
    out: set[int] = set()
    heard: set[int] = set()
    numbers = itertools.count()
    queue: list[tuple[int, int, int, int, int]] = []  # arrival, number, slot, client, version

    def send(now: int, slot: int, version: int) -> None:
        while True:
            client = int(able[int(next(choices) * len(able))])
            if client not in out and client not in heard:
                break
        seconds = clock.work[client] + clock.delay.at(np.float64(next(delays)))
        out.add(client)
        arrival = now + round(float(seconds) * MICRO)
        heapq.heappush(queue, (arrival, next(numbers), slot, client, version))

    for slot in range(slots):
        send(0, slot, 0)
    clients = np.zeros((rounds, arrivals), np.int32)
    slot_of, staleness = np.zeros_like(clients), np.zeros_like(clients)
    at = np.zeros(rounds + 1, np.int64)
    for version in range(rounds):
        for i in range(arrivals):
            now, _, slot, client, sent = heapq.heappop(queue)
            clients[version, i], slot_of[version, i] = client, slot
            staleness[version, i] = version - sent
            out.remove(client)
            heard.add(client)
            last = i == arrivals - 1
            if last:
                heard.clear()
            send(now, slot, version + last)
        at[version + 1] = now
    return Flights(clients, slot_of, staleness, np.diff(at) / MICRO, slots)


def _uniform(seed: int, what: str) -> Iterator[float]:
    """Numbers in (0, 1), the same on every machine."""
    key, block = rng.fold(jax.random.key(seed), "clock", what), 0
    while True:
        bits = np.asarray(jax.random.bits(rng.fold(key, "block", block), (_BLOCK,), jnp.uint32))
        yield from (bits.astype(np.float64) + 0.5) / 2.0**32
        block += 1
