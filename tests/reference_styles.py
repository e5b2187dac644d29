"""Styles of images (FDA, CFSI, LAB) and LADD in plain NumPy, float64; random draws are inputs.

Written from fani.md (2.12-2.14, 4.3, 8) and caldarola.md (2.13, 2.15, 8, 9), apart from the
package. Images are (H, W, 3) in 0..255, RGB, all of one size; logits (images, H, W, C). [X] marks
what the authors' released code does where the documents say something else or nothing.
"""

import numpy as np
from reference_segmentation import IGNORE, existing, log_softmax, pixel_losses, softmax

# ---- FDA ---------------------------------------------------------------------------------------


def band(h, w, beta=None, rule="printed", half=None):
    """(top, bottom, left, right) of the low frequencies in the centred (fftshift) spectrum.

    The constant is at (h // 2, w // 2).
    rule "printed": floor(beta h) x floor(beta w) entries (fani 5.11-5.15); an even number of them
                    has one more before the constant than behind it, and is then not symmetric
         "half":    floor(beta h), floor(beta w) to each side of the constant ([X] CFSI, 0.05)
         "square":  floor(beta min(h, w)) to each side (FDA's own code)
    half=b overrides all: b to each side, 2b + 1 entries (LADD: b = 1). Cut at the borders.
    """
    if half is not None:
        rows = cols = 2 * half + 1
    elif rule == "printed":
        rows, cols = int(beta * h), int(beta * w)
    elif rule == "half":
        rows, cols = 2 * int(beta * h) + 1, 2 * int(beta * w) + 1
    else:
        rows = cols = 2 * int(beta * min(h, w)) + 1
    top, left = h // 2 - rows // 2, w // 2 - cols // 2
    return max(top, 0), min(top + rows, h), max(left, 0), min(left + cols, w)


def spectrum(x):
    """(amplitude, phase) of each channel, centred: the constant at (h // 2, w // 2)."""
    f = np.fft.fftshift(np.fft.fft2(np.asarray(x, np.float64), axes=(0, 1)), axes=(0, 1))
    return np.abs(f), np.angle(f)


def image_of(amplitude, phase, take="real"):
    """Back from a centred spectrum. take="abs" is [X] of CFSI: negative values are mirrored."""
    f = np.fft.ifftshift(amplitude * np.exp(1j * phase), axes=(0, 1))
    x = np.fft.ifft2(f, axes=(0, 1))
    return np.abs(x) if take == "abs" else x.real


def finished(x, how=None):
    """None: as it is; "clip": to 0..255; "round": rounded, clipped ([X] LADD);

    "wrap": cut to integers modulo 256, not clipped ([X] CFSI: a cast to uint8 after "abs").
    """
    if how == "clip":
        return np.clip(x, 0, 255)
    if how == "round":
        return np.clip(np.round(x), 0, 255)
    if how == "wrap":
        return np.trunc(x) % 256
    return x


def swap(content, donor, where, lam=1.0, take="real", finish=None):
    """FDA (fani 5.15) of `content` with the centred amplitude `donor`, in the band `where`.

    Amplitude lam donor + (1 - lam) own inside, own outside; phase own. The documents call the
    donor "source" and the content "target". lam = 0 or the own amplitude: nothing changes.
    donor: the whole (H, W, 3) spectrum, or only its window.
    """
    amplitude, phase = spectrum(content)
    top, bottom, left, right = where
    if donor.shape == amplitude.shape:
        donor = donor[top:bottom, left:right]
    if donor.shape != (bottom - top, right - left, amplitude.shape[2]):
        raise ValueError(f"amplitudes {donor.shape} for the band {where}")
    own = amplitude[top:bottom, left:right]
    amplitude[top:bottom, left:right] = lam * donor + (1 - lam) * own
    return finished(image_of(amplitude, phase, take), finish)


def fda(content, style, beta=None, rule="printed", half=None, lam=1.0, take="real", finish=None):
    """FDA of one image with the style of another of the same size."""
    where = band(*content.shape[:2], beta, rule, half)
    return swap(content, spectrum(style)[0], where, lam, take, finish)


# ---- banks: CFSI and LAB -----------------------------------------------------------------------


def chosen(n, half="even"):
    """Which of a client's n images: "even" indices ([X]), "first" half, or "all" of them."""
    return {
        "even": list(range(0, n, 2)),
        "first": list(range(n // 2)),
        "all": list(range(n)),
    }[half]


def bank_of(clients, entry, half="all"):
    """[(client, entry)] in order of clients and images; `clients`: {k: images}.

    half: whether the bank itself holds half of the images (FedDrive's text) or all of them ([X]).
    """
    return [(k, entry(xs[i])) for k, xs in clients.items() for i in chosen(len(xs), half)]


def donors(bank, client, which="others"):
    """Entries a client may draw. "others": not its own (CFSI: A \\ A^k; [X] IDDA, for both);

    "all": its own too (LAB as printed; [X] Cityscapes, for both).
    """
    return [entry for k, entry in bank if which == "all" or k != client]


def restyled(images, entries, picks, restyle, half="even"):
    """Images at the indices `chosen` by restyle(i, image, entries[picks[i]]), others unchanged.

    picks[i] in 0..len(entries)-1: one uniform draw per image. Nothing to draw from: unchanged.
    """
    out = [np.asarray(x, np.float64) for x in images]
    for i in chosen(len(images), half):
        if entries:
            out[i] = restyle(i, out[i], entries[picks[i]])
    return out


def cfsi(
    clients,
    client,
    picks,
    lams,
    beta=0.05,
    rule="half",
    which="others",
    half="even",
    bank_half="all",
    take="real",
    finish=None,
):
    """CFSI: amplitudes of other clients' images, lam ~ U(0, 1) given for each image (2.12).

    [X]: rule="half", beta=0.05 (not printed), half="even", take="abs", finish="wrap". The whole
    spectrum is mixed with beta=1 and rule="printed".
    """
    bank = bank_of(clients, lambda x: spectrum(x)[0], bank_half)

    def mix(i, x, amplitude):
        return swap(x, amplitude, band(*x.shape[:2], beta, rule), lams[i], take, finish)

    return restyled(clients[client], donors(bank, client, which), picks, mix, half)


# sRGB to XYZ under D65, and the white that goes with it. OpenCV's numbers; others differ in the
# fourth digit (white (0.95047, 1, 1.08883)), which moves LAB by less than 0.02.
XYZ = np.array(
    [[0.412453, 0.357580, 0.180423], [0.212671, 0.715160, 0.072169], [0.019334, 0.119193, 0.950227]]
)
WHITE = np.array([0.950456, 1.0, 1.088754])


def rgb_to_lab(rgb, white=WHITE, unit="float"):
    """CIE L*a*b* of sRGB in 0..255, last axis: gamma, XYZ, cube roots.

    unit "float": L in 0..100, a and b about -127..127.
         "bytes": 255 L / 100, a + 128, b + 128, rounded and clipped to 0..255 (as OpenCV stores
                  8-bit images, up to its tables' rounding; [X])
    """
    c = np.asarray(rgb, np.float64) / 255
    linear = np.where(c <= 0.04045, c / 12.92, ((np.maximum(c, 0.04045) + 0.055) / 1.055) ** 2.4)
    t = linear @ XYZ.T / white
    f = np.where(t > (6 / 29) ** 3, np.cbrt(t), t / (3 * (6 / 29) ** 2) + 4 / 29)
    lab = np.stack(
        [116 * f[..., 1] - 16, 500 * (f[..., 0] - f[..., 1]), 200 * (f[..., 1] - f[..., 2])], -1
    )
    if unit == "bytes":
        lab = np.clip(np.round(lab * [2.55, 1, 1] + [0, 128, 128]), 0, 255)
    return lab


def lab_to_rgb(lab, white=WHITE, unit="float"):
    """The inverse, clipped to 0..255 (colours that no screen has); "bytes": rounded."""
    lab = np.asarray(lab, np.float64)
    if unit == "bytes":
        lab = (lab - [0, 128, 128]) / [2.55, 1, 1]
    y = (lab[..., 0] + 16) / 116
    f = np.stack([y + lab[..., 1] / 500, y, y - lab[..., 2] / 200], -1)
    t = np.where(f > 6 / 29, f**3, 3 * (6 / 29) ** 2 * (f - 4 / 29))
    linear = np.maximum((t * white) @ np.linalg.inv(XYZ).T, 0)
    c = np.where(linear <= 0.0031308, 12.92 * linear, 1.055 * linear ** (1 / 2.4) - 0.055)
    rgb = np.clip(255 * c, 0, 255)
    return np.round(rgb) if unit == "bytes" else rgb


def lab_statistics(image, unit="float", white=WHITE):
    """(mean, std) per channel of the image in LAB: the six numbers sent; std with n."""
    lab = rgb_to_lab(image, white, unit).reshape(-1, 3)
    return lab.mean(0), lab.std(0)


def lab_transfer(image, style, unit="float", white=WHITE):
    """(sigma_T / sigma_S) (x - mu_S) + mu_T in LAB, back to RGB (fani 5.16, caldarola 6.1).

    style: (mu_T, sigma_T) of the donor. A channel without spread (0 / 0 in print) becomes mu_T.
    unit="bytes" ([X]): all in 8-bit LAB; the result is clipped to 0..255 and cut to integers
    before it goes back.
    """
    lab = rgb_to_lab(image, white, unit)
    mean, std = lab_statistics(image, unit, white)
    ratio = np.array([t / s if s > 0 else 0.0 for t, s in zip(style[1], std, strict=True)])
    lab = ratio * (lab - mean) + style[0]
    if unit == "bytes":
        lab = np.floor(np.clip(lab, 0, 255))
    return lab_to_rgb(lab, white, unit)


def lab_client(clients, client, picks, which="all", half="even", bank_half="all", unit="float"):
    """LAB of a client's images with `picks` from the bank of all (or other) clients."""
    bank = bank_of(clients, lambda x: lab_statistics(x, unit), bank_half)
    move = lambda i, x, entry: lab_transfer(x, entry, unit)
    return restyled(clients[client], donors(bank, client, which), picks, move, half)


# ---- LADD: styles and clusters -----------------------------------------------------------------


def style(image, half=1):
    """a: the (3, 2b + 1, 2b + 1) window of the amplitude around the constant (2.14 a)."""
    top, bottom, left, right = band(*image.shape[:2], half=half)
    return spectrum(image)[0][top:bottom, left:right].transpose(2, 0, 1)


def client_style(images, half=1):
    """a_k, what a client uploads: the mean over its images. 27 numbers for 3 x 3.

    Amplitudes grow with H W: images must have one size first ([X]: 1024 x 512, BGR).
    """
    return np.mean([style(x, half) for x in images], axis=0)


def with_style(image, a, lam=1.0, finish=None):
    """FDA with an uploaded style: pre-training augmentation, and the restyling of test images."""
    where = band(*image.shape[:2], half=a.shape[1] // 2)
    return swap(image, a.transpose(1, 2, 0), where, lam, "real", finish)


def distances(styles):
    """L2 between the flattened styles: (K, K)."""
    flat = np.asarray(styles, np.float64).reshape(len(styles), -1)
    return np.array([[np.sqrt(((a - b) ** 2).sum()) for b in flat] for a in flat])


def within(styles, labels):
    """delta_k (Alg. 9): mean distance to the others of one's own cluster; 0 if alone."""
    d, out = distances(styles), np.zeros(len(labels))
    for k in range(len(labels)):
        others = [h for h in range(len(labels)) if labels[h] == labels[k] and h != k]
        out[k] = np.mean([d[k, h] for h in others]) if others else 0.0
    return out


def silhouettes(styles, labels):
    """sigma_k = (Delta_k - delta_k) / max of both; 0 if alone, or if both are 0 (Alg. 9).

    Delta_k: the smallest mean distance to another cluster. One cluster only: all 0.
    """
    d, delta, out = distances(styles), within(styles, labels), np.zeros(len(labels))
    for k in range(len(labels)):
        means = [
            np.mean([d[k, h] for h in range(len(labels)) if labels[h] == s])
            for s in sorted(set(labels))
            if s != labels[k]
        ]
        alone = sum(s == labels[k] for s in labels) == 1
        if means and not alone and max(min(means), delta[k]) > 0:
            out[k] = (min(means) - delta[k]) / max(min(means), delta[k])
    return out


def k_means(flat, clusters, seed):
    """Labels of one k-means run (scikit-learn, one k-means++ start)."""
    from sklearn.cluster import KMeans

    return KMeans(clusters, n_init=1, random_state=seed).fit(flat).labels_.tolist()


def inertia(styles, labels):
    """Sum of squared distances to the cluster means."""
    flat = np.asarray(styles, np.float64).reshape(len(styles), -1)
    labels = np.asarray(labels)
    return sum(((flat[labels == s] - flat[labels == s].mean(0)) ** 2).sum() for s in set(labels))


def cluster(styles, numbers=range(4, 20), seeds=range(10), keep="delta", run=k_means):
    """(labels, scores {o: mean silhouette}) of Algorithm 9 (caldarola: 7).

    numbers: {m, ..., n - 1}, not printed; seeds: R, not printed ([X]: 4..19, 10 starts).
    keep: of the runs for one o, that with the smallest sum of delta_k (as printed, r in R), or
          "inertia" ([X]: what k-means itself keeps). First of equals.
    o with the largest mean silhouette, the smallest of equals; o > K is left out.
    """
    flat = np.asarray(styles, np.float64).reshape(len(styles), -1)
    cost = (
        (lambda s: within(styles, s).sum()) if keep == "delta" else (lambda s: inertia(styles, s))
    )
    best, scores = {}, {}
    for o in numbers:
        if o <= len(flat):
            best[o] = min([run(flat, o, r) for r in seeds], key=cost)
            scores[o] = float(np.mean(silhouettes(styles, best[o])))
    o = max(sorted(scores), key=lambda o: scores[o])
    return best[o], scores


def same_partition(a, b):
    """Whether two labellings are one up to the clusters' names."""
    pairs = set(zip(a, b, strict=True))
    return len(pairs) == len(set(a)) == len(set(b))


def centroids(styles, labels):
    """mu_s: mean of a_k over all clients of the cluster, unweighted, active or not (2.14 e)."""
    return [
        np.mean([a for a, s in zip(styles, labels, strict=True) if s == c], axis=0)
        for c in range(max(labels) + 1)
    ]


def nearest(a, centres):
    """s*: index of the centre nearest in L2, the first of equals."""
    return int(np.argmin([np.sqrt(((a - mu) ** 2).sum()) for mu in centres]))


def predicted(image, centres, models, restyle=True, half=1, finish=None):
    """(s*, output): each test image by the model of the nearest style (2.14 e).

    restyle=True: the image first takes the style mu_s* (fani); False: as it is ([X], caldarola).
    models: one function of an image per cluster: the students theta_s, not the teachers.
    """
    s = nearest(style(image, half), centres)
    image = with_style(image, centres[s], finish=finish) if restyle else image
    return s, models[s](image)


# ---- LADD: aggregation and teachers ------------------------------------------------------------


def specific(tags, which, head_norm=True, statistics=True):
    """Names of v, the parameters that belong to a cluster; the rest is u (fani Table 5.18).

    tags: {name: (place, kind)}, place "backbone" | "head", kind "weight" | "scale" | "shift" |
    "mean" | "var" (the last four of BatchNorm).
    which "none" (FedAvg), "all", "cls" (the head), "backbone", "bn".
    head_norm=False: "cls" and "backbone" without their BatchNorm ([X]: convolutions only).
    statistics=False: running means and variances are never specific.
    """
    names = []
    for name, (place, kind) in tags.items():
        norm = kind != "weight"
        is_in = {
            "none": False,
            "all": True,
            "cls": place == "head" and (head_norm or not norm),
            "backbone": place == "backbone" and (head_norm or not norm),
            "bn": norm,
        }[which]
        if is_in and (statistics or kind not in ("mean", "var")):
            names.append(name)
    return names


def mean_of(models, sizes, name):
    """sum n_k x_k / sum n_k of one array."""
    return sum(n * m[name] for n, m in zip(sizes, models, strict=True)) / sum(sizes)


def aggregate(models, overall, trained, sizes, cluster_of, own, empty="keep"):
    """(models, overall) after a round: one full model per cluster, and one for all (Alg. 10).

    trained: {k: model} of the active clients; own: the names of v (`specific`).
    u <- mean over all active clients, by n_k; v_s <- over the active clients of cluster s (8 A9).
    A cluster none of whose clients is active still gets the new u, and for v
      empty "keep": what it had ([D]);  "overall": `overall` of before this round ([X])
    overall: u, and for v the unweighted mean of v_s over the clusters that were active ([X]; the
    documents have no such model). Nobody active (or with examples): nothing changes.
    """
    active = [k for k in trained if sizes[k] > 0]
    if not active:
        return models, overall
    all_of = [trained[k] for k in active], [sizes[k] for k in active]
    groups = {}
    for k in active:
        groups.setdefault(cluster_of[k], []).append(k)
    new = []
    for s, model in enumerate(models):
        members = groups.get(s, [])
        out = {}
        for name in model:
            if name not in own:
                out[name] = mean_of(*all_of, name)
            elif members:
                out[name] = mean_of(
                    [trained[k] for k in members], [sizes[k] for k in members], name
                )
            else:
                out[name] = model[name] if empty == "keep" else overall[name]
        new.append(out)
    one = {}
    for name in overall:
        if name in own:
            one[name] = sum(new[s][name] for s in groups) / len(groups)
        else:
            one[name] = mean_of(*all_of, name)
    return new, one


def next_teacher(teacher, model, t, omega, start, count=None):
    """theta-hat_s after round t (Alg. 10; caldarola 5.9): {name: array}, every array alike.

    t mod omega != 0: unchanged. t < start: the model. Else the mean (tau teacher + model) /
    (tau + 1) with tau = (t - start) / omega as printed, or `count`, the number of models already
    averaged ([X]). They differ if omega does not divide start: tau starts as a fraction above 0.
    start=None: no averaging, always the model.
    """
    if t % omega:
        return teacher
    if start is None or t < start:
        return dict(model)
    tau = (t - start) / omega if count is None else count
    return {n: (tau * teacher[n] + model[n]) / (tau + 1) for n in model}


def ladd(
    begin,
    clusters,
    cohorts,
    train,
    sizes,
    cluster_of,
    own,
    omega=1,
    start=None,
    first=1,
    empty="keep",
    tau="printed",
):
    """(models, teachers, overall) after the cohorts of rounds first, first + 1, ... (Alg. 10).

    train(t, k, model, teacher, begin) -> model; a client starts from {u, v_s} of its cluster s.
    The teacher changes at the end of the round, with the model just aggregated (Alg. 10 writes
    both indices); first: whether rounds count from 1 or 0. Clusters that were not active update
    their teacher like the others. tau "printed" or "count", see `next_teacher`.
    """
    models, teachers = [dict(begin)] * clusters, [dict(begin)] * clusters
    overall, averaged = dict(begin), 0
    for t, cohort in enumerate(cohorts, first):
        trained = {}
        for k in cohort:
            if sizes[k] > 0:
                s = cluster_of[k]
                trained[k] = train(t, k, models[s], teachers[s], begin)
        models, overall = aggregate(models, overall, trained, sizes, cluster_of, own, empty)
        count = averaged if tau == "count" else None
        pairs = zip(teachers, models, strict=True)
        teachers = [next_teacher(g, w, t, omega, start, count) for g, w in pairs]
        averaged += start is not None and t >= start and t % omega == 0
    return models, teachers, overall


# ---- LADD: local losses ------------------------------------------------------------------------


def pixel_mean(values, real=None, kept=None):
    """Mean over the pixels of real images; kept: values outside count as 0, but are counted."""
    exists = existing(values, real)
    values = values if kept is None else np.where(kept, values, 0.0)
    return values[exists].mean() if exists.any() else 0.0


def entropy(z, real=None, rule="printed"):
    """L_E = CE(p, p) = -sum p log p, mean over pixels; its gradient flows through both p.

    rule "released" ([X], times 0.005 by default, 0 in the configurations):
    ((H / ln C)^2 + 1e-8)^2 per pixel.
    """
    h = -(softmax(z) * log_softmax(z)).sum(-1)
    if rule == "released":
        h = ((h / np.log(z.shape[-1])) ** 2 + 1e-8) ** 2
    return pixel_mean(h, real)


def kl(z, other, real=None, direction="student"):
    """KL(p || q) of softmax, mean over pixels: L_TS (teacher) and L_KD (pre-trained), constants.

    direction "student": sum p (log p - log q), as printed; "teacher": sum q (log q - log p).
    """
    a, b = (z, other) if direction == "student" else (other, z)
    return pixel_mean((softmax(a) * (log_softmax(a) - log_softmax(b))).sum(-1), real)


def pseudo_labels(z, rule="released", threshold=0.9, share=0.66, ignore=IGNORE, real=None):
    """Most probable classes where they are trusted, else `ignore`; z: logits of whoever labels.

    rule "threshold": confidence > threshold
         "released":  confidence > threshold, or among the floor(share n) most confident of the n
                      pixels of that predicted class in that image ([X]; first of equals)
         "fda":       confidence >= min(threshold, x_c), x_c the entry round(share n) (from 0, at
                      most n - 1) of the n confidences of class c in rising order, over all images
                      at once, hence about 1 - share of them (the FDA authors' code)
    Whose logits: the local model's (fani), the teacher's (caldarola, [X]). Padded images, `real`
    False, get `ignore` and are in no count.
    """
    p, exists = softmax(np.asarray(z, np.float64)), existing(z[..., 0], real)
    guess, sure = p.argmax(-1), p.max(-1)
    keep = exists & (sure > threshold)
    if rule == "fda":
        keep = np.zeros_like(keep)
        for c in range(z.shape[-1]):
            mine = exists & (guess == c)
            if mine.any():
                rising = np.sort(sure[mine])
                cut = rising[min(round(share * len(rising)), len(rising) - 1)]
                keep |= mine & (sure >= min(threshold, cut))
    if rule == "released":
        for i in range(len(z)):
            for c in range(z.shape[-1]):
                mine = [
                    at for at in np.ndindex(guess[i].shape) if guess[i][at] == c and exists[i][at]
                ]
                order = np.argsort([-sure[i][at] for at in mine], kind="stable")
                for j in order[: int(share * len(mine))]:
                    keep[i][mine[j]] = True
    return np.where(keep, guess, ignore)


def self_training(z, labels, ignore=IGNORE, real=None, over="all"):
    """CE(p, pseudo-labels). over "all" pixels, ignored ones as 0 ([X]), or those "kept" (0: 0)."""
    exists, kept = existing(labels, real), labels != ignore
    values = pixel_losses(z, labels, ignore)
    if over == "all":
        return pixel_mean(values, real)
    return values[exists & kept].mean() if (exists & kept).any() else 0.0


def released_distillation(z, begin, alpha=0.5, kept=None, real=None):
    """[X] L_KD = -mean over pixels AND classes of log p softmax(alpha logits of theta^0).

    kept: pixels where the pre-trained model's own pseudo-labels are trusted; others count as 0.
    """
    values = -(log_softmax(z) * softmax(alpha * np.asarray(begin, np.float64))).mean(-1)
    return pixel_mean(values, real, kept)


def local_loss(z, teacher, begin, lam, rule="printed", labels_by=None, pseudo=None, real=None):
    """(total, parts) for logits of the student, the cluster's teacher and the pre-trained model.

    rule "printed" (fani 5.21): L_E + (L_CE + L_TS) + lam L_KD
                   L_TS = KL(p || teacher), L_KD = KL(p || begin), pseudo-labels of the student
                   itself by "threshold"
         "symbols" (fani's list of symbols): L_E + L_TS + lam L_KD
         "caldarola" (5.10): L_CE + lam L_KD, pseudo-labels of the teacher by "released"
         "released" ([X]): the same with `released_distillation` masked as it says
    labels_by "student" | "teacher" and pseudo (a rule of `pseudo_labels`) override. L_CE is a mean
    over all pixels. Teacher, begin and pseudo-labels are constants for the gradient.
    """
    printed = rule in ("printed", "symbols")
    labels_by = labels_by or ("student" if printed else "teacher")
    pseudo = pseudo or ("threshold" if printed else "released")
    labels = pseudo_labels(z if labels_by == "student" else teacher, pseudo, real=real)
    parts = {"kd": kl(z, begin, real)}
    if rule != "symbols":
        parts["ce"] = self_training(z, labels, real=real)
    if printed:
        parts["entropy"], parts["teacher"] = entropy(z, real), kl(z, teacher, real)
    if rule == "released":
        kept = pseudo_labels(begin, pseudo, real=real) != IGNORE
        parts["kd"] = released_distillation(z, begin, kept=kept, real=real)
    return sum(lam * v if n == "kd" else v for n, v in parts.items()), parts


def slope(f, x, step=1e-6):
    """Gradient of f at x by central differences (pseudo-labels must not flip within the step)."""
    out = np.zeros_like(x, np.float64)
    for at in np.ndindex(x.shape):
        e = np.zeros_like(out)
        e[at] = step
        out[at] = (f(x + e) - f(x - e)) / (2 * step)
    return out
