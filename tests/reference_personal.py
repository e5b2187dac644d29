"""Personalised federated learning in plain NumPy, float64: clients keep part of the model.

Written from fani.md (2.0, 2.9, 2.10, 3, 5, 7.1, 7.2, 8) and, where marked, from papers as recalled
and from what released code was seen to do; apart from the package.

A model is a dict {leaf: array}. `gradient(params, batch)` gives a dict with the same leaves and is
the caller's (weight decay and temperature belong in it); a batch is whatever it takes. `own` is a
collection of leaves: those that stay with a client. `drawn` is {client: batches} of one round (for
`fedalt`: {client: (own_batches, shared_batches)}), `counts` {client: number of training examples}.
`states` is {client: its own leaves}; a client that has not taken part yet has no entry, and has the
own leaves of `params`, which never change. Nothing is ever changed in place.

The thesis names PP by what is personal and FP by what is trained: FedSim(psi) keeps the classifier
and shares the extractor, FP(psi) trains the classifier and leaves the extractor as it is.
"""

import numpy as np

HEAD = ("W", "b")


# A small model: softmax regression, or two layers where there are "W1" and "b1".


def features(params, x):
    """phi: the inputs themselves, or one layer with ReLU."""
    return np.maximum(x @ params["W1"] + params["b1"], 0) if "W1" in params else x


def logits(params, x, tau=1.0):
    """psi(phi(x)) / tau (2.5: tau = 0.1 where Fed3R made the classifier)."""
    return (features(params, x) @ params["W"] + params["b"]) / tau


def masked_logits(z, classes, absent=-np.inf):
    """2.10 at full width: only the columns of the local classes count.

    absent=0.0 is a reading seen in released code (for predictions only): an absent class then wins
    wherever every local logit is negative, which 8 C forbids.
    """
    masked = np.full(z.shape, float(absent))
    for c in classes:
        masked[:, c] = z[:, c]
    return masked


def softmax(z):
    e = np.exp(z - z.max(1, keepdims=True))
    return e / e.sum(1, keepdims=True)


def probabilities(params, x, tau=1.0, classes=None):
    z = logits(params, x, tau)
    return softmax(z if classes is None else masked_logits(z, classes))


def loss(params, batch, tau=1.0, classes=None):
    """Mean cross-entropy; with `classes` the softmax runs over those only (OLL, head not cut)."""
    x, y = batch
    p = probabilities(params, x, tau, classes)
    return -np.mean([np.log(p[i, y[i]]) for i in range(len(y))])


def gradient(params, batch, tau=1.0, classes=None):
    """Gradient of `loss`. With `classes`, columns of absent classes have exactly 0."""
    x, y = batch
    signal = probabilities(params, x, tau, classes)
    for i in range(len(y)):
        signal[i, y[i]] -= 1
    signal /= len(y) * tau
    h = features(params, x)
    g = {"W": h.T @ signal, "b": signal.sum(0)}
    if "W1" in params:
        back = (signal @ params["W"].T) * (h > 0)
        g |= {"W1": x.T @ back, "b1": back.sum(0)}
    return g


def leaves(params, part, head=HEAD):
    """Leaves of "psi" (classifier), "phi" (all others) or "f" (all), as in FP(.) and PP(.)."""
    if part == "f":
        return set(params)
    return set(head) if part == "psi" else set(params) - set(head)


# Local training and averages.


def sgd(params, batches, gradient, lr, names=None):
    """theta_k <- theta_k - lr * gradient, batch by batch (2.0); only the leaves in `names` move."""
    params = dict(params)
    for batch in batches:
        g = gradient(params, batch)
        for n in params:
            if names is None or n in names:
                params[n] = params[n] - lr * g[n]
    return params


def mean(models, weights):
    """sum_k (n_k / n_t) theta_k over clients that took part (2.0); both are {client: ...}."""
    total = sum(weights[k] for k in models)
    first = next(iter(models.values()))
    return {n: sum(weights[k] / total * m[n] for k, m in models.items()) for n in first}


def batch_counts(counts, size):
    """Weights of the released code (8 B28): local batches of an epoch, the last one partly full."""
    return {k: -(-n // size) for k, n in counts.items()}


def mix(old, new, beta):
    """(1 - beta) old + beta new; SGD on the server with learning rate beta (2.0, FedOpt)."""
    return {n: (1 - beta) * old[n] + beta * new[n] for n in old}


def fedavg_round(params, drawn, counts, gradient, lr, server_lr=1.0):
    """FedAvg (2.0, Alg. 1; Alg. 2 with SGD on the server). Clients without examples: skipped."""
    models = {k: sgd(params, b, gradient, lr) for k, b in drawn.items() if counts[k]}
    return mix(params, mean(models, counts), server_lr) if models else params


# Partial personalisation (2.9, phase 3).


def split(params, own):
    """(u, v): what is shared and what is a client's own."""
    return (
        {n: a for n, a in params.items() if n not in own},
        {n: a for n, a in params.items() if n in own},
    )


def fedsim(shared, mine, batches, gradient, lr, own_lr=None):
    """FedSim (3): one local update; u_k and v_k move together, by gradients at the same point."""
    own_lr = lr if own_lr is None else own_lr
    params = shared | mine
    for batch in batches:
        g = gradient(params, batch)
        params = {n: a - (own_lr if n in mine else lr) * g[n] for n, a in params.items()}
    return split(params, mine)


def fedalt(shared, mine, batches, gradient, lr, own_lr=None):
    """FedAlt (3): one local update; first v_k with u frozen, then u_k with the new v_k frozen.

    batches: (own_batches, shared_batches), whose lengths are the steps of the halves (released: E
    epochs each, drawn anew).
    """
    own_batches, shared_batches = batches
    params = sgd(shared | mine, own_batches, gradient, lr if own_lr is None else own_lr, set(mine))
    return split(sgd(params, shared_batches, gradient, lr, set(shared)), mine)


def partial_round(params, states, drawn, counts, own, update, server_lr=1.0):
    """One round of PP (2.9): u_k <- u^t, train, upload u_k only; v_k stays.

    update(shared, mine, batches) -> (shared, mine): `fedsim` or `fedalt` with their rates bound.
    counts: weights of the mean (examples; `batch_counts` for the released code).
    """
    shared, first = split(params, own)
    states, uploads = dict(states), {}
    for k, batches in drawn.items():
        if counts[k]:
            uploads[k], states[k] = update(shared, states.get(k, first), batches)
    if uploads:
        shared = mix(shared, mean(uploads, counts), server_lr)
    return first | shared, states


def personal_model(params, states, client):
    """What client k is tested with: the newest u and its own v_k (the first v if never drawn)."""
    return params | states.get(client, {})


# pFedMe.


def moreau(w, theta, batches, gradient, lr, penalty, decay=0.0):
    """Descent on L(theta) + penalty/2 ||theta - w||^2 from `theta`, one step for each batch.

    decay: decay * theta is added to the gradient (0.001 in the code of pFedMe's authors).
    """
    for batch in batches:
        g = gradient(theta, batch)
        theta = {n: a - lr * (g[n] + penalty * (a - w[n]) + decay * a) for n, a in theta.items()}
    return theta


def pfedme(
    w, batches, gradient, lr, penalty, steps, inner_lr=None, start="w", pull=True, decay=0.0
):
    """pFedMe (3): one local update; returns (w_k, last theta).

    For each batch: theta ~ argmin L + penalty/2 ||theta - w||^2 by `steps` steps on that batch,
    then w <- w - lr penalty (w - theta), as penalty (w - theta) is the gradient of the envelope.

    Where paper and code differ:
    start  "w": theta starts from w at each batch (code of the thesis; default).
           "theta": from the last theta of this round (code of the authors of pFedMe). The paper
           only asks for an approximate minimum.
    pull   True: as written. False, code of the thesis: it adds penalty ||theta - w||^2 to the loss
           but cut off from differentiation, so theta takes plain steps of SGD.
    inner_lr  the paper has a rate for theta apart from lr; code of the thesis: one rate (None).
    """
    theta = w
    for batch in batches:
        theta = moreau(
            w,
            w if start == "w" else theta,
            [batch] * steps,
            gradient,
            lr if inner_lr is None else inner_lr,
            penalty if pull else 0.0,
            decay,
        )
        w = {n: a - lr * penalty * (a - theta[n]) for n, a in w.items()}
    return w, theta


def pfedme_round(params, drawn, counts, update, beta=1.0):
    """Server of pFedMe: w <- (1 - beta) w + beta mean_k w_k. Returns (params, {client: theta}).

    update(w, batches) -> (w_k, theta). Nothing is own here. counts: examples in the code of its
    authors, 1 for each client in the paper, `batch_counts` in the code of the thesis (beta there is
    the server's learning rate, 1). The paper tests theta_k (personal) and w (global); the code of
    the thesis tests w. In the paper all clients train and a sample is averaged; here, and in the
    thesis, only `drawn` trains: w is the same, only the theta of others is not.
    """
    trained = {k: update(params, b) for k, b in drawn.items() if counts[k]}
    thetas = {k: theta for k, (_, theta) in trained.items()}
    if not trained:
        return params, thetas
    return mix(params, mean({k: w for k, (w, _) in trained.items()}, counts), beta), thetas


def pfedme_partial_round(params, states, drawn, counts, own, update, beta=1.0, state="kept"):
    """pFedMe(psi), pFedMe(phi): w_k = u + v_k is trained whole, u_k goes up (7.2).

    What becomes of v_k is open:
    "kept"     v_k (of w_k, not theta) is the client's state, as for all PP (2.9; default)
    "reset"    clients are stateless (3): each starts from the own leaves of `params`
    "carried"  code of the thesis: nobody restores the own leaves, so each client starts from those
               of the client trained before it; they are states["carried"]
    """
    shared, first = split(params, own)
    states, uploads = dict(states), {}
    for k, batches in drawn.items():
        if counts[k]:
            place = "carried" if state == "carried" else k
            mine = first if state == "reset" else states.get(place, first)
            w, _ = update(shared | mine, batches)
            uploads[k], states[place] = split(w, own)
    if uploads:
        shared = mix(shared, mean(uploads, counts), beta)
    return first | shared, {} if state == "reset" else states


# Full personalisation (2.9, phase 4).


def toward(gradient, anchor, penalty, half=False):
    """Gradient of L + penalty ||theta - anchor||^2 (Ditto, 3); half: penalty/2 (literature)."""
    factor = penalty if half else 2 * penalty

    def total(params, batch):
        g = gradient(params, batch)
        return {n: g[n] + factor * (a - anchor[n]) for n, a in params.items()}

    return total


def finetune(params, batches, gradient, lr, names=None, penalty=0.0, anchor=None, half=False):
    """FP(f), or of the leaves in `names` only; Ditto where there is a penalty. No communication.

    anchor: the model FP starts from (3; default). After PP the released code takes the server's
    model instead, with the own leaves of phase 2: give it `params` of `partial_round`.
    """
    anchor = params if anchor is None else anchor
    return sgd(params, batches, toward(gradient, anchor, penalty, half), lr, names)


def ditto_round(params, states, drawn, counts, gradient, lr, penalty, half=True, own_lr=None):
    """Ditto as in its paper (recalled; not in the thesis): FedAvg, and a whole model per client.

    drawn: {client: (batches of w_k, batches of v_k)}. v_k is pulled to w^t, not to the new w. A
    client's first v_k is w^t of the round it is first drawn in.
    """
    states = dict(states)
    for k, (_, mine) in drawn.items():
        if counts[k]:
            pulled = toward(gradient, params, penalty, half)
            states[k] = sgd(states.get(k, params), mine, pulled, lr if own_lr is None else own_lr)
    shared = {k: batches for k, (batches, _) in drawn.items()}
    return fedavg_round(params, shared, counts, gradient, lr), states


# Only local labels (2.10).


def local_classes(y):
    """sorted(C_k): classes of a client's training examples."""
    return sorted({int(c) for c in y})


def prune(params, classes, head=HEAD):
    """Alg. 7: the columns of the local classes; the bias too, where there is one."""
    return params | {n: params[n][..., list(classes)] for n in head if n in params}


def relabel(y, classes):
    """c -> index of c in sorted(C_k). Closed set: another label is a ValueError."""
    return np.array([list(classes).index(int(c)) for c in y], dtype=int)


def predictions(z, classes=None):
    """argmax, the first of equals; with `classes`, z is of a pruned head and labels are global."""
    best = [int(np.argmax(row)) for row in z]
    return np.array(best if classes is None else [classes[i] for i in best], dtype=int)


def oll_accuracy(params, x, y, classes, tau=1.0):
    """Accuracy of a pruned model against global labels; one of an absent class is never right."""
    return float(np.mean(predictions(logits(params, x, tau), classes) == np.asarray(y)))


def head_floats(d, classes, bias=False):
    """Memory of a classifier: d C, with OLL d C_k (bias: one more each; the thesis has none)."""
    return classes * (d + bias)


def learning_rate(fed3r, oll, base=0.1):
    """FP (2.10): base, x 0.1 if Fed3R made the classifier, x 0.1 again with OLL.

    8 B18: the one released configuration of OLL has 0.01 after Fed3R, not 0.001.
    """
    return base * (0.1 if fed3r else 1.0) * (0.1 if oll else 1.0)


# Measures (5).


def weighted_mean_accuracy(accuracies, sizes):
    """WMA (Eq. 4.4): sum_k n_k^test / n^test acc_k. Clients without tests are left out."""
    pairs = [(a, n) for a, n in zip(accuracies, sizes, strict=True) if n]
    return sum(n * a for a, n in pairs) / sum(n for _, n in pairs)


def quantile(values, q):
    """Of clients alike, linear between neighbours: position q (K - 1) of the sorted values."""
    v = sorted(values)
    at = q * (len(v) - 1)
    low = min(int(at), len(v) - 1)
    high = min(low + 1, len(v) - 1)
    return v[low] + (at - low) * (v[high] - v[low])


def weighted_quantile(values, sizes, q):
    """Released summary (with sizes; ones for its unweighted one): the least value with mass >= q.

    Where the mass is q exactly, the mean of that value and the next different one.
    """
    values, sizes = list(values), list(sizes)
    distinct = sorted({v for v, n in zip(values, sizes, strict=True) if n})
    target, mass = q * sum(sizes), 0.0
    for i, v in enumerate(distinct):
        mass += sum(n for a, n in zip(values, sizes, strict=True) if a == v)
        if abs(mass - target) < 1e-10 and i + 1 < len(distinct):
            return (v + distinct[i + 1]) / 2
        if mass >= target:
            return v
    return distinct[-1]


def class_accuracies(predicted, y, num_classes, empty=np.nan):
    """Accuracy of each class; `empty` for one without test examples (released: 0.0)."""
    predicted, y = np.asarray(predicted), np.asarray(y)
    return np.array(
        [np.mean(predicted[y == c] == c) if np.any(y == c) else empty for c in range(num_classes)]
    )


def local_and_absent(predicted, y, classes, num_classes, empty=np.nan):
    """Figure 4.7: mean class-wise accuracy on local classes and on absent ones, on global tests.

    Classes are alike whatever their examples; one without tests is left out (empty=0.0: counts as
    0). NaN where no class is left.
    """
    acc = class_accuracies(predicted, y, num_classes, empty)
    means = []
    for group in (True, False):
        kept = [a for c, a in enumerate(acc) if (c in classes) == group and not np.isnan(a)]
        means.append(float(np.mean(kept)) if kept else float("nan"))
    return tuple(means)


# Communication (7.2).


def phase_floats(phase, b, d, c, local=None):
    """(down, up) floats of one participation (Tables 3.2, 4.2); b: extractor, c: classes.

    phase: "Fed3R" (once; local: C_k, or the mean of it), "Fed3R-Sync" (once), "FT(f)", "FT(phi)",
    "FT(psi)", "PP(psi)" and "PP(phi)" (named by what stays: the other part travels), "FP", "OLL".
    """
    if phase in ("FP", "OLL"):
        return 0, 0
    if phase.startswith("Fed3R"):
        return 0, d * (d + 1) // 2 + d * (c if phase == "Fed3R-Sync" else local)
    size = {
        "FT(f)": b + d * c,
        "FT(phi)": b,
        "FT(psi)": d * c,
        "PP(psi)": b,
        "PP(phi)": d * c,
    }[phase]
    return size, size


def phase_bytes(phases, b, d, c, local=None, width=4):
    """Bytes of each phase: [(phase, participations), ...] -> list; participations: cohort x rounds.

    For Fed3R: clients that have reported. Handing the last model (or the Fed3R classifier) to all
    clients before FP or OLL is not counted, as in the tables.
    """
    return [n * width * sum(phase_floats(phase, b, d, c, local)) for phase, n in phases]
