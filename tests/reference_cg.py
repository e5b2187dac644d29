"""FedCG (Caldarola et al. 2021) in plain NumPy, float64, on a ReLU network of linear layers.

Written from caldarola.md 2.14, the tables of 6.6 and question 31 of 8; apart from the package.

    (5.11)  student: CE(student(x), d^),  d^ = argmax teacher(x)
    (5.12)  z^l = f_a^l(h) + lambda_l sum_d w_d f_{s,d}^l(h)
    (5.13)  V^ = ReLU(A V W^l), row d of V holds the parameters of f_{s,d}^l
    (5.14)  A_ii = beta,  A_ij = (1 - beta) h_ij / sum_{d != i} h_id,  h_ij = 1 / ||w_s^i - w_s^j||

`params` is a dict of arrays, layers i = 0, 1, ...:
    W{i} (inputs, outputs), b{i}    the layer that all domains share, f_a
    V{i} (D, q)                     only at layers with a branch; q = inputs * outputs + outputs, a
                                    row is the kernel of a domain, row by row, then its bias
    lambda{i}                       a number, only where V{i} is
    G{i} (q, q)                     W^l of (5.13), if the graph has one
    E{i} (r, q)                     if there is one, G{i} is (q, r) and the two are the bottleneck
A classifier of domains is a dict with W{i} and b{i} alone. `weights` is (examples, D): w_d.
`adjacency` is {layer: (D, D)}. A client is {"x", "y", "batches": index arrays}, and may have
"domains", labels that then replace the teacher's (oracle domains, Table 5.9). `state` is {"params",
"student", "teacher", "adjacency", "round"}. Nothing is ever changed in place.

`how` stands for relu (True: (5.13); False: V^ = A V W^l) and residual (True: (5.12); False: the
rows "GCN" of Table 5.9). There, A = U is `uniform`, A = H is `hamming`, W is G{i} or its absence.

Choices where the spec leaves room (a second reading that it names is an option):
 1.  z^l of (5.12) is what ReLU reads: the branch is added before it.
 2.  "GCN" without "FedCG" in Table 5.9: a layer with a branch is f_{s,d} alone, no f_a, no lambda;
     its W{i} and b{i} stay as they are.
 3.  V^ takes ReLU of parameters as printed, so that kernels and biases of branches are never
     negative; relu=False is the column of Table 5.9 without it.
 4.  Bottleneck: V^ = ReLU(ReLU(A V G) E), no biases.
 5.  w_s of (5.14) are rows of V, not of V^, of all layers with a branch, one after the other: one A
     (it has no index l). one_graph=False: an A for every layer. Both are the same for a last layer.
 6.  Domains with equal parameters have h = infinity: they share 1 - beta in equal parts, the limit.
     One domain alone has A = 1: rows always sum to 1.
 7.  Initial A: `identity` (L3350, the default of `start`) or `uniform` (L3330), to which the spec
     gives no number: 1/D everywhere, or with beta: A_ii = beta and the rest in equal parts.
 8.  Hamming: (5.14) with the number of attributes that differ for the norm, same beta.
 9.  A is a constant of local training; the server makes it anew after every average, so that the
     initial A serves the first round only. learn_graph=False: it stays (oracle ablation).
 10. Local training: one loop; a batch moves the network by the gradient of the cross-entropy, then
     the student by that of (5.11). The student reads inputs, no features; the two share nothing.
     With given domains the student learns those.
 11. Training takes the teacher's hard label (ties: the first) as w; tests take the student's
     softmax, as the text says. The print has the teacher's symbol: by="teacher". soft=False:
     one-hot (Table 5.10, "Soft").
 12. Everything is averaged as in FedAvg, N_k / N, also all rows of V (point 4). An empty domain
     then keeps its row if A is diagonal; else it has a gradient through A, and moves.
     per_domain=True: row d is averaged with the number of examples that client k has in d, in its
     training data, by the teacher of the round; an empty domain keeps its row whatever A is.
 13. The teacher becomes the averaged student at the end of every `every`-th round; 0: never.
 14. Clients without examples are left out; a round of none counts as a round and changes nothing
     else.
 15. Initial values, lambda's too, are the caller's. A branch of 0 never moves if lambda is 0 too,
     nor does V = 0 under the ReLU of (5.13), whose slope at 0 is 0 here.
"""

import numpy as np
from reference_open import softmax
from reference_teachers import cross_entropy

# Graphs of domains.


def identity(count):
    return np.eye(count)


def uniform(count, beta=None):
    if beta is None:
        return np.full((count, count), 1 / count)
    return graph(np.ones((count, count)), beta)


def graph(distances, beta=0.5):
    """(5.14) for given distances between domains."""
    count = len(distances)
    if count == 1:
        return np.ones((1, 1))
    a = np.zeros((count, count))
    for i in range(count):
        others = [j for j in range(count) if j != i]
        same = [j for j in others if distances[i][j] == 0]
        h = {j: 1.0 for j in same} or {j: 1 / distances[i][j] for j in others}
        a[i, i] = beta
        for j in h:
            a[i, j] = (1 - beta) * h[j] / sum(h.values())
    return a


def hamming(attributes, beta=0.5):
    """attributes: (D, attributes of an example of domain d)."""
    rows = np.asarray(attributes)
    return graph([[(a != b).sum() for b in rows] for a in rows], beta)


def similarity(v, beta=0.5):
    """(5.14) for domain parameters, one row per domain."""
    return graph([[np.linalg.norm(a - b) for b in v] for a in v], beta)


def branches(params):
    return [i for i in range(depth(params)) if f"V{i}" in params]


def adjacency_of(params, beta=0.5, one_graph=True):
    """{layer: A} from the domain parameters as they are."""
    if not branches(params):
        return {}
    whole = np.concatenate([params[f"V{i}"] for i in branches(params)], axis=1)
    rows = {i: whole if one_graph else params[f"V{i}"] for i in branches(params)}
    return {i: similarity(v, beta) for i, v in rows.items()}


def graph_convolve(v, a, g=None, e=None, relu=True):
    """(5.13): the parameters that are used."""
    u = a @ v
    if g is not None:
        u = u @ g
    if e is not None:
        u = np.maximum(u, 0) @ e
    return np.maximum(u, 0) if relu else u


def graph_gradient(v, a, signal, g=None, e=None, relu=True):
    """{"V", "G", "E"}: gradients of sum(signal * V^)."""
    mixed = a @ v
    if relu:
        signal = signal * (graph_convolve(v, a, g, e, relu=False) > 0)
    grads = {}
    if e is not None:
        inner = mixed @ g
        grads["E"] = np.maximum(inner, 0).T @ signal
        signal = (signal @ e.T) * (inner > 0)
    if g is not None:
        grads["G"] = mixed.T @ signal
        signal = signal @ g.T
    return grads | {"V": a.T @ signal}


# The network.


def depth(params):
    return sum(n.startswith("W") for n in params)


def split(row, shape):
    """(kernel, bias) of one domain."""
    size = shape[0] * shape[1]
    return row[:size].reshape(shape), row[size:]


def convolved(params, i, adjacency, relu=True):
    """[(kernel, bias) of every domain] at layer i."""
    g, e = params.get(f"G{i}"), params.get(f"E{i}")
    used = graph_convolve(params[f"V{i}"], adjacency[i], g, e, relu)
    return [split(row, params[f"W{i}"].shape) for row in used]


def forward(params, x, weights=None, adjacency=None, relu=True, residual=True):
    """(What every layer reads, {layer: sum_d w_d f_{s,d}}, logits)."""
    inputs, specific, h = [], {}, x
    for i in range(depth(params)):
        inputs.append(h)
        z = h @ params[f"W{i}"] + params[f"b{i}"]
        if f"V{i}" in params:
            domains = convolved(params, i, adjacency, relu)
            each = np.stack([h @ kernel + bias for kernel, bias in domains], axis=1)
            specific[i] = (weights[:, :, None] * each).sum(1)
            z = z + params[f"lambda{i}"] * specific[i] if residual else specific[i]
        h = np.maximum(z, 0)
    return inputs, specific, z


def gradient(params, x, y, weights=None, adjacency=None, relu=True, residual=True):
    """(Mean cross-entropy, its gradient in all of `params`)."""
    inputs, specific, z = forward(params, x, weights, adjacency, relu, residual)
    loss, signal = cross_entropy(z, y)
    grads = {}
    for i in reversed(range(depth(params))):
        h, branch = inputs[i], i in specific
        shared = signal if residual or not branch else 0 * signal
        grads[f"W{i}"], grads[f"b{i}"] = h.T @ shared, shared.sum(0)
        back = shared @ params[f"W{i}"].T
        if branch:
            grads[f"lambda{i}"] = (shared * specific[i]).sum()
            pull = params[f"lambda{i}"] * signal if residual else signal
            rows = []
            for d, (kernel, _) in enumerate(convolved(params, i, adjacency, relu)):
                own = weights[:, d, None] * pull
                rows.append(np.concatenate([(h.T @ own).ravel(), own.sum(0)]))
                back = back + own @ kernel.T
            g, e = params.get(f"G{i}"), params.get(f"E{i}")
            found = graph_gradient(params[f"V{i}"], adjacency[i], np.stack(rows), g, e, relu)
            grads |= {f"{n}{i}": value for n, value in found.items()}
        signal = back * (h > 0)
    return loss, grads


def assign(classifier, x, soft=False):
    """w: (examples, D), probabilities or one-hot."""
    z = forward(classifier, x)[2]
    return softmax(z) if soft else np.eye(z.shape[1])[z.argmax(1)]


def predict(state, x, by="student", soft=True, **how):
    """Logits at test time."""
    weights = assign(state[by], x, soft)
    return forward(state["params"], x, weights, state["adjacency"], **how)[2]


# Rounds.


def start(params, student, teacher, adjacency=None):
    """The state before the first round; A is the identity unless it is given."""
    default = {i: identity(len(params[f"V{i}"])) for i in branches(params)}
    return {
        "params": params,
        "student": student,
        "teacher": teacher,
        "adjacency": default if adjacency is None else adjacency,
        "round": 0,
    }


def domain_weights(state, client):
    """One-hot domains of all of a client's examples, as in training."""
    if "domains" in client:
        return np.eye(domains_of(state["student"]))[client["domains"]]
    return assign(state["teacher"], client["x"])


def domains_of(student):
    """D: how many domains a classifier knows."""
    return len(student[f"b{depth(student) - 1}"])


def descend(params, grads, lr):
    return {n: value - lr * grads[n] for n, value in params.items()}


def local_sgd(state, client, lr, student_lr=None, **how):
    """(params, student) of a client after its batches."""
    params, student = state["params"], state["student"]
    weights = domain_weights(state, client)
    for batch in client["batches"]:
        x, y, w = client["x"][batch], client["y"][batch], weights[batch]
        grads = gradient(params, x, y, w, state["adjacency"], **how)[1]
        params = descend(params, grads, lr)
        taught = gradient(student, x, w.argmax(1))[1]
        student = descend(student, taught, lr if student_lr is None else student_lr)
    return params, student


def average(models, counts):
    total = sum(counts)
    pairs = list(zip(models, counts, strict=True))
    return {n: sum(count / total * m[n] for m, count in pairs) for n in models[0]}


def average_domains(old, models, domain_counts):
    """{V{i}}: every row by the examples of its domain. domain_counts: per client, (D,)."""
    total = sum(domain_counts)
    out = {}
    for i in branches(old):
        out[f"V{i}"] = old[f"V{i}"].copy()
        for d in np.flatnonzero(total):
            shares = [counts[d] / total[d] for counts in domain_counts]
            pairs = zip(shares, models, strict=True)
            out[f"V{i}"][d] = sum(share * m[f"V{i}"][d] for share, m in pairs)
    return out


def round_step(
    state,
    clients,
    lr,
    student_lr=None,
    every=1,
    beta=0.5,
    learn_graph=True,
    one_graph=True,
    per_domain=False,
    **how,
):
    """The state after a round of these clients."""
    clients = [c for c in clients if len(c["x"])]
    t = state["round"] + 1
    if not clients:
        return state | {"round": t}
    trained = [local_sgd(state, c, lr, student_lr, **how) for c in clients]
    counts, models = [len(c["x"]) for c in clients], [params for params, _ in trained]
    params = average(models, counts)
    if per_domain:
        domain_counts = [domain_weights(state, c).sum(0) for c in clients]
        params |= average_domains(state["params"], models, domain_counts)
    student = average([student for _, student in trained], counts)
    return {
        "params": params,
        "student": student,
        "teacher": student if every and t % every == 0 else state["teacher"],
        "adjacency": adjacency_of(params, beta, one_graph) if learn_graph else state["adjacency"],
        "round": t,
    }
