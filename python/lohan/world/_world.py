"""The processes of a run, and the small messages that they exchange.

[Note: The store carries control messages] Processes meet at the rendezvous store of
torch.distributed (under torchrun a TCPStore of its agent), and lohan's control messages stay there:
descriptions at wrap and a few numbers in each step. A collective of a process group would be faster
by a fraction of a millisecond, but it cannot be abandoned, names no rank, and hangs until its
timeout if a process dies in the middle of it. A wait on the store ends when _watch.py finds that a
process is gone, and the error says which. A call of the store can itself block if the network is
down, so calls are made by a thread, and the caller stops waiting for the thread.

[Note: Rounds] In round n each process writes x/n/RANK and waits for the keys of all. A message
begins with the number of backwards whose gradients its process has exchanged, so that one that
still waits for gradients knows whether they are on their way. A process that
gives up writes a mark to the keys that are missing, which ends the wait of its own thread and of
all others: a thread that still waits when the interpreter ends would end the process with an abort.

[Note: Connections] Each thread has a connection of its own, because a call that waits occupies it.
To open one, torch looks up names, which takes seconds where the name server does not answer. So a
session that ends leaves its connections to the next one of the process.
"""

from __future__ import annotations

import contextlib
import datetime
import json
import os
import queue
import socket
import struct
import sys
import threading
import time
import weakref
from collections.abc import Collection, Mapping
from typing import Any

import torch

from lohan.common import _exit, _log
from lohan.common._wake import Flag
from lohan.errors import (
    LohanError,
    PeerLostError,
    PeerStepError,
    StepError,
    WorldMismatchError,
    reason_of,
)
from lohan.world._meeting import POLL_S, Meeting
from lohan.world._rendezvous import (
    SAY_AFTER_S,
    is_agents_store,
    join_timeout_s,
    say_alone,
)
from lohan.world._watch import BEAT_S, End, Peer, Watch, wait_out

_SLICE_S = 0.1
# How long bytes may still arrive from a process that is known to be gone.
_LATE_S = 0.3
_TEXT_MAX = 400
_MESSAGE, _GIVEN_UP = b"+", "-"  # what a key begins with: see [Note: Rounds]
_HEAD = struct.Struct("<cQ")  # _MESSAGE, and the number of backwards
_LOOK_AFTER_S = 1.0  # how long a wait for gradients lasts before it looks for messages
# How long an error of the store waits for the watch to find its cause.
_CAUSE_S = 2.0
# How long rank 0 stays after it has given up the meeting: two beats of each process, and a margin.
_ROLL_S = 5 * BEAT_S
# A wait of the thread that makes the store's calls; the caller decides when to give up.
_FOREVER = datetime.timedelta(days=20)

_spare: list[tuple[Any, Any]] = []  # stores and connections to them: see [Note: Connections]
_count = 0  # the worlds that this process has joined; all processes join them in the same order


class _Job:
    """A call for the thread, and its result."""

    def __init__(self, payload: bytes, number: int) -> None:
        self.payload = payload
        self.number = number
        self.values: list[bytes] = []
        self.error: BaseException | None = None
        self.is_given_up = False  # a process has given up the round
        self.is_abandoned = False  # this process no longer waits for it
        self.done = Flag()


class World:
    """The processes that train one model, from one call of wrap() to close().

    Attributes:
        rank: this process's rank.
        size: the number of processes, at least 2.
        peers: all processes, by rank.
        backwards: how many exchanges of gradients this process has ended.
    """

    backwards = 0

    def __init__(self, base: Any, rank: int, size: int, timeout_s: float) -> None:
        global _count
        _count += 1
        self._prefix = f"lohan/{_count}"  # later followed by that of _meeting.py
        self.rank = rank
        self.size = size
        self.peers: list[Peer] = []
        self._timeout_s = timeout_s
        self._base = base
        self._connection = _connect(base)
        self._store: Any = None  # until all processes have met
        self._meeting: Meeting | None = None  # until then; made by the thread
        self._watch: Watch | None = None
        self._number = 0  # of exchanges
        self._broken = ""  # why no exchange is possible any more
        self._is_closed = False
        self._is_failed = False  # whether the thread's connection has failed
        self._jobs: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self._is_served = Flag()  # the thread makes no calls any more
        threading.Thread(target=self._serve, name="lohan-world", daemon=True).start()
        try:
            self._meet(timeout_s)
        except BaseException:
            self._end_service()
            raise

    def _within(self, connection: Any) -> Any:
        dist: Any = torch.distributed
        return dist.PrefixStore(self._prefix, connection)

    def _meet(self, timeout_s: float) -> None:
        """Wait until all processes are here, and start to watch them."""
        connection = _connect(self._base)
        me = {"host": socket.gethostname(), "pid": os.getpid(), "node": node()}
        told = self._wait(json.dumps(me).encode(), "lohan.wrap()")
        peers = [Peer(rank, **json.loads(value)) for rank, value in enumerate(told)]
        self.peers = peers
        watch = Watch(
            self._within(connection),
            peers,
            self.rank,
            timeout_s,
            lambda: _spare.append((weakref.ref(self._base), connection)),
        )
        watch.phase = "in lohan.wrap()"
        try:
            self._wait(b"", "lohan.wrap()")  # every process has its first beat in the store
        except BaseException:
            watch.close()
            raise
        watch.start()
        self._watch = watch

    # --- Messages ---------------------------------------------------------------------------

    def exchange(self, payload: bytes, what: str) -> list[bytes]:
        """Give every process a message, and return those of all, by rank.

        Args:
            payload: this process's message.
            what: what the message is for, with a number that all processes agree on.

        Raises:
            PeerLostError: a process died or fell silent, or the rendezvous store is gone.
            PeerStepError: a process closed its session, or left with an error.
            WorldMismatchError: a process is at another point of the program.
            StepError: an earlier exchange was interrupted.
        """
        values = self._wait(what.encode() + b"\0" + payload, what)
        found = [value.partition(b"\0") for value in values]
        for rank, (name, _, _) in enumerate(found):
            if name != what.encode():
                self._broken = "the processes are at different points of the program"
                raise WorldMismatchError(
                    f"{self.name(rank)} is at {name.decode()!r}, but {self.name(self.rank)} is at"
                    f" {what!r}: all processes must call lohan in the same order; end all of them"
                )
        return [value for _, _, value in found]

    def first_of(self, value: Any, what: str) -> Any:
        """Return rank 0's value, which JSON can represent, in every process."""
        return json.loads(self.exchange(json.dumps(value).encode(), what)[0])

    def name(self, rank: int) -> str:
        """Return a process's name for messages."""
        return str(self.peers[rank]) if self.peers else f"rank {rank}"

    def substore(self, name: str) -> Any:
        """Return a part of the rendezvous store that only these processes use."""
        dist: Any = torch.distributed
        return dist.PrefixStore(name, self._within(_connect(self._base)))

    def say(self, phase: str) -> None:
        """Set what the other processes are told that this one is doing."""
        if self._watch is not None:
            self._watch.phase = phase

    def _wait(self, payload: bytes, what: str) -> list[bytes]:
        """Hand a message to the thread, and wait for all messages or for a reason to give up."""
        if self._broken:
            raise StepError(f"{self._broken}: close the session, and restart all processes")
        job = _Job(_HEAD.pack(_MESSAGE, self.backwards) + payload, self._number)
        self._number += 1
        self._broken = f"an exchange was interrupted ({what})"
        watch = self._watch
        if watch is not None:
            watch.look_for(())  # messages of this exchange are no longer early
            watch.expect(self._keys(job.number))
        self._jobs.put(job)
        try:
            self._await(job, what)
        except BaseException as error:
            job.is_abandoned = True
            if watch is not None:
                is_known = isinstance(error, LohanError)
                text = _end_text(error, f"in {what}")
                end = None if is_known else End(self.rank, "failed", text)
                watch.release(self._keys(job.number), _GIVEN_UP, end)
            raise
        if watch is not None:
            watch.expect(())
        self._broken = ""
        return job.values

    def _await(self, job: _Job, what: str) -> None:
        began = time.monotonic()
        has_said = False
        while not job.done.wait(_SLICE_S) or job.is_given_up:
            waited = time.monotonic() - began
            self._check(job, waited, what)
            if waited > SAY_AFTER_S and not has_said:
                has_said = self.say_waiting(waited, what)
            if job.is_given_up:
                time.sleep(_SLICE_S / 10)  # until the watch knows why
        if job.error is not None:
            self._let_watch_see()
            raise self._lost_store(job.error, what)

    def _serve(self) -> None:
        """Make the store's calls for _wait(), in a thread. See [Note: Rounds]."""
        while (job := self._jobs.get()) is not None:
            try:
                if self._store is None and not self._have_met(job):
                    continue
                store, keys = self._store, self._keys(job.number)
                store.set(keys[self.rank], job.payload)
                if self._watch is None and not self._has_polled(keys, job):
                    continue
                store.wait(keys, _FOREVER)
                values = store.multi_get(keys)
                job.is_given_up = any(value[:1] != _MESSAGE for value in values)
                job.values = [value[_HEAD.size :] for value in values]
                if job.number > 0:  # whoever has written in this round has read the one before
                    store.delete_key(self._keys(job.number - 1)[self.rank])
            except Exception as error:
                job.error, self._is_failed = error, True
            job.done.set()
        if not self._is_failed:
            _spare.append((weakref.ref(self._base), self._connection))
        self._is_served.set()

    def _have_met(self, job: _Job) -> bool:
        """Wait for all processes; return whether they are there."""
        store = self._within(self._connection)
        self._meeting = Meeting(store, self.rank, self.size, self._timeout_s)
        prefix = self._meeting.prefix(lambda: not job.is_abandoned)
        if prefix is None:
            return False
        self._prefix += f"/{prefix}"
        self._store = self._within(self._connection)
        return True

    def _end_service(self) -> None:
        """End the thread. One inside a call of the store would abort the end of the program."""
        self._jobs.put(None)
        wait_out(self._is_served, _CAUSE_S)

    def _has_polled(self, keys: list[str], job: _Job) -> bool:
        """Wait for keys without a watch; return whether they are there."""
        while not job.is_abandoned:
            if self._store.check(keys):
                return True
            if self._meeting is not None:
                self._meeting.look()
            time.sleep(POLL_S)
        return False

    def _keys(self, number: int) -> list[str]:
        return [f"x/{number}/{rank}" for rank in range(self.size)]

    def _check(self, job: _Job, waited: float, what: str) -> None:
        """Raise an error if the messages that are waited for will not come."""
        watch = self._watch
        if watch is None:
            self._check_meeting(waited)
            return
        self._check_store(watch, what)
        for end in watch.ends.values():
            is_missed = end.rank == self.rank or end.rank in watch.absent
            if job.is_given_up or (is_missed and not job.done.is_set()):
                raise self._end_error(end, what)
        if job.is_given_up and waited > self._timeout_s:
            self._broken = "a process has left an exchange"
            raise PeerStepError(
                f"another process was interrupted in {what} and does not continue: end all"
                " processes, and restart them with resume=True"
            )

    def _check_meeting(self, waited: float) -> None:
        """Raise an error if not all processes will meet."""
        meeting, limit_s = self._meeting, join_timeout_s(self._timeout_s)
        is_late = waited > limit_s or (meeting is not None and meeting.is_over)
        if meeting is not None and self.rank == 0 and (is_late or meeting.lost is not None):
            meeting.is_over = True
            time.sleep(_ROLL_S)  # the thread writes the roll, and the others read it
        if meeting is not None and meeting.lost is not None:
            raise PeerLostError(
                f"{self.name(meeting.lost)} called lohan.wrap(), and has been silent for"
                f" {self._timeout_s:.0f} s since: it has ended or was stopped, or its machine or"
                " the network to it is down. Start all processes again"
            )
        if is_late:
            absent = meeting.absent if meeting is not None else ()
            who = ", ".join(map(self.name, absent)) or "another process"
            raise PeerLostError(
                f"{who} did not call lohan.wrap() within {limit_s:.0f} s after"
                f" {self.name(self.rank)}: start {self.size} processes, as WORLD_SIZE says, and"
                " call lohan.wrap() in each of them. If they take longer, raise"
                " parallel.timeout_s: the"
                " wait is ten times as long"
            )

    def _check_store(self, watch: Watch, what: str) -> None:
        if watch.error is not None:
            raise self._lost_store(watch.error, what)
        silent = time.monotonic() - watch.contact
        if silent > self._timeout_s + BEAT_S:
            raise self._lost_store(TimeoutError(f"no answer for {silent:.0f} s"), what)

    def check_peers(self, missing: Mapping[int, float], what: str) -> None:
        """Raise an error if bytes that this process waits for will not come.

        Args:
            missing: the ranks that it waits for, and for how many seconds nothing has come from
                each of them.
            what: what the bytes are for.

        Raises:
            PeerLostError: a process died or fell silent, or the rendezvous store is gone.
            PeerStepError: a process closed its session, or left with an error.
            WorldMismatchError: a process is at another point of the program.
        """
        watch = self._watch
        assert watch is not None
        self._check_store(watch, what)
        if self.rank in watch.ends:
            raise self._end_error(watch.ends[self.rank], what)
        for rank, seconds in missing.items():
            end = watch.ends.get(rank)
            # What a process sent before it closed its session may still be on its way.
            if end is not None and (end.how != "closed" or seconds > self._timeout_s):
                if seconds > _LATE_S:
                    raise self._end_error(end, what)
            elif rank in watch.early and self._is_past(watch.early[rank], seconds):
                self._broken = "the processes are at different points of the program"
                other = watch.early[rank][_HEAD.size :].partition(b"\0")[0].decode()
                raise WorldMismatchError(
                    f"{self.name(rank)} is at {other!r}, but {self.name(self.rank)} is at"
                    f" {what!r}: all processes must run the same number of backwards per step"
                )
        longest = max(missing.values(), default=0.0)
        watch.look_for(self._keys(self._number) if longest > _LOOK_AFTER_S else ())

    def _is_past(self, message: bytes, seconds: float) -> bool:
        """Return whether a process that has sent a message has left out what this one waits for.

        Args:
            message: the message.
            seconds: for how long nothing has come from the process.
        """
        if seconds > self._timeout_s or message[:1] != _MESSAGE:
            return seconds > self._timeout_s
        their: int = _HEAD.unpack_from(message)[1]
        return their <= self.backwards  # it has not ended the backward that this one waits in

    def check_here(self, ranks: Collection[int], what: str, *, may_close: bool = False) -> None:
        """Raise an error if one of several processes no longer takes part, or any is lost.

        Args:
            ranks: the processes.
            what: what they are needed for.
            may_close: whether they may have closed their sessions.

        Raises:
            PeerLostError: a process died or fell silent, or the rendezvous store is gone.
            PeerStepError: a process closed its session, or left with an error.
        """
        watch = self._watch
        assert watch is not None
        self._check_store(watch, what)
        until = time.monotonic() + _LATE_S
        while found := [
            end
            for end in watch.ends.values()
            if end.how == "lost"
            or end.rank == self.rank
            or (end.rank in ranks and not (may_close and end.how == "closed"))
        ]:
            first = min(found, key=lambda end: end.how != "lost")
            # A process that failed because another one is lost tells so before the watch does.
            if first.how == "lost" or time.monotonic() > until:
                raise self._end_error(first, what)
            time.sleep(_SLICE_S / 10)

    def lost_wire(self, rank: int, error: BaseException, what: str) -> LohanError:
        """Return the error for a connection to a process that has failed."""
        if known := self.known_end(rank, what):
            return known
        self._broken = "a connection has failed"
        reason = reason_of(error)
        failed = f"the connection of {self.name(self.rank)} to {self.name(rank)} failed in {what}"
        if self._watch is not None:  # see [Note: Followers]
            text = f"does not answer: {failed}: {reason}"
            self._watch.found(End(rank, "lost", text))
        return PeerLostError(f"{failed}: {reason}. Restart the processes with resume=True")

    def known_end(self, rank: int | None, what: str) -> LohanError | None:
        """Wait a moment for the reason why something of another process has failed.

        Args:
            rank: the process; None: any.
            what: what has failed.

        Returns:
            The error that names the process that has ended first, or None if none is known to have.
        """
        watch = self._watch
        until = time.monotonic() + _CAUSE_S
        while watch is not None and time.monotonic() < until:
            for end in watch.ends.values():
                if end.how == "lost" or rank in (None, end.rank):
                    return self._end_error(end, what)
            if watch.error is not None:
                return self._lost_store(watch.error, what)
            watch.nudge()
            time.sleep(_SLICE_S / 2)
        return None

    def _end_error(self, end: End, what: str) -> LohanError:
        """Return the error for an end, or for a loss that may have led to it: [Note: Followers]."""
        assert self._watch is not None
        if end.rank != self.rank:
            end = next((each for each in self._watch.ends.values() if each.how == "lost"), end)
        self._broken = f"{self.name(end.rank)} is gone"
        if end.rank == self.rank:
            return PeerLostError(
                f"the other processes have given up on {self.name(end.rank)}: it {end.text}. If it"
                " was stopped for a while, restart all processes with resume=True"
            )
        if end.how == "lost":
            return PeerLostError(
                f"{self.name(end.rank)} {end.text}. {self.name(self.rank)} waited for it in {what}."
                " Restart the processes with resume=True, which continues after the last step; the"
                " number of processes may change"
            )
        return PeerStepError(f"{self.name(end.rank)} {end.text}, but {what} needs all processes")

    def _lost_store(self, error: BaseException, what: str) -> LohanError:
        for end in self._watch.ends.values() if self._watch is not None else ():
            return self._end_error(end, what)  # the reason why the store is gone
        self._broken = "the rendezvous store is gone"
        where = f"{os.environ.get('MASTER_ADDR', '?')}:{os.environ.get('MASTER_PORT', '?')}"
        if self.rank == 0 and not is_agents_store():
            why = "This process serves it: it was stopped, or blocked for as long"
        else:
            server = "torchrun's agent" if is_agents_store() else self.name(0)
            why = f"{server}, which serves it, has ended, or the network to it is down"
        return PeerLostError(
            f"the rendezvous store ({where}) does not answer {self.name(self.rank)} in {what}:"
            f" {reason_of(error)}. {why}. Restart the processes with resume=True"
        )

    def _let_watch_see(self) -> None:
        """Give the watch time to find out that the process that serves the store has ended."""
        watch = self._watch
        until = time.monotonic() + _CAUSE_S
        while watch is not None and not watch.ends and watch.error is None:
            time.sleep(_SLICE_S / 10)
            if time.monotonic() > until:
                return

    def say_waiting(self, waited: float, what: str) -> bool:
        """Print which processes a message is missing from; return whether that was done."""
        watch = self._watch
        if watch is None:
            say_alone(self.rank, self.size)
            return True
        if not watch.phases:
            watch.ask()
            return False
        others = [
            f"{self.name(rank)}: {phase}"
            for rank, phase in watch.phases.items()
            if rank != self.rank
        ]
        watch.phases = {}
        _log.note(
            f"{self.name(self.rank)} has waited {waited:.0f} s for the others in {what}:"
            f" {'; '.join(others)}"
        )
        return True

    # --- The end ----------------------------------------------------------------------------

    def fail(self, error: BaseException, what: str) -> None:
        """Tell the other processes that this one cannot continue, although its session is open.

        Args:
            error: the error.
            what: what it has ended.
        """
        self._broken = self._broken or f"this process failed in {what}"
        if self._watch is not None and not self._is_closed:
            end = End(self.rank, "failed", _end_text(error, f"in {what}"))
            self._watch.release(self._keys(self._number), _GIVEN_UP, end)

    def leave_after(self, step: int) -> None:
        """Tell the other processes that the session is closed, and why the program ends, if so."""
        error = sys.exception()
        if error is None and not hasattr(sys, "ps1"):  # at a prompt, the program continues
            error = getattr(sys, "last_value", None)
        if _exit.is_terminated() or isinstance(error, Exception | KeyboardInterrupt):
            self.leave("failed", _end_text(error or SystemExit(), f"after step {step}"))
        else:
            self.leave("closed", f"closed its session after step {step}")

    def leave(self, how: str, text: str) -> None:
        """Tell the other processes that this one no longer takes part. Idempotent.

        Args:
            how: "closed" or "failed".
            text: what happened, for example "closed its session after step 40".
        """
        if self._is_closed:
            return
        self._is_closed = True
        self._broken = self._broken or "the session is closed"
        # Without torchrun's agent, rank 0 serves the store.
        is_agent = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
        lingers = self.rank == 0 and not is_agent
        try:
            if self._watch is not None:
                self._watch.stop(End(self.rank, how, text), lingers=lingers)
        finally:
            self._end_service()

    def __repr__(self) -> str:
        """Return rank and size."""
        return f"World(rank={self.rank}, size={self.size})"


def named(error: BaseException) -> str:
    """Return an error's class and the first line of its message, as other processes see it."""
    text = str(error).partition("\n")[0][:_TEXT_MAX]
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def _end_text(error: BaseException, where: str) -> str:
    if _exit.is_terminated():
        return f"was ended by SIGTERM {where}"
    return f"failed {where} with {named(error)}"


def node() -> str:
    """Return an identifier of this machine, or of the node that torchrun started.

    Processes on one node see each other's process IDs, so that a container is a node of its own.
    """
    with contextlib.suppress(OSError):
        boot = open("/proc/sys/kernel/random/boot_id").read().strip()
        space = os.stat("/proc/self/ns/pid").st_ino
        return f"{os.environ.get('GROUP_RANK', '')}/{socket.gethostname()}/{boot}/{space}"
    return f"{os.environ.get('GROUP_RANK', '')}/{socket.gethostname()}"


def _connect(base: Any) -> Any:
    """Return a connection to a store: one that an earlier session has left, or a new one."""
    _spare[:] = [each for each in _spare if each[0]() is base]  # all processes must use one store
    return _spare.pop()[1] if _spare else base.clone()
