"""A thread that notices when another process of the run ends, fails or falls silent.

[Note: Signs of life] Each process increments a counter in the rendezvous store every BEAT_S
seconds and reads the counters of the two ranks before it. A counter that stands still for
peer_timeout_s means that the process is lost: it was stopped, its machine is off, or the network to
it is down. On the same machine a pidfd reports the end of a process within milliseconds. Whoever
notices a loss records it in the store, where every process looks in each round; so does a process
that leaves on its own, with the reason.

[Note: Followers] The loss of one process ends all others, and each of them cuts its connections. So
a process often hears first of one that has only followed. But the store has had the loss since
before the follower's end. So ends are read until no new one is found, and errors name a lost
process if there is one.

The beats come from a Python thread. Code that holds the GIL for longer than peer_timeout_s looks
like a lost process, which is why the default is long.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import select
import threading
import time
from typing import TYPE_CHECKING, Any

from lohan.common._wake import Flag
from lohan.world._rendezvous import is_agents_store

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

BEAT_S = 0.5
# A round that took this much longer than planned means that this process was stopped itself, so
# that others had no chance to be heard.
STALL_S = 2.0
_LAST_LOOK_MS = 300
# How long a process that serves the store stays for the others.
_LINGER_S = 2.0
_KILLED = "has ended without closing its session: it was killed, or left through os._exit()"


def wait_out(event: Flag, seconds: float) -> bool:
    """Wait for an event, and return whether it has happened; Ctrl-C and SIGTERM do not end this.

    A thread that is inside a call of the store when the interpreter ends would abort the process.
    """
    until = time.monotonic() + seconds
    interruption: BaseException | None = None
    while True:
        try:
            has_happened = event.wait(max(0.0, until - time.monotonic()))
            break
        except BaseException as error:
            interruption = error
    if interruption is not None:
        raise interruption
    return has_happened


@dataclasses.dataclass(frozen=True)
class Peer:
    """A process of the run.

    Attributes:
        rank: its rank.
        host: the name of its machine.
        pid: its process ID on that machine.
        node: an identifier that is equal for processes on one machine.
    """

    rank: int
    host: str
    pid: int
    node: str

    def __str__(self) -> str:
        """Return the process as messages name it."""
        return f"rank {self.rank} (host {self.host}, process {self.pid})"


@dataclasses.dataclass(frozen=True)
class End:
    """Why a process no longer takes part.

    Attributes:
        rank: its rank.
        how: "closed" (it closed its session), "failed" (it left with an error) or "lost".
        text: what happened, as the end of a sentence that begins with the process.
    """

    rank: int
    how: str
    text: str


class Watch:
    """The thread, and what it knows about the other processes.

    Attributes:
        ends: the processes that no longer take part, by rank. The thread replaces the dictionary,
            because other threads iterate over it.
        phases: what each process last reported to be doing, by rank; read on request.
        phase: what this process reports.
        contact: the last time (time.monotonic()) at which the store answered.
        error: the error of the store if it cannot be reached any more, else None.
    """

    def __init__(
        self,
        store: Any,
        peers: Sequence[Peer],
        rank: int,
        timeout_s: float,
        on_end: Callable[[], None],
    ) -> None:
        self.ends: dict[int, End] = {}
        self.phases: dict[int, str] = {}
        self.phase = ""
        self.contact = time.monotonic()
        self.error: BaseException | None = None
        self._store = store
        self._peers = peers
        self._rank = rank
        self._timeout_s = timeout_s
        self._on_end = on_end  # called if the store still answers when the thread ends
        self._beats = 0
        self._end_count = 0
        self._wanted: tuple[str, ...] = ()  # keys that an exchange waits for
        self.absent: frozenset[int] = frozenset()  # ended ranks whose key is not there
        self._next_keys: tuple[str, ...] = ()  # keys of the next exchange, while bytes are awaited
        # What other ranks have written to keys of look_for(), and these keys.
        self._looked: tuple[tuple[str, ...], Mapping[int, bytes]] = ((), {})
        self._released: list[tuple[str, str]] = []  # keys to write, and their marks
        self._found: list[End] = []  # ends of others to record
        self._own_end: End | None = None  # why this process no longer takes part
        self._is_asked = False  # whether the phases of all processes are wanted
        self._stops = self._lingers = False
        self._is_over = Flag()
        self._reader, self._writer = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        self._pidfds = self._open_pidfds()
        # The counters of the ranks before this one: what they were, and since when.
        size = len(peers)
        watched = {(rank - 1) % size, (rank - 2) % size} - {rank}
        self._seen: dict[int, tuple[bytes, float]] = {
            each: (b"", time.monotonic()) for each in sorted(watched)
        }
        self.beat()
        self._thread = threading.Thread(target=self._run, name="lohan-watch", daemon=True)

    def start(self) -> None:
        """Start the thread. All processes must have called beat() before."""
        self._thread.start()

    def beat(self) -> None:
        """Report that this process is alive, and what it is doing."""
        self._beats += 1
        self._store.set(f"beat/{self._rank}", f"{self._beats} {self.phase}")

    def _open_pidfds(self) -> dict[int, int]:
        """Return a pidfd of each other process on this machine, by file descriptor."""
        mine = self._peers[self._rank]
        found: dict[int, int] = {}
        for peer in self._peers:
            if peer.node != mine.node or peer.pid == mine.pid:
                continue
            with contextlib.suppress(OSError):  # without it, its beats still tell
                found[os.pidfd_open(peer.pid)] = peer.rank
        return found

    def nudge(self) -> None:
        """Wake the thread for a round now."""
        with contextlib.suppress(OSError):  # a full pipe wakes it as well
            os.write(self._writer, b"x")

    def expect(self, keys: Sequence[str]) -> None:
        """Set the keys, one of each rank, that this process waits for (none if empty)."""
        self.absent = frozenset()
        self._wanted = tuple(keys)
        if self.ends and keys:
            self.nudge()

    def look_for(self, keys: Sequence[str]) -> None:
        """Set the keys, one of each rank, that no process should have written yet."""
        self._next_keys = tuple(keys)

    @property
    def early(self) -> Mapping[int, bytes]:
        """What other ranks have written to the keys of look_for(), by rank."""
        keys, found = self._looked
        return found if keys == self._next_keys else {}

    def ask(self) -> None:
        """Request the phases of all processes."""
        self._is_asked = True
        self.nudge()

    def release(self, keys: Sequence[str], mark: str, end: End | None) -> None:
        """End the waits for keys in all processes: write a mark to those that are missing.

        Args:
            keys: the keys.
            mark: the mark.
            end: why this process no longer takes part, for the others; None: they know.
        """
        self._own_end = self._own_end or end
        self._released += [(key, mark) for key in keys]
        self.nudge()

    def found(self, end: End) -> None:
        """Let the thread record an end that another thread has found out, before that of its own.

        Args:
            end: the end of another process.
        """
        self._found.append(end)
        self.nudge()

    def record(self, end: End) -> None:
        """Record in the store, once, that a process no longer takes part."""
        value = json.dumps(dataclasses.asdict(end))
        self._store.compare_set(f"end/{end.rank}", "", value)
        self._store.add("ends", 1)

    def stop(self, end: End, *, lingers: bool) -> None:
        """Record why this process leaves, and stop the thread.

        The thread does both, because no new one can be started while the interpreter ends. This
        does not wait for a store that does not answer.

        Args:
            end: why this process leaves.
            lingers: whether this process serves the store. With its end the others could not even
                read why it has ended, so it waits until they have left, but not for long.
        """
        self._own_end = self._own_end or end
        self._lingers = lingers
        self._stops = True
        self.nudge()
        if wait_out(self._is_over, 2 * _LINGER_S):
            self.close()

    def close(self) -> None:
        """Close the file descriptors. The thread has ended, or was never started."""
        for fd in (self._reader, self._writer, *self._pidfds):
            with contextlib.suppress(OSError):
                os.close(fd)
        self._pidfds = {}

    # --- The thread -------------------------------------------------------------------------

    def _run(self) -> None:
        poll = select.poll()
        for fd in (self._reader, *self._pidfds):
            poll.register(fd, select.POLLIN)
        try:
            while not self._stops:
                before = time.monotonic()
                ready = [fd for fd, _ in poll.poll(BEAT_S * 1000)]
                now = time.monotonic()
                if now - before > BEAT_S + STALL_S:
                    self._forgive(now)
                for fd in ready:
                    if fd in self._pidfds:
                        poll.unregister(fd)
                        self._ended(self._pidfds[fd])
                    else:
                        with contextlib.suppress(BlockingIOError):
                            os.read(fd, 4096)
                if not self._stops:
                    self._round()
            self._write_marks()
            self._linger()
            self._on_end()
        except Exception as error:  # the store's; World.exchange() raises it
            self._note_ended()
            self.error = error
        finally:
            self._is_over.set()

    def _write_marks(self) -> None:
        """Record the end of this process, if it has ended, and only then end the others' waits."""
        while self._found:
            self.record(self._found.pop())
        if self._own_end is not None:
            self.record(self._own_end)
        while self._released:
            key, mark = self._released.pop()
            self._store.compare_set(key, "", mark)

    def _linger(self) -> None:
        until = time.monotonic() + _LINGER_S
        ends = [f"end/{peer.rank}" for peer in self._peers]
        while self._lingers and time.monotonic() < until and not self._store.check(ends):
            time.sleep(BEAT_S / 10)

    def _note_ended(self) -> None:
        """Note whether rank 0 has ended, if it served the store from this machine.

        Without the store, no other process can say why it ends, so their ends do not count.
        """
        servers = [fd for fd, rank in self._pidfds.items() if rank == 0]
        if is_agents_store() or not servers:
            return
        poll = select.poll()
        poll.register(servers[0], select.POLLIN)
        if poll.poll(_LAST_LOOK_MS):
            self.ends = {0: End(0, "lost", _KILLED), **self.ends}

    def _forgive(self, now: float) -> None:
        self._seen = {rank: (value, now) for rank, (value, _) in self._seen.items()}

    def _ended(self, rank: int) -> None:
        """Record that a process on this machine has ended, unless it said why before."""
        self.record(End(rank, "lost", _KILLED))

    def _round(self) -> None:
        self.beat()
        now = time.monotonic()
        for rank, (last, since) in self._seen.items():
            value = self._store.get(f"beat/{rank}")
            if value != last:
                self._seen[rank] = (value, now)
            elif now - since > self._timeout_s and rank not in self.ends:
                when = time.strftime("%H:%M:%S", time.localtime(time.time() - (now - since)))
                doing = value.decode().partition(" ")[2]
                silent = f"has been silent since {when}, {doing}: it was stopped, or its machine or"
                self.record(End(rank, "lost", f"{silent} the network to it is down"))
        count = self._store.add("ends", 0)
        if count != self._end_count:
            self._end_count = count
            self._read_ends()
        if self._released or self._found:
            self._write_marks()
        wanted = self._wanted
        if wanted and self.ends:
            absent = frozenset(r for r in self.ends if not self._store.check([wanted[r]]))
            if wanted is self._wanted:
                self.absent = absent
        if keys := self._next_keys:
            found = [rank for rank, key in enumerate(keys) if self._store.check([key])]
            self._looked = keys, {r: self._store.get(keys[r]) for r in found if r != self._rank}
        if self._is_asked:
            self._is_asked = False
            values = self._store.multi_get([f"beat/{peer.rank}" for peer in self._peers])
            self.phases = {
                rank: value.decode().partition(" ")[2] for rank, value in enumerate(values)
            }
        self.contact = time.monotonic()

    def _read_ends(self) -> None:
        """Read the ends of processes, and the losses that have led to them: [Note: Followers]."""
        ends = dict(self.ends)
        count = -1
        while count < len(ends):
            count = len(ends)
            for peer in self._peers:
                if peer.rank not in ends and self._store.check([f"end/{peer.rank}"]):
                    ends[peer.rank] = End(**json.loads(self._store.get(f"end/{peer.rank}")))
        self.ends = ends
