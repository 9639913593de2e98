"""How the processes of a run meet in a part of the rendezvous store that is theirs alone.

[Note: Restarts] When torchrun restarts the processes of a run, their store still has the keys of
the processes before, and nothing in the environment tells them apart on all machines. So each
process writes a random number, and rank 0 answers with all numbers that it finds and with a random
prefix. A process accepts only an answer that has its own number, and says so below the prefix. The
prefix is in use once all processes have accepted it; if rank 0 has read a number of an earlier
process, it answers again as soon as that number changes.

[Note: Who has come] Until all have met, each process increments a counter of its own, and rank 0
reads those of all. A process has come if its counter has changed while rank 0 looked, since that of
an earlier process stands still, or if it has accepted a prefix; and it is lost if its counter then
stands still for peer_timeout_s. Rank 0 writes the roll: who has not come, and who is lost. The
others read the roll, and watch rank 0's counter.
"""

from __future__ import annotations

import dataclasses
import json
import secrets
import time
from typing import TYPE_CHECKING, Any

from lohan.world._watch import BEAT_S, STALL_S

if TYPE_CHECKING:
    from collections.abc import Callable

POLL_S = 0.02


@dataclasses.dataclass
class _Counter:
    """A process's counter: its value, since when it has that, and whether it has changed."""

    value: bytes
    since: float
    has_changed: bool = False


class Meeting:
    """The processes before all of them have met, as this one sees them. See [Note: Who has come].

    Attributes:
        absent: the ranks that have not come, as far as this process knows.
        lost: a rank that has come and fallen silent, or None.
        is_over: whether rank 0 waits no longer. It may serve the store, which then ends with it.
    """

    def __init__(self, store: Any, rank: int, size: int, timeout_s: float) -> None:
        """Prepare to meet the others; no call of the store is made.

        Args:
            store: the rendezvous store.
            rank: this process's rank.
            size: the number of processes.
            timeout_s: how long a process may be silent.
        """
        self._store = store
        self._rank = rank
        self._size = size
        self._timeout_s = timeout_s
        self._mine = secrets.token_hex(8)
        self._beats = 0
        self._next = 0.0  # when to look again
        self._counters: dict[int, _Counter] = {}
        self._have_met = False  # whether all have accepted a prefix
        self.absent = [each for each in range(size) if each != rank]
        self.lost: int | None = None
        self.is_over = False

    def prefix(self, is_needed: Callable[[], bool]) -> str | None:
        """Wait for all processes, and return a prefix that only they use. See [Note: Restarts].

        Args:
            is_needed: whether to wait any longer; None is returned once it is not.
        """
        store, rank, size = self._store, self._rank, self._size
        numbers = [f"here/{each}" for each in range(size)]
        answered: list[str] = []
        accepted = ""
        store.set(numbers[rank], self._mine)
        while is_needed():
            self.look()
            if rank == 0 and store.check(numbers):
                found = [value.decode() for value in store.multi_get(numbers)]
                if found != answered:
                    answered = found
                    store.set("answer", json.dumps([secrets.token_hex(8), found]))
            if store.check(["answer"]):
                prefix, found = json.loads(store.get("answer"))
                if found[rank : rank + 1] == [self._mine] and prefix != accepted:
                    accepted = prefix
                    store.set(f"{prefix}/accepted/{rank}", "")
            if accepted and store.check([f"{accepted}/accepted/{each}" for each in range(size)]):
                self._have_met = True
                return accepted
            time.sleep(POLL_S)
        return None

    def look(self) -> None:
        """Report that this process is alive, and learn about the others; not in every call."""
        now = time.monotonic()
        if now < self._next:
            return
        if self._beats > 0 and now > self._next + STALL_S:  # this process was stopped itself
            for counter in self._counters.values():
                counter.since = now
        self._next = now + BEAT_S
        self._beats += 1
        self._store.set(f"alive/{self._rank}", f"{self._mine} {self._beats}")
        self._count([*range(1, self._size)] if self._rank == 0 else [0], now)
        if self._rank == 0:
            self.absent = [rank for rank, c in self._counters.items() if not self._has_come(c)]
            self._store.set("roll", json.dumps([self._mine, self.absent, self.lost, self.is_over]))
        elif self.lost is None and self._has_come(self._counters[0]):
            self._read_roll()

    def _count(self, ranks: list[int], now: float) -> None:
        """Read counters, and notice one that stands still."""
        is_settled = self.is_over or self.lost is not None  # others end because of that
        for rank, value in zip(ranks, self._values([f"alive/{r}" for r in ranks]), strict=True):
            counter = self._counters.setdefault(rank, _Counter(value, now))
            if counter.value != value:
                self._counters[rank] = _Counter(value, now, has_changed=True)
            elif is_settled or not self._has_come(counter):
                continue
            elif now - counter.since > self._timeout_s:
                self.lost = rank

    def _has_come(self, counter: _Counter) -> bool:
        return self._have_met or counter.has_changed

    def _values(self, keys: list[str]) -> list[bytes]:
        """Return the values of keys; b"" for those that do not exist."""
        if self._store.check(keys):
            found: list[bytes] = self._store.multi_get(keys)
            return found
        return [self._store.get(key) if self._store.check([key]) else b"" for key in keys]

    def _read_roll(self) -> None:
        number = self._counters[0].value.decode().partition(" ")[0]
        roll = self._values(["roll"])[0]
        if roll and json.loads(roll)[0] == number:
            _, self.absent, self.lost, self.is_over = json.loads(roll)
