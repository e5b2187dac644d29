"""One system in a process of its own, told what to do line by line.

`round` trains a round and answers its seconds and images, `loss` the model's loss, `peak` the peak
memory in MB, `matmul` the float32 matrix product rate in GFLOP/s of jax here.
"""

import json
import os
import resource
import sys
import time


def matmul_rate() -> float:
    """The best of five 1600^3 products inside a compiled loop."""
    import jax
    import jax.numpy as jnp

    n, repeat = 1600, 10
    a = jax.random.normal(jax.random.key(0), (n, n), jnp.float32) / n
    run = jax.jit(lambda a: jax.lax.fori_loop(0, repeat, lambda i, b: a @ b, a))
    run(a).block_until_ready()
    times = []
    for _ in range(5):
        start = time.perf_counter()
        run(a).block_until_ready()
        times.append(time.perf_counter() - start)
    return repeat * 2 * n**3 / min(times) / 1e9


def main(system: str, workload: str) -> None:
    """Answers on the original standard output; whatever libraries print goes to stderr."""
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    from systems import SYSTEMS
    from workloads import WORKLOADS

    round, loss = SYSTEMS[system](WORKLOADS[workload])
    for line in sys.stdin:
        command = line.strip()
        start = time.perf_counter()
        if command == "round":
            images = round()
            answer = [time.perf_counter() - start, images]
        elif command == "loss":
            answer = loss()
        elif command == "peak":
            answer = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
        else:
            answer = matmul_rate()
        answers.write(json.dumps(answer) + "\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
