"""What the authors' released programs do where their papers say otherwise, in plain NumPy."""

import numpy as np
from reference_methods import unit


def fedgloss_radii(rounds, rho_0, rho_clients, rho_server, warmup):
    """One radius per round, of clients and of the server, as tables that are filled one by one."""
    if warmup <= 1:
        return [rho_clients] * rounds, [rho_server] * rounds
    of_clients = [rho_0]
    while len(of_clients) <= warmup:
        of_clients.append(of_clients[-1] + (rho_clients - rho_0) / warmup)
    of_clients += [rho_clients] * (rounds - len(of_clients))
    of_server = [rho_0]  # each next one is the last of the clients' plus a step of the server's
    while len(of_server) <= warmup:
        of_server.append(of_clients[-1] + (rho_server - rho_0) / warmup)
    of_server += [rho_server] * (rounds - len(of_server))
    return of_clients[:rounds], of_server[:rounds]


def fedgloss(c, beta, radii):
    """With SAM on clients, radii that change from round to round, and the weaker server dual."""
    w = c.w0
    direction, sigma = np.zeros_like(w), np.zeros_like(w)
    sigmas = np.zeros((c.num_clients, len(w)))
    for t, (rho, rho_server) in enumerate(zip(*radii, strict=True)):
        start, trained = w + rho_server * unit(direction), {}
        for k, batches in c.cohort(t).items():

            def gradient(v, b, k=k, start=start, rho=rho):
                there = c.grad(v + rho * unit(c.grad(v, b)), b)
                return there - sigmas[k] + (v - start) / beta

            trained[k] = c.train(start, batches, gradient)
        for k, v in trained.items():
            sigmas[k] -= (v - start) / beta
            sigma = sigma - (v - start) / (beta * c.num_clients * len(trained))
        direction = c.mean({k: start - v for k, v in trained.items()})
        w = w - direction - beta * sigma
    return w


def adam(rate, b1, b2, epsilon):
    """Of PyTorch, as a server step."""

    def step(w, delta, memory):
        t = memory["t"] = memory.get("t", 0) + 1
        memory["m"] = b1 * memory.get("m", 0) + (1 - b1) * delta
        memory["v"] = b2 * memory.get("v", 0) + (1 - b2) * delta**2
        m, v = memory["m"] / (1 - b1**t), memory["v"] / (1 - b2**t)
        return w - rate * m / (np.sqrt(v) + epsilon)

    return step


def adagrad(rate, epsilon):
    """Of PyTorch: squares are summed from 0 on."""

    def step(w, delta, memory):
        memory["v"] = memory.get("v", 0) + delta**2
        return w - rate * delta / (np.sqrt(memory["v"]) + epsilon)

    return step


def adabest(c, mu, beta):
    """Every client counts once; mu by the mean size of those seen before, over the client's own."""
    w, mean = c.w0, c.w0
    bias, last, seen = np.zeros((c.num_clients, len(w))), {}, []
    for t in range(len(c.rounds)):
        trained = {}
        for k, batches in c.cohort(t).items():
            strength = mu * (np.mean(seen) if seen else 0) / len(c.members[k])
            pull = strength * bias[k]
            trained[k] = c.train(w, batches, lambda v, b, pull=pull: c.grad(v, b) - pull)
        for k, v in trained.items():
            bias[k] = bias[k] / (t - last.get(k, -1)) + w - v
            last[k] = t
            seen.append(len(c.members[k]))
        new = sum(trained.values()) / len(trained)
        w, mean = new - beta * (mean - new), new
    return w
