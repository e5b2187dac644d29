"""Mapping one function over the clients of a cohort, several ways that give the same numbers.

The function is `work(shared, member)`: what all clients share comes first. It returns two trees, of
which the first is summed over the cohort and the second is stacked. Only the sum of the uploads is
ever held, except under `vmap`.

| strategy  | work                                         | memory per device        |
|-----------|----------------------------------------------|--------------------------|
| `vmap`    | all clients at once                          | cohort x (model + batch) |
| `map`     | one after the other                          | one client               |
| `chunked` | `chunk` at once, chunks in sequence          | chunk x (model + batch)  |
| `sharded` | devices share the cohort, sums by psum       | as within one device     |

`auto` is `sharded` on several devices; on one, `map` on CPU, where clients in sequence use all
cores already and convolutions with per-client weights are slow, and `vmap` elsewhere. With a
`chunk`, a device of `sharded` has that many clients at once.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from fedjax_flat import errors

Work = Callable[[Any, Any], tuple[Any, Any]]
AXIS = "clients"


class CohortMap(NamedTuple):
    """`run(work, shared, members) -> (summed, stacked)`; a mesh's devices share the members."""

    name: str
    run: Callable[[Work, Any, Any], tuple[Any, Any]]
    mesh: Mesh | None = None

    @property
    def multiple(self) -> int:
        """The number of members must be a multiple of this."""
        return 1 if self.mesh is None else self.mesh.size

    def replicate(self, tree: Any) -> Any:
        """Puts a copy of every array on each device of the mesh, in all processes."""
        return self._put(tree, lambda x: PartitionSpec())

    def share(self, clients: Any) -> Any:
        """The state of all clients, of which each device has a part, in or out of a compiled step.

        All of it, where the devices do not divide the clients, and in several processes, of which
        one writes it to disk.
        """
        if self.mesh is None:
            return clients
        size = self.mesh.size
        on_host = lambda x: jax.typeof(x).memory_space == jax.memory.Space.Host
        split = lambda x: not (x.shape[0] % size or on_host(x) or jax.process_count() > 1)
        spec_of = lambda x: PartitionSpec(AXIS) if split(x) else PartitionSpec()
        if any(isinstance(x, jax.core.Tracer) for x in jax.tree.leaves(clients)):
            keep = lambda x: jax.lax.with_sharding_constraint(
                x, NamedSharding(self.mesh, PartitionSpec(AXIS))
            )
            return jax.tree.map(lambda x: keep(x) if split(x) else x, clients)
        return self._put(clients, spec_of)

    def _put(self, tree: Any, spec_of: Callable[[Any], PartitionSpec]) -> Any:
        mesh = self.mesh
        if mesh is None:
            return tree

        def place(x):
            kind = x.sharding.memory_kind  # what is in host memory stays there
            sharding = NamedSharding(mesh, spec_of(x), memory_kind=kind)
            if jax.process_count() == 1:
                return jax.device_put(x, sharding)
            if jax.dtypes.issubdtype(x.dtype, jax.dtypes.prng_key):
                return jax.random.wrap_key_data(place(jax.random.key_data(x)))
            value = np.asarray(x)
            return jax.make_array_from_callback(value.shape, sharding, lambda i: value[i])

        return jax.tree.map(place, tree)


def _vmap(work: Work, shared: Any, members: Any) -> tuple[Any, Any]:
    summed, stacked = jax.vmap(work, (None, 0))(shared, members)
    return jax.tree.map(lambda x: jnp.sum(x, axis=0), summed), stacked


def _map(work: Work, shared: Any, members: Any) -> tuple[Any, Any]:
    first = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape[1:], x.dtype), members)
    zeros = jax.tree.map(
        lambda s: jnp.zeros(s.shape, s.dtype), jax.eval_shape(work, shared, first)[0]
    )

    def body(carry, member):
        summed, stacked = work(shared, member)
        return optax.tree.add(carry, summed), stacked

    return jax.lax.scan(body, zeros, members)


def _chunked(work: Work, shared: Any, members: Any, *, chunk: int) -> tuple[Any, Any]:
    """A last, smaller chunk follows when `chunk` does not divide the cohort."""
    size = jax.tree.leaves(members)[0].shape[0]
    whole = size // chunk * chunk
    parts = []
    if whole:
        head = jax.tree.map(
            lambda x: x[:whole].reshape(whole // chunk, chunk, *x.shape[1:]), members
        )
        summed, stacked = _map(lambda shared, m: _vmap(work, shared, m), shared, head)
        parts.append((summed, jax.tree.map(lambda x: x.reshape(whole, *x.shape[2:]), stacked)))
    if size > whole:
        parts.append(_vmap(work, shared, jax.tree.map(lambda x: x[whole:], members)))
    if len(parts) == 1:
        return parts[0]
    (sum_a, stack_a), (sum_b, stack_b) = parts
    return (
        optax.tree.add(sum_a, sum_b),
        jax.tree.map(lambda a, b: jnp.concatenate([a, b]), stack_a, stack_b),
    )


def _sharded(work: Work, shared: Any, members: Any, *, mesh: Mesh, inner) -> tuple[Any, Any]:
    def share(shared, members):
        summed, stacked = inner(work, shared, members)
        return jax.lax.psum(summed, AXIS), stacked

    each, all_ = PartitionSpec(AXIS), PartitionSpec()
    # check_vma off: loops start from replicated parameters and end with a client's own.
    split = jax.shard_map(
        share, mesh=mesh, in_specs=(all_, each), out_specs=(all_, each), check_vma=False
    )
    return split(shared, members)


def cohort_map(
    strategy: str = "auto", *, chunk: int = 0, devices: int = 0, among: Sequence[Any] = ()
) -> CohortMap:
    """The strategy of this name.

    `sharded` takes the first `devices` of the devices `among` (by default those that are here), 0
    meaning all. `chunk` clients are on a device at once; 0 is 8 if chunked, else as many as
    there are.
    """
    if chunk < 0:
        raise errors.UsageError(f"cohort.chunk = {chunk}: expected 0 or more.")
    among = list(among) or jax.devices()
    present, kind = len(among), among[0].platform
    if not 0 <= devices <= present:
        raise errors.UsageError(
            f"cohort.devices = {devices}, but jax sees {present} ({kind}). Ask for at most that "
            "many, or 0 for all."
        )
    one_device = "map" if kind == "cpu" else "vmap"
    if strategy == "auto":
        strategy = "sharded" if (devices or present) > 1 else one_device
    inner = {"vmap": _vmap, "map": _map}

    def sharded():
        mesh = Mesh(np.array(among[: devices or present]), (AXIS,))
        each, name = inner[one_device], one_device
        if chunk:
            each, name = functools.partial(_chunked, chunk=chunk), f"chunked by {chunk}"
        run = functools.partial(_sharded, mesh=mesh, inner=each)
        return CohortMap(f"sharded over {mesh.size}, {name} on each", run, mesh)

    make = errors.lookup(
        "cohort strategy",
        strategy,
        {
            "vmap": lambda: CohortMap("vmap", _vmap),
            "map": lambda: CohortMap("map", _map),
            "chunked": lambda: CohortMap(
                f"chunked by {chunk or 8}", functools.partial(_chunked, chunk=chunk or 8)
            ),
            "sharded": sharded,
        },
    )
    return make()
