"""One row per method: how closely it agrees with NumPy, where it ends on quadratics, what it keeps.

    python benchmarks/method_table.py       (a few minutes; the same checks run in `make test`)

difference   largest to the reference in tests/reference_methods.py, relative to the largest
             parameter: 5 rounds, 4 of 7 unequal clients (one without examples), 2 local epochs
optimum      distance to the minimum of the mean loss, heterogeneous quadratics, all clients, 400
             rounds of 5 full steps; FedAvg's biased point lies where `biased` says 0
"""

import pathlib
import sys

sys.path.insert(0, str(pathlib.Path(__file__).parents[1] / "tests"))

import methods
import numpy as np
import quadratic

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
    "fedsgd": {"server__learning_rate": 0.3},
}


def main() -> None:
    """Prints the table."""
    rows = []
    for case, (name, _, _) in methods.CASES.items():
        row = [case, f"{methods.disagreement(case):.1e}"]
        if case == name:
            end = quadratic.solve(name, **GENTLE.get(name, {}))
            d = describe(name)
            row += [
                f"{np.linalg.norm(end - quadratic.OPTIMUM):.1e}",
                f"{np.linalg.norm(end - quadratic.biased_point()):.1e}",
                f"{d['models_down']:g} {d['models_up']:g}",
                f"{4 * 797_962 * d['client_state'] / 1e6:.1f} MB",
            ]
        else:
            row += ["", "", "", ""]
        rows.append(row)
        print(f"\r{len(rows)} of {len(methods.CASES)}", end="", file=sys.stderr)
    print(file=sys.stderr)
    header = ["method", "difference", "optimum", "biased", "models down, up", "state of the CNN"]
    print(tables.table(header, rows))


if __name__ == "__main__":
    main()
