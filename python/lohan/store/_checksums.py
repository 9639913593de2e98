"""The checksums of files that are read in place: in memory, and in the store.

[Note: First reads] A base that is read in place is not read by wrap(): whoever first reads a piece
of 1 MiB, the engine or in_place.py, records its checksum ([Note: First reads] in
csrc/sched/in_place.h), and every later read is compared with it. At the start of a backward, and
when the session is closed, what has been recorded since is written to the store. So the commit of a
step has the checksums of what its forward has read: whatever a committed step depends on is
verified in every later session. A piece that no forward has read yet (of an expert to which no
token was routed) has no checksum, and is recorded by the run that reads it. What is read first in
a later micro-batch of an accumulated step is in the commit of the next step.

Until a piece is first read, only the file's size and time of modification show a change. Sessions
that must compare all bytes at the start read the whole base in wrap(): those of several processes,
which compare their bases, and zeroth-order training, whose journal is ahead of the store's commits.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from lohan.common import _bar
from lohan.errors import StoreMismatchError
from lohan.torch_glue._tensor import bytes_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from lohan import _core
    from lohan.layout._block import Layout
    from lohan.layout._files import File
    from lohan.store._store import Extents


def begin(layout: Layout, extents: Extents, store: _core.Store, *, reads: bool) -> None:
    """Make the checksums of a new store: unknown ones, or if `reads`, those of all bytes.

    Raises:
        StoreError: a file cannot be read, or was written to meanwhile.
    """
    if extents.checksums < 0:
        return
    in_place = layout.in_place
    in_place.forget(layout)
    if not reads:
        return
    total = sum(run.nbytes for unit in layout.units for run in unit.runs)
    with _bar.Bar("computing checksums of weights=") as bar:
        in_place.checksums = in_place.scan(layout, lambda nbytes: bar.add(nbytes, total))
    in_place.check_unchanged()
    write(layout, extents, store)


def write(layout: Layout, extents: Extents, store: _core.Store) -> None:
    """Write the checksums to the store, for its next commit."""
    raw = layout.in_place.all_checksums()
    values = torch.frombuffer(bytearray(raw), dtype=torch.uint8)
    store.write(extents.checksums, 0, values.data_ptr(), values.numel())
    layout.in_place.written = raw


def read(layout: Layout, extents: Extents, store: _core.Store) -> None:
    """Read the checksums from the store."""
    if extents.checksums < 0:
        return
    layout.in_place.forget(layout)
    values = torch.empty(extents.table[extents.checksums][0], dtype=torch.uint8)
    store.read(extents.checksums, 0, values.data_ptr(), values.numel())
    raw, at = bytes_of(values).tobytes(), 0
    for sums in layout.in_place.checksums.values():
        nbytes = len(sums) * sums.itemsize
        memoryview(sums).cast("B")[:] = raw[at : at + nbytes]
        at += nbytes
    layout.in_place.written = layout.in_place.all_checksums()


def check_content(layout: Layout, then: Sequence[File]) -> None:
    """Verify the checksums of all files if any file has a new path or modification time.

    Raises:
        StoreMismatchError: a block's bytes have changed; the message names the block and its files.
    """
    files = layout.in_place
    pairs = zip(files.files, then, strict=False)
    is_same = len(files.files) == len(then) and all(
        now.path == was.path and now.mtime_ns == was.mtime_ns for now, was in pairs
    )
    if is_same:
        return
    found = files.scan(layout)
    for index, known in files.checksums.items():
        unit, now = layout.units[index], found[index]
        if all(old in (0, new) for old, new in zip(known, now, strict=True)):
            known[:] = now
            continue
        names = sorted({files.files[run.file].path.name for run in unit.runs})
        raise StoreMismatchError(
            f"{files.files[unit.runs[0].file].path.parent}: the bytes of {unit.name!r} in"
            f" {', '.join(names)} have changed since the store was created: restore those files, or"
            " pass weights=FOLDER with a folder that has them"
        )
