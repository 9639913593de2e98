"""Messages of many bytes between the processes of a run, through gloo of torch.distributed.

[Note: Tagged messages] There are no collectives: a process sends a message with a tag, and the
receiver names the sender and the tag. Messages with different tags may be sent and received in any
order. A send completes when the receiver has asked for the message, so nothing piles up on the way.

[Note: Waits of gloo] A wait for a message cannot be abandoned, hangs if the other process dies in
the middle of a message, and cuts all connections when its timeout is over. So a daemon thread per
process and direction makes the waits, without a timeout, in the order of the messages, and nobody
waits for these threads: whoever waits for a message asks World.check_peers() whether it can still
arrive. If it cannot, close() lets another wait time out, which cuts all connections and so ends the
threads. A thread whose wait ended while the interpreter ends would abort the process, and that is
likely: processes that fail together end together, and each cuts its connections.
"""

from __future__ import annotations

import contextlib
import datetime
import os
import queue
import socket
import threading
import time
from typing import TYPE_CHECKING, Any

import torch

from lohan.errors import PeerLostError, lacks, reason_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from lohan.world._world import World

# gloo's own timeouts never end a wait: see [Note: Waits of gloo].
_FOREVER = datetime.timedelta(days=20)
_TAG_END = (1 << 31) - 1  # no message has this tag
_POLL_S = 0.1
# How long threads have to end once their connections are cut.
_CUT_S = 1.0
_WHAT = "the connections of lohan.wrap()"
_groups: list[Any] = []  # the groups of gloo in which a thread may still wait


class Wire:
    """Connections to the other processes."""

    def __init__(self, world: World, on_error: Callable[[int, BaseException], None]) -> None:
        """Connect to all other processes, which must do the same.

        Args:
            world: the processes.
            on_error: called by a thread with the rank of the process whose message has failed.

        Raises:
            UnsupportedError: this build of torch has no gloo.
            PeerLostError, PeerStepError: a process is gone, or cannot be reached.
        """
        self._on_error = on_error
        self._group = _connected(gloo_groups(), world)
        others = [rank for rank in range(world.size) if rank != world.rank]
        # By peer and direction: messages on their way, and what to call when they are there.
        self._queues: dict[tuple[int, str], queue.SimpleQueue[Any]] = {
            (rank, way): queue.SimpleQueue() for rank in others for way in ("out", "in")
        }
        self._threads = [
            threading.Thread(
                target=self._wait, args=key, name=f"lohan-wire-{key[1]}-{key[0]}", daemon=True
            )
            for key in self._queues
        ]
        for thread in self._threads:
            thread.start()

    def send(self, peer: int, tensor: torch.Tensor, tag: int, done: Callable[[], None]) -> None:
        """Send a tensor of bytes, which must not change until a thread has called done."""
        self._begin(self._group.send, (peer, "out"), tensor, tag, done)

    def receive(self, peer: int, tensor: torch.Tensor, tag: int, done: Callable[[], None]) -> None:
        """Receive as many bytes as the tensor has. A thread calls done when they are there."""
        self._begin(self._group.recv, (peer, "in"), tensor, tag, done)

    def _begin(
        self,
        call: Callable[..., Any],
        key: tuple[int, str],
        tensor: torch.Tensor,
        tag: int,
        done: Callable[[], None],
    ) -> None:
        try:
            work = call([tensor], key[0], tag % _TAG_END)
        except RuntimeError as error:  # the connection is closed
            self._on_error(key[0], error)
            return
        self._queues[key].put((work, tensor, done))

    def close(self) -> None:
        """End the threads, and close the connections. See [Note: Waits of gloo]. Idempotent."""
        if self._group is None:
            return
        for each in self._queues.values():
            each.put(None)
        if not self._have_ended(_POLL_S):
            cut(self._group, {peer for peer, _ in self._queues})
        if self._have_ended(_CUT_S):
            close(self._group)
        self._group = None

    def _have_ended(self, seconds: float) -> bool:
        """Wait for the threads, but not for longer, and return whether all have ended."""
        until = time.monotonic() + seconds
        for thread in self._threads:
            thread.join(max(0.0, until - time.monotonic()))
        return not any(thread.is_alive() for thread in self._threads)

    def _wait(self, peer: int, way: str) -> None:
        waiting = self._queues[peer, way]
        while (item := waiting.get()) is not None:
            work, _, done = item
            try:
                work.wait()
                done()
            except BaseException as error:
                self._on_error(peer, error)
                return


def cut(group: Any, peers: Iterable[int]) -> None:
    """Cut all connections, which ends the waits: wait too briefly for what nobody sends."""
    for peer in peers:
        try:
            work = group.recv([torch.empty(1, dtype=torch.uint8)], peer, _TAG_END)
        except RuntimeError:  # this connection is closed already, or is this process
            continue
        with contextlib.suppress(RuntimeError):
            work.wait(datetime.timedelta(milliseconds=1))
        return


def gloo_groups() -> Any:
    """Return torch's class of groups that gloo connects.

    Raises:
        UnsupportedError: this build of torch has no gloo.
    """
    dist: Any = torch.distributed
    if not dist.is_gloo_available():
        raise lacks("a run of several processes", "gloo")
    return dist.ProcessGroupGloo


def connect(gloo: Any, world: World, name: str, ranks: Sequence[int], device: Any) -> Any:
    """Return a group that is connected to some processes, which all call this.

    A thread connects, because that takes as long as the slowest process, and cannot be abandoned.

    Args:
        gloo: what gloo_groups() returns.
        world: the processes.
        name: the name of the connections, which no others have.
        ranks: the processes to connect, with this one.
        device: gloo's device.

    Raises:
        PeerLostError, PeerStepError: a process is gone, or cannot be reached.
    """
    options = gloo._Options()
    options._timeout = _FOREVER
    options._devices = [device]
    store = world.substore(name)
    made: list[Any] = []
    errors: list[BaseException] = []

    def make() -> None:
        try:
            made.append(gloo(store, ranks.index(world.rank), len(ranks), options))
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=make, name="lohan-connect", daemon=True)
    began = time.monotonic()
    thread.start()
    while thread.is_alive():
        thread.join(_POLL_S)
        waited = time.monotonic() - began
        others = dict.fromkeys((r for r in ranks if r != world.rank), waited)
        world.check_peers(others, _WHAT)
    if errors:
        if known := world.known_end(None, _WHAT):
            raise known from errors[0]
        raise PeerLostError(
            f"{world.name(world.rank)} cannot connect to the other processes:"
            f" {reason_of(errors[0])}. Set GLOO_SOCKET_IFNAME to the network interface that leads"
            " to them"
        ) from errors[0]
    _groups.append(made[0])
    return made[0]


def close(group: Any) -> None:
    """Close a group's connections once no thread waits in it and nothing else refers to it."""
    if group in _groups:
        _groups.remove(group)


def _connected(gloo: Any, world: World) -> Any:
    """Return a group that is connected to all processes."""
    group = connect(gloo, world, "wire", range(world.size), _device(gloo, world))
    world.exchange(b"", _WHAT)  # a process that closes its session cuts those that still connect
    return group


def _device(gloo: Any, world: World) -> Any:
    """Return gloo's device: the network interface that leads to the other processes.

    By default gloo looks up the machine's own name, which takes seconds where the name server does
    not answer, and uses the loopback interface if that fails.
    """
    interface = os.environ.get("GLOO_SOCKET_IFNAME", "").partition(",")[0]
    if interface:
        return gloo.create_device(interface=interface)
    address = _address_towards(os.environ.get("MASTER_ADDR", ""))
    told = [
        value.decode()
        for value in world.exchange(address.encode(), "the exchange of network addresses")
    ]
    if len({peer.node for peer in world.peers}) > 1 and _is_local(address):
        # MASTER_ADDR is this machine. Another machine's address leads to the right interface.
        others = (each for each in told if each and not _is_local(each))
        address = _address_towards(next(others, ""))
    return gloo.create_device(hostname=address) if address else gloo.create_default_device()


def _address_towards(host: str) -> str:
    """Return this machine's address on the way to a host; "" if there is none."""
    try:
        family, kind, _, _, where = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind) as probe:
            probe.connect(where)  # sends nothing
            return str(probe.getsockname()[0])
    except OSError:
        return ""


def _is_local(address: str) -> bool:
    return address in ("", "::1") or address.startswith("127.")
