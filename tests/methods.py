"""One row per method and variant: its settings, and the NumPy reference that it must agree with."""

import functools
import itertools

import numpy as np
import reference
import reference_adapt as adapt
import reference_methods as ref
import reference_open as open_ref
import reference_released as released
import reference_teachers as teachers
from conftest import Problem

from fedjax_flat import testing

SAM = {"client__sharpness": "sam", "client__rho": 0.2}
OWN_RHO = {"client__rho": 0.2}


def layer_slices(c):
    ends = np.cumsum([0] + [w.size + b.size for w, b in c.layers(c.w0)])
    return [slice(a, b) for a, b in itertools.pairwise(ends)]


# name, settings (algorithm.* if no section is named), reference
CASES = {
    "fedavg": ("fedavg", {}, lambda c: ref.fedopt(c, ref.plain)),
    "fedsam": ("fedsam", OWN_RHO, lambda c: ref.fedopt(c, ref.plain, gradient=ref.sam(c, 0.2))),
    "fedasam": (
        "fedasam", {"client__rho": 0.5},
        lambda c: ref.fedopt(c, ref.plain, gradient=ref.asam(c, 0.5, 0.2)),
    ),
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
    "fedadagrad from zero": (
        "fedadagrad", {"server__adaptive__beta1": 0.0, "server__adaptive__initial": "zero"},
        lambda c: ref.fedopt(c, released.adagrad(0.01, 1e-3)),
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
    "adabest released": (
        "adabest", {"adabest__variant": "released", "adabest__mu": 0.5},
        lambda c: released.adabest(c, 0.5, 0.9),
    ),
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
    "fedgloss warm-up": (
        "fedgloss", {"fedgloss__variant": "released", **SAM, "client__rho_warmup": 3},
        lambda c: released.fedgloss(
            c, 10.0, released.fedgloss_radii(len(c.rounds), 0.001, 0.2, 0.15, 3)
        ),
    ),
    "naivefedgloss": ("naivefedgloss", {}, lambda c: ref.fedgloss(c, 0.15, 10.0, naive=True)),
    "fedntd": ("fedntd", {"fedntd__tau": 2.0}, lambda c: open_ref.fedntd(c, 1.0, 2.0)),
    "fedntd reverse": (
        "fedntd", {"fedntd__beta": 0.3, "fedntd__reverse": True},
        lambda c: open_ref.fedntd(c, 0.3, 1.0, reverse=True),
    ),
    "feddc": ("feddc", {"feddc__alpha": 0.1}, lambda c: open_ref.feddc(c, 0.1)),
    "feddc released": (
        "feddc", {"feddc__alpha": 0.1, "feddc__variant": "released"},
        lambda c: open_ref.feddc(c, 0.1, released=True),
    ),
    "fedgkd": (
        "fedgkd", {"fedgkd__gamma": 2.0, "fedgkd__models": 3},
        lambda c: teachers.fedgkd(c, 2.0, size=3),
    ),
    "fedgkd_vote": (
        "fedgkd_vote", {"fedgkd__gamma": 2.0, "fedgkd__models": 3},
        lambda c: teachers.fedgkd(c, 2.0, size=3, vote=True),
    ),
    "fedgkd of one model": (
        "fedgkd", {"fedgkd__gamma": 2.0, "fedgkd__models": 1}, lambda c: teachers.fedgkd(c, 2.0)
    ),
    "fedmlb": (
        "fedmlb", {"fedmlb__lambda1": 0.5, "fedmlb__lambda2": 2.0},
        lambda c: teachers.fedmlb(c, 0.5, 2.0),
    ),
    "moon": ("moon", {"moon__mu": 2.0}, lambda c: teachers.moon(c, 2.0, 0.5)),
    "fedmax": ("fedmax", {"fedmax__beta": 3.0}, lambda c: teachers.fedmax(c, 3.0)),
    "self_training": (
        "self_training", {"self_training__rule": "threshold", "self_training__threshold": 0.5},
        lambda c: adapt.self_training(c, 0.5),
    ),
    "ladd": (
        "ladd", {"ladd__rule": "threshold", "ladd__threshold": 0.5, "ladd__kd": 2.0,
                 "ladd__start": 3},
        lambda c: adapt.ladd(c, 0.5, kd=2.0, start=3),
    ),
    "fedlc": ("fedlc", {"fedlc__tau": 0.7}, lambda c: teachers.fedlc(c, 0.7)),
    "fedrs": ("fedrs", {}, lambda c: teachers.fedrs(c, 0.5)),
    "wsm": ("wsm", {}, teachers.wsm),
    "feddistill_plus": (
        "feddistill_plus", {"feddistill__gamma": 2.0}, lambda c: teachers.feddistill(c, 2.0)
    ),
    "fednova": (
        "fednova", {"client__momentum": 0.8, "fednova__mu": 0.3},
        lambda c: teachers.fednova(c, 0.8, 0.3),
    ),
    "fednova by norm": (
        "fednova", {"client__momentum": 0.8, "fednova__effective": "norm"},
        lambda c: teachers.fednova(c, 0.8, effective="norm"),
    ),
    "gma": ("gma", {"gma__threshold": 0.7}, lambda c: teachers.gma(c, 0.7)),
    "feddyn+fedmlb": (
        "feddyn+fedmlb", {"feddyn__alpha": 0.1, "weighting": "uniform"},
        lambda c: teachers.feddyn_fedmlb(c, 0.1),
    ),
    "fedavgm+fedmlb": ("fedavgm+fedmlb", {}, lambda c: teachers.fedavgm_fedmlb(c, 0.9)),
    "fedadam+moon": (
        "fedadam+moon", {}, lambda c: teachers.moon(c, step=ref.adaptive("adam", 0.01))
    ),
    "fedgh": ("fedgh", {}, ref.fedgh),
    "fedgh by layer": ("fedgh", {"fedgh__scope": "layer"}, lambda c: ref.fedgh(c, layer_slices(c))),
}


NO_DUALS = {"fedgloss__rho": 0.0, "fedgloss__duals": False}
# (method, settings), (what it becomes, settings), tolerance: 0 is bit for bit
LIMITS = [
    (("fedprox", {"fedprox__mu": 0.0}), ("fedavg", {}), 0),
    (("fedntd", {"fedntd__beta": 0.0}), ("fedavg", {}), 1e-6),
    (("fedgkd", {"fedgkd__gamma": 0.0}), ("fedavg", {}), 0),
    (("fedmlb", {"fedmlb__lambda1": 0.0, "fedmlb__lambda2": 0.0}), ("fedavg", {}), 0),
    (("moon", {"moon__mu": 0.0}), ("fedavg", {}), 0),
    (("fedmax", {"fedmax__beta": 0.0}), ("fedavg", {}), 0),
    (("fedrs", {"fedrs__alpha": 1.0}), ("fedavg", {}), 0),
    (("feddistill_plus", {"feddistill__gamma": 0.0}), ("fedavg", {}), 0),
    (("gma", {"gma__threshold": 0.0}), ("fedavg", {}), 1e-6),
    (("fedsam", {"client__rho": 0.0}), ("fedavg", {}), 1e-6),
    (("fedasam", {"client__rho": 0.0}), ("fedavg", {}), 1e-6),
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
    return Problem()


def algorithm_of(name, task=None, data=None, **settings):
    """The registered method, from a config; keywords with `__` for the dot."""
    sections = ("client", "server", "algorithm", "model", "wire", "data")
    dotted = {k.replace("__", "."): v for k, v in settings.items()}
    full = {k if k.split(".")[0] in sections else f"algorithm.{k}": v for k, v in dotted.items()}
    return testing.algorithm_of(name, task or problem().task, full, data)


class Run(testing.Run):
    """A method on the problem."""

    def __init__(self, name, settings, **options):
        super().__init__(algorithm_of(name, **settings), problem(), **options)

    @property
    def params(self):
        return self.model.params


@functools.cache
def run(case) -> Run:
    name, settings, _ = CASES[case]
    return Run(name, settings, cosine=True)


@functools.cache
def clients() -> ref.Clients:
    d = testing.drawn(problem())
    layers = reference.unpack(d.params)
    return ref.Clients(layers, d.x, d.y, d.members, d.rounds, d.rate)


def disagreement(case) -> float:
    """Largest difference to the reference, relative to the largest parameter."""
    ours = ref.Clients.flat(reference.unpack(run(case).params))
    theirs = CASES[case][2](clients())
    return float(np.abs(ours - theirs).max() / np.abs(theirs).max())
