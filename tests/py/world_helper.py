"""Runs of several processes: started by a server that has imported torch, watched, and awaited."""

from __future__ import annotations

import atexit
import ctypes
import dataclasses
import gc
import itertools
import multiprocessing
import os
import pathlib
import pickle
import signal
import socket
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from typing import Any

from orphans import end_with
from patience import HUNG_S

_SERVER = multiprocessing.get_context("forkserver")
_PRELOADED = ["torch", "torch._dynamo", "torch.distributed", "lohan.wrap"]
_SERVER.set_forkserver_preload(_PRELOADED)
_numbers = itertools.count()


def preload(*modules: str) -> None:
    """Let the server import further modules before its first process."""
    _PRELOADED.extend(name for name in modules if name not in _PRELOADED)
    _SERVER.set_forkserver_preload(_PRELOADED)


@dataclasses.dataclass
class Ended:
    """How a process of a run ended.

    Attributes:
        code: its exit code; negative for a signal.
        value: what its function returned, or None.
        error: the name of the class of the exception that ended it, or "".
        text: that exception's message.
        said: what it wrote to stderr.
        ended_at: time.monotonic() when its function had returned or raised, 0 if it never did.
    """

    code: int
    value: Any
    error: str
    text: str
    said: str
    ended_at: float


class Group:
    """The processes of one run."""

    def __init__(
        self,
        folder: pathlib.Path,
        count: int,
        function: Callable[..., Any],
        *args: Any,
        nodes: int = 1,
        spaces: Sequence[str] | None = None,
        address: str = "127.0.0.1",
        env: dict[str, str] | None = None,
    ) -> None:
        """Start the processes.

        Args:
            folder: a folder for what they leave.
            count: the number of processes.
            function: what each of them calls.
            args: its arguments.
            nodes: the number of nodes, among which the processes are divided.
            spaces: the network namespaces of the nodes; None: all share this process's.
            address: where rank 0 serves the rendezvous store.
            env: further environment variables.
        """
        self._folder = folder / f"group-{next(_numbers)}"
        self._folder.mkdir()
        port = _free_port()
        self.processes = []
        for rank in range(count):
            variables = {
                "RANK": str(rank),
                "WORLD_SIZE": str(count),
                "MASTER_ADDR": address,
                "MASTER_PORT": str(port),
                "GROUP_RANK": str(rank * nodes // count),
                "CUDA_VISIBLE_DEVICES": "",
                **(env or {}),
            }
            space = None if spaces is None else spaces[rank * nodes // count]
            process = _SERVER.Process(
                target=_body,
                args=(os.getpid(), str(self._folder), rank, variables, space, function, args),
            )
            process.start()
            self.processes.append(process)

    def kill(self, rank: int, number: int = signal.SIGKILL) -> None:
        """Send a signal to a process."""
        os.kill(self.processes[rank].pid or 0, number)

    def wait(self, timeout_s: float = HUNG_S) -> list[Ended]:
        """Wait for all processes, kill those that hang, and say how each ended."""
        until = time.monotonic() + timeout_s
        for process in self.processes:
            process.join(max(0.0, until - time.monotonic()))
        hung = [rank for rank, process in enumerate(self.processes) if process.is_alive()]
        for rank in hung:
            self.kill(rank)
            self.processes[rank].join()
        ended = [self._ended(rank) for rank in range(len(self.processes))]
        assert not hung, f"ranks {hung} hung: {ended}"
        return ended

    def _ended(self, rank: int) -> Ended:
        said = (self._folder / f"said.{rank}").read_text(errors="replace")
        path = self._folder / f"result.{rank}"
        value, error, text, at = None, "", "", 0.0
        if path.exists():
            value, error, text, at = pickle.loads(path.read_bytes())
        return Ended(self.processes[rank].exitcode or 0, value, error, text, said, at)


def run(
    folder: pathlib.Path, count: int, function: Callable[..., Any], *args: Any, **options: Any
) -> list[Any]:
    """Run a function in several processes, each of which must succeed; return what they return.

    The options are those of Group.
    """
    ended = Group(folder, count, function, *args, **options).wait()
    for rank, each in enumerate(ended):
        assert each.code == 0, f"rank {rank}: {each.error}: {each.text}\n{each.said}"
    return [each.value for each in ended]


def _free_port() -> int:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        return int(taken.getsockname()[1])


def _body(
    tests: int,
    folder: str,
    rank: int,
    variables: dict[str, str],
    space: str | None,
    function: Callable[..., Any],
    args: tuple[Any, ...],
) -> None:
    """Run in the process: set its environment, call the function, leave its result in a file."""
    import torch

    gc.freeze()  # what the server has imported, as conftest.py does
    end_with(tests)
    out = os.open(os.path.join(folder, f"said.{rank}"), os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(out, 1)
    os.dup2(out, 2)
    if space is not None:
        with open(f"/run/netns/{space}") as file:
            if ctypes.CDLL(None, use_errno=True).setns(file.fileno(), 0) != 0:
                raise OSError(ctypes.get_errno(), f"cannot enter the namespace {space}")
    os.environ.update(variables)
    torch.set_num_threads(1)
    torch.manual_seed(1)
    result: tuple[Any, str, str, float]
    failed = None
    try:
        result = (function(*args), "", "", time.monotonic())
    except BaseException as error:
        failed = error
        result = (None, type(error).__name__, str(error), time.monotonic())
    path = os.path.join(folder, f"result.{rank}")
    with open(path + ".part", "wb") as file:
        pickle.dump(result, file)
    os.rename(path + ".part", path)
    if failed is not None:
        sys.last_value = failed  # as Python sets it at the end of a program
        traceback.print_exception(failed)
    atexit._run_exitfuncs()  # multiprocessing ends a process without them
    if failed is not None:
        sys.exit(1)
