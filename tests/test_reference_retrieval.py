"""The NumPy version of retrieval, against hand, brute force and finite differences."""

import itertools

import numpy as np
import pytest
import reference_retrieval as ref


@pytest.fixture
def rng():
    return np.random.default_rng(0)


def differences(f, x, step=1e-6):
    """The gradient of f at x, one coordinate at a time."""
    out = np.zeros_like(x)
    for at in np.ndindex(x.shape):
        up, down = x.copy(), x.copy()
        up[at] += step
        down[at] -= step
        out[at] = (f(up) - f(down)) / (2 * step)
    return out


def test_gem_by_hand_and_at_its_limits(rng):
    x = np.array([1.0, 2, 3, 6]).reshape(2, 2, 1)
    np.testing.assert_allclose(ref.gem(x, 1), [3])
    np.testing.assert_allclose(ref.gem(x, 2), [np.sqrt(12.5)])
    np.testing.assert_allclose(ref.gem(x, 3), [63 ** (1 / 3)])
    np.testing.assert_allclose(ref.gem(x, 200.0), [6], rtol=1e-2)
    np.testing.assert_allclose(ref.gem(np.full((4, 5, 2), 0.7), 3.3), [0.7, 0.7])
    assert ref.gem(rng.normal(size=(3, 4, 5, 6)), 3).shape == (3, 6)
    np.testing.assert_allclose(ref.gem(-np.ones((2, 2, 1)), 3, eps=1e-3), [1e-3])


def test_gem_gradients_are_those_of_finite_differences(rng):
    x, upstream = rng.uniform(0.2, 2, (3, 2, 4)), rng.normal(size=4)
    x[0, 0, 0] = -0.5  # below eps
    dx, dp = ref.gem_gradients(x, 2.7, upstream)
    loss = lambda x, p: float(np.sum(upstream * ref.gem(x, p)))
    np.testing.assert_allclose(dx, differences(lambda x: loss(x, 2.7), x), atol=1e-8)
    slope = differences(lambda p: loss(x, p[0]), np.array([2.7]))
    np.testing.assert_allclose(dp, slope[0], atol=1e-8)
    assert dx[0, 0, 0] == 0


def test_normalised_vectors_have_length_one(rng):
    np.testing.assert_allclose(ref.l2_normalised(np.array([[3.0, 4]])), [[0.6, 0.8]])
    assert not ref.l2_normalised(np.zeros((1, 3))).any()
    x, u = rng.normal(size=(2, 5)), rng.normal(size=(2, 5))
    slope = differences(lambda x: float(np.sum(u * ref.l2_normalised(x))), x)
    np.testing.assert_allclose(ref.l2_normalised_backward(x, u), slope, atol=1e-8)


def test_triplet_losses_by_hand():
    q, p = np.array([[0.0, 0]] * 3), np.array([[3.0, 4]] * 3)
    n = np.array([[0.0, 4], [9, 0], [5, 0]])
    # d(q, p) = 5; d(q, n) = 4, 9, 5; squared 25 against 16, 81, 25.
    np.testing.assert_allclose(ref.triplet_losses(q, p, n, 0.5), [1.5, 0, 0.5])
    np.testing.assert_allclose(ref.triplet_losses(q, p, n, 0.5, squared=True), [9.5, 0, 0.5])
    assert ref.triplet_loss(q, p, n, 0.5) == pytest.approx(2 / 3)


@pytest.mark.parametrize("squared", [False, True])
def test_triplet_gradients_are_those_of_finite_differences(rng, squared):
    q, p, n = rng.normal(size=(3, 6, 4))
    losses = ref.triplet_losses(q, p, n, 0.3, squared)
    assert 0 < np.count_nonzero(losses) < 6  # some triplets are satisfied
    found = ref.triplet_gradients(q, p, n, 0.3, squared)
    total = lambda *x: float(ref.triplet_losses(*x, 0.3, squared).sum())
    parts = [lambda x: total(x, p, n), lambda x: total(q, x, n), lambda x: total(q, p, x)]
    for gradient, f, x in zip(found, parts, (q, p, n), strict=True):
        np.testing.assert_allclose(gradient, differences(f, x), atol=1e-7)
        assert not gradient[losses == 0].any()


def test_contrastive_losses_by_hand_and_their_gradients(rng):
    a, b = np.zeros((4, 1)), np.array([[2.0], [0.25], [2.0], [0.5]])
    same = [True, False, False, True]
    np.testing.assert_allclose(ref.contrastive_losses(a, b, same, 1.0), [2, 0.28125, 0, 0.125])
    a, b = rng.normal(size=(2, 5, 3))
    same = [True, False, True, False, False]
    da, db = ref.contrastive_gradients(a, b, same, 2.5)
    total = lambda a, b: float(ref.contrastive_losses(a, b, same, 2.5).sum())
    np.testing.assert_allclose(da, differences(lambda x: total(x, b), a), atol=1e-7)
    np.testing.assert_allclose(db, differences(lambda x: total(a, x), b), atol=1e-7)


def test_multi_similarity_by_hand():
    # Angles 0, 60 and 90 degrees; 0 and 1 belong together, 2 is alone.
    x = np.array([[1, 0], [0.5, np.sqrt(0.75)], [0, 1.0]])
    positive, negative = ref.pairs_by_identity([7, 7, 9], [7, 7, 9])
    positive = ref.not_itself(positive)
    pull = lambda s: np.log(1 + np.exp(-2 * (s - 0.5))) / 2
    push = lambda *s: np.log(1 + sum(np.exp(50 * (x - 0.5)) for x in s)) / 50
    h = np.sqrt(0.75)
    plain = ref.multi_similarity_losses(x, positive, negative, mined=False)
    np.testing.assert_allclose(plain, [pull(0.5) + push(0), pull(0.5) + push(h), push(0, h)])
    # Image 0: its negative (S = 0) is below S of its positive - 0.1, and that above 0 + 0.1.
    mined = ref.multi_similarity_losses(x, positive, negative)
    np.testing.assert_allclose(mined, [0, pull(0.5) + push(h), 0])
    assert ref.multi_similarity_loss(x, positive, negative) == pytest.approx(mined.mean())


def test_mining_with_a_large_epsilon_keeps_all_pairs(rng):
    x = ref.l2_normalised(rng.normal(size=(6, 3)))
    positive, negative = ref.pairs_by_identity([0, 0, 1, 1, 2, 2], [0, 0, 1, 1, 2, 2])
    positive = ref.not_itself(positive)
    all_pairs = ref.multi_similarity_losses(x, positive, negative, mined=False)
    wide = ref.multi_similarity_losses(x, positive, negative, epsilon=3.0)
    np.testing.assert_allclose(wide, all_pairs)


def test_pairs_by_radius_at_the_radius_itself():
    positive, negative = ref.pairs_by_radius([[0, 0]], [[3, 4], [6, 8], [0, 5.01], [11, 0]], 5, 10)
    assert positive.tolist() == [[True, False, False, False]]
    assert negative.tolist() == [[False, False, False, True]]


def test_mined_triplets_by_hand():
    positions = np.array([[0.0, 0], [10, 0], [20, 0], [100, 0], [200, 0]])
    positive, negative = ref.pairs_by_radius(positions, positions, 25, 50)
    embeddings = np.array([[0.0], [3.0], [1.0], [2.0], [9.0]])
    assert ref.best_positive(embeddings, positive, 0) == 2
    assert ref.best_positive(embeddings, positive, 0, among=[0, 1, 3]) == 1
    assert ref.best_positive(embeddings, positive, 4) is None
    assert ref.hardest_negatives(embeddings, negative, 0, 3) == [3, 4]
    assert ref.hardest_negatives(embeddings, negative, 3, 2) == [1, 2]  # both at 1: the first
    assert ref.mined_triplets(embeddings, positive, negative) == [(0, 2, 3), (1, 2, 3), (2, 0, 3)]
    two = ref.mined_triplets(embeddings, positive, negative, [1], [0, 2, 3, 4], negatives=2)
    assert two == [(1, 2, 3), (1, 2, 4)]


def test_mining_is_the_extreme_over_all_triplets(rng):
    positions, embeddings = rng.uniform(0, 100, (12, 2)), rng.normal(size=(12, 3))
    positive, negative = ref.pairs_by_radius(positions, positions, 30, 50)
    found = ref.mined_triplets(embeddings, positive, negative)
    assert len(found) > 5
    d = lambda a, b: np.linalg.norm(embeddings[a] - embeddings[b])
    gps = lambda a, b: np.linalg.norm(positions[a] - positions[b])
    for q, p, n in found:
        assert q != p
        assert gps(q, p) <= 30
        assert gps(q, n) > 50
        for a, b in itertools.product(range(12), repeat=2):
            if a != q and gps(q, a) <= 30:
                assert d(q, p) <= d(q, a)
            if gps(q, b) > 50:
                assert d(q, n) <= d(q, b)


def test_recall_by_hand():
    database, queries = np.array([[0.0], [1.0], [2.0], [3.0]]), np.array([[0.1], [1.5], [2.9], [9]])
    assert ref.nearest_in_database(queries[1], database, 4) == [1, 2, 0, 3]  # 1 and 2 are equal
    positive = [[0], [2], [0], []]
    assert ref.recall_at(queries, database, positive, (1, 2, 4)) == {1: 0.25, 2: 0.5, 4: 0.75}
    assert ref.recall_at(queries, database, positive, (1, 4), "skip") == {1: 1 / 3, 4: 1.0}
    flags = np.zeros((4, 4), bool)
    for q, right in enumerate(positive):
        flags[q, right] = True
    assert ref.recall_at(queries, database, flags, (1, 2, 4)) == {1: 0.25, 2: 0.5, 4: 0.75}


def test_recall_never_falls_with_n_and_ends_at_one(rng):
    queries, database = rng.normal(size=(9, 3)), rng.normal(size=(20, 3))
    positive = rng.random((9, 20)) < 0.2
    positive[:, 0] |= ~positive.any(1)
    values = list(ref.recall_at(queries, database, positive, (1, 3, 5, 10, 20)).values())
    assert values == sorted(values)
    assert values[-1] == 1
