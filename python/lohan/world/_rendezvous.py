"""How a process finds the rendezvous store of its run, its rank, and the number of processes."""

from __future__ import annotations

import contextlib
import datetime
import os
import queue
import threading
import time
from typing import Any

import torch

from lohan.common import _log
from lohan.errors import ModelError, PeerLostError, lacks

_VARIABLES = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
_SLICE_S = 0.1
SAY_AFTER_S = 5.0  # how long a process waits for others before it says so
# How long a process waits for others to call wrap(): at least this many seconds, and this multiple
# of peer_timeout_s. They may have data to prepare before, but one that has failed never comes.
JOIN_TIMEOUT_S = 600.0
_JOIN_FACTOR = 10
# The timeout of calls of the store, as torch.distributed's own default.
_CALL_TIMEOUT = datetime.timedelta(seconds=1800)

# The store that this process has opened itself. It is kept until the process ends, because rank 0
# may be the one that serves it.
_own_store: tuple[Any, int, int] | None = None


def process_count() -> int:
    """Return the number of processes of the run: torch.distributed's, or the environment's.

    Raises:
        ModelError: WORLD_SIZE is not a number.
    """
    said = os.environ.get("WORLD_SIZE", "1")
    if not said.isdecimal():
        raise ModelError(f"the environment variable WORLD_SIZE is {said!r}, which is not a number")
    count = int(said)
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        count = max(count, torch.distributed.get_world_size())
    return count


def is_agents_store() -> bool:
    """Return whether torchrun's agent serves the rendezvous store; otherwise rank 0 does."""
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == str(True)


def join_timeout_s(peer_timeout_s: float) -> float:
    """Return how long a process waits for others to call wrap()."""
    return max(JOIN_TIMEOUT_S, _JOIN_FACTOR * peer_timeout_s)


def find_store(peer_timeout_s: float) -> tuple[Any, int, int]:
    """Return the rendezvous store, this process's rank and the number of processes.

    Args:
        peer_timeout_s: how long a process may be silent.
    """
    global _own_store
    if not torch.distributed.is_available():
        raise lacks(f"WORLD_SIZE={process_count()}", "torch.distributed")
    dist: Any = torch.distributed
    if dist.is_initialized():
        store = dist.distributed_c10d._get_default_store()
        return store, dist.get_rank(), dist.get_world_size()
    if _own_store is not None:
        return _own_store
    missing = [name for name in _VARIABLES if not os.environ.get(name)]
    if missing:
        raise ModelError(
            f"WORLD_SIZE is {process_count()}, but {', '.join(missing)} is not set: start the"
            " program with torchrun, or set"
            f" {', '.join(_VARIABLES)} in each process"
        )
    try:
        _own_store = _rendezvous(join_timeout_s(peer_timeout_s))
    except (RuntimeError, ValueError, OSError) as error:
        reason = str(error).partition("\n")[0]
        raise PeerLostError(
            f"the rendezvous store at {os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
            f" cannot be reached by rank {os.environ['RANK']}: {reason}{_about_server()}"
        ) from error
    return _own_store


def _about_server() -> str:
    """Return what may be wrong with the process that serves the store, unless it is this one."""
    if is_agents_store():
        who = "torchrun's agent"
    elif os.environ["RANK"] == "0":
        return ""
    else:
        who = "rank 0"
    return f". {who}, which serves it, was not started or has ended, or the network to it is down"


def _connected(timeout_s: float) -> tuple[Any, int, int]:
    """Return what torch's rendezvous "env://" does, except that rank 0 does not wait for others.

    It could not say which of them have not come; World does.
    """
    dist: Any = torch.distributed
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    port = int(os.environ["MASTER_PORT"])
    if not 0 < port < 1 << 16:
        raise ValueError(f"MASTER_PORT is {port}, which is not a port")
    store = dist.TCPStore(
        os.environ["MASTER_ADDR"],
        port,
        size,
        is_master=rank == 0 and not is_agents_store(),
        timeout=datetime.timedelta(seconds=timeout_s),
        wait_for_workers=False,
        multi_tenant=not is_agents_store(),
        use_libuv=os.environ.get("USE_LIBUV", "1") == "1",
    )
    store.set_timeout(_CALL_TIMEOUT)
    return store, rank, size


def _rendezvous(timeout_s: float) -> tuple[Any, int, int]:
    """Connect to the store. A thread does that, because Ctrl-C does not end it."""
    found: queue.SimpleQueue[Any] = queue.SimpleQueue()

    def call() -> None:
        try:
            found.put(_connected(timeout_s))
        except Exception as error:
            found.put(error)

    threading.Thread(target=call, name="lohan-rendezvous", daemon=True).start()
    began, has_said = time.monotonic(), False
    while True:
        with contextlib.suppress(queue.Empty):
            result: Any = found.get(timeout=_SLICE_S)
            break
        if time.monotonic() - began > SAY_AFTER_S and not has_said:
            has_said = True
            say_alone(int(os.environ["RANK"]), process_count())
    if isinstance(result, Exception):
        raise result
    made: tuple[Any, int, int] = result
    return made


def say_alone(rank: int, size: int) -> None:
    _log.note(
        f"rank {rank} has waited {SAY_AFTER_S:.0f} s for the other {size - 1} processes to"
        " call lohan.wrap()"
    )
