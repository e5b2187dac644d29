"""Scores, losses, splits and batch normalisation of federated segmentation in plain NumPy, float64.

Written from fani.md (2.11, 3, 4.2, 5, 7.1) and caldarola.md (2.15, 4.3), apart from the package.
Logits are (images, H, W, C), labels (images, H, W); `ignore` marks pixels without a label. Where
the documents leave something open it is an option; [X] marks what the authors' released code does.
"""

import numpy as np

IGNORE = 255

# ---- scores ------------------------------------------------------------------------------------


def confusion(labels, predictions, classes, ignore=IGNORE, outside="error"):
    """M[i, j]: number of pixels of class i predicted as j; pixels labelled `ignore` are left out.

    What is predicted on those pixels never counts, not even as a false positive. Other labels
    outside 0..classes-1: outside="error" or "skip" ([X] skips them; 255 is then one of them).
    """
    matrix = np.zeros((classes, classes), np.int64)
    pairs = zip(np.ravel(labels).tolist(), np.ravel(predictions).tolist(), strict=True)
    for truth, guess in pairs:
        if truth == ignore:
            continue
        if not 0 <= truth < classes:
            if outside == "error":
                raise ValueError(f"label {truth} of {classes} classes")
            continue
        matrix[truth, guess] += 1
    return matrix


def class_iou(matrix):
    """IoU_c = TP / (TP + FP + FN) (fani 5.8; caldarola 2.5); NaN for 0 / 0."""
    out = np.full(len(matrix), np.nan)
    for c in range(len(matrix)):
        union = matrix[c].sum() + matrix[:, c].sum() - matrix[c, c]
        if union > 0:
            out[c] = matrix[c, c] / union
    return out


def mean_iou(matrix, over="truth", absent=0.0):
    """Mean of `class_iou` of one matrix; NaN if no class counts.

    over "truth": classes with labelled pixels ([X], the tables). A class that is only predicted is
                  left out, its pixels still harm the true classes.
         "union": classes labelled or predicted: one only predicted counts as 0
         "all":   all C classes as printed (fani 5.9); one with 0 / 0 counts as `absent`
    """
    values = []
    for c, iou in enumerate(class_iou(matrix)):
        if over == "all":
            values.append(absent if np.isnan(iou) else iou)
        elif matrix[c].sum() > 0 if over == "truth" else not np.isnan(iou):
            values.append(iou)
    return float(np.mean(values)) if values else np.nan


def set_miou(labels, predictions, classes, ignore=IGNORE, over="truth", absent=0.0):
    """One confusion matrix over the whole test set, then `mean_iou` ([X]; compare tables to it)."""
    total = np.zeros((classes, classes), np.int64)
    for y, p in zip(labels, predictions, strict=True):
        total += confusion(y, p, classes, ignore)
    return mean_iou(total, over, absent)


def image_miou(labels, predictions, classes, ignore=IGNORE, over="all", absent=0.0):
    """As printed (fani 5.9, 5.10): `mean_iou` per image, then the mean over the images.

    Images without any labelled pixel are left out under "truth" and "union"; under "all" they
    count as `absent`. absent=0 or 1 is open (0 / 0 in print).
    """
    scores = []
    for y, p in zip(labels, predictions, strict=True):
        scores.append(mean_iou(confusion(y, p, classes, ignore), over, absent))
    scores = [s for s in scores if not np.isnan(s)]
    return float(np.mean(scores)) if scores else np.nan


def pixel_accuracy(matrix):
    """Correct pixels over labelled pixels (NaN if none)."""
    return np.trace(matrix) / matrix.sum() if matrix.sum() > 0 else np.nan


def class_accuracy(matrix):
    """Recall per class: M_cc / row sum; NaN where nothing is labelled."""
    rows = matrix.sum(1)
    return np.array([matrix[c, c] / rows[c] if rows[c] > 0 else np.nan for c in range(len(rows))])


def final_score(history, last=100, ddof=0):
    """(mean, std) of the scores of the last `last` rounds: FedDrive's 20 of 5 rounds each (5).

    `history`: {round (1..T): score}. Rounds T-last+1..T count. ddof is open (0: NumPy's).
    """
    end = max(history)
    scores = [s for t, s in history.items() if t > end - last]
    return float(np.mean(scores)), float(np.std(scores, ddof=ddof))


# ---- hard mining -------------------------------------------------------------------------------


def softmax(z):
    """Over the last axis."""
    e = np.exp(z - z.max(-1, keepdims=True))
    return e / e.sum(-1, keepdims=True)


def log_softmax(z):
    """Over the last axis."""
    z = z - z.max(-1, keepdims=True)
    return z - np.log(np.exp(z).sum(-1, keepdims=True))


def pixel_losses(logits, labels, ignore=IGNORE):
    """Cross-entropy per pixel, 0 where the label is `ignore`: (images, H, W)."""
    out = np.zeros(labels.shape)
    log_p = log_softmax(np.asarray(logits, np.float64))
    for at in np.ndindex(labels.shape):
        if labels[at] != ignore:
            out[at] = -log_p[at][labels[at]]
    return out


def mean_ce(logits, labels, ignore=IGNORE, real=None):
    """Cross-entropy over the labelled pixels of real images; 0 if there are none."""
    keep = (labels != ignore) & existing(labels, real)
    return pixel_losses(logits, labels, ignore)[keep].mean() if keep.any() else 0.0


def existing(labels, real):
    """Boolean (images, H, W) from `real`: None (all), one per image, or one per pixel."""
    out = np.ones(labels.shape, bool)
    if real is not None:
        real = np.asarray(real, bool)
        out &= real.reshape(real.shape + (1,) * (labels.ndim - real.ndim))
    return out


def hardest(losses, share=0.25):
    """Indices of the floor(share n) largest of n, ties to the earlier; at least one if n > 0."""
    k = min(len(losses), max(1, int(share * len(losses))))
    return np.argsort(-np.asarray(losses), kind="stable")[:k]


def mined(
    logits, labels, share=0.25, ignore=IGNORE, real=None, count="all", scope="image", weigh="images"
):
    """(loss, gradient by logits): cross-entropy of the hardest 25 % of the pixels (7.1).

    real: what is not padding, per image or per pixel (see `existing`). Padding is as if it were
          not there: it neither enters nor is counted.
    count "all":   k = floor(share * pixels of the image); pixels to ignore are counted, with loss
                   0, and may fill the k when there are too few others ([X])
          "valid": k = floor(share * labelled pixels), at least 1; images without any are left out
    scope "image": k of each image, then as `weigh` ([X]);  "batch": k of all pixels together
    weigh "images": mean over images of the mean of its k;  "pixels": mean of all kept pixels (the
                   same if images have as many pixels that count; not under "valid")
    k is at least 1 (with fewer than 4 pixels [X] has none and gives NaN). No pixels: 0.
    """
    losses, exists = pixel_losses(logits, labels, ignore), existing(labels, real)
    counted = exists if count == "all" else exists & (labels != ignore)
    pools = {}
    for at in np.ndindex(labels.shape):
        if counted[at]:
            pools.setdefault(at[0] if scope == "image" else 0, []).append(at)
    groups = []
    for pixels in pools.values():
        groups.append([pixels[j] for j in hardest([losses[at] for at in pixels], share)])
    loss, gradient = 0.0, np.zeros(np.shape(logits))
    kept = sum(len(g) for g in groups)
    for group in groups:
        weight = 1 / (len(groups) * len(group)) if weigh == "images" else 1 / kept
        for at in group:
            loss += weight * losses[at]
            if labels[at] != ignore:
                gradient[at] = weight * softmax(np.asarray(logits[at], np.float64))
                gradient[at][labels[at]] -= weight
    return loss, gradient


def heads_loss(heads, labels, weights=None, **options):
    """Main output and auxiliary heads, each with its own mining, weights 1 (4.2 [X])."""
    weights = [1.0] * len(heads) if weights is None else weights
    return sum(w * mined(z, labels, **options)[0] for w, z in zip(weights, heads, strict=True))


# ---- Algorithm 8 -------------------------------------------------------------------------------


def classes_in(labels, classes, ignore=IGNORE):
    """(images, classes) booleans: which classes appear in each label map."""
    out = np.zeros((len(labels), classes), bool)
    for i, y in enumerate(labels):
        for c in np.unique(y):
            if c != ignore:
                out[i, c] = True
    return out


def rarest(has, left):
    """(c*, its images): the class in the fewest remaining images, but some; ties to the lower c."""
    pools = {c: [i for i in left if has[i, c]] for c in range(has.shape[1])}
    pools = {c: pool for c, pool in pools.items() if pool}
    if not pools:
        return None, []
    c = min(pools, key=lambda c: (len(pools[c]), c))
    return c, pools[c]


def class_imbalance(has, sizes, choose, rest="fill"):
    """fani Algorithm 8 with c* chosen anew inside the while loop, among classes that are left.

    has: `classes_in`; sizes: S_k; choose(pool, m) -> m of the sorted list `pool`. A draw either
    fills the client or empties D^c*, so choosing c* at each turn or when it runs out is the same.
    Images without any class are in no D^c: rest="fill" deals them, by `choose`, to clients that no
    class can fill any more; "leave" lets those stay short ([X]: split files hold 2,970 of 2,975).
    """
    left, clients = list(range(len(has))), []
    for size in sizes:
        mine = []
        while len(mine) < size and left:
            c, pool = rarest(has, left)
            if c is None:
                if rest == "leave":
                    break
                pool = left
            drawn = list(choose(list(pool), min(size - len(mine), len(pool))))
            mine += drawn
            left = [i for i in left if i not in drawn]
        clients.append(mine)
    return clients


def uniform_choice(rng):
    """`choose` without replacement, uniform."""
    return lambda pool, m: [int(i) for i in rng.choice(pool, m, replace=False)]


def class_imbalance_fault(has, sizes, clients):
    """None if some draws of Algorithm 8 give this split (as sets), else what is wrong, for whom.

    Whatever generator drew: when D^c* does not exceed what a client still needs, it must hold all
    of it; else all that it still needs must come from it.
    """
    left = list(range(len(has)))
    for k, (size, members) in enumerate(zip(sizes, clients, strict=True)):
        todo = sorted(int(i) for i in members)
        if len(set(todo)) < len(todo) or not set(todo) <= set(left):
            return f"client {k}: an image twice"
        need = size
        while need and left:
            c, pool = rarest(has, left)
            pool = left if c is None else pool
            if len(pool) <= need:
                taken = pool
                if not set(pool) <= set(todo):
                    return f"client {k}: class {c} has {len(pool)} images, not all are here"
            else:
                taken = [i for i in todo if i in pool]
                if len(taken) < need or len(todo) != need:
                    return f"client {k}: {need} images of class {c} expected"
            todo = [i for i in todo if i not in taken]
            left = [i for i in left if i not in taken]
            need -= len(taken)
        if todo:
            return f"client {k}: too many images"
    return None


def doubled(images, labels, batch=16):
    """Sets smaller than a batch: with a copy of each image, flipped left to right, behind (4.2)."""
    if len(images) >= batch:
        return images, labels
    both = lambda x: np.concatenate([x, x[:, :, ::-1]])
    return both(images), both(labels)


# ---- batch normalisation -----------------------------------------------------------------------

# What stays with the client; everything else is averaged. A model is {name: array} and `kinds`
# {name: "weight" | "scale" | "shift" | "mean" | "var"}: the last four belong to BatchNorm.
KEPT = {
    "fedavg": (),  # running statistics are averaged like weights (8 B28 [X])
    "fedbn": ("scale", "shift", "mean", "var"),
    "silobn": ("mean", "var"),
}


def received(server, own, kinds, strategy):
    """What a client starts from: the server's, and its own for the kinds it keeps."""
    return {n: own[n] if kinds[n] in KEPT[strategy] else server[n] for n in server}


def weighted_mean(models, sizes):
    """sum n_k x_k / sum n_k, by name; variances too are averaged as they are."""
    total = sum(sizes)
    return {n: sum(s * m[n] for s, m in zip(sizes, models, strict=True)) / total for n in models[0]}


def bn_rounds(strategy, start, kinds, cohorts, train, sizes):
    """(server, {client: model}) after the cohorts; train(t, k, model) -> model, sizes: n_k.

    Clients begin with `start` for what they keep, also when they join late, and keep it while
    absent. The server's copy of kept names never moves from `start`: nothing is sent. The models
    of clients are what they would be tested with: the final server's, and what they kept.
    Clients without examples do not take part.
    """
    server, own = dict(start), {k: dict(start) for k in range(len(sizes))}
    for t, cohort in enumerate(cohorts):
        active = [k for k in cohort if sizes[k] > 0]
        if not active:
            continue
        trained = [train(t, k, received(server, own[k], kinds, strategy)) for k in active]
        for k, model in zip(active, trained, strict=True):
            own[k] = dict(model)  # only the kinds it keeps are ever read again
        mean = weighted_mean(trained, [sizes[k] for k in active])
        server = {n: server[n] if kinds[n] in KEPT[strategy] else mean[n] for n in server}
    return server, {k: received(server, own[k], kinds, strategy) for k in own}


def uploaded(kinds, strategy):
    """Names that travel."""
    return [n for n in kinds if kinds[n] not in KEPT[strategy]]


def moments(x, real=None):
    """Per channel (last axis) over all else: mean and biased variance. `real`: as in `existing`."""
    x = np.asarray(x, np.float64)
    rows = x[existing(np.zeros(x.shape[:-1]), real)]
    return rows.mean(0), ((rows - rows.mean(0)) ** 2).mean(0)


def normalised(x, mean, var, scale, shift, eps=1e-5):
    """scale (x - mean) / sqrt(var + eps) + shift (5.1-5.2)."""
    return scale * (x - mean) / np.sqrt(var + eps) + shift


def running(mean, var, x, momentum=0.1, real=None, unbiased=False, space="var"):
    """Running statistics after the batch x: (1 - momentum) old + momentum batch (5.3).

    momentum is the share of the new. unbiased=True: the batch's variance with n - 1 (PyTorch);
    False: with n (JAX libraries). space="std": as printed, standard deviations are averaged.
    """
    m, v = moments(x, real)
    if unbiased:
        n = existing(np.zeros(np.shape(x)[:-1]), real).sum()
        v = v * n / (n - 1)
    mix = lambda old, new: (1 - momentum) * old + momentum * new
    return mix(mean, m), mix(np.sqrt(var), np.sqrt(v)) ** 2 if space == "std" else mix(var, v)


def adabn(layers, x, eps=1e-5, real=None):
    """(output, [(mean, var)]): statistics of x itself in every BatchNorm, all else frozen.

    layers: functions and (scale, shift) pairs, in order. Each BatchNorm is measured on what the
    layers before give, with their new statistics already. x is a whole domain ("domain": AdaBN) or
    one test batch (what a network in training mode does; SiloBN "standard" [X]). Padded images,
    `real` False, are not measured.
    """
    statistics = []
    for layer in layers:
        if callable(layer):
            x = layer(x)
        else:
            statistics.append(moments(x, real))
            x = normalised(x, *statistics[-1], *layer, eps)
    return x, statistics


def with_statistics(layers, statistics, x, eps=1e-5):
    """The same network with given statistics (those kept by a client, or of `adabn`)."""
    left = list(statistics)
    for layer in layers:
        x = layer(x) if callable(layer) else normalised(x, *left.pop(0), *layer, eps)
    return x


def standard_confusion(layers, batches, classes, eps=1e-5, ignore=IGNORE):
    """SiloBN "standard": each (images, labels) batch by its own statistics; one matrix."""
    total = np.zeros((classes, classes), np.int64)
    for x, y in batches:
        total += confusion(y, adabn(layers, x, eps)[0].argmax(-1), classes, ignore)
    return total


def by_domain_confusion(layers, tests, statistics, classes, eps=1e-5, ignore=IGNORE):
    """SiloBN "by domain": {domain: (images, labels)} with its client's statistics; one matrix.

    The score is on the union of all test sets, not a mean over domains.
    """
    total = np.zeros((classes, classes), np.int64)
    for domain, (x, y) in tests.items():
        out = with_statistics(layers, statistics[domain], x, eps)
        total += confusion(y, out.argmax(-1), classes, ignore)
    return total
