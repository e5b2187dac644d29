"""Label flipping and poisoned models: against NumPy, and wrong input."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import reference_sequence as seq
from conftest import small_config
from test_sequence import SIZES, Run, Trainer, fedavg, flat, problem

import fedjax_flat as ff
from fedjax_flat import experiment
from fedjax_flat.algorithms.poisoned import chosen, poisoned
from fedjax_flat.data import Batch, Partition, attacks
from fedjax_flat.engine import sampling
from fedjax_flat.testing import blobs

COARSE = np.repeat(np.arange(20), 5)


class Fine:
    name, task, num_classes, coarse = "fine", "classification", 100, tuple(COARSE.tolist())
    train = ff.data.Examples(np.zeros((4, 1)), np.array([0, 1, 2, 99]))


def test_pairs_keep_their_rules():
    for text in ("intra", "extra"):
        pairs = attacks.pairs_of(text, Fine)(np.random.default_rng(0))
        assert len(pairs) == 10
        assert seq.kind_of_pairs(pairs, COARSE) == text
        np.testing.assert_array_equal(attacks.swapped(100, pairs), seq.flip_map(100, pairs))
    for pairs in seq.CIFAR10_SWAPS.values():
        text = ",".join(f"{a}-{b}" for a, b in pairs)
        assert attacks.pairs_of(text, blobs_of(10))(None) == pairs
    ways = {tuple(sorted(map(tuple, map(sorted, attacks.pairs_of(
        "0-2,3-5", blobs_of(10), random=True)(np.random.default_rng(i)))))) for i in range(20)}
    assert len(ways) == 3  # of pairing four classes


def blobs_of(classes):
    class Some:
        name, num_classes, coarse = "some", classes, ()

    return Some


@pytest.mark.parametrize(("of_groups", "share"), [(0.1, 0.1), (0.3, 0.5), (0.25, 0.15)])
def test_attackers_are_as_many_as_numpys(of_groups, share):
    groups = [list(range(10 * g, 10 * g + 10)) for g in range(50)]
    rng = np.random.default_rng
    ours = attacks.attackers(500, share, of_groups, rng(1), Partition.of(groups))
    theirs = seq.draw_attackers(groups, of_groups, share, rng(1))
    assert ours == theirs
    assert attacks.attackers(500, share, of_groups, rng(1)) == seq.draw_attackers_fedavg(
        500, of_groups, share, rng(1)
    )


@pytest.mark.parametrize("choice", ["fixed", "random"])
def test_only_attackers_see_other_labels(choice):
    shift = attacks.swap_labels(
        Fine, 6, swaps="extra", choice=choice, share=0.5, of_groups=1.0, seed=3
    )
    labels = jnp.arange(100, dtype=jnp.uint8)
    batch = Batch(jnp.zeros((100, 1)), labels, jnp.ones(100, bool))
    seen = [np.asarray(shift.see(batch, jnp.int32(k), jnp.arange(100)).labels) for k in range(6)]
    changed = [s for s in seen if (s != np.arange(100)).any()]
    assert len(changed) == 3
    assert all((s != np.arange(100)).sum() == 20 and s.dtype == np.uint8 for s in changed)
    assert (len({s.tobytes() for s in changed}) == 1) == (choice == "fixed")
    assert not shift.evaluated


@pytest.mark.parametrize(("swaps", "message"), [
    ("1-1", "class 1 would become itself"), ("0-2,2-1", "a class is in two pairs"),
    ("0-3", "there are 3 classes"), ("0", "'0' is no pair"), ("intra", "has no superclasses"),
])
def test_wrong_swaps(swaps, message):
    with pytest.raises(ff.UsageError, match=message):
        attacks.swap_labels(
            blobs(12), 3, swaps=swaps, choice="fixed", share=0.5, of_groups=1.0, seed=0
        )


def test_poisoned_models_are_numpys():
    bad = chosen(7, 0.3, 1)
    assert len(bad) == 2
    sampler = ff.uniform(7, 4)
    run = Run(poisoned(fedavg(), bad, -2.0), problem().data, sampler, 2)
    cohorts = [np.asarray(sampling.draw(sampler, jax.random.key(0), jnp.int32(t)).clients)
               for t in range(2)]
    real = [[int(k) for k in c if SIZES[k]] for c in cohorts]
    assert any(k in bad for c in real for k in c)
    train = seq.poisoned(Trainer([len(c) for c in real]), bad, -2.0)
    expected = seq.fedavg(flat(problem().variables), train, SIZES, real)
    for ours, theirs in zip(run.models, expected, strict=True):
        np.testing.assert_allclose(flat(ours), theirs, atol=2e-5 * np.abs(theirs).max())


def test_attackers_of_a_config_are_in_groups():
    """Four of 20 clients, both clients of two of ten groups; models are poisoned by groups."""
    built = experiment.build(small_config(
        algorithm__name="fedseq", data__shift__name="swap_labels", data__shift__swaps="0-1",
        data__shift__share=1.0, data__shift__of_groups=0.2, attack__share=0.1,
        server__aggregate="median",
    ))
    batch = Batch(jnp.zeros((2, 1)), jnp.array([0, 1]), jnp.ones(2, bool))
    wrong = [k for k in range(20)
             if int(built.data.shift.see(batch, jnp.int32(k), jnp.arange(2)).labels[0]) == 1]
    assert len(wrong) == 4
    groups = built.grouping.at(0)
    assert len({groups.client_of[list(groups.indices).index(k)] for k in wrong}) == 2
    with pytest.raises(ff.UsageError, match=r"attack\.share is 0"):
        experiment.build(small_config(attack__factor=3.0))
