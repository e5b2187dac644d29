"""Every registered method: against NumPy, and the contract that all of them keep."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from methods import CASES, clients, disagreement, problem, run

from fedjax_flat import testing
from fedjax_flat.algorithms import METHODS
from fedjax_flat.engine.round import traffic
from fedjax_flat.testing import COHORT, SIZES

# Of a model with normalisation, which the problem here has not: test_batchnorm.py.
# Of one with images in it, without a global model, with examples on the server: test_teachers.py.
# Closed forms, which do not stay where the gradient is zero: test_fed3r.py. With labels on the
# server alone: test_mcd.py. Under a clock: test_clock.py. Of clients with models of their own:
# test_personal.py. Who trains after whom, and whose server is whose: test_sequence.py.
ELSEWHERE = {
    "fedbn", "silobn", "fedfa", "feddistill", "feddf", "fed3r", "fed3r_rf", "fedncm",
    "fedasync", "fedbuff", "fedsim", "fedalt", "pfedme", "fp", "oll",
    "mcd", "fedcg", "fedseq", "fedcyclic", "fedasyncseq", "fedseq2par", "hierfavg",
}
NAMES = [name for name in METHODS if name not in ELSEWHERE]


def test_every_method_has_a_reference_and_a_hard_problem():
    assert {part for name, _, _ in CASES.values() for part in name.split("+")} == set(NAMES)
    drawn = clients().rounds
    assert any(2 in members for members in drawn), "the client without examples is drawn"
    absent = set(range(len(SIZES))) - set(drawn[0])
    assert len(absent) == len(SIZES) - COHORT, "participation is partial"


# One of each kind: two exchanges, kept deltas, control variates, an ascent with a memory, a term,
# something kept beside a method.
KINDS = ("naivefedgloss", "fedgh", "scaffold", "fedsmoo", "fedntd", "moon")
# What is only added to FedAvg keeps the contract if one of its kind does.
ADDED = [n for n in NAMES if METHODS[n].add and METHODS[n].sharpness == "any" and n not in KINDS]
# Other settings or another server around what is compared anyway.
VARIANTS = ("fedgkd of one model", "fedavgm+fedmlb", "fedadam+moon", "fednova by norm")


def slow_if(names, slow):
    return [pytest.param(n, marks=pytest.mark.slow if n in slow else ()) for n in names]


@pytest.mark.parametrize("case", slow_if(CASES, VARIANTS))
def test_agrees_with_numpy(case):
    assert disagreement(case) < 2e-5


@pytest.mark.parametrize("name", slow_if(NAMES, ADDED))
class TestContract:
    """One compiled step serves all of these."""

    def test_same_bits_again_and_after_a_checkpoint(self, name):
        testing.check_resume(run(name))

    def test_only_sampled_clients_change_state(self, name):
        testing.check_members(run(name))

    def test_finite_and_still_where_the_gradient_is_zero(self, name):
        testing.check_still(run(name))

    def test_metrics_of_the_model_and_its_moves(self, name):
        first = run(name)
        norm = np.sqrt(sum(np.sum(np.square(w)) for w in jax.tree.leaves(first.params)))
        assert float(first.infos[-1].norm) == pytest.approx(norm, rel=1e-5)
        model = lambda i: np.concatenate([
            np.ravel(w) for w in jax.tree.leaves(
                first.algorithm.models(first.states[i].server)["global"].params
            )
        ])
        a, b = model(-3) - model(-2), model(-2) - model(-1)
        cosine = a @ b / (np.linalg.norm(a) * np.linalg.norm(b))
        assert float(first.infos[-1].metrics["cosine"]) == pytest.approx(cosine, abs=1e-4)
        assert float(first.infos[0].metrics["cosine"]) == 0


per_kind = pytest.mark.parametrize("name", slow_if(NAMES, {*NAMES} - {*KINDS}))


@per_kind
def test_vmap_agrees_with_map(name):
    testing.check_strategies(run(name))


@per_kind
@pytest.mark.slow
def test_padding_changes_nothing(name):
    testing.check_padding(run(name))


# Models down, models up, models kept per client; two exchanges where there are two.
TRAFFIC = {
    "scaffold": (2, 2, 1), "fedgamma": (2, 2, 1), "feddyn": (1, 1, 1), "adabest": (1, 1, 1),
    "mime": (4, 2, 0), "mimelite": (2, 2, 0), "fedcm": (2, 1, 0), "mofedsam": (2, 1, 0),
    "fedspeed": (1, 1, 1), "fedsmoo": (2, 2, 2), "fedgloss": (1, 1, 1), "naivefedgloss": (2, 2, 1),
    "feddc": (2, 2, 2), "fedgkd": (2, 1, 0), "fedgkd_vote": (3, 1, 0), "moon": (1, 1, 1),
    "ladd": (3, 1, 0),  # of a client that has not got the first model; else (2, 1, 0)
    # 3 x 3 logits and which of 3 classes there are, of a model of 103
    "feddistill_plus": (1 + (9 + 3 / 4) / 103, 1 + (9 + 3 / 4) / 103, 0),
}


@pytest.mark.parametrize("name", NAMES)
def test_traffic_and_state(name):
    first = run(name)
    size = sum(w.size for w in jax.tree.leaves(problem().params))
    sent = traffic(first.algorithm, first.states[0], first.data)
    state = sum(
        x.size for x in jax.tree.leaves(first.states[0].clients) if x.dtype == jnp.float32
    )
    found = (sent.down / 32 / size, sent.up / 32 / size, state / size / len(SIZES))
    assert found == pytest.approx(TRAFFIC.get(name, (1, 1, 0)))
