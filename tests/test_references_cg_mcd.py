"""The NumPy versions of FedCG and MCD, against differences, by hand and in limits."""

import itertools

import numpy as np
import pytest
import reference_cg as cg
import reference_mcd as mcd
import reference_open
import reference_personal

D, LR = 3, 0.1
SIZES = (4, 5, 3)


@pytest.fixture
def rng():
    return np.random.default_rng(0)


def close(a, b, tolerance=1e-12):
    assert set(a) == set(b)
    for n in a:
        np.testing.assert_allclose(a[n], b[n], rtol=0, atol=tolerance)


def differ(a, b):
    return np.abs(np.asarray(a) - np.asarray(b)).max() > 1e-6


def slopes(f, params, eps=1e-6):
    out = {}
    for n, a in params.items():
        a = np.asarray(a, float)
        out[n] = np.zeros_like(a)
        for i in np.ndindex(a.shape):
            step = np.zeros_like(a)
            step[i] = eps
            out[n][i] = (f(params | {n: a + step}) - f(params | {n: a - step})) / (2 * eps)
    return out


def linear_layers(rng, sizes):
    out = {}
    for i, shape in enumerate(itertools.pairwise(sizes)):
        out |= {f"W{i}": rng.normal(size=shape), f"b{i}": rng.normal(size=shape[1])}
    return out


def branched(rng, layers, count=D, graph="W"):
    """graph: "" for none, "W", or "bottleneck"."""
    params = linear_layers(rng, SIZES)
    for i in layers:
        q = params[f"W{i}"].size + params[f"b{i}"].size
        params |= {f"V{i}": rng.normal(size=(count, q)), f"lambda{i}": rng.normal()}
        if graph:
            r = 4 if graph == "bottleneck" else q
            params[f"G{i}"] = rng.normal(size=(q, r)) / np.sqrt(q)
        if graph == "bottleneck":
            params[f"E{i}"] = rng.normal(size=(r, q)) / np.sqrt(r)
    return params


def people(rng, counts=(7, 4, 0, 6), domains=None):
    """Clients with batches of 3, two epochs."""
    out = []
    for n in counts:
        orders = [rng.permutation(n) for _ in range(2)]
        batches = [o[i : i + 3] for o in orders for i in range(0, n, 3)]
        data = {"x": rng.normal(size=(n, SIZES[0])), "y": rng.integers(0, SIZES[-1], n)}
        if domains is not None:
            data["domains"] = rng.choice(domains, n)
        out.append(data | {"batches": batches})
    return out


def begin(rng, layers=(1,), adjacency=None, **options):
    params = branched(rng, layers, **options)
    count = options.get("count", D)
    student, teacher = (linear_layers(rng, (SIZES[0], count)) for _ in range(2))
    return cg.start(params, student, teacher, adjacency)


def mixing(rng, layers=(1,), count=D):
    rows = rng.random((count, count))
    return {i: rows / rows.sum(1, keepdims=True) for i in layers}


@pytest.mark.parametrize("graph", ["", "W", "bottleneck"])
@pytest.mark.parametrize("relu", [True, False])
@pytest.mark.parametrize("residual", [True, False])
@pytest.mark.parametrize("layers", [(1,), (0, 1)])
def test_cg_gradient_by_differences(rng, layers, residual, relu, graph):
    params, a = branched(rng, layers, graph=graph), mixing(rng, layers)
    x, y = rng.normal(size=(6, SIZES[0])), rng.integers(0, SIZES[-1], 6)
    how = {"relu": relu, "residual": residual}
    for w in (np.eye(D)[rng.integers(0, D, 6)], rng.dirichlet(np.ones(D), 6)):
        found = cg.gradient(params, x, y, w, a, **how)[1]
        close(found, slopes(lambda p, w=w: cg.gradient(p, x, y, w, a, **how)[0], params), 1e-7)
        assert np.abs(found["V1"]).max() > 1e-3
        assert residual or not found["W1"].any()


def test_graphs_by_hand():
    rows = cg.graph([[0, 1, 3], [1, 0, 2], [3, 2, 0]], beta=0.5)
    np.testing.assert_allclose(rows, [[0.5, 3 / 8, 1 / 8], [1 / 3, 0.5, 1 / 6], [0.2, 0.3, 0.5]])
    v = np.array([[0.0, 0], [3, 4], [0, 4]])
    np.testing.assert_allclose(cg.similarity(v, 0.2)[0], [0.2, 0.8 * 4 / 9, 0.8 * 5 / 9])
    flags = [[0, 0], [0, 1], [1, 1]]
    np.testing.assert_allclose(cg.hamming(flags)[0], [0.5, 1 / 3, 1 / 6])
    assert (cg.uniform(4) == 0.25).all()
    np.testing.assert_allclose(cg.uniform(3, beta=0.5)[1], [0.25, 0.5, 0.25])


def test_equal_domains_and_one_domain():
    v = np.array([[1.0, 1], [1, 1], [5, 5], [1, 1]])
    a = cg.similarity(v)
    np.testing.assert_allclose(a[0], [0.5, 0.25, 0, 0.25])
    np.testing.assert_allclose(a[2], [1 / 6, 1 / 6, 0.5, 1 / 6])
    np.testing.assert_allclose(a.sum(1), 1)
    assert cg.similarity(v[:1]) == [[1.0]]


def test_one_graph_is_of_all_layers(rng):
    params = branched(rng, (0, 1))
    one, own = cg.adjacency_of(params), cg.adjacency_of(params, one_graph=False)
    assert (one[0] == one[1]).all()
    assert differ(own[0], own[1])
    last = branched(rng, (1,))
    close(cg.adjacency_of(last), cg.adjacency_of(last, one_graph=False), 0)


def test_convolution_by_hand():
    v, a = np.array([[1.0, 2], [3, -8]]), np.array([[0.5, 0.5], [0, 1]])
    g = np.array([[0.0, 1], [1, 0]])
    np.testing.assert_array_equal(cg.graph_convolve(v, a, relu=False), [[2, -3], [3, -8]])
    np.testing.assert_array_equal(cg.graph_convolve(v, a, g), [[0, 2], [0, 3]])
    up = np.array([[1.0, 1], [1, -1]])
    np.testing.assert_array_equal(cg.graph_convolve(v, a, g, up), [[2, 0], [3, 0]])


def test_identity_does_not_mix_and_uniform_makes_equal(rng):
    v, g = rng.normal(size=(D, 6)), rng.normal(size=(6, 6))
    np.testing.assert_array_equal(cg.graph_convolve(v, cg.identity(D), relu=False), v)
    changed = v.copy()
    changed[1] += 1
    apart = [cg.graph_convolve(u, cg.identity(D), g) for u in (v, changed)]
    np.testing.assert_array_equal(apart[0][[0, 2]], apart[1][[0, 2]])
    assert differ(apart[0][1], apart[1][1])
    same = cg.graph_convolve(v, cg.uniform(D), g, relu=False)
    np.testing.assert_allclose(same, np.broadcast_to(same[0], same.shape), atol=1e-12)


def test_hard_and_soft_assignment(rng):
    classifier, x = linear_layers(rng, (4, D)), rng.normal(size=(9, 4))
    hard, soft = cg.assign(classifier, x), cg.assign(classifier, x, soft=True)
    np.testing.assert_allclose(soft.sum(1), 1)
    assert set(hard.ravel()) == {0.0, 1.0}
    np.testing.assert_array_equal(hard.argmax(1), soft.argmax(1))
    assert differ(hard, soft)
    ties = {"W0": np.zeros((4, D)), "b0": np.zeros(D)}
    np.testing.assert_array_equal(cg.assign(ties, x).argmax(1), 0)


def test_the_branch_is_a_layer_per_example(rng):
    params = branched(rng, (1,), graph="")
    x, w = rng.normal(size=(5, 4)), rng.dirichlet(np.ones(D), 5)
    z = cg.forward(params, x, w, {1: np.eye(D)}, relu=False)[2]
    for i in range(5):
        row = w[i] @ params["V1"]
        kernel, bias = row[:15].reshape(5, 3), row[15:]
        h = np.maximum(x[i] @ params["W0"] + params["b0"], 0)
        branch = h @ kernel + bias
        np.testing.assert_allclose(
            z[i], h @ params["W1"] + params["b1"] + params["lambda1"] * branch, atol=1e-12
        )


def as_personal(params):
    two = {"W0": "W1", "b0": "b1", "W1": "W", "b1": "b"}
    names = two if "W1" in params else {"W0": "W", "b0": "b"}
    return {names[n]: value for n, value in params.items()}


def test_one_domain_and_no_branch_is_fedavg(rng):
    state, clients = begin(rng, layers=(), count=1), people(rng)
    drawn = {k: [(c["x"][b], c["y"][b]) for b in c["batches"]] for k, c in enumerate(clients)}
    counts = {k: len(c["x"]) for k, c in enumerate(clients)}
    gradient = reference_personal.gradient
    params = as_personal(state["params"])
    for _ in range(2):
        state = cg.round_step(state, clients, LR)
        params = reference_personal.fedavg_round(params, drawn, counts, gradient, LR)
    close(as_personal(state["params"]), params)


def test_one_domain_is_one_layer_more(rng):
    """lambda = 1 and no graph: both kernels have the gradient of their sum, and lambda its own."""
    params = branched(rng, (1,), count=1, graph="") | {"lambda1": 1.0}
    x, y = rng.normal(size=(6, 4)), rng.integers(0, 3, 6)
    found = cg.gradient(params, x, y, np.ones((6, 1)), {1: np.ones((1, 1))}, relu=False)[1]
    kernel, bias = cg.split(params["V1"][0], (5, 3))
    summed = {n: params[n] for n in ("W0", "b0")}
    summed |= {"W1": params["W1"] + kernel, "b1": params["b1"] + bias}
    plain = cg.gradient(summed, x, y)[1]
    close({n: found[n] for n in plain}, plain)
    np.testing.assert_allclose(found["V1"][0], [*plain["W1"].ravel(), *plain["b1"]], atol=1e-12)


def test_student_learns_the_teacher(rng):
    state, clients = begin(rng), people(rng, (30,))
    x, first, expected = clients[0]["x"], state["teacher"], as_personal(state["student"])
    labels = cg.assign(first, x).argmax(1)
    assert len(set(labels)) > 1
    batches = [(x[b], labels[b]) for b in clients[0]["batches"]]
    expected = reference_personal.sgd(expected, batches, reference_personal.gradient, 0.3)
    state = cg.round_step(state, clients, LR, student_lr=0.3, every=2)
    close(as_personal(state["student"]), expected)
    close(state["teacher"], first, 0)
    state = cg.round_step(state, clients, LR, every=2)
    close(state["teacher"], state["student"], 0)
    fixed = cg.round_step(cg.round_step(state, clients, LR, every=0), clients, LR, every=0)
    close(fixed["teacher"], state["teacher"], 0)
    assert differ(fixed["student"]["W0"], state["student"]["W0"])


@pytest.mark.parametrize("mixed", [False, True])
@pytest.mark.parametrize("per_domain", [False, True])
def test_an_empty_domain(rng, per_domain, mixed):
    """Nobody has domain 1: its row moves only through A, and only in a plain average."""
    adjacency = mixing(rng) if mixed else None
    state = begin(rng, adjacency=adjacency)
    new = cg.round_step(state, people(rng, domains=[0, 2]), LR, per_domain=per_domain)
    old, now = state["params"]["V1"], new["params"]["V1"]
    assert differ(old[0], now[0])
    assert differ(old[2], now[2])
    assert differ(old[1], now[1]) == (mixed and not per_domain)


def test_average_of_domains_by_hand(rng):
    """A diagonal, a domain for each client: per domain, a row is that of its client alone."""
    state, clients = begin(rng), people(rng, (4, 6, 3))
    for d, c in enumerate(clients):
        c["domains"] = np.full(len(c["x"]), d)
    own = [cg.local_sgd(state, c, LR)[0]["V1"] for c in clients]
    new = cg.round_step(state, clients, LR, per_domain=True)["params"]["V1"]
    plain = cg.round_step(state, clients, LR)["params"]["V1"]
    old = state["params"]["V1"]
    for d, share in enumerate((4 / 13, 6 / 13, 3 / 13)):
        np.testing.assert_allclose(new[d], own[d][d], atol=1e-12)
        np.testing.assert_allclose(plain[d], old[d] + share * (own[d][d] - old[d]), atol=1e-12)


def test_the_server_makes_the_graph(rng):
    state, clients = begin(rng), people(rng)
    new = cg.round_step(state, clients, LR, beta=0.3)
    close(new["adjacency"], {1: cg.similarity(new["params"]["V1"], 0.3)}, 0)
    close(cg.round_step(state, clients, LR, learn_graph=False)["adjacency"], {1: np.eye(D)}, 0)


def test_cg_empty_clients_and_rounds(rng):
    state, clients = begin(rng), people(rng)
    close(
        cg.round_step(state, clients, LR)["params"],
        cg.round_step(state, [c for c in clients if len(c["x"])], LR)["params"],
        0,
    )
    new = cg.round_step(state, people(rng, (0,)), LR)
    assert new.pop("round") == 1
    assert all(new[n] is state[n] for n in new)


def test_weights_of_a_test(rng):
    state, x = begin(rng, adjacency=mixing(rng)), rng.normal(size=(8, 4))
    found = {
        (by, soft): cg.predict(state, x, by, soft)
        for by in ("student", "teacher")
        for soft in (True, False)
    }
    values = list(found.values())
    assert all(differ(a, b) for i, a in enumerate(values) for b in values[:i])
    w = cg.assign(state["student"], x, soft=True)
    z = cg.forward(state["params"], x, w, state["adjacency"])[2]
    np.testing.assert_array_equal(cg.predict(state, x), z)


# Maximum Classifier Discrepancy.


@pytest.fixture
def model(rng):
    sizes = {"generator": (4, 6, 5), "first": (5, 4, 3), "second": (5, 3)}
    return {name: linear_layers(rng, s) for name, s in sizes.items()}


def labelled(rng, n=6):
    return rng.normal(size=(n, 4)), rng.integers(0, 3, n)


@pytest.mark.parametrize("loss", [mcd.source_loss, mcd.discrepancy_loss])
def test_mcd_gradient_by_differences(rng, model, loss):
    batch = labelled(rng)
    batch = batch if loss is mcd.source_loss else batch[0]
    found = loss(model, batch)[1]
    for name in mcd.ALL:
        expected = slopes(lambda p, name=name: loss(model | {name: p}, batch)[0], model[name])
        close(found[name], expected, 1e-7)
        assert np.abs(found[name]["W0"]).max() > 1e-3


def test_discrepancy_by_hand():
    z1, z2 = (
        np.log([[0.5, 0.25, 0.25], [0.2, 0.2, 0.6]]),
        np.log([[0.25, 0.5, 0.25], [0.2, 0.2, 0.6]]),
    )
    value, *signals = mcd.discrepancy(z1, z2)
    np.testing.assert_allclose(value, 0.5 / 6)
    for i, signal in enumerate(signals):
        at = lambda z, i=i: mcd.discrepancy(*((z["z"], z2) if i == 0 else (z1, z["z"])))[0]
        expected = slopes(at, {"z": (z1, z2)[i]})["z"]
        np.testing.assert_allclose(signal[0], expected[0], atol=1e-7)


def test_equal_classifiers_do_not_differ(rng, model):
    same = model | {"second": model["first"]}
    x, y = labelled(rng)
    value, grads = mcd.discrepancy_loss(same, x)
    assert value == 0
    assert not any(g.any() for part in grads.values() for g in part.values())
    after = mcd.step_c(same, x, LR)
    assert all((after[p][n] == same[p][n]).all() for p in same for n in same[p])
    assert mcd.discrepancy_loss(model, x)[0] > 0
    z = mcd.forward(same, x)[2]
    layers = lambda net: [(net[f"W{i}"], net[f"b{i}"]) for i in range(2)]
    chain = layers(same["generator"]) + layers(same["first"])
    np.testing.assert_allclose(z, reference_open.forward(chain, x)[1], atol=1e-12)
    np.testing.assert_allclose(mcd.predict(same, x), 2 * z)
    p = reference_open.softmax(z)[np.arange(len(y)), y]
    np.testing.assert_allclose(mcd.source_loss(same, (x, y))[0], -2 * np.log(p).mean())


def test_who_moves_in_which_step_and_where(rng, model):
    source, target, lr = labelled(rng), rng.normal(size=(7, 4)), 1e-3
    ce = lambda m: mcd.source_loss(m, source)[0]
    gap = lambda m: mcd.discrepancy_loss(m, target)[0]
    after = {
        "a": mcd.step_a(model, source, lr),
        "b": mcd.step_b(model, source, target, lr),
        "alone": mcd.step_b(model, None, target, lr),
        "c": mcd.step_c(model, target, lr, 1),
    }
    parts = {"a": set(mcd.ALL), "b": {"first", "second"}, "alone": {"first", "second"}}
    for step, new in after.items():
        moved = {p for p in mcd.ALL if differ(new[p]["W0"], model[p]["W0"])}
        assert moved == parts.get(step, {"generator"})
    assert ce(after["a"]) < ce(model)
    assert ce(after["b"]) - gap(after["b"]) < ce(model) - gap(model)
    assert gap(after["alone"]) > gap(model)
    assert gap(after["c"]) < gap(model)


def test_step_c_is_repeated(rng, model):
    target, once = rng.normal(size=(7, 4)), model
    for _ in range(4):
        once = mcd.step_c(once, target, LR, 1)
    close(mcd.step_c(model, target, LR)["generator"], once["generator"], 0)
    assert differ(once["generator"]["W0"], mcd.step_c(model, target, LR, 3)["generator"]["W0"])


def same_model(a, b, tolerance=1e-12):
    for name in mcd.ALL:
        close(a[name], b[name], tolerance)


def halves(rng, counts, batches=2):
    """Clients whose batches are their examples in order, in equal parts."""
    out = []
    for n in counts:
        x = rng.normal(size=(n, 4))
        out.append({"x": x, "batches": np.split(np.arange(n), batches)})
    return out


def test_one_client_is_centralised(rng, model):
    clients, sources = halves(rng, (8, 0)), [labelled(rng) for _ in range(2)]
    clients[0]["source"] = sources
    central = mcd.train(model, sources, mcd.targets_of(clients[0]), LR)
    same_model(mcd.joint_round(model, clients, LR), central)
    same_model(mcd.synchronous_round(model, sources, clients, LR), central)
    split = mcd.split_round(model, sources, clients, LR)
    by_hand = mcd.step_a(mcd.step_a(model, sources[0], LR), sources[1], LR)
    for target in mcd.targets_of(clients[0]):
        by_hand = mcd.step_c(mcd.step_b(by_hand, None, target, LR), target, LR)
    same_model(split, by_hand)
    assert differ(split["first"]["W0"], central["first"]["W0"])


def test_synchronous_clients_are_their_union(rng, model):
    clients, sources = halves(rng, (8, 0, 4)), [labelled(rng) for _ in range(2)]
    union = [
        np.concatenate(t) for t in zip(*map(mcd.targets_of, (clients[0], clients[2])), strict=True)
    ]
    found = mcd.synchronous_round(model, sources, clients, LR)
    same_model(found, mcd.train(model, sources, union, LR))


def test_split_round_is_a_weighted_mean(rng, model):
    clients, sources = halves(rng, (8, 0, 4)), [labelled(rng)]
    begun = mcd.split_round(model, sources, [], LR)
    same_model(begun, mcd.step_a(model, sources[0], LR), 0)
    same_model(begun, mcd.synchronous_round(model, sources, [], LR), 0)
    one, two = (mcd.local(begun, clients[k], LR) for k in (0, 2))
    mean = {p: {n: (2 * one[p][n] + two[p][n]) / 3 for n in one[p]} for p in one}
    same_model(mcd.split_round(model, sources, clients, LR), mean)
    slow = mcd.split_round(model, sources, [], LR, server_lr=0.0)
    same_model(slow, model, 0)
