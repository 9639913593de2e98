"""Programs in processes that have imported torch and lohan already, and that end as Python does.

To start Python and import these takes longer than most programs of the tests run. So a server
imports them once, and forks for each program. The child executes the program as the module
`__main__`, at the top of the server's own script: what ends it, an exception, a signal or the last
line, meets the same code of the interpreter as in a process of its own. Exit handlers run, threads
are joined, modules are torn down, and Ctrl-C ends it by SIGINT. Garbage collection excludes only
what the server has imported. There is one server per process of the tests; it and its programs end
with that.
"""

from __future__ import annotations

import array
import contextlib
import ctypes
import functools
import gc
import importlib
import json
import os
import pathlib
import select
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Sequence
from typing import IO, Any

from patience import HUNG_S

PR_SET_PDEATHSIG = 1
_IMPORTED = ["torch", "torch._dynamo", "lohan.wrap", "pytest"]
_REQUEST_BYTES = 1 << 20


def preload(*modules: str) -> None:
    """Let the server import further modules, if it has not started yet and they are installed."""
    _IMPORTED.extend(name for name in modules if name not in _IMPORTED)


class Program:
    """A program that the server has started: what the tests use of subprocess.Popen.

    Args:
        words: the path of the program, or "-c" and its text; then its arguments.
        env: changes of the environment; None: none.
        own_session: whether it becomes the leader of a session.
    """

    def __init__(
        self, words: Sequence[str], env: dict[str, str] | None = None, own_session: bool = False
    ) -> None:
        self.args = [*words]
        self.returncode: int | None = None
        out, err = os.pipe(), os.pipe()
        self._told, theirs = socket.socketpair()
        request = {
            "words": self.args,
            "env": {**os.environ, **(env or {})},
            "folder": os.getcwd(),
            "own_session": own_session,
        }
        given = [theirs.fileno(), out[1], err[1]]
        socket.send_fds(_server(), [json.dumps(request).encode()], given)
        for number in (out[1], err[1]):
            os.close(number)
        theirs.close()
        self.stdout: IO[str] = os.fdopen(out[0], encoding="utf-8", errors="replace")
        self.stderr: IO[str] = os.fdopen(err[0], encoding="utf-8", errors="replace")
        self.pid = self._number(HUNG_S)

    def _number(self, timeout_s: float) -> int:
        """Return the next number that the server sends: the process id, then the exit status."""
        if not select.select([self._told], [], [], timeout_s)[0]:
            raise subprocess.TimeoutExpired(self.args, timeout_s)
        found = array.array("q", self._told.recv(8))
        assert len(found) == 1, "the server has ended: see what it wrote"
        return found[0]

    def poll(self) -> int | None:
        """Return the exit status, or None while it runs."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.wait(0)
        return self.returncode

    def wait(self, timeout: float = HUNG_S) -> int:
        """Wait until it has ended; return its exit status, negative for a signal."""
        if self.returncode is None:
            self.returncode = self._number(timeout)
            self._told.close()
        return self.returncode

    def send_signal(self, number: int) -> None:
        """Send a signal to it if it runs."""
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        """Send SIGKILL to it."""
        self.send_signal(signal.SIGKILL)

    def communicate(self, timeout: float = HUNG_S) -> tuple[str, str]:
        """Read both pipes until every process has closed them, and wait until it has ended."""
        found = ["", ""]

        def read(at: int, pipe: IO[str]) -> None:
            found[at] = pipe.read()

        readers = [
            threading.Thread(target=read, args=each, daemon=True)
            for each in enumerate((self.stdout, self.stderr))
        ]
        for reader in readers:
            reader.start()
        for reader in readers:
            reader.join(timeout)
            if reader.is_alive():
                raise subprocess.TimeoutExpired(self.args, timeout, *found)
        self.wait(timeout)
        self.close()
        return found[0], found[1]

    def close(self) -> None:
        """Close the pipes."""
        self.stdout.close()
        self.stderr.close()


def run(
    words: Sequence[str], env: dict[str, str] | None = None, timeout_s: float = HUNG_S
) -> subprocess.CompletedProcess[str]:
    """Run a program, and return its exit status and what it wrote."""
    program = Program(words, env)
    try:
        out, err = program.communicate(timeout_s)
    finally:
        program.kill()
    return subprocess.CompletedProcess(program.args, program.wait(), out, err)


@functools.cache
def _server() -> socket.socket:
    """Start the server of this process; return the socket for requests."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    ours.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _REQUEST_BYTES)
    subprocess.Popen(
        [sys.executable, __file__, str(theirs.fileno()), *_IMPORTED],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        pass_fds=[theirs.fileno()],
        start_new_session=True,
    )
    theirs.close()
    return ours


# --- The server -----------------------------------------------------------------------------------


def _serve(requests: socket.socket) -> tuple[dict[str, Any], list[int]] | None:
    """Fork for each request. Return the request and its descriptors in a child, None at the end."""
    running: dict[int, tuple[int, int]] = {}  # by descriptor: the process and where its status goes
    while True:
        for ready in select.select([requests, *running], [], [])[0]:
            if ready is not requests:
                child, told = running.pop(ready)
                _tell(told, os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
                os.close(told)
                os.close(ready)
                continue
            said, given, _, _ = socket.recv_fds(requests, _REQUEST_BYTES, 3)
            if not said:
                return None
            child = os.fork()
            if child == 0:
                for number in [*running, *(told for _, told in running.values())]:
                    os.close(number)
                return json.loads(said), given
            running[os.pidfd_open(child)] = child, given[0]
            _tell(given[0], child)
            for number in given[1:]:
                os.close(number)


def _tell(descriptor: int, number: int) -> None:
    with contextlib.suppress(BrokenPipeError):
        os.write(descriptor, array.array("q", [number]))


def _end_with_parent() -> None:
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def _become(request: dict[str, Any], given: list[int]) -> Any:
    """Make this process the program's; return the program's code."""
    if request["own_session"]:
        os.setsid()
    os.close(given[0])
    for number, at in zip(given[1:], (1, 2), strict=True):
        os.dup2(number, at)
        os.close(number)
    os.chdir(request["folder"])
    os.environ.clear()
    os.environ.update(request["env"])
    tempfile.tempdir = None
    sys.argv = words = request["words"]
    folders = [each for each in os.environ.get("PYTHONPATH", "").split(os.pathsep) if each]
    if words[0] == "-c":
        sys.path[:1] = ["", *folders]
        path, text = "<string>", words.pop(1)
    else:
        sys.path[:1] = [os.path.dirname(words[0]), *folders]
        path, text = words[0], pathlib.Path(words[0]).read_text(encoding="utf-8")
    return compile(text, path, "exec", dont_inherit=True)


def _program() -> Any:
    """Import and serve; in a child, return its program's code, to be run in an empty module."""
    _end_with_parent()
    for name in sys.argv[2:]:
        with contextlib.suppress(ImportError):
            importlib.import_module(name)
    gc.collect()
    gc.freeze()
    with socket.socket(fileno=int(sys.argv[1])) as requests:
        got = _serve(requests)
    if got is None:
        os._exit(0)  # the libraries take a while to end
    _end_with_parent()
    code = _become(*got)
    everything = globals()
    everything["__file__"], everything["__doc__"] = code.co_filename, None
    for name in [name for name in everything if not name.startswith("__")]:
        del everything[name]
    return code


if __name__ == "__main__":
    exec(_program())
