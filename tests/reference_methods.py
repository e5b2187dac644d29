"""Every federated method in plain NumPy, float64: a model is one vector, a client is a loop.

Written from the papers' equations, apart from the package. `Clients` holds the data and the drawn
randomness: `rounds` is a list of {client: batches}, a batch an array of example indices.
"""

import numpy as np
import reference


class Clients:
    """Six-line access to losses: gradients of batches and of whole clients."""

    def __init__(self, layers, x, y, members, rounds, lr):
        self.shapes = [w.shape for pair in layers for w in pair]
        self.w0 = self.flat(layers)
        self.x, self.y, self.members, self.rounds, self.lr = x, y, members, rounds, lr
        self.num_clients = len(members)

    @staticmethod
    def flat(layers):
        return np.concatenate([w.ravel() for pair in layers for w in pair])

    def layers(self, w):
        ends = np.cumsum([int(np.prod(s)) for s in self.shapes])
        parts = [p.reshape(s) for p, s in zip(np.split(w, ends[:-1]), self.shapes, strict=True)]
        return list(zip(parts[::2], parts[1::2], strict=True))

    def grad(self, w, batch):
        return self.flat(reference.mean_gradient(self.layers(w), self.x[batch], self.y[batch]))

    def full_grad(self, w, k):
        return self.grad(w, self.members[k])

    def cohort(self, t):
        """Clients of round t that have examples."""
        return {k: b for k, b in self.rounds[t].items() if len(self.members[k])}

    def train(self, w, batches, direction):
        for batch in batches:
            w = w - self.lr * direction(w, batch)
        return w

    def mean(self, values):
        """Weighted by the number of examples; values: {client: vector}."""
        total = sum(len(self.members[k]) for k in values)
        return sum(len(self.members[k]) / total * v for k, v in values.items())


def unit(v):
    n = np.linalg.norm(v)
    return v / n if n > 0 else v


def sam(c, rho):
    return lambda w, b: c.grad(w + rho * unit(c.grad(w, b)), b)


def asam(c, rho, eta):
    """T = |w| + eta for kernels, 1 for biases."""

    def direction(w, batch):
        x, y = c.x[batch], c.y[batch]
        return c.flat(reference.asam_gradient(c.layers(w), x, y, rho=rho, eta=eta))

    return direction


def fedopt(c, step, mu=0.0, gradient=None):
    """`step(w, delta, memory) -> w`; FedProx with mu."""
    gradient = gradient or c.grad
    w, memory = c.w0, {}
    for t in range(len(c.rounds)):
        trained = {
            k: c.train(w, b, lambda v, batch, x=w: gradient(v, batch) + mu * (v - x))
            for k, b in c.cohort(t).items()
        }
        w = step(w, c.mean({k: w - v for k, v in trained.items()}), memory)
    return w


def plain(w, delta, memory):
    return w - delta


def with_momentum(beta):
    def step(w, delta, memory):
        memory["v"] = beta * memory.get("v", 0) + delta
        return w - memory["v"]

    return step


def adaptive(kind, rate, b1=0.9, b2=0.99, tau=1e-3, inside=False, correct=False):
    def step(w, delta, memory):
        memory["t"] = memory.get("t", 0) + 1
        start = 0.0 if correct and kind != "adagrad" else tau**2
        m = b1 * memory.get("m", 0) + (1 - b1) * delta
        v = memory.get("v", np.full_like(delta, start))
        square = delta**2
        if kind == "adagrad":
            v = v + square
        elif kind == "adam":
            v = b2 * v + (1 - b2) * square
        else:
            v = v - (1 - b2) * square * np.sign(v - square)
        memory["m"], memory["v"] = m, v
        if correct:
            m = m / (1 - b1 ** memory["t"])
            v = v / (1 - b2 ** memory["t"]) if kind != "adagrad" else v
        return w - rate * m / (np.sqrt(v + tau) if inside else np.sqrt(v) + tau)

    return step


def fedsgd(c, rate):
    w = c.w0
    for t in range(len(c.rounds)):
        w = w - rate * c.mean({k: c.full_grad(w, k) for k in c.cohort(t)})
    return w


def scaffold(c, option=2, rho=0.0):
    x, control = c.w0, np.zeros_like(c.w0)
    own = np.zeros((c.num_clients, len(x)))
    gradient = sam(c, rho) if rho else c.grad
    for t in range(len(c.rounds)):
        trained, change = {}, 0
        for k, batches in c.cohort(t).items():
            w = c.train(x, batches, lambda v, b, k=k, c=control: gradient(v, b) - own[k] + c)
            if option == 1:
                new = c.full_grad(x, k)
            else:
                new = own[k] - control + (x - w) / (len(batches) * c.lr)
            trained[k], change, own[k] = w, change + new - own[k], new
        x = x - c.mean({k: x - w for k, w in trained.items()})
        control = control + change / c.num_clients
    return x


def fedgloss(c, rho_server, beta, rho=0.0, duals=True, naive=False, released=False):
    """FedDyn is rho_server = 0 with beta = 1 / alpha."""
    w = c.w0
    direction, sigma = np.zeros_like(w), np.zeros_like(w)
    sigmas = np.zeros((c.num_clients, len(w)))
    gradient = sam(c, rho) if rho else c.grad

    def visit(t, start):
        def toward(k):
            if not duals:
                return gradient
            return lambda v, b: gradient(v, b) - sigmas[k] + (v - start) / beta

        return {k: c.train(start, b, toward(k)) for k, b in c.cohort(t).items()}

    for t in range(len(c.rounds)):
        if naive:
            direction = c.mean({k: w - v for k, v in visit(t, w).items()})
        start = w + rho_server * unit(direction)
        trained = visit(t, start)
        direction = c.mean({k: start - v for k, v in trained.items()})
        w = w - direction
        if duals:
            for k, v in trained.items():
                sigmas[k] -= (v - start) / beta
            change = sum(v - start for v in trained.values()) / (beta * c.num_clients)
            sigma = sigma - (change / len(trained) if released else change)
            w = w - beta * sigma
    return w


def adabest(c, mu, beta):
    w, mean = c.w0, c.w0
    bias, last = np.zeros((c.num_clients, len(w))), {}
    for t in range(len(c.rounds)):
        trained = {}
        for k, batches in c.cohort(t).items():
            trained[k] = c.train(w, batches, lambda v, b, k=k: c.grad(v, b) - bias[k])
            bias[k] = bias[k] / (t - last.get(k, t - 1)) + mu * (w - trained[k])
            last[k] = t
        new = w - c.mean({k: w - v for k, v in trained.items()})
        w, mean = new - beta * (mean - new), new
    return w


def mime(c, beta, lite):
    w, m = c.w0, np.zeros_like(c.w0)
    for t in range(len(c.rounds)):
        g0 = c.mean({k: c.full_grad(w, k) for k in c.cohort(t)})

        def direction(v, b, x=w, g0=g0, m=m):
            d = c.grad(v, b) if lite else c.grad(v, b) - c.grad(x, b) + g0
            return (1 - beta) * d + beta * m

        trained = {k: c.train(w, b, direction) for k, b in c.cohort(t).items()}
        w = w - c.mean({k: w - v for k, v in trained.items()})
        m = (1 - beta) * g0 + beta * m
    return w


def fedcm(c, alpha, rho=0.0):
    w, d = c.w0, np.zeros_like(c.w0)
    gradient = sam(c, rho) if rho else c.grad
    for t in range(len(c.rounds)):
        cohort = c.cohort(t)
        trained = {
            k: c.train(w, b, lambda v, batch, d=d: alpha * gradient(v, batch) + (1 - alpha) * d)
            for k, b in cohort.items()
        }
        delta = c.mean({k: w - v for k, v in trained.items()})
        d = delta / (c.lr * np.mean([len(b) for b in cohort.values()]))
        w = w - delta
    return w


def fedacg(c, momentum, beta):
    w, m = c.w0, np.zeros_like(c.w0)
    for t in range(len(c.rounds)):
        ahead = w + momentum * m
        trained = {
            k: c.train(ahead, b, lambda v, batch, a=ahead: c.grad(v, batch) + beta * (v - a))
            for k, b in c.cohort(t).items()
        }
        m = momentum * m + c.mean({k: v - ahead for k, v in trained.items()})
        w = w + m
    return w


def fedspeed(c, rho, alpha, prox, normalised=False):
    w = c.w0
    duals = np.zeros((c.num_clients, len(w)))
    for t in range(len(c.rounds)):
        uploads = {}
        for k, batches in c.cohort(t).items():

            def direction(v, b, k=k, x=w):
                g = c.grad(v, b)
                e = rho * (unit(g) if normalised else g)
                quasi = (1 - alpha) * g + alpha * c.grad(v + e, b)
                return quasi - duals[k] + (v - x) / prox

            v = c.train(w, batches, direction)
            duals[k] -= (v - w) / prox
            uploads[k] = v - prox * duals[k]
        w = c.mean(uploads)
    return w


def fedsmoo(c, rho, beta):
    x, s, h = c.w0, np.zeros_like(c.w0), np.zeros_like(c.w0)
    duals, mus = np.zeros((2, c.num_clients, len(x)))
    for t in range(len(c.rounds)):
        trained = {}
        for k, batches in c.cohort(t).items():
            w = x
            for b in batches:
                e = rho * unit(c.grad(w, b) - mus[k] - s)
                mus[k] += e - s
                w = w - c.lr * (c.grad(w + e, b) - duals[k] + (w - x) / beta)
            duals[k] -= (w - x) / beta
            trained[k] = w
        h = h - sum(w - x for w in trained.values()) / (beta * c.num_clients)
        x = c.mean(trained) - beta * h
        s = rho * unit(sum(mus[k] for k in trained))
    return x


def fedgh(c, blocks=None):
    """`blocks`: slices harmonised by themselves; None for the whole vector."""
    w = c.w0
    for t in range(len(c.rounds)):
        deltas = {k: w - c.train(w, b, c.grad) for k, b in c.cohort(t).items()}
        order = [k for k in c.rounds[t] if k in deltas]
        for part in blocks or [slice(None)]:
            for a, i in enumerate(order):
                for j in order[a + 1 :]:
                    u, v = deltas[i][part].copy(), deltas[j][part].copy()
                    if u @ v < 0:
                        deltas[i][part] = u - (u @ v) / (v @ v) * v
                        deltas[j][part] = v - (u @ v) / (u @ u) * u
        w = w - c.mean(deltas)
    return w
