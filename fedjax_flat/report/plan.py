"""An experiment's round compiled for a TPU slice that is not here: what it would need there.

libtpu (extra `plan`) compiles ahead of time for real topologies on any machine. From the compiled
program come the memory of a chip, the arithmetic, and what chips say to each other; from a second
one, with another number of clients on a chip at once, how many would fit. Speed is not among it:
no compiler says.
`runtime.compile_for_absent_tpus()` must come before jax does, as it does on the command line.
"""

import importlib.util
import math
import os
import re
import time
from typing import Any, NamedTuple

import jax
import ml_collections
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from fedjax_flat import errors, experiment
from fedjax_flat.data import FederatedData
from fedjax_flat.engine import cohort
from fedjax_flat.engine.round import round_step
from fedjax_flat.experiment import usage
from fedjax_flat.report import tables

# Memory of a chip in bytes, from the vendor's tables; of which XLA leaves a part to programs.
MEMORY = {"v4": 32e9, "v5e": 16e9, "v5p": 95e9, "v6e": 32e9}
COLLECTIVES = ("all-reduce", "all-gather", "reduce-scatter", "all-to-all", "collective-permute")


class Compiled(NamedTuple):
    """One round, compiled; sizes in bytes, per chip."""

    strategy: str
    at_once: int  # clients on a chip
    arguments: int
    temporaries: int
    flops: float
    traffic: float  # bytes read and written
    collectives: dict[str, int]
    seconds: float

    @property
    def memory(self) -> int:
        """At once: state and data, donated to what replaces them, and temporaries."""
        return self.arguments + self.temporaries


class Plan(NamedTuple):
    """What a round needs on every chip of a target."""

    target: str
    chips: int
    available: float
    cohort: int
    as_asked: Compiled
    other: Compiled  # with one client on a chip at once, or two; the same if a chip has one only

    @property
    def alone(self) -> Compiled:
        """That with one client on a chip at once."""
        return min(self.as_asked, self.other, key=lambda c: c.at_once)

    @property
    def per_client(self) -> float:
        """Memory of one more client on a chip at once."""
        more = self.as_asked.at_once - self.other.at_once
        return (self.as_asked.memory - self.other.memory) / more if more else 0.0

    @property
    def largest_chunk(self) -> int:
        """Clients that fit on a chip at once, by a line through the two programs; 0 is none."""
        room = self.available - self.alone.memory
        if room < 0:
            return 0
        here = math.ceil(self.cohort / self.chips)
        return here if self.per_client <= 0 else 1 + int(room / self.per_client)


def devices_of(target: str) -> tuple[str, list[Any]]:
    """(the kind of chip, the chips) of `tpu:v5e:2x2`."""
    parts = target.split(":")
    if len(parts) != 3 or parts[0] != "tpu":
        raise errors.UsageError(
            f"target {target!r}: expected tpu:KIND:TOPOLOGY, e.g. tpu:v5e:2x2 or tpu:v5p:2x2x1. "
            "(Compiling ahead for a GPU needs the GPU.)"
        )
    errors.lookup("TPU", parts[1], MEMORY)
    if importlib.util.find_spec("libtpu") is None:
        raise errors.UsageError(
            "plan compiles with libtpu, which is not installed: pip install 'fedjax-flat[plan]'."
        )
    from jax.experimental import topologies

    try:
        found = topologies.get_topology_desc(f"{parts[1]}:{parts[2]}", "tpu")
    except Exception as e:  # whatever libtpu says of a topology that it does not know
        reason = str(e).strip().splitlines() or [type(e).__name__]
        raise errors.UsageError(
            f"target {target!r}: no such topology of {parts[1]}: {reason[0][:200]}. Expected chips "
            "along each side, e.g. 2x2 or 4x4 (v4, v5p: 2x2x1)."
        ) from None
    return parts[1], list(found.devices)


def plan(
    config: ml_collections.ConfigDict, target: str, data_dir: str | os.PathLike | None = None
) -> Plan:
    """Compiles the config's round for the target, twice."""
    kind, devices = devices_of(target)
    built = experiment.build(config, data_dir)
    size = config.cohort.size
    asked = compile_round(built, devices, config.cohort.chunk)
    other = asked
    if math.ceil(size / len(devices)) > 1:
        other = compile_round(built, devices, 2 if asked.at_once == 1 else 1)
    return Plan(target, len(devices), MEMORY[kind], size, asked, other)


def compile_round(built: experiment.Experiment, devices: list[Any], chunk: int) -> Compiled:
    """One round over all devices, `chunk` clients on each at once (0 is all)."""
    config = built.config
    data = built.data_at(0)
    if not isinstance(data, FederatedData):
        data = data.of(np.arange(config.cohort.size))
    over = cohort.cohort_map("sharded", chunk=chunk, among=devices)
    step = round_step(
        built.algorithm, built.sample, over, built.averages, task=built.task,
        cosine=config.metrics.cosine, chained=usage.members_of(config) == "chain",
    )
    mesh = over.mesh
    assert mesh is not None
    state = jax.eval_shape(built.init)
    everywhere = _placed(state._replace(clients=()), mesh, PartitionSpec())
    split = PartitionSpec(cohort.AXIS) if built.members % mesh.size == 0 else PartitionSpec()
    state = everywhere._replace(clients=_placed(state.clients, mesh, split))
    start = time.perf_counter()
    compiled: Any = jax.jit(step, donate_argnums=0).lower(
        state, _placed(data, mesh, PartitionSpec())
    ).compile()
    memory, cost = compiled.memory_analysis(), compiled.cost_analysis()
    here = math.ceil(config.cohort.size / len(devices))
    return Compiled(
        over.name, min(chunk or here, here), memory.argument_size_in_bytes,
        memory.temp_size_in_bytes,
        cost.get("flops", math.nan), cost.get("bytes accessed", math.nan),
        collectives_in(compiled.as_text()),
        time.perf_counter() - start,
    )


def collectives_in(program: str) -> dict[str, int]:
    """How many of each are in the text of a compiled program; one of several arrays is one."""
    return {c: len(re.findall(rf"(?<= ){c}(?:-start)?\(", program)) for c in COLLECTIVES}


def _placed(tree: Any, mesh: Mesh, spec: PartitionSpec) -> Any:
    """Shapes on the devices of a mesh."""
    sharding = NamedSharding(mesh, spec)
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), tree)


def page(found: Plan) -> str:
    """The plan for people."""
    programs = [found.as_asked] + [found.other] * (found.other is not found.as_asked)
    rows = [
        [c.strategy, _mega(c.arguments), _mega(c.temporaries), _mega(c.memory),
         f"{c.flops:.3g}", _mega(c.traffic), f"{c.seconds:.0f}"]
        for c in programs
    ]
    header = ["per chip, MB", "state, data", "temporary", "at once", "FLOP", "moved", "compiled, s"]
    said = ", ".join(f"{n} {name}" for name, n in found.as_asked.collectives.items() if n) or "none"
    lines = [
        f"{found.target}: {found.chips} chips of {_mega(found.available)} MB; a cohort of "
        f"{found.cohort}", "", tables.table(header, rows), "",
        "(FLOP and bytes as XLA counts them: the body of a loop once.)",
        f"collectives of a round: {said}", advice(found),
    ]
    return "\n".join(lines)


def advice(found: Plan) -> str:
    """Which strategy to take there, or by how much nothing fits."""
    here = math.ceil(found.cohort / found.chips)
    chunk = found.largest_chunk
    if not chunk:
        lacks = found.alone.memory - found.available
        return (
            f"does not fit: one client at once needs {_mega(lacks)} MB more than a chip has. What "
            "would help: client state in host memory (cohort.client_state=host), data on the host "
            "(data.placement=host), a smaller client.batch_size, model.precision=bfloat16, or a "
            "larger chip."
        )
    if found.as_asked.memory > found.available:
        over = found.as_asked.memory - found.available
        return (
            f"does not fit as asked: {_mega(over)} MB too much. Take --config.cohort.strategy="
            f"sharded --config.cohort.chunk={chunk}: about {chunk} clients fit on a chip at once "
            "(by a line through two programs)."
        )
    if here == 1:
        return "fits, with the one client that a chip has; more at once: plan a larger cohort."
    most = "any number of" if found.per_client <= 0 else f"about {chunk}"
    return (
        f"fits. On a chip, {most} clients fit at once (here {here}), so a cohort of "
        f"{found.chips * chunk} without chunks, and any with --config.cohort.chunk={chunk}."
    )


def _mega(count: float) -> str:
    return f"{count / 1e6:,.0f}"
