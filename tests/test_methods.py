"""Every registered method: against NumPy, and the contract that all of them keep."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import assert_close, assert_same_bits
from methods import CASES, COHORT, ROUNDS, SIZES, Run, clients, disagreement, problem, run

from fedjax_flat.algorithms.registry import METHODS
from fedjax_flat.engine.checkpoint import Checkpoints
from fedjax_flat.engine.round import floats_per_client


def test_every_method_has_a_reference_and_a_hard_problem():
    assert {name for name, _, _ in CASES.values()} == set(METHODS)
    drawn = clients().rounds
    assert any(2 in members for members in drawn), "the client without examples is drawn"
    absent = set(range(len(SIZES))) - set(drawn[0])
    assert len(absent) == len(SIZES) - COHORT, "participation is partial"


@pytest.mark.parametrize("case", CASES)
def test_agrees_with_numpy(case):
    assert disagreement(case) < 2e-5


@pytest.mark.parametrize("name", METHODS)
class TestContract:
    """One compiled step serves all of these."""

    def test_same_bits_again_and_after_a_checkpoint(self, name, tmp_path):
        first = run(name)
        checkpoints = Checkpoints(tmp_path)
        checkpoints.save(2, first.states[2])
        state = checkpoints.restore(first.start(problem().params))[1]
        checkpoints.close()
        for _ in range(2, ROUNDS):
            state, _ = first.step(state, first.data)
        assert_same_bits(state, first.states[-1])

    def test_only_sampled_clients_change_state(self, name):
        first = run(name)
        if first.states[0].clients == ():
            return
        changed = [
            {k for k in range(len(SIZES)) if differ(before.clients, after.clients, k)}
            for before, after in zip(first.states, first.states[1:], strict=False)
        ]
        for t, members in enumerate(changed):
            with_examples = {k for k in clients().rounds[t] if SIZES[k]}
            assert members == with_examples

    def test_finite_and_still_where_the_gradient_is_zero(self, name):
        """A classifier so sure that softmax is exactly 0 and 1."""
        first = run(name)
        params = jax.tree.map(jnp.zeros_like, problem().params)
        params["classifier"]["bias"] = params["classifier"]["bias"].at[0].set(200.0)
        data = first.data.replace(
            examples=first.data.examples._replace(labels=jnp.zeros_like(first.data.examples.labels))
        )
        state = first.start(params)
        for _ in range(2):
            state, info = first.step(state, data)
        assert bool(info.finite)
        model = first.algorithm.models(state.server)["global"]
        assert_close(model, params, 1e-6)

    def test_pseudo_gradient_metrics(self, name):
        first = run(name)
        norm = np.sqrt(sum(np.sum(np.square(w)) for w in jax.tree.leaves(first.params)))
        assert float(first.infos[-1].norm) == pytest.approx(norm, rel=1e-5)
        flat = lambda s: np.concatenate(
            [np.ravel(g) for g in jax.tree.leaves(s.pseudo_gradient)]
        )
        a, b = flat(first.states[-2]), flat(first.states[-1])
        cosine = a @ b / (np.linalg.norm(a) * np.linalg.norm(b))
        assert float(first.infos[-1].cosine) == pytest.approx(cosine, abs=1e-4)
        assert float(first.infos[0].cosine) == 0


# One of each kind: two exchanges, kept deltas, control variates, an ascent with a memory.
KINDS = ("naivefedgloss", "fedgh", "scaffold", "fedsmoo")


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=() if n in KINDS else pytest.mark.slow) for n in METHODS]
)
def test_vmap_agrees_with_map(name):
    other = Run(*CASES[name][:2], strategy="vmap", rounds=2)
    assert_close(other.states[2].server, run(name).states[2].server, 2e-6)
    assert_close(other.states[2].clients, run(name).states[2].clients, 2e-6)


def differ(a, b, k):
    return any(
        not np.array_equal(x[k], y[k])
        for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True)
    )


# Models down, models up, models kept per client; two exchanges where there are two.
TRAFFIC = {
    "scaffold": (2, 2, 1), "fedgamma": (2, 2, 1), "feddyn": (1, 1, 1), "adabest": (1, 1, 1),
    "mime": (4, 2, 0), "mimelite": (2, 2, 0), "fedcm": (2, 1, 0), "mofedsam": (2, 1, 0),
    "fedspeed": (1, 1, 1), "fedsmoo": (2, 2, 2), "fedgloss": (1, 1, 1), "naivefedgloss": (2, 2, 1),
}


@pytest.mark.parametrize("name", METHODS)
def test_traffic_and_state(name):
    first = run(name)
    size = sum(w.size for w in jax.tree.leaves(problem().params))
    down, up = floats_per_client(first.algorithm, first.states[0], first.data)
    state = sum(
        x.size for x in jax.tree.leaves(first.states[0].clients) if x.dtype == jnp.float32
    )
    assert (down / size, up / size, state / size / len(SIZES)) == TRAFFIC.get(name, (1, 1, 0))


