"""One row per method: how closely it agrees with NumPy, where it ends on quadratics, what it keeps.

    python benchmarks/method_table.py       (a few minutes; the same checks run in `make test`)

difference   largest to the reference in tests/reference_methods.py, relative to the largest
             parameter: 5 rounds, 4 of 7 unequal clients (one without examples), 2 local epochs
limit        what the method becomes, with the largest difference after 3 rounds; limits without
             a figure are tests of tests/test_limits.py
optimum      distance to the minimum of the mean loss, heterogeneous quadratics, all clients, 400
             rounds of 5 full steps; FedAvg's biased point lies where `biased` says 0
"""

import pathlib
import sys

sys.path.insert(0, str(pathlib.Path(__file__).parents[1] / "tests"))

import jax
import methods
import numpy as np
import quadratic

from fedjax_flat.algorithms import METHODS
from fedjax_flat.report import tables
from fedjax_flat.report.methods import describe

# Smaller penalties for the quadratics, whose curvature is 0.5 to 4.
GENTLE = {
    "feddyn": {"feddyn__alpha": 0.5}, "fedprox": {"fedprox__mu": 1.0},
    "fedgloss": {"fedgloss__rho": 0.0, "fedgloss__beta": 2.0},
    "naivefedgloss": {"fedgloss__rho": 0.0, "fedgloss__beta": 2.0},
    "fedsmoo": {"client__rho": 0.0, "fedsmoo__beta": 2.0},
    "fedspeed": {"client__rho": 0.0, "fedspeed__prox": 2.0},
    "fedgamma": {"client__rho": 0.0}, "mofedsam": {"client__rho": 0.0},
    "mime": {"mime__momentum": 0.0}, "mimelite": {"mime__momentum": 0.0},
    "fedsgd": {"server__learning_rate": 0.3}, "feddc": {"feddc__alpha": 0.5},
    "fedsam": {"client__rho": 0.0}, "fedasam": {"client__rho": 0.0},
}


# Terms of a loss over classes, which quadratics have not.
NEED_CLASSES = [n for n, m in METHODS.items() if m.add and m.sharpness == "any"]
# Those that take more than other settings to show.
OTHER_LIMITS = {
    "fedsgd": "gradient descent on the union", "fedadam": "Adam, with one client",
    "scaffold": "fedavg's steps, if all c_k = c", "feddyn": "fedavg's steps, alpha -> 0",
    "fedspeed": "fedavg with server rate 2, prox -> inf",
    "feddc": "fedavg with server rate 2, first round, alpha=0", "fedgh": "fedavg, with one client",
    "fednova": "fedavg, with equal clients",
}


def limits() -> dict[str, str]:
    """The first limit of every method, measured."""
    found = dict(OTHER_LIMITS)
    for (name, settings), (base, base_settings), _ in methods.LIMITS:
        if name in found:
            continue
        ends = [methods.Run(n, s, rounds=3).params
                for n, s in ((name, settings), (base, base_settings))]
        gaps = jax.tree.map(lambda a, b: float(np.abs(a - b).max()), *ends)
        to = methods.limit_name((base, base_settings))
        changed = methods.limit_name(("", settings)).strip()
        found[name] = f"{to}, at {changed}: {max(jax.tree.leaves(gaps)):.0e}"
    return found


def main() -> None:
    """Prints the table."""
    rows, becomes = [], limits()
    for case, (name, _, _) in methods.CASES.items():
        row = [case, f"{methods.disagreement(case):.1e}"]
        if case in METHODS:
            ends = ["", ""]
            if name not in NEED_CLASSES:
                end = quadratic.solve(name, **GENTLE.get(name, {}))
                ends = [f"{np.linalg.norm(end - point):.1e}"
                        for point in (quadratic.OPTIMUM, quadratic.biased_point())]
            d = describe(name)
            row += [
                becomes.get(name, ""),
                *ends,
                f"{d['models_down']:.3g} {d['models_up']:.3g}",
                f"{4 * 797_962 * d['client_state'] / 1e6:.1f} MB",
            ]
        else:
            row += [""] * 5
        rows.append(row)
        print(f"\r{len(rows)} of {len(methods.CASES)}", end="", file=sys.stderr)
    print(file=sys.stderr)
    header = ["method", "difference", "limit", "optimum", "biased", "down, up", "state of the CNN"]
    print(tables.table(header, rows, left=(0, 2)))


if __name__ == "__main__":
    main()
