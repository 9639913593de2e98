"""The journals of a zeroth-order run in several processes, one in each replica of its store.

[Note: Journals of replicas] Each replica (replicas/_places.py) has a journal. The journals of one
run differ only at the end, if processes were killed at different moments; on resume, whoever has
fewer steps gets the missing records from a process that has them.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from lohan.common import _log
from lohan.config import Config
from lohan.errors import StoreError, WorldMismatchError
from lohan.journal import _journal
from lohan.journal._journal import packed, unpacked
from lohan.journal._zo_run import uuid_of
from lohan.replicas._places import REPLICA, run_of
from lohan.store import _store

if TYPE_CHECKING:
    from lohan import _core
    from lohan.journal._journal import Journal
    from lohan.journal._zeroth import Record
    from lohan.world._world import World

# The most bytes of records in one message: a TCPStore takes 8 MiB at most.
_RECORDS_BYTES = 4 << 20


def level(world: World, journal: Journal) -> None:
    """Give every process the same steps: those of the longest journal.

    Raises:
        WorldMismatchError: the journals are not those of one run.
    """
    rule = journal.rule
    count = len(journal.records)
    facts = [rule.seed, rule.eps, rule.samples, rule.rng]
    told = [
        json.loads(value)
        for value in world.exchange(json.dumps([count, facts]).encode(), "resume, steps")
    ]
    counts = [row[0] for row in told]
    least, most = min(counts), max(counts)
    longest = counts.index(most)
    same = hashlib.sha256(packed(journal.records[:least], 0, rule.samples)).digest()
    digests = world.exchange(same, "resume, records")
    for rank, digest in enumerate(digests):
        if digest != digests[0] or told[rank][1] != told[0][1]:
            raise _apart(world, 0, rank, least)
    records: list[Record] = []
    part = max(1, _RECORDS_BYTES // (_journal.BYTES * rule.samples))
    for first in range(least, most, part):
        mine = journal.records[first : first + part] if world.rank == longest else ()
        said = world.exchange(packed(mine, first, rule.samples), f"resume, records from {first}")
        records += unpacked(said[longest], first, rule.samples)
    own = journal.records[least:]
    if packed(own, least, rule.samples) != packed(records[: len(own)], least, rule.samples):
        raise _apart(world, longest, world.rank, count)
    if count < most:
        _extend(journal, records[count - least :])


def _apart(world: World, one: int, other: int, count: int) -> WorldMismatchError:
    return WorldMismatchError(
        f"the journals of {world.name(one)} and {world.name(other)} differ within their first"
        f" {count} steps: one of them was trained on its own. Move the directory of the one that is"
        " not wanted away; it is then copied from the other"
    )


def level_alone(journal: Journal, directories: Sequence[str], store: _core.Store) -> None:
    """Take over steps that only another replica of the run in these directories has.

    A process of an earlier run with several processes may have been killed before it wrote the last
    step, which another one had already written.
    """
    for parent in directories:
        for path in sorted(Path(parent).glob("rank-*")):
            if REPLICA.fullmatch(path.name) is None or not (path / _journal.NAME).exists():
                continue
            names = [os.path.join(directory, path.name) for directory in directories]
            with contextlib.suppress(StoreError):
                _take_over(journal, names, run_of(store))


def _take_over(journal: Journal, names: Sequence[str], run: str) -> None:
    store = _store.open_existing(names, Config(allow_buffered=True), read_only=True)
    try:
        if run_of(store) != run:
            return
        rule, records = _journal.read(names, uuid_of(store))
    finally:
        store.close()
    count = len(journal.records)
    is_longer = rule == journal.rule and len(records) > count
    mine = packed(journal.records, 0, rule.samples)
    if is_longer and packed(records[:count], 0, rule.samples) == mine:
        _extend(journal, records[count:])


def _extend(journal: Journal, records: Sequence[Record]) -> None:
    journal.extend(records)
    _log.note(
        f"{journal.path}: took over {len(records)} steps, up to step {len(journal.records)},"
        " that only another process had written"
    )
