"""Runs scripts in processes that have imported their libraries already.

Libraries like transformers take longer to import than the scripts of the tests to run. So a server
imports them once, and forks for each script. It reads one line of JSON per script from stdin (its
path and working folder), and answers with the exit code and the output.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import importlib
import json
import os
import pathlib
import runpy
import select
import signal
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Sequence
from types import TracebackType

from patience import HUNG_S

PR_SET_PDEATHSIG = 1


class Scripts:
    """A server, as a context manager.

    Args:
        modules: what it imports. A module that is not installed is left to the scripts.
    """

    def __init__(self, modules: Sequence[str]) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-W", "ignore", __file__, *modules],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )

    def __enter__(self) -> Scripts:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._process.communicate()

    def run(self, path: pathlib.Path, folder: pathlib.Path) -> tuple[int, str]:
        """Run a script in a folder; return its exit code, and its output with its errors."""
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(json.dumps([str(path), str(folder)]) + "\n")
        self._process.stdin.flush()
        if not select.select([self._process.stdout], [], [], HUNG_S)[0]:
            os.killpg(self._process.pid, signal.SIGKILL)
            raise AssertionError(f"{path} hung for {HUNG_S:.0f} s")
        code, said = json.loads(self._process.stdout.readline())
        return int(code), str(said)


def _end_with_parent() -> None:
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def _run(path: str, folder: str) -> int:
    """Run a script as Python does, in this process; return its exit code."""
    os.chdir(folder)
    sys.argv = [path]
    sys.path[0] = os.path.dirname(path)
    code = 0
    try:
        runpy.run_path(path, run_name="__main__")
    except SystemExit as error:
        code = error.code if isinstance(error.code, int) else int(error.code is not None)
    except BaseException as error:
        sys.last_value = error
        traceback.print_exception(error)
        code = 1
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    return code


def main() -> None:
    """Import the modules that the arguments name, and serve."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what libraries print when they are imported is no answer
    _end_with_parent()
    for name in sys.argv[1:]:
        with contextlib.suppress(ImportError):
            importlib.import_module(name)
    for line in sys.stdin:
        path, folder = json.loads(line)
        with tempfile.TemporaryFile() as said:
            child = os.fork()
            if child == 0:
                _end_with_parent()
                os.dup2(said.fileno(), 1)
                os.dup2(said.fileno(), 2)
                os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
                os._exit(_run(path, folder))
            code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
            said.seek(0)
            print(
                json.dumps([code, said.read().decode(errors="replace")]), file=answers, flush=True
            )
    os._exit(0)  # the libraries take seconds to end


if __name__ == "__main__":
    main()
