"""One row per method and variant: its settings, and the NumPy reference that it must agree with."""

import functools
import itertools

import jax
import numpy as np
import reference
import reference_methods as ref
from conftest import Problem, small_config
from test_fedavg import randomness, reference_data

import fedjax_flat as ff
from fedjax_flat import method

SIZES, COHORT, EPOCHS, BATCH, LR, ROUNDS = (7, 3, 0, 12, 1, 9, 5), 4, 2, 4, 0.1, 5
SAM = {"client__sharpness": "sam", "client__rho": 0.2}
OWN_RHO = {"client__rho": 0.2}


def layer_slices(c):
    ends = np.cumsum([0] + [w.size + b.size for w, b in c.layers(c.w0)])
    return [slice(a, b) for a, b in itertools.pairwise(ends)]


# name, settings (algorithm.* if no section is named), reference
CASES = {
    "fedavg": ("fedavg", {}, lambda c: ref.fedopt(c, ref.plain)),
    "fedsam": ("fedavg", SAM, lambda c: ref.fedopt(c, ref.plain, gradient=ref.sam(c, 0.2))),
    "fedsgd": ("fedsgd", {"server__learning_rate": 0.5}, lambda c: ref.fedsgd(c, 0.5)),
    "fedavgm": ("fedavgm", {}, lambda c: ref.fedopt(c, ref.with_momentum(0.9))),
    "fedadam": ("fedadam", {}, lambda c: ref.fedopt(c, ref.adaptive("adam", 0.01))),
    "fedadam inside": (
        "fedadam", {"server__adaptive__epsilon": "inside"},
        lambda c: ref.fedopt(c, ref.adaptive("adam", 0.01, inside=True)),
    ),
    "fedadam corrected": (
        "fedadam", {"server__adaptive__bias_correction": True},
        lambda c: ref.fedopt(c, ref.adaptive("adam", 0.01, correct=True)),
    ),
    "fedadagrad": (
        "fedadagrad", {"server__adaptive__beta1": 0.0},
        lambda c: ref.fedopt(c, ref.adaptive("adagrad", 0.01, b1=0.0)),
    ),
    "fedyogi": ("fedyogi", {}, lambda c: ref.fedopt(c, ref.adaptive("yogi", 0.01))),
    "fedprox": ("fedprox", {"fedprox__mu": 0.5}, lambda c: ref.fedopt(c, ref.plain, mu=0.5)),
    "scaffold": ("scaffold", {}, ref.scaffold),
    "scaffold option I": (
        "scaffold", {"scaffold__option": 1}, lambda c: ref.scaffold(c, option=1)
    ),
    "feddyn": ("feddyn", {"feddyn__alpha": 0.1}, lambda c: ref.fedgloss(c, 0.0, 10.0)),
    "feddyn with SAM": (
        "feddyn", {"feddyn__alpha": 0.1, **SAM}, lambda c: ref.fedgloss(c, 0.0, 10.0, rho=0.2)
    ),
    "adabest": ("adabest", {}, lambda c: ref.adabest(c, 0.02, 0.9)),
    "mime": ("mime", {}, lambda c: ref.mime(c, 0.9, lite=False)),
    "mimelite": ("mimelite", {}, lambda c: ref.mime(c, 0.9, lite=True)),
    "fedcm": ("fedcm", {}, lambda c: ref.fedcm(c, 0.1)),
    "mofedsam": ("mofedsam", OWN_RHO, lambda c: ref.fedcm(c, 0.1, rho=0.2)),
    "fedacg": ("fedacg", {}, lambda c: ref.fedacg(c, 0.85, 0.01)),
    "fedspeed": (
        "fedspeed", {**OWN_RHO, "fedspeed__prox": 2.0},
        lambda c: ref.fedspeed(c, 0.2, 0.95, 2.0),
    ),
    "fedspeed normalised": (
        "fedspeed", {**OWN_RHO, "fedspeed__prox": 2.0, "fedspeed__normalised": True},
        lambda c: ref.fedspeed(c, 0.2, 0.95, 2.0, normalised=True),
    ),
    "fedgamma": ("fedgamma", OWN_RHO, lambda c: ref.scaffold(c, rho=0.2)),
    "fedsmoo": ("fedsmoo", OWN_RHO, lambda c: ref.fedsmoo(c, 0.2, 10.0)),
    "fedgloss": ("fedgloss", {}, lambda c: ref.fedgloss(c, 0.15, 10.0)),
    "fedgloss with SAM": ("fedgloss", SAM, lambda c: ref.fedgloss(c, 0.15, 10.0, rho=0.2)),
    "fedgloss without duals": (
        "fedgloss", {"fedgloss__duals": False}, lambda c: ref.fedgloss(c, 0.15, 10.0, duals=False)
    ),
    "fedgloss released": (
        "fedgloss", {"fedgloss__variant": "released"},
        lambda c: ref.fedgloss(c, 0.15, 10.0, released=True),
    ),
    "naivefedgloss": ("naivefedgloss", {}, lambda c: ref.fedgloss(c, 0.15, 10.0, naive=True)),
    "fedgh": ("fedgh", {}, ref.fedgh),
    "fedgh by layer": ("fedgh", {"fedgh__scope": "layer"}, lambda c: ref.fedgh(c, layer_slices(c))),
}


NO_DUALS = {"fedgloss__rho": 0.0, "fedgloss__duals": False}
# (method, settings), (what it becomes, settings), tolerance: 0 is bit for bit
LIMITS = [
    (("fedprox", {"fedprox__mu": 0.0}), ("fedavg", {}), 0),
    (("adabest", {"adabest__mu": 0.0, "adabest__beta": 0.0}), ("fedavg", {}), 0),
    (("mimelite", {"mime__momentum": 0.0}), ("fedavg", {}), 1e-6),
    (("fedcm", {"fedcm__alpha": 1.0}), ("fedavg", {}), 1e-6),
    (("mofedsam", {"fedcm__alpha": 1.0, **OWN_RHO}), ("fedavg", SAM), 1e-6),
    (("fedacg", {"fedacg__momentum": 0.0, "fedacg__beta": 0.0}), ("fedavg", {}), 1e-6),
    (("fedgamma", {"client__rho": 0.0}), ("scaffold", {}), 1e-6),
    (("fedsmoo", {"client__rho": 0.0}), ("feddyn", {"feddyn__alpha": 0.1}), 1e-6),
    (("fedgloss", {"fedgloss__rho": 0.0}), ("feddyn", {"feddyn__alpha": 0.1}), 1e-6),
    (("fedgloss", NO_DUALS), ("fedavg", {}), 1e-6),
    (("fedgloss", {**NO_DUALS, **SAM}), ("fedavg", SAM), 1e-6),
    (("naivefedgloss", {"fedgloss__rho": 0.0}), ("feddyn", {"feddyn__alpha": 0.1}), 1e-6),
]


def limit_name(limit) -> str:
    """'fedprox mu=0'."""
    name, settings = limit
    return " ".join([name, *(f"{k.split('__')[-1]}={v}" for k, v in settings.items())])


@functools.cache
def problem() -> Problem:
    return Problem(SIZES)


def algorithm_of(name, objective=None, **settings):
    """The registered method, from a config."""
    sections = ("client", "server", "algorithm")
    full = {
        k if k.split("__")[0] in sections else f"algorithm__{k}": v for k, v in settings.items()
    }
    options = {
        "client__learning_rate": LR, "client__batch_size": BATCH, "client__epochs": EPOCHS, **full
    }
    config = small_config(algorithm__name=name, **options)
    method.check_combination(config)
    return method.build_algorithm(config, objective or problem().objective)


class Run:
    """A method on the problem: its jitted step, and the states after each round."""

    def __init__(self, name, settings, strategy="map", rounds=ROUNDS):
        self.algorithm = algorithm_of(name, **settings)
        self.data = problem().data
        sample = ff.uniform(len(SIZES), COHORT)
        over = ff.cohort_map(strategy, chunk=2)
        self.step = jax.jit(ff.round_step(self.algorithm, sample, over))
        self.states, self.infos = [self.start(problem().params)], []
        for _ in range(rounds):
            state, info = self.step(self.states[-1], self.data)
            self.states.append(state)
            self.infos.append(info)

    def start(self, params):
        return ff.init_state(self.algorithm, params, len(SIZES), jax.random.key(0))

    @property
    def params(self):
        return self.algorithm.models(self.states[-1].server)["global"]


@functools.cache
def run(case) -> Run:
    name, settings, _ = CASES[case]
    return Run(name, settings)


@functools.cache
def clients() -> ref.Clients:
    p = problem()
    drawn = randomness(p, rounds=ROUNDS, cohort=COHORT, batch_size=BATCH, epochs=EPOCHS)
    members = [p.partition.client(k) for k in range(len(SIZES))]
    layers = reference.unpack(p.params)
    return ref.Clients(layers, *reference_data(p), members, drawn, LR)


def disagreement(case) -> float:
    """Largest difference to the reference, relative to the largest parameter."""
    ours = ref.Clients.flat(reference.unpack(run(case).params))
    theirs = CASES[case][2](clients())
    return float(np.abs(ours - theirs).max() / np.abs(theirs).max())
