"""Packets as bytes and back, in NumPy, on the host: what a message really weighs.

    data = pack(packet)                 of encode(tree, state, key)
    packet = unpack(data, like)         `like`: the shapes of a packet, which both sides know

One part after the other (packet.py), each filled up to whole bytes:
    plain arrays   their own bytes, little-endian
    Levels         bits of equal number, first bit highest; three symbols five to a byte
    Sparse         how many, in 32 bits; then for each its gap in Golomb code, and its sign or value
    Kernels        how many, in 32 bits; then for each its number, and its signs: 00, 01 +, 10 -;
                   then the dense layers as a Sparse
    Seeded         the seed, then the values

Survivors that are 0 are not written, but by a seeded part.
"""

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from fedjax_flat import errors
from fedjax_flat.ops.select import at_random
from fedjax_flat.wire.packet import Kernels, Levels, Seeded, Sparse, golomb_parameter, parts_of


def pack(packet: Any) -> bytes:
    """The bytes of a packet."""
    return b"".join(
        _WAYS.get(type(part), (_write_plain, _read_plain))[0](part)
        for part in parts_of(jax.device_get(packet))
    )


def unpack(data: bytes, like: Any) -> Any:
    """The packet of which these are the bytes."""
    stream = _Stream(data)
    found = [
        _WAYS.get(type(part), (_write_plain, _read_plain))[1](stream, part)
        for part in parts_of(like)
    ]
    if stream.at != len(data):
        raise errors.UsageError(
            f"{len(data)} bytes are too many: such a packet ends after {stream.at}."
        )
    structure = jax.tree.structure(like, is_leaf=lambda x: type(x) in _WAYS)
    return jax.tree.unflatten(structure, found)


class _Stream:
    """Bytes that are read from the front."""

    def __init__(self, data: bytes):
        self.data, self.at = data, 0

    def take(self, count: int) -> bytes:
        piece = self.data[self.at : self.at + count]
        if len(piece) < count:
            raise errors.UsageError("the bytes end in the middle of a packet: some are missing.")
        self.at += count
        return piece

    def number(self) -> int:
        return int.from_bytes(self.take(4), "big")

    def bits(self, count: int) -> np.ndarray:
        return np.unpackbits(np.frombuffer(self.take(-(-count // 8)), np.uint8))[:count]


def _write_plain(x: Any) -> bytes:
    return np.asarray(x).tobytes()


def _read_plain(stream: _Stream, like: Any) -> np.ndarray:
    count = math.prod(like.shape) * like.dtype.itemsize
    return np.frombuffer(stream.take(count), like.dtype).reshape(like.shape)


def _write_levels(part: Levels) -> bytes:
    values = part.values.astype(np.int64).ravel() - part.least
    if part.symbols == 3:
        fives = np.pad(values, (0, -len(values) % 5)).reshape(-1, 5)
        return (fives @ 3 ** np.arange(5)).astype(np.uint8).tobytes()
    return np.packbits(_fields(values, (part.symbols - 1).bit_length())).tobytes()


def _read_levels(stream: _Stream, like: Levels) -> Levels:
    shape = like.values.shape
    size, width = math.prod(shape), (like.symbols - 1).bit_length()
    if like.symbols == 3:
        data = np.frombuffer(stream.take(-(-size // 5)), np.uint8).astype(np.int64)
        values = (data[:, None] // 3 ** np.arange(5) % 3).ravel()[:size]
    else:
        values = _numbers(stream.bits(size * width), width)
    return like.replace(values=(values + like.least).astype(like.values.dtype).reshape(shape))


def _write_sparse(part: Sparse) -> bytes:
    vector = _joined(part.values)
    at = np.flatnonzero(vector)
    kept = vector[at]
    values = {
        0: np.zeros((len(at), 0), np.uint8),
        1: (kept < 0).astype(np.uint8)[:, None],
        32: _fields(kept.astype(np.float32).view(np.uint32).astype(np.int64), 32),
    }[part.value_bits]
    bits = golomb(np.diff(at, prepend=-1), values, golomb_parameter(part.kept / part.size))
    return len(at).to_bytes(4, "big") + np.packbits(bits).tobytes()


def _read_sparse(stream: _Stream, like: Sparse) -> Sparse:
    count, b = stream.number(), golomb_parameter(like.kept / like.size)
    bits = np.unpackbits(np.frombuffer(stream.data, np.uint8, offset=stream.at))
    gaps, values, used = read_golomb(bits, count, like.value_bits, b)
    stream.take(-(-used // 8))
    at = np.cumsum(gaps) - 1
    vector = np.zeros(like.size, next(iter(like.values.values())).dtype)
    if like.value_bits == 32:
        vector[at] = _numbers(values, 32).astype(np.uint32).view(np.float32)
    else:
        vector[at] = 1 - 2 * values[:, 0].astype(np.int8) if like.value_bits else 1
    return like.replace(values=_parted(vector, like.values))


def golomb(gaps: np.ndarray, values: np.ndarray, b: int) -> np.ndarray:
    """Bits: for each survivor gap - 1 = q 2^b + r as q ones, a zero and r, then its own bits."""
    q, r = np.divmod(gaps - 1, 2**b)
    lengths = q + 1 + b + values.shape[1]
    start = np.cumsum(lengths) - lengths
    edges = np.zeros(int(lengths.sum()) + 1, np.int8)  # where runs of ones begin and end
    np.add.at(edges, start, 1)
    np.add.at(edges, start + q, -1)
    bits = np.cumsum(edges, dtype=np.int8)[:-1].astype(np.uint8)
    fixed = np.concatenate([_fields(r, b), values], axis=1)
    bits[(start + q + 1)[:, None] + np.arange(fixed.shape[1])] = fixed
    return bits


def read_golomb(
    bits: np.ndarray, count: int, width: int, b: int
) -> tuple[np.ndarray, np.ndarray, int]:
    """(gaps, the survivors' own bits, how many bits were read): the inverse of `golomb`."""
    zeros = np.flatnonzero(bits == 0)
    at, ends, runs = 0, np.zeros(count, np.int64), np.zeros(count, np.int64)
    for i in range(count):
        found = np.searchsorted(zeros, at)
        if found == len(zeros):
            raise errors.UsageError("the bytes end in the middle of a packet: some are missing.")
        ends[i], runs[i] = zeros[found], zeros[found] - at
        at = int(zeros[found]) + 1 + b + width
    fixed = bits[(ends + 1)[:, None] + np.arange(b + width)]
    return runs * 2**b + _numbers(fixed[:, :b], b) + 1, fixed[:, b:], at


def _write_seeded(part: Seeded) -> bytes:
    mask = np.asarray(at_random(jnp.asarray(part.seed), part.size, part.kept))
    return part.seed.tobytes() + _joined(part.values)[mask].tobytes()


def _read_seeded(stream: _Stream, like: Seeded) -> Seeded:
    seed = _read_plain(stream, like.seed)
    mask = np.asarray(at_random(jnp.asarray(seed), like.size, like.kept))
    vector = np.zeros(like.size, np.float32)
    vector[mask] = np.frombuffer(stream.take(4 * like.kept), np.float32)
    return like.replace(values=_parted(vector, like.values), seed=seed)


def _write_kernels(part: Kernels) -> bytes:
    chosen, columns = _joined(part.chosen), _columns(part.signs)
    numbers = np.flatnonzero(chosen)
    signs = np.stack([columns < 0, columns > 0], axis=-1).astype(np.uint8)[numbers]
    rows = [_fields(numbers, chosen.size.bit_length()), signs.reshape(len(numbers), -1)]
    data = np.packbits(np.concatenate(rows, axis=1)).tobytes()
    dense = _write_sparse(part.dense) if part.dense else b""
    return len(numbers).to_bytes(4, "big") + data + dense


def _read_kernels(stream: _Stream, like: Kernels) -> Kernels:
    kernels = sum(x.size for x in like.chosen.values())
    width, area = kernels.bit_length(), math.prod(next(iter(like.signs.values())).shape[:2])
    count = stream.number()
    rows = stream.bits(count * (width + 2 * area)).reshape(count, width + 2 * area)
    numbers = _numbers(rows[:, :width], width)
    entries = rows[:, width:].reshape(count, area, 2).astype(np.int8)
    chosen, columns = np.zeros(kernels, bool), np.zeros((kernels, area), np.int8)
    chosen[numbers], columns[numbers] = True, entries[..., 1] - entries[..., 0]
    ends = np.cumsum([x.size for x in like.chosen.values()])[:-1]
    pieces = zip(np.split(columns, ends), like.signs.items(), strict=True)
    signs = {name: piece.T.reshape(x.shape) for piece, (name, x) in pieces}
    dense = _read_sparse(stream, like.dense) if like.dense else ()
    return like.replace(signs=signs, chosen=_parted(chosen, like.chosen), dense=dense)


def _columns(signs: dict[str, Any]) -> np.ndarray:
    """One row per kernel, layer after layer."""
    return np.concatenate([x.reshape(-1, x.shape[2] * x.shape[3]).T for x in signs.values()])


def _fields(values: Any, width: int) -> np.ndarray:
    """Whole numbers as rows of so many bits, the first bit highest."""
    return (values.reshape(-1, 1) >> np.arange(width - 1, -1, -1) & 1).astype(np.uint8)


def _numbers(bits: np.ndarray, width: int) -> np.ndarray:
    """What `_fields` was made of."""
    return bits.reshape(-1, width).astype(np.int64) @ (1 << np.arange(width - 1, -1, -1))


def _joined(arrays: dict[str, Any]) -> np.ndarray:
    return np.concatenate([np.asarray(x).ravel() for x in arrays.values()])


def _parted(vector: np.ndarray, like: dict[str, Any]) -> dict[str, Any]:
    ends = np.cumsum([math.prod(x.shape) for x in like.values()])[:-1]
    pieces = zip(np.split(vector, ends), like.items(), strict=True)
    return {name: piece.reshape(x.shape) for piece, (name, x) in pieces}


_WAYS: dict[type, tuple[Any, Any]] = {
    Levels: (_write_levels, _read_levels),
    Sparse: (_write_sparse, _read_sparse),
    Seeded: (_write_seeded, _read_seeded),
    Kernels: (_write_kernels, _read_kernels),
}
