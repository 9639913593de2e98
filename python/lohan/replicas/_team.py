"""Processes of one machine that share parameters: who they are, and how they find the memory.

[Note: Teams] The process with the lowest rank on a machine is the owner of a team: it has the
store, the parameters in memory and the optimizer's states, and makes every update. The others are
its mates: their engines read the owner's parameters where they are (csrc/team/team.h), and they
send their gradients to the owners of all machines. So main memory and SSD traffic of a machine do
not grow with the number of its processes.

[Note: How mates find the memory] The shared memory has no name. The owner sends its file
descriptor, and that of what wakes its engine, through a socket in the abstract namespace, whose
random name it tells the others through the rendezvous store; a mate answers with what wakes its own
engine. Both check that the other process belongs to the same user.
"""

from __future__ import annotations

import os
import secrets
import socket
import struct
import time
from typing import TYPE_CHECKING

from lohan.errors import LohanError, NetworkError, UnsupportedError

if TYPE_CHECKING:
    from lohan import _core
    from lohan.world._world import World

_TIMEOUT_S = 30.0
_SLICE_S = 0.2
_CREDENTIALS = struct.Struct("3i")  # pid, uid, gid: struct ucred of Linux


class Team:
    """This process's place in the team of its machine.

    Attributes:
        number: 0 for the owner, 1 and more for its mates, in the order of their ranks.
        owner: the rank of the owner.
        ranks: the ranks of all its processes.
        mates: the ranks of its mates.
        owners: the ranks of the owners of all machines.
        machine: the number of this machine, in the order of the owners.
    """

    def __init__(self, world: World) -> None:
        """Find the processes of this machine."""
        nodes: dict[str, list[int]] = {}
        for peer in world.peers:
            nodes.setdefault(peer.node, []).append(peer.rank)
        here = nodes[world.peers[world.rank].node]
        self._world = world
        self.ranks = here
        self.number = here.index(world.rank)
        self.owner = here[0]
        self.mates = here[1:]
        self.owners = sorted(ranks[0] for ranks in nodes.values())
        self.machine = self.owners.index(self.owner)
        self._link: socket.socket | None = None  # a mate's connection to its owner

    @property
    def mate_count(self) -> int:
        """The number of mates; 0 if this machine has one process."""
        return len(self.mates)

    @property
    def is_mate(self) -> bool:
        """Whether another process has the parameters of this one."""
        return self.number > 0

    def lead(self, engine: _core.Engine) -> None:
        """Give the mates the engine's memory, as the owner.

        Raises:
            NetworkError: a mate cannot be reached through a socket, or belongs to another user.
            PeerLostError, PeerStepError: a mate is gone.
        """
        try:
            self._lead(engine)
        except OSError as error:
            raise self._failed(None, error) from error

    def _lead(self, engine: _core.Engine) -> None:
        name = f"lohan-{os.getpid()}-{secrets.token_hex(8)}"
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as door:
            door.settimeout(_SLICE_S)
            if self.mate_count > 0:
                door.bind(f"\0{name}")
                door.listen(self.mate_count)
            self._world.exchange(name.encode(), "the shared memory")
            for _ in range(self.mate_count):
                with self._accepted(door) as link:
                    link.settimeout(_TIMEOUT_S)
                    _check_user(link)
                    number = link.recv(1)
                    socket.send_fds(link, [b"+"], [*engine.team_files()])
                    bell = _received(link, 1)[0]
                    try:
                        engine.team_bell(number[0], bell)
                    finally:
                        os.close(bell)

    def _accepted(self, door: socket.socket) -> socket.socket:
        """Return the connection of a mate, unless one is gone."""
        until = time.monotonic() + _TIMEOUT_S
        while True:
            try:
                return door.accept()[0]
            except TimeoutError:
                self._world.check_here(self.mates, "sharing its memory")
                if time.monotonic() > until:
                    raise

    def follow(self) -> tuple[int, int]:
        """Wait for the owner's memory, as a mate.

        Returns:
            File descriptors of the shared memory, and of what wakes the owner's engine.

        Raises:
            NetworkError: the owner cannot be reached through a socket, or belongs to another user.
        """
        told = self._world.exchange(b"", "the shared memory")
        self._link = link = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            link.settimeout(_TIMEOUT_S)
            link.connect(f"\0{told[self.owner].decode()}")
            _check_user(link)
            link.send(bytes([self.number]))
            memory, bell = _received(link, 2)
        except OSError as error:
            link.close()
            raise self._failed(self.owner, error) from error
        return memory, bell

    def _failed(self, rank: int | None, error: OSError) -> LohanError:
        """Return the error for a socket to a process of this machine, or to any of them."""
        if known := self._world.known_end(rank, "sharing memory"):
            return known
        who = "its other processes" if rank is None else self._world.name(rank)
        return NetworkError(
            f"{self._world.name(self._world.rank)} cannot share memory with {who}: {error}."
            " Parallel(share=True) needs processes that see each other's sockets (one network"
            " namespace);"
            " otherwise leave it out"
        )

    def join(self, engine: _core.Engine, bell: int) -> None:
        """Complete follow(): connect the engine with the owner's."""
        assert self._link is not None
        engine.team_bell(0, bell)
        os.close(bell)
        with self._link:
            socket.send_fds(self._link, [b"+"], [engine.team_files()[1]])
        self._link = None


def _check_user(link: socket.socket) -> None:
    row = link.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    pid, uid, _ = _CREDENTIALS.unpack(row)
    if uid != os.geteuid():
        raise NetworkError(
            f"process {pid}, which belongs to user {uid}, answered for a process of this run, whose"
            f" user is {os.geteuid()}: Parallel(share=True) needs processes of one user"
        )


def _received(link: socket.socket, count: int) -> list[int]:
    data, fds, _, _ = socket.recv_fds(link, 1, count)
    if not data or len(fds) != count:
        raise ConnectionError(
            f"{len(fds)} file descriptors came instead of {count}: the process has ended, or it has"
            " too many open files (see ulimit -n)"
        )
    return fds


def refuse_on_mate(team: Team, what: str) -> UnsupportedError:
    """Return the error for what only the owner of a team can do."""
    return UnsupportedError(
        f"{what} is not supported in a process that reads the parameters of another one"
        f" (Parallel(share=True)): do it on rank {team.owner}, or wrap without share="
    )
