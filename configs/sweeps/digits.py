"""A sweep on the embedded digits: FedAvg and FedASAM, two rates each, three seeds; a minute.

    fedjax-flat sweep configs/sweeps/digits.py --run runs/sweep
    fedjax-flat table runs/sweep --form latex
"""

import fedjax_flat as ff


def get_sweep(text=""):
    o = ff.arguments(text, rounds=20, seeds=3, stop="none")
    return ff.Sweep(
        rows={"FedAvg": {}, "FedASAM": {"algorithm.name": "fedasam", "client.rho": 0.5}},
        tune={"client.learning_rate": (0.1, 0.03)},
        seeds=o.seeds,
        stop=o.stop,
        config={
            "rounds": o.rounds, "partition.clients": 20, "data.validation": 0.1,
            "eval.splits": ("validation", "test"), "eval.every": 5, "eval.window": 5,
        },
    )
