"""Many pictures into one array of bytes: decoded by threads, kept in a memory-mapped cache.

A picture becomes RGB (or grey), its shorter side is resized to `side`, and the middle square is
kept; with `stretch`, both sides are resized, as LEAF does. Large JPEGs are decoded at the smallest
of their own scales that is still large enough.
"""

import concurrent.futures
import io
import json
import logging
import math
import os
import pathlib
from collections.abc import Callable, Sequence
from typing import NamedTuple, TypeVar

import numpy as np

from fedjax_flat import errors, progress
from fedjax_flat.data.sources import files

VERSION = 1  # of what is in caches; another number makes them anew
MODES = {1: "L", 3: "RGB", 4: "RGBA"}
_NAMED = 3  # how many unreadable images an error names
_AT_ONCE = 64  # images, by one thread

T = TypeVar("T")

log = logging.getLogger(__name__)


class Form(NamedTuple):
    """What pictures become: squares of `side`, or of their own size when that is 0."""

    side: int = 0
    channels: int = 3
    stretch: bool = False


def picture(source: pathlib.Path | bytes, form: Form) -> np.ndarray:
    """One picture, (height, width, channels) of bytes."""
    from PIL import Image, ImageOps

    side = form.side
    with Image.open(io.BytesIO(source) if isinstance(source, bytes) else source) as opened:
        if side:
            opened.draft(None, (side, side))
        image = ImageOps.exif_transpose(opened).convert(MODES[form.channels])
    if form.stretch:
        image = image.resize((side, side), Image.Resampling.BICUBIC)
    elif side:
        width, height = image.size
        cut = min(width, height)
        left, top = (width - cut) / 2, (height - cut) / 2
        image = image.resize((side, side), Image.Resampling.BICUBIC,
                             box=(left, top, left + cut, top + cut))
    return np.asarray(image, np.uint8).reshape(image.height, image.width, form.channels)


def pictures(
    name: str, paths: Sequence[pathlib.Path], form: Form, *, root: pathlib.Path,
    skip_unreadable: bool = False,
) -> tuple[np.ndarray, np.ndarray]:
    """(pictures of the readable files, positions of those files), from root's cache if there."""
    cache, everything = files.cache_folder(root), np.arange(len(paths))
    made_of = lambda which: files.fingerprint(root, [paths[i] for i in which], VERSION, form)
    skipped = cache / f"{made_of(everything)}.unreadable.json"
    unreadable: list[int] = []
    if skip_unreadable and skipped.is_file():
        unreadable = json.loads(skipped.read_text())
        log.warning("%s: %d unreadable images are left out, as before.", name, len(unreadable))
    while True:
        kept = np.delete(everything, unreadable)
        if not len(kept):
            raise errors.UsageError(f"{name}: none of {len(paths)} images can be read.")
        shape = (len(kept), form.side, form.side, form.channels)
        path = cache / f"{made_of(kept)}.npy"
        if path.is_file():
            return files.memory_mapped(path, shape, np.uint8), kept
        fetch = lambda which, kept=kept: [paths[i] for i in kept[which.start:which.stop]]
        try:
            filled(name, path, shape, fetch, lambda file: picture(file, form))
        except Unreadable as e:
            text = _unreadable(name, [paths[i] for i in kept[e.which]], e.why)
            if not skip_unreadable:
                raise errors.UsageError(
                    f"{text} Repair or remove them, or leave them out with "
                    "--config.data.skip_unreadable=True."
                ) from e
            log.warning("%s Left out.", text)
            unreadable = sorted([*unreadable, *kept[e.which].tolist()])
            with files.written_whole(skipped) as partial:
                partial.write_text(json.dumps(unreadable))


class Unreadable(Exception):
    """Some pictures cannot be decoded: which, and why the first cannot."""

    def __init__(self, which: list[int], why: str):
        super().__init__(which, why)
        self.which, self.why = which, why


def filled(
    name: str, path: pathlib.Path | None, shape: tuple[int, ...],
    fetch: Callable[[range], Sequence[T]], one: Callable[[T], np.ndarray],
) -> np.ndarray:
    """An array of bytes in the file `path`, or in memory without one: one(item) for each item.

    `fetch` gets the items of some positions. Both are called by several threads.
    """
    if path is None:
        array = np.empty(shape, np.uint8)
        _fill(name, array, fetch, one)
        return array
    with files.written_whole(path) as partial:
        _allocate(partial, shape)
        array = np.load(partial, mmap_mode="r+", allow_pickle=False)
        _fill(name, array, fetch, one)
        array.flush()
    return files.memory_mapped(path, shape, np.uint8)


def _allocate(path: pathlib.Path, shape: tuple[int, ...]) -> None:
    """Claims the space first: a full disk is an error here, and the end of the process later."""
    with open(path, "wb") as file:
        np.lib.format.write_array_header_1_0(
            file, {"descr": "|u1", "fortran_order": False, "shape": shape}
        )
        start, size = file.tell(), math.prod(shape)
        if hasattr(os, "posix_fallocate"):
            os.posix_fallocate(file.fileno(), start, size)
        else:
            file.truncate(start + size)


def _fill(name: str, array: np.ndarray, fetch: Callable, one: Callable) -> None:
    from PIL import Image

    wrong: dict[int, str] = {}

    def put(which: range) -> int:
        for i, item in zip(which, fetch(which), strict=True):
            try:
                array[i] = one(item)
            except (OSError, SyntaxError, ValueError, Image.DecompressionBombError) as e:
                wrong[i] = str(e) or type(e).__name__
        return len(which)

    count = len(array)
    parts = [range(i, min(i + _AT_ONCE, count)) for i in range(0, count, _AT_ONCE)]
    pool = concurrent.futures.ThreadPoolExecutor(os.cpu_count())
    try:
        with progress.bar(what=f"decoding {name}", total=count, unit="images") as bar:
            for done in pool.map(put, parts):
                bar.update(done)
    finally:  # Ctrl-C waits for the pictures in hand, not for all
        pool.shutdown(cancel_futures=True)
    if wrong:
        raise Unreadable(sorted(wrong), wrong[min(wrong)])


def _unreadable(name: str, paths: Sequence[pathlib.Path], why: str) -> str:
    named = ", ".join(map(str, paths[:_NAMED])) + (", ..." if len(paths) > _NAMED else "")
    return f"{name}: {len(paths)} unreadable images: {named} ({why})."
