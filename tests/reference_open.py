"""FedNTD, FedDC, FedBN / SiloBN and 8-bit uploads in plain NumPy, float64.

Written from the papers' equations (and, where marked, from what the authors' code computes), apart
from the package. `Clients` is that of `reference_methods`; empty clients never take part.
"""

import numpy as np
import reference
import reference_methods

# ---- FedNTD ------------------------------------------------------------------------------------


def forward(layers, x):
    """Activations before every layer, and the logits, of a ReLU MLP."""
    activations = [x]
    for weight, bias in layers[:-1]:
        activations.append(np.maximum(activations[-1] @ weight + bias, 0))
    return activations, activations[-1] @ layers[-1][0] + layers[-1][1]


def backward(layers, activations, signal):
    """Gradients of the layers from `signal`, the gradient with respect to the logits."""
    grads = []
    for i in reversed(range(len(layers))):
        grads.append((activations[i].T @ signal, signal.sum(0)))
        signal = (signal @ layers[i][0].T) * (activations[i] > 0)
    return grads[::-1]


def softmax(z):
    e = np.exp(z - z.max(1, keepdims=True))
    return e / e.sum(1, keepdims=True)


def not_true(z, y, tau):
    """Softmax of z / tau over the classes other than y; 0 at y."""
    z = z / tau
    z[np.arange(len(y)), y] = -np.inf
    return softmax(z)


def log_or_zero(p):
    return np.log(np.where(p > 0, p, 1))


def ntd_loss(layers, teacher, x, y, beta, tau, squared=True, reverse=False):
    """The local loss of FedNTD on one batch; see `fedntd`."""
    z, zt = forward(layers, x)[1], forward(teacher, x)[1]
    cross_entropy = -np.log(softmax(z)[np.arange(len(y)), y]).mean()
    p, q = not_true(zt, y, tau), not_true(z, y, tau)
    if reverse:
        p, q = q, p
    kl = (p * (log_or_zero(p) - log_or_zero(q))).sum(1).mean()
    return cross_entropy + beta * (tau**2 if squared else 1) * kl


def ntd_gradient(layers, teacher, x, y, beta, tau, squared=True, reverse=False):
    """Gradient of `ntd_loss` by hand: in the logits z, d KL(p || q) / dz = (q - p) / tau.

    Reversed, d KL(q || p) / dz = q (log q - log p - KL) / tau, row by row. The true class's logit
    moves by the cross-entropy alone.
    """
    activations, z = forward(layers, x)
    p, q = not_true(forward(teacher, x)[1], y, tau), not_true(z, y, tau)
    if reverse:
        gap = log_or_zero(q) - log_or_zero(p)
        pull = q * (gap - (q * gap).sum(1, keepdims=True)) / tau
    else:
        pull = (q - p) / tau
    signal = softmax(z) - np.eye(z.shape[1])[y] + beta * (tau**2 if squared else 1) * pull
    return backward(layers, activations, signal / len(y))


def fedntd(c, beta, tau, squared=True, reverse=False):
    """FedNTD (Lee et al. 2022): FedAvg whose local loss is CE + beta tau^2 KL(teacher || student).

    Teacher: the model the round started from, fixed. Both softmaxes leave the true class out (C - 1
    classes) and are taken at temperature tau. CE and KL are means over the batch. CE has no
    temperature. Server: the mean of the models weighted by examples.

    The default is mora.md 2.9 [O] and also the authors' code at its later stored state
    (Lee-Gihun/FedNTD 57789c8, algorithms/fedntd/criterion.py: tau^2, batch mean, teacher first).
    squared=False drops tau^2: the other stored state of that file (043269e), and the equation
    of the paper as recalled, not checked. At tau = 1 (the authors' configuration) they agree.
    reverse=True is KL(student || teacher), the order in Mora's repository (mora.md 2.9 [C]).
    """
    w = c.w0
    for t in range(len(c.rounds)):

        def direction(v, b, x=w):
            args = c.layers(v), c.layers(x), c.x[b], c.y[b], beta, tau, squared, reverse
            return c.flat(ntd_gradient(*args))

        w = w - c.mean({k: w - c.train(w, b, direction) for k, b in c.cohort(t).items()})
    return w


# ---- FedDC -------------------------------------------------------------------------------------


def feddc(c, alpha, released=False, scaled=False):
    """FedDC (Gao et al. 2022): a drift h_k and a gradient correction per client.

    Paper (w: the round's global model, K_k: the steps client k takes, N: all clients; all zero at
    the start; kept while a client is absent):
      objective  F_k(v) = L_k(v) + alpha/2 ||h_k + v - w||^2 + <v, g_k - g> / (lr K_k)
      step       v <- v - lr (grad + alpha (h_k + v - w) + (g_k - g) / (lr K_k)), from v = w
      drift      h_k <- h_k + (v_k - w)
      updates    g_k <- v_k - w, the last local change (not accumulated, not divided);
                 g = (1/N) sum over ALL clients of g_k, unweighted, as of the end of last round
      server     w <- sum over the cohort of p_k (v_k + h_k), p_k = n_k / (examples of the cohort),
                 with the new h_k
    Chosen where the text leaves room: examples as weights on the server, none in g; g over all
    clients; one K_k, that of the client now training, divides g_k and g. scaled=True instead
    divides each g_k by its own lr K_k when made, then averages (the same if all K are equal).

    released=True: what the authors' code computes (gaoliang13/FedDC a7cb165,
    utils_methods_FedDC.py and train_model_FedDC), see `feddc_released`.
    """
    if released:
        return feddc_released(c, alpha)
    w = c.w0
    drift, own = np.zeros((2, c.num_clients, len(w)))
    for t in range(len(c.rounds)):
        mean, moved = own.sum(0) / c.num_clients, {}
        for k, batches in c.cohort(t).items():
            rate = 1 / (c.lr * len(batches))
            pull = (own[k] - mean) * (1 if scaled else rate)

            def direction(v, b, x=w, k=k, pull=pull):
                return c.grad(v, b) + alpha * (drift[k] + v - x) + pull

            change = c.train(w, batches, direction) - w
            drift[k] += change
            own[k] = change * (rate if scaled else 1)
            moved[k] = change + drift[k]
        w = w + c.mean(moved)
    return w


def feddc_released(c, alpha):
    """FedDC as the authors' code computes it, term by term against the paper's form.

    s_k = n_k N / (all examples): 1 for equal clients. c_k, c: control variates, zero at the start.
      step    grad + (alpha / s_k) (h_k + v - w) - c_k + c / s_k     paper: no s_k
      drift   h_k <- h_k + (v_k - w)                                  the same
      client  c_k <- c_k - c / s_k + (w - v_k) / (lr K_k)             SCAFFOLD's second option; the
              paper's is -g_k / (lr K_k), without the terms c_k - c: opposite sign in the variable
              AND in the loss, so the same direction of pull, but another recursion
      server  c <- c + (1/N) sum over the cohort of s_k (c_k_new - c_k_old): over ALL clients
      model   w <- plain mean over the COHORT of v_k + plain mean over ALL N clients of h_k
              paper: one mean of v_k + h_k over the cohort, weighted by examples
    Left out: clipping at norm 10, weight decay, learning-rate decay (there lr K uses the first
    learning rate, and one K for all: epochs * ceil(mean examples / batch); here the client's own).
    """
    w, control = c.w0, np.zeros_like(c.w0)
    drift, own = np.zeros((2, c.num_clients, len(w)))
    examples = sum(len(m) for m in c.members)
    for t in range(len(c.rounds)):
        trained, change = {}, 0
        for k, batches in c.cohort(t).items():
            s = len(c.members[k]) * c.num_clients / examples
            correction = own[k] - control / s

            def direction(v, b, x=w, k=k, s=s, correction=correction):
                return c.grad(v, b) + alpha / s * (drift[k] + v - x) - correction

            trained[k] = c.train(w, batches, direction)
            drift[k] += trained[k] - w
            new = correction + (w - trained[k]) / (c.lr * len(batches))
            change, own[k] = change + s * (new - own[k]), new
        if trained:
            w = sum(trained.values()) / len(trained) + drift.sum(0) / c.num_clients
            control = control + change / c.num_clients
    return w


# ---- an MLP with BatchNorm ---------------------------------------------------------------------

EPS, MOMENTUM = 1e-5, 0.1


def bn_head(params, hidden, y):
    """Mean cross-entropy from the normalised hidden layer on, with its gradients."""
    a = params["gamma"] * hidden + params["beta"]
    logits = np.maximum(a, 0) @ params["W2"] + params["b2"]
    p = softmax(logits)
    loss = -np.log(p[np.arange(len(y)), y]).mean()
    signal = (p - np.eye(p.shape[1])[y]) / len(y)
    return loss, a, signal


def bn_normalise(params, x):
    """Training mode: (normalised, batch mean, biased batch variance) of x W1 + b1."""
    z = x @ params["W1"] + params["b1"]
    mean, var = z.mean(0), ((z - z.mean(0)) ** 2).mean(0)
    return (z - mean) / np.sqrt(var + EPS), mean, var


def bn_loss(params, x, y):
    return bn_head(params, bn_normalise(params, x)[0], y)[0]


def bn_gradient(params, x, y):
    """(gradients, batch mean, unbiased batch variance), through the batch's statistics too.

    Back through zh = (z - mean) / sd: dz = (d - mean(d) - zh mean(d zh)) / sd, d the signal at zh.
    """
    zh, mean, var = bn_normalise(params, x)
    _, a, signal = bn_head(params, zh, y)
    da = (signal @ params["W2"].T) * (a > 0)
    d = da * params["gamma"]
    dz = (d - d.mean(0) - zh * (d * zh).mean(0)) / np.sqrt(var + EPS)
    grads = {
        "W1": x.T @ dz, "b1": dz.sum(0), "gamma": (da * zh).sum(0), "beta": da.sum(0),
        "W2": np.maximum(a, 0).T @ signal, "b2": signal.sum(0),
    }  # fmt: skip
    return grads, mean, var * len(x) / max(len(x) - 1, 1)


def bn_local(params, stats, x, y, batches, lr, rho=0.0):
    """SGD, or SAM with rho > 0; the pass at w alone moves the running statistics, once a step."""
    for b in batches:
        g, mean, var = bn_gradient(params, x[b], y[b])
        stats = {
            "mean": (1 - MOMENTUM) * stats["mean"] + MOMENTUM * mean,
            "var": (1 - MOMENTUM) * stats["var"] + MOMENTUM * var,
        }
        if rho > 0:
            length = np.sqrt(sum((v**2).sum() for v in g.values()))
            step = rho / length if length > 0 else 0.0
            g = bn_gradient({n: v + step * g[n] for n, v in params.items()}, x[b], y[b])[0]
        params = {n: v - lr * g[n] for n, v in params.items()}
    return params, stats


def bn_evaluate(params, stats, x):
    """Logits with the running statistics."""
    z = x @ params["W1"] + params["b1"]
    zh = (z - stats["mean"]) / np.sqrt(stats["var"] + EPS)
    return np.maximum(params["gamma"] * zh + params["beta"], 0) @ params["W2"] + params["b2"]


def bn_rounds(params, stats, x, y, members, rounds, lr, rho, kept):
    """FedAvg in which the entries named `kept` stay with each client between its rounds.

    Returns (averaged entries, [kept entries of every client]); averages are weighted by examples.
    """
    start = {**params, **stats}
    shared = {n: v for n, v in start.items() if n not in kept}
    own = [{n: start[n] for n in kept} for _ in members]
    for cohort in rounds:
        cohort = {k: b for k, b in cohort.items() if len(members[k])}
        total = sum(len(members[k]) for k in cohort)
        mean = dict.fromkeys(shared, 0)
        for k, batches in cohort.items():
            model = {**shared, **own[k]}
            p, s = {n: model[n] for n in params}, {n: model[n] for n in stats}
            p, s = bn_local(p, s, x, y, batches, lr, rho)
            model = {**p, **s}
            own[k] = {n: model[n] for n in kept}
            mean = {n: v + len(members[k]) / total * model[n] for n, v in mean.items()}
        shared = mean if cohort else shared
    return shared, own


def fedbn(params, stats, x, y, members, rounds, lr, rho=0.0):
    """FedBN (Li et al. 2021): all of BatchNorm stays: (W1, b1, W2, b2; each client's own four)."""
    kept = ("gamma", "beta", "mean", "var")
    return bn_rounds(params, stats, x, y, members, rounds, lr, rho, kept)


def silobn(params, stats, x, y, members, rounds, lr, rho=0.0):
    """SiloBN: only the statistics stay: (all six parameters; each client's mean and var)."""
    return bn_rounds(params, stats, x, y, members, rounds, lr, rho, ("mean", "var"))


def fedavg_bn(params, stats, x, y, members, rounds, lr, rho=0.0):
    """Everything averaged, statistics too (the variance as it is): (params, stats)."""
    model, _ = bn_rounds(params, stats, x, y, members, rounds, lr, rho, ())
    return {n: model[n] for n in params}, {n: model[n] for n in stats}


# ---- 8-bit uploads -----------------------------------------------------------------------------


def quantise8(x):
    """To the nearest of 256 equally spaced levels from min(x) to max(x), both included, and back.

    level = round((x - min) / step), step = (max - min) / 255, halves to the even level; a constant
    tensor comes back as it is. The thesis leaves its quantiser open; mora.md A7 reads it as affine,
    min to max, per tensor. Nearest rounding and the 256 levels are chosen here.
    """
    low, step = x.min(), (x.max() - x.min()) / 255
    return low + np.rint((x - low) / step) * step if step > 0 else x.copy()


def fedavg_8bit(c, biases=True):
    """FedAvg, each client's upload w - w_k quantised tensor by tensor; the download is exact.

    biases=False leaves vectors in float, as mora.md 2.4 and 2.6 count them (32 bits each).
    """
    w = c.w0
    for t in range(len(c.rounds)):
        uploads = {}
        for k, batches in c.cohort(t).items():
            delta = c.layers(w - c.train(w, batches, c.grad))
            uploads[k] = c.flat(
                [tuple(quantise8(v) if biases or v.ndim > 1 else v for v in p) for p in delta]
            )
        w = w - c.mean(uploads)
    return w


def bits8(shapes, biases=True, ranges=True):
    """Bits of one upload: 8 a value, 64 a quantised tensor (min and step, or max, in float32).

    biases=False, ranges=False is mora.md's rule (2.6): 8 a weight, 32 a bias, no side information.
    """
    total = 0
    for shape in shapes:
        if biases or len(shape) > 1:
            total += 8 * int(np.prod(shape)) + (64 if ranges else 0)
        else:
            total += 32 * int(np.prod(shape))
    return total


# ---- self-check --------------------------------------------------------------------------------


def slopes(f, w, eps=1e-5):
    """Central differences of f at the vector w."""
    return np.array([(f(w + e) - f(w - e)) / (2 * eps) for e in eps * np.eye(len(w))])


def example(sizes=(7, 0, 12, 5), rounds=4, every=False, seed=0):
    """A small federation: a client without examples, part of the clients each round."""
    rng = np.random.default_rng(seed)
    ends = np.cumsum(sizes)
    x, y = rng.normal(size=(ends[-1], 4)), rng.integers(0, 5, ends[-1])
    layers = [(rng.normal(size=s), rng.normal(size=s[1])) for s in ((4, 6), (6, 5))]
    members = [np.arange(e - n, e) for e, n in zip(ends, sizes, strict=True)]
    drawn = []
    for _ in range(rounds):
        some = range(len(sizes)) if every else rng.permutation(len(sizes))[:3]
        order = {int(k): rng.permutation(members[k]) for k in some}
        drawn.append({k: [o[i : i + 3] for i in range(0, len(o), 3)] for k, o in order.items()})
    return reference_methods.Clients(layers, x, y, members, drawn, 0.1)


def check_ntd():
    c = example()
    rng, b = np.random.default_rng(1), np.arange(9)
    teacher, worst = c.layers(c.w0 + rng.normal(size=c.w0.shape)), 0.0
    for squared in (True, False):
        for reverse in (True, False):
            rest = teacher, c.x[b], c.y[b], 0.7, 2.5, squared, reverse
            by_hand = c.flat(ntd_gradient(c.layers(c.w0), *rest))
            numeric = slopes(lambda w, r=rest: ntd_loss(c.layers(w), *r), c.w0)
            worst = max(worst, np.abs(by_hand - numeric).max())
    assert worst < 1e-6, worst
    plain = reference_methods.fedopt(c, reference_methods.plain)
    zero, ntd = fedntd(c, 0.0, 2.0), fedntd(c, 1.0, 2.0)
    assert np.allclose(zero, plain, rtol=0, atol=1e-12)
    assert np.allclose(fedntd(c, 1.0, 1.0), fedntd(c, 1.0, 1.0, squared=False), rtol=0, atol=1e-12)
    assert np.abs(ntd - plain).max() > 1e-3
    two = [w - w.mean(1, keepdims=True) if w.ndim > 1 else w for p in teacher for w in p]
    pair = [tuple(two[:2]), (two[2][:, :2], two[3][:2])]  # two classes: nothing is left to distil
    args = c.x[b], c.y[b] % 2
    g = ntd_gradient(pair, [(w + 1, v) for w, v in pair], *args, 3.0, 2.0)
    assert np.allclose(c.flat(g), c.flat(reference.mean_gradient(pair, *args)), atol=1e-12)
    return worst


def check_dc():
    def plain(c, step):
        return reference_methods.fedopt(c, step)

    def twice(w, delta, memory):
        return w - 2 * delta

    def summed(w, delta, memory):
        memory["h"] = memory.get("h", 0) + delta
        return w - delta - memory["h"]

    first = example(rounds=1)  # nothing stored yet: the cohort's mean of v + h is w - 2 delta
    assert np.allclose(feddc(first, 0.0), plain(first, twice), rtol=0, atol=1e-12)
    for mode in ({}, {"scaled": True}, {"released": True}):
        one = example(sizes=(9,), rounds=5, every=True)  # g_1 = g, c_1 = c: no correction
        assert np.allclose(feddc(one, 0.0, **mode), plain(one, summed), rtol=0, atol=1e-9)
        half = example(sizes=(6, 6), rounds=1, every=True)
        assert np.allclose(feddc(half, 0.0, **mode), plain(half, twice), rtol=0, atol=1e-12)
    equal = example(sizes=(6, 6, 6, 6))
    assert np.allclose(feddc(equal, 0.3), feddc(equal, 0.3, scaled=True), rtol=0, atol=1e-12)
    part = example(sizes=(6, 6, 6, 6), rounds=1)  # 3 of 4: w - (1 + 3 / 4) delta in the code
    share = plain(part, lambda w, delta, memory: w - 1.75 * delta)
    assert np.allclose(feddc(part, 0.0, released=True), share, rtol=0, atol=1e-12)
    c = example()
    runs = [feddc(c, 0.3), feddc(c, 0.3, scaled=True), feddc(c, 0.3, released=True), feddc(c, 0.0)]
    return [float(np.abs(r - runs[0]).max()) for r in runs[1:]]


def check_bn():
    rng = np.random.default_rng(2)
    shapes = {"W1": (4, 6), "b1": (6,), "gamma": (6,), "beta": (6,), "W2": (6, 5), "b2": (5,)}
    params = {n: rng.normal(size=s) for n, s in shapes.items()}
    stats = {"mean": np.zeros(6), "var": np.ones(6)}
    c = example()
    x, y, b = c.x, c.y, np.arange(8)

    def unflat(w):
        parts = np.split(w, np.cumsum([int(np.prod(s)) for s in shapes.values()])[:-1])
        return {n: v.reshape(s) for (n, s), v in zip(shapes.items(), parts, strict=True)}

    w = np.concatenate([v.ravel() for v in params.values()])
    g, mean, var = bn_gradient(params, x[b], y[b])
    numeric = slopes(lambda v: bn_loss(unflat(v), x[b], y[b]), w)
    worst = np.abs(np.concatenate([v.ravel() for v in g.values()]) - numeric).max()
    assert worst < 1e-6, worst
    z = x[b] @ params["W1"] + params["b1"]
    assert np.allclose(mean, z.mean(0))
    assert np.allclose(var, z.var(0, ddof=1))
    assert np.allclose(bn_gradient(params, x[:1], y[:1])[2], 0)  # one example: no variance
    batch = {"mean": z.mean(0), "var": z.var(0)}
    zh = bn_normalise(params, x[b])[0]
    head = np.maximum(params["gamma"] * zh + params["beta"], 0) @ params["W2"] + params["b2"]
    assert np.allclose(bn_evaluate(params, batch, x[b]), head)
    check_bn_federated(params, stats, c)
    return worst


def check_bn_federated(params, stats, c):
    data = params, stats, c.x, c.y
    one, batches = [c.members[2]], [r[2] for r in c.rounds if 2 in r]
    for rho in (0.0, 0.05):
        alone = bn_local(*data, [b for bs in batches for b in bs], c.lr, rho)
        rest = one, [{0: b} for b in batches], c.lr, rho
        shared, own = fedbn(*data, *rest)
        p, s = fedavg_bn(*data, *rest)
        for n, v in {**alone[0], **alone[1]}.items():
            assert np.allclose({**shared, **own[0]}[n], v)
            assert np.allclose({**p, **s}[n], v)
    rest = c.members, c.rounds, c.lr
    shared, own = fedbn(*data, *rest)
    assert set(shared) == {"W1", "b1", "W2", "b2"}
    assert len(own) == c.num_clients
    assert np.array_equal(own[1]["gamma"], params["gamma"])  # the empty client
    assert not np.allclose(own[0]["gamma"], own[2]["gamma"])
    p, s = fedavg_bn(*data, *rest)
    assert set(p) == set(params)
    assert np.isfinite(s["var"]).all()
    once, twice = (bn_local(*data, batches[0][:1], c.lr, rho) for rho in (0.0, 0.05))
    for n in stats:  # SAM's second pass leaves the statistics alone
        assert np.array_equal(once[1][n], twice[1][n])
    assert not np.allclose(once[0]["W1"], twice[0]["W1"])
    rest = c.members, c.rounds[:1], c.lr  # the three train alike in the first round
    a, b, d = (f(*data, *rest)[0] for f in (fedbn, silobn, fedavg_bn))
    assert all(np.allclose(a[n], d[n]) for n in a)
    assert all(np.allclose(b[n], d[n]) for n in d)


def check_bits():
    rng = np.random.default_rng(3)
    x = rng.normal(size=(40, 50))
    q = quantise8(x)
    step = (x.max() - x.min()) / 255
    assert np.abs(q - x).max() <= step / 2 + 1e-12
    assert len(np.unique(q)) <= 256
    assert np.isclose(q.min(), x.min())
    assert np.isclose(q.max(), x.max())
    assert np.allclose(quantise8(q), q)
    assert np.array_equal(quantise8(np.ones(3)), np.ones(3))
    assert bits8([(4, 6), (6,)]) == 8 * 30 + 128
    factors = []
    for a, b, d in ((26, 51, 410), (24, 48, 384), (22, 45, 358)):  # mora.md: 6.2, 7.1, 8.1
        kernels = [(5, 5, 1, a), (5, 5, a, b), (49 * b, d), (d, 62)]
        bits = bits8(kernels + [s[-1:] for s in kernels], biases=False, ranges=False)
        factors.append(32 * 1690046 / bits)
    assert np.allclose(factors, [6.2, 7.1, 8.1], rtol=0, atol=0.05), factors
    c = example()
    exact = reference_methods.fedopt(c, reference_methods.plain)
    gap = [float(np.abs(fedavg_8bit(c, biases=v) - exact).max()) for v in (True, False)]
    assert max(gap) < 0.05
    assert min(gap) > 0
    return factors, gap


if __name__ == "__main__":
    print("FedNTD gradient, worst difference:", check_ntd())
    print("FedDC limits hold; gaps of scaled, released, alpha = 0:", check_dc())
    print("BatchNorm gradient, worst difference:", check_bn())
    print("8 bit: factors, gaps to FedAvg:", check_bits())
