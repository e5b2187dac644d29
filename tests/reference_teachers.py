"""Teachers, contrast, calibration, feature augmentation, server rules: NumPy, float64.

Written from the equations in mora.md 2.8 - 2.16, 3a, 3g, 3h and the papers they cite, apart from
the package; where the text leaves room, the docstring says what was chosen. `Clients` is that of
`reference_methods`; empty clients never take part. Every `*_loss` is a mean over the batch and
returns (value, gradient of the layers by hand).
"""

import numpy as np
from reference_methods import plain, with_momentum
from reference_open import backward, forward, softmax

SPACE = {"axis": (1, 2), "keepdims": True}


def log_softmax(z):
    z = z - z.max(1, keepdims=True)
    return z - np.log(np.exp(z).sum(1, keepdims=True))


def cross_entropy(z, y):
    """(Mean, gradient in z)."""
    value = -log_softmax(z)[np.arange(len(y)), y].mean()
    return value, (softmax(z) - np.eye(z.shape[1])[y]) / len(y)


def kl(a, b):
    """KL(softmax(a) || softmax(b)): (of every row, its gradients in a and in b)."""
    p, logs = softmax(a), log_softmax(a) - log_softmax(b)
    rows = (p * logs).sum(1)
    return rows, p * (logs - rows[:, None]), softmax(b) - p


def backward_features(layers, activations, signal, extra):
    """`backward` with `extra` added to the gradient at the features the classifier reads."""
    features = activations[-1]
    hidden = (signal @ layers[-1][0].T + extra) * (features > 0)
    last = features.T @ signal, signal.sum(0)
    return [*backward(layers[:-1], activations[:-1], hidden), last]


def vector(c, loss):
    """The gradient of `loss(layers, x, y)` as a function of the model and a batch of indices."""
    return lambda v, b: c.flat(loss(c.layers(v), c.x[b], c.y[b])[1])


def run(c, local, step=plain, after=lambda w, trained: None):
    """FedAvg with another local loss.

    `local(w, k)` -> loss(layers, x, y) of client k in the round that starts from w;
    `step(w, delta, memory)`: the server, as in `reference_methods.fedopt`, delta the mean of
    w - v_k weighted by examples; `after(w, trained)` sees the new model and {k: v_k}.
    """
    w, memory = c.w0, {}
    for t in range(len(c.rounds)):
        trained = {k: c.train(w, b, vector(c, local(w, k))) for k, b in c.cohort(t).items()}
        w = step(w, c.mean({k: w - v for k, v in trained.items()}), memory)
        after(w, trained)
    return w


def gkd_loss(layers, teachers, x, y, gamma, tau=1.0, squared=False):
    """CE + gamma/2 * mean over teachers of KL(softmax(z_t / tau) || softmax(z / tau))."""
    activations, z = forward(layers, x)
    loss, signal = cross_entropy(z, y)
    for teacher in teachers:
        rows, _, pull = kl(forward(teacher, x)[1] / tau, z / tau)
        weight = gamma / 2 * (tau**2 if squared else 1) / (len(teachers) * len(y))
        loss, signal = loss + weight * rows.sum(), signal + weight * pull / tau
    return loss, backward(layers, activations, signal)


def fedgkd(c, gamma, size=1, vote=False, tau=1.0, squared=False, step=plain):
    """FedGKD (Yao et al. 2021), mora.md 2.10: distil from the last `size` global models.

    The buffer holds w0 at the start and gets the new model after every server update, so the
    model the round starts from is always in it; while fewer than `size` exist, those are used.
    Teacher: the mean of their parameters; vote=True (FedGKD-VOTE): each is a teacher, mean of the
    KLs, equal weights. The equation has no temperature: tau = 1; squared=True: times tau^2.
    """
    models = [c.w0]

    def local(w, k):
        recent = models[-size:]
        teachers = [c.layers(m) for m in (recent if vote else [np.mean(recent, axis=0)])]
        return lambda layers, x, y: gkd_loss(layers, teachers, x, y, gamma, tau, squared)

    return run(c, local, step, lambda w, trained: models.append(w))


def mlb_loss(layers, frozen, x, y, l1, l2, stopped=False, targets=None):
    """CE + l1 mean_i CE(z_i) + l2 mean_i KL(softmax(z_i) || softmax(z)).

    Path i = 1 .. L - 1: local layers 1 .. i (each with its ReLU), then frozen ones. stopped: no
    gradient through z_i in the KL; `targets` may then hold the z_i of another point.
    """
    activations, z = forward(layers, x)
    loss, signal = cross_entropy(z, y)
    grads, paths = [], range(1, len(layers))
    for i in paths:
        inner, hybrid = forward(frozen[i:], activations[i])
        ce, back = cross_entropy(hybrid, y)
        rows, first, pull = kl(hybrid if targets is None else targets[i - 1], z)
        loss += (l1 * ce + l2 * rows.mean()) / len(paths)
        signal = signal + l2 * pull / (len(y) * len(paths))
        back = (l1 * back + (0 if stopped else l2 * first / len(y))) / len(paths)
        for (weight, _), a in zip(frozen[i:][::-1], inner[::-1], strict=True):
            back = (back @ weight.T) * (a > 0)  # ends at local layer i, before its ReLU
        grads.append(backward(layers[:i], activations[:i], back))
    grads.append(backward(layers, activations, signal))
    reach = [[g[j] for g in grads if j < len(g)] for j in range(len(layers))]
    return loss, [tuple(map(sum, zip(*pairs, strict=True))) for pairs in reach]


def mlb_local(c, l1, l2, stopped):
    return lambda w, k: lambda ls, x, y: mlb_loss(ls, c.layers(w), x, y, l1, l2, stopped)


def fedmlb(c, l1=1.0, l2=1.0, stopped=False, step=plain):
    """FedMLB (Kim et al. 2022), mora.md 2.11: every layer of the MLP a block, temperature 1.

    Frozen: the model the round started from. The gradient goes through everything that depends on
    the local weights, so through z_i in the KL too (equation as printed; the authors' code,
    jinkyu032/FedMLB, detaches nothing either). stopped=True: z_i in the KL is a fixed target.
    """
    return run(c, mlb_local(c, l1, l2, stopped), step)


def fedavgm_fedmlb(c, beta, l1=1.0, l2=1.0, stopped=False):
    """Server: v <- beta v + delta, w <- w - v (mora.md 2.14), rate 1."""
    return fedmlb(c, l1, l2, stopped, with_momentum(beta))


def feddyn_fedmlb(c, alpha, l1=1.0, l2=1.0, stopped=False):
    """FedDyn's rule (mora.md 2.8) around FedMLB's loss; l1 = l2 = 0 is FedDyn.

    Step: gradient - g_k + alpha (v - w); g_k <- g_k - alpha (v_k - w), kept while absent.
    Server: h <- h - alpha / K sum over the cohort of (v_k - w), w <- plain mean of v_k - h / alpha.
    K = all clients, those without examples counted. Returns w, the model sent to clients.
    """
    w, h = c.w0, np.zeros_like(c.w0)
    g = np.zeros((c.num_clients, len(w)))
    for t in range(len(c.rounds)):
        trained = {}
        for k, batches in c.cohort(t).items():
            loss = vector(c, mlb_local(c, l1, l2, stopped)(w, k))
            pulled = lambda v, b, k=k, x=w, f=loss: f(v, b) - g[k] + alpha * (v - x)
            trained[k] = c.train(w, batches, pulled)
            g[k] -= alpha * (trained[k] - w)
        if trained:
            h = h - alpha / c.num_clients * sum(v - w for v in trained.values())
            w = np.mean(list(trained.values()), axis=0) - h / alpha
    return w


def cosine(z, other):
    """(Cosines of the rows, their gradient in z); both 0 where z or other is all zero."""
    lengths = [np.linalg.norm(v, axis=1, keepdims=True) for v in (z, other)]
    u, v = (w / np.where(n > 0, n, 1) for w, n in zip((z, other), lengths, strict=True))
    value = (u * v).sum(1, keepdims=True)
    return value, (v - value * u) / np.where(lengths[0] > 0, lengths[0], np.inf)


def moon_loss(layers, received, previous, x, y, mu, tau):
    """CE + mu * mean of -log(e^a / (e^a + e^b)), a, b = cosines to received, previous over tau."""
    activations, z = forward(layers, x)
    loss, signal = cross_entropy(z, y)
    others = (forward(model, x)[0][-1] for model in (received, previous))
    (a, da), (b, db) = (cosine(activations[-1], other) for other in others)
    far = 1 / (1 + np.exp((a - b) / tau))
    extra = mu * far * (db - da) / (tau * len(y))
    loss += mu * np.logaddexp(0, (b - a) / tau).mean()
    return loss, backward_features(layers, activations, signal, extra)


def moon(c, mu=1.0, tau=0.5, step=plain):
    """MOON (Li et al. 2021), mora.md 2.16, without the projection head.

    Representation: the features the classifier reads (last hidden layer after its ReLU). Received:
    the round's model; previous: the client's own model at the end of its last round, before its
    first the received one (the term is then log 2, without gradient). Features all zero: cosine 0.
    """
    own = {}

    def local(w, k):
        pair = c.layers(w), c.layers(own.get(k, w))
        return lambda layers, x, y: moon_loss(layers, *pair, x, y, mu, tau)

    return run(c, local, step, lambda w, trained: own.update(trained))


def ffa_parts(x, spread, mask, eps):
    """For the mean and the sd over space: (values (N, 1, 1, C), mean over N, scale, its slope).

    scale^2 = (1 + C f / sum_c f) (Var_N + eps), f = 1 / (1 + 1 / (G + eps)). Variances are biased
    (divided by the count); means and variances over N count the rows of `mask` only.
    """
    mask = np.ones(len(x)) if mask is None else np.asarray(mask, float)
    weight = mask[:, None, None, None] / max(mask.sum(), 1)
    stats = x.mean(**SPACE), np.sqrt(x.var(**SPACE) + eps)
    for values, g in zip(stats, spread, strict=True):
        importance = 1 / (1 + 1 / (g + eps))
        boost = 1 + len(g) * importance / importance.sum()
        mean = (weight * values).sum(0)
        scale = np.sqrt(boost * ((weight * (values - mean) ** 2).sum(0) + eps))
        yield values, mean, scale, weight * boost * (values - mean) / scale


def ffa_forward(x, running, spread, noise, apply=True, mask=None, eps=1e-6, momentum=0.99):
    """FFA layer in training (mora.md 2.13) on x (N, H, W, C): (y, new running).

    running = (mu, sd), start (0, 1); spread = (Gm, Gs) from the server, start 1; noise = two
    standard normal draws (N, C), for the mean and for the sd; mask: 1 for real rows. apply=False:
    y = x and the running statistics stay (both public codes return before they move them); they
    stay also if no row is real. The authors' code (tfzhou/FedFA) has unbiased variances; biased
    here, as in the code mora.md read. Features without space have no sd: not defined.
    """
    if not apply:
        return x, running
    (mu, *_, m, _), (sd, *_, s, _) = parts = list(ffa_parts(x, spread, mask, eps))
    rate = 0 if mask is not None and not np.any(mask) else 1 - momentum
    moved = [(1 - rate) * r + rate * p[1].ravel() for r, p in zip(running, parts, strict=True)]
    e_mu, e_sd = (e[:, None, None] for e in noise)
    return (sd + s * e_sd) * (x - mu) / sd + (mu + m * e_mu), tuple(moved)


def ffa_gradient(x, spread, noise, signal, mask=None, eps=1e-6):
    """Gradient in x of sum(signal * y), through mean, sd and both variances (apply=True).

    y = x + s e_sd xh + m e_mu with xh = (x - mu) / sd; the scales m, s depend on all real rows.
    """
    (mu, _, _, slope_mu), (sd, _, s, slope_sd) = ffa_parts(x, spread, mask, eps)
    e_mu, e_sd = (e[:, None, None] for e in noise)
    xh = (x - mu) / sd
    d = signal * s * e_sd
    inner = (d - d.mean(**SPACE) - xh * (d * xh).mean(**SPACE)) / sd
    at_mu = slope_mu * (signal * e_mu).sum((0, 1, 2))
    at_sd = slope_sd * (signal * e_sd * xh).sum((0, 1, 2))
    return signal + inner + (at_mu + at_sd * xh) / (x.shape[1] * x.shape[2])


def ffa_server(uploads, pooled=False):
    """(Gm, Gs) from the cohort's [(running mu, running sd), ...]: biased, clients count alike.

    Per channel (mora.md A32); pooled=True: one variance of all values for every channel, as in
    the authors' code (unbiased there, and there the statistics are averaged like parameters).
    """
    stacks = [np.stack(s) for s in zip(*uploads, strict=True)]
    return tuple(np.full(s.shape[1], s.var()) if pooled else s.var(0) for s in stacks)


def distill_loss(layers, teacher, x, y, gamma):
    """CE + gamma KL(softmax(teacher[y]) || softmax(z)); teacher (C, C), NaN rows: no term."""
    activations, z = forward(layers, x)
    loss, signal = cross_entropy(z, y)
    known = ~np.isnan(teacher[y, :1])
    rows, _, pull = kl(np.where(known, teacher[y], 0), z)
    signal = signal + gamma * known * pull / len(y)
    return loss + gamma * (known[:, 0] * rows).mean(), backward(layers, activations, signal)


def label_teacher(uploads, classes, weighted=False, skip=None):
    """uploads {label: {client: (logits, count)}} -> (C, C), the mean over clients but `skip`."""
    teacher = np.full((classes, classes), np.nan)
    for label, by_client in uploads.items():
        kept = [v for k, v in by_client.items() if k != skip]
        if kept:
            z, counts = zip(*kept, strict=True)
            teacher[label] = np.average(z, axis=0, weights=counts if weighted else None)
    return teacher


def feddistill(c, gamma, shared=True, weighted=False, leave_out=False):
    """FedDistill+ (shared: FedAvg of the weights too), or FedDistill: returns all clients' models.

    Uploads: mean logits per label of the client's examples under the model at the end of its local
    training, with counts. Teacher of a label: the plain mean (weighted: by counts) over the clients
    that uploaded it in the latest round in which any did; leave_out drops the client's own share.
    No teacher in the first round, nor for labels not uploaded so far. Regulariser: KL, as in the
    code of FedGen's authors, which differs: logits seen while training, all past rounds together,
    counts from 1, zeros of labels a client lacks averaged in. mora.md 3a: outputs, not logits.
    """
    w, uploads = c.w0, {}
    own = np.tile(w, (c.num_clients, 1))
    for t in range(len(c.rounds)):
        trained, fresh = {}, {}
        for k, batches in c.cohort(t).items():
            table = label_teacher(uploads, c.shapes[-1][0], weighted, k if leave_out else None)
            loss = lambda layers, x, y, table=table: distill_loss(layers, table, x, y, gamma)
            own[k] = trained[k] = c.train(w if shared else own[k], batches, vector(c, loss))
            z, y = forward(c.layers(own[k]), c.x[c.members[k]])[1], c.y[c.members[k]]
            for label in np.unique(y):
                fresh.setdefault(label, {})[k] = z[y == label].mean(0), (y == label).sum()
        uploads.update(fresh)
        w = w - c.mean({k: w - v for k, v in trained.items()})
    return w if shared else own


def max_loss(layers, x, y, beta):
    """CE + beta KL(U || softmax(a)), a: the features the classifier reads, U uniform over them."""
    activations, z = forward(layers, x)
    loss, signal = cross_entropy(z, y)
    rows, _, pull = kl(np.zeros_like(activations[-1]), activations[-1])
    grads = backward_features(layers, activations, signal, beta * pull / len(y))
    return loss + beta * rows.mean(), grads


def fedmax(c, beta, step=plain):
    """FedMAX (Chen et al. 2020), mora.md 3h; the authors' code has beta / width for beta."""
    return run(c, lambda w, k: lambda layers, x, y: max_loss(layers, x, y, beta), step)


def calibrated_loss(layers, x, y, scale, shift):
    """CE of scale * z + shift, per class; a shift of -inf takes the class out of the softmax."""
    activations, z = forward(layers, x)
    loss, signal = cross_entropy(scale * z + shift, y)
    return loss, backward(layers, activations, scale * signal)


def calibrated(c, rule, step=plain):
    """FedAvg with that loss: (scale, shift) = rule(class counts of all the client's examples)."""

    def local(w, k):
        counts = np.bincount(c.y[c.members[k]], minlength=c.shapes[-1][0])
        return lambda layers, x, y: calibrated_loss(layers, x, y, *rule(counts))

    return run(c, local, step)


def fedlc(c, tau, absent=np.inf, step=plain):
    """FedLC (Zhang et al. 2022), mora.md 3h [O]: z_c - tau n_c^(-1/4).

    Classes the client lacks leave the softmax (the limit n -> 0; the code mora.md read floors n at
    1e-8: absent=100 * tau): z_c - absent; 0 keeps them without a shift. The paper's denominator,
    as recalled, leaves the true class out; here it is an ordinary softmax.
    """
    shift = lambda n: np.where(n > 0, -tau * np.maximum(n, 1.0) ** -0.25, -absent)
    return calibrated(c, lambda counts: (1.0, shift(counts)), step)


def fedrs(c, alpha, step=plain):
    """FedRS (Li and Zhan 2021): logits (with bias) of classes the client lacks times alpha."""
    return calibrated(c, lambda counts: (np.where(counts > 0, 1.0, alpha), 0.0), step)


def wsm(c, step=plain):
    """WSM, mora.md 3h [O]: -log(n_y e^z_y / sum_c n_c e^z_c), n the client's class counts."""
    with np.errstate(divide="ignore"):  # log 0: a class the client lacks leaves the softmax
        return calibrated(c, lambda counts: (1.0, np.log(counts)), step)


def nova_norm(steps, lr, momentum=0.0, mu=0.0):
    """||a_k||_1: how far, in units of lr, `steps` local steps go if every gradient is 1."""
    moved = velocity = 0.0
    for _ in range(steps):
        velocity = momentum * velocity + 1 - lr * mu * moved
        moved += velocity
    return moved


def fednova(c, momentum=0.0, mu=0.0, effective="steps", step=plain):
    """FedNova (Wang et al. 2020): delta = tau_eff sum_k p_k (w - v_k) / ||a_k||_1.

    Local: velocity <- momentum velocity + grad + mu (v - w), zero at the start of the round; the
    proximal term is part of the gradient (the authors' code adds it after the momentum; the same
    unless both are used). tau_eff = sum_k p_k tau_k, tau_k the steps; effective="norm" puts
    ||a_k||_1 for tau_k (that code without a proximal term). p_k: share of the cohort's examples.
    """
    w, memory = c.w0, {}
    for t in range(len(c.rounds)):
        directions, effects = {}, {}
        for k, batches in c.cohort(t).items():
            v, velocity = w, 0.0
            for b in batches:
                velocity = momentum * velocity + c.grad(v, b) + mu * (v - w)
                v = v - c.lr * velocity
            norm = nova_norm(len(batches), c.lr, momentum, mu)
            directions[k] = (w - v) / norm
            effects[k] = norm if effective == "norm" else len(batches)
        w = step(w, c.mean(effects) * c.mean(directions), memory)
    return w


def gma_mask(deltas, threshold):
    """A = |mean_k sign(delta_k)| (clients count alike, sign(0) = 0); 1 where A >= threshold."""
    agreement = np.abs(np.mean(np.sign(deltas), axis=0))
    return np.where(agreement >= threshold, 1.0, agreement)


def gma(c, threshold, rate=1.0):
    """Gradient-masked averaging (Tenison et al. 2022): w <- w - rate * mask * weighted mean."""
    w = c.w0
    for t in range(len(c.rounds)):
        deltas = {k: w - c.train(w, b, c.grad) for k, b in c.cohort(t).items()}
        if deltas:
            w = w - rate * gma_mask(list(deltas.values()), threshold) * c.mean(deltas)
    return w


def df_loss(layers, teachers, x):
    """KL(softmax(mean_k z_k(x)) || softmax(z(x))); the teachers count alike."""
    activations, z = forward(layers, x)
    rows, _, pull = kl(np.mean([forward(t, x)[1] for t in teachers], axis=0), z)
    return rows.mean(), backward(layers, activations, pull / len(x))


def feddf(c, public, batches, rate):
    """FedDF (Lin et al. 2020): FedAvg, then SGD with `rate` on public inputs; the cohort teaches.

    batches: per round, index arrays into `public`. The original has Adam and early stopping.
    """
    w = c.w0
    for t in range(len(c.rounds)):
        trained = {k: c.train(w, b, c.grad) for k, b in c.cohort(t).items()}
        teachers = [c.layers(v) for v in trained.values()]
        w = w - c.mean({k: w - v for k, v in trained.items()})
        for b in batches[t] if teachers else ():
            w = w - rate * c.flat(df_loss(c.layers(w), teachers, public[b])[1])
    return w
