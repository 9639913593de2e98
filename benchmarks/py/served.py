"""A contestant in a separate process, which takes its turn when requested over a pipe.

When it is ready, it describes itself in one JSON object. From then on it answers each line that it
reads with one JSON value: the seconds that the request took by its own clock, or another result.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TextIO

# A turn takes seconds, and a start that compiles some minutes; this ends a process that hangs.
DEADLINE_S = 900
END_DEADLINE_S = 60


def free_port() -> int:
    """Return a free TCP port: each DeepSpeed process needs a different one."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


def deepspeed_environment(python: str) -> dict[str, str]:
    """Return the environment variables for DeepSpeed.

    They include the folder in which tools/setup_deepspeed.sh built its extensions, if it exists.

    Args:
        python: the interpreter of an environment with DeepSpeed.
    """
    folder = Path(python).absolute().parent  # not resolved: an environment's python is a link
    environment = {
        **os.environ,
        "PATH": f"{folder}{os.pathsep}{os.environ.get('PATH', '')}",  # torch looks for ninja there
        "DS_ACCELERATOR": "cpu",
        "RANK": "0",
        "WORLD_SIZE": "1",
        "LOCAL_RANK": "0",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()),
    }
    if (folder.parent / "extensions").is_dir():
        environment["TORCH_EXTENSIONS_DIR"] = str(folder.parent / "extensions")
    return environment


class Served:
    """The process that takes turns, as seen by the one that requests them.

    Args:
        command: the program and its arguments.
        environment: the program's environment; None: that of this process.

    Raises:
        RuntimeError: the program ended before it was ready, or was killed because it was not ready
            within DEADLINE_S; the message has the end of its stderr.
        OSError: the program cannot be started.
    """

    def __init__(
        self, command: Sequence[str | Path], environment: Mapping[str, str] | None = None
    ) -> None:
        self.complaints = tempfile.TemporaryFile(mode="w+")
        self.process = subprocess.Popen(
            [str(word) for word in command],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self.complaints,
            env=environment,
            text=True,
        )
        try:
            self.hello: dict[str, Any] = json.loads(self._answer())
        except BaseException:
            self.process.kill()
            self.process.wait()
            raise

    def _answer(self) -> str:
        timer = threading.Timer(DEADLINE_S, self.process.kill)
        timer.daemon = True
        begin = time.monotonic()
        timer.start()
        try:
            line = self.process.stdout.readline()
        finally:
            timer.cancel()
        if line:
            return line
        code = self.process.wait()
        late = f", killed after {DEADLINE_S} s" if time.monotonic() - begin >= DEADLINE_S else ""
        self.complaints.seek(0)
        end = self.complaints.read()[-1000:].strip()
        raise RuntimeError(f"{self.process.args[0]} ended with code {code}{late}: {end}")

    def ask(self, request: str) -> Any:
        """Send a request and return its answer.

        Raises:
            RuntimeError: the program ended, or was killed because it took too long.
        """
        with contextlib.suppress(BrokenPipeError):  # it has ended; _answer() raises the error
            self.process.stdin.write(request + "\n")
            self.process.stdin.flush()
        return json.loads(self._answer())

    def seconds(self, request: str) -> float:
        """Send a request and return the seconds that it took."""
        return float(self.ask(request))

    def close(self) -> None:
        """End the process, killing it if necessary. Idempotent."""
        with contextlib.suppress(BrokenPipeError):
            self.process.stdin.close()
        try:
            self.process.wait(END_DEADLINE_S)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        self.complaints.close()


def answers() -> TextIO:
    """Return the pipe for answers, and redirect everything else on stdout to stderr."""
    pipe = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    return pipe


def answer_all(pipe: TextIO, hello: Mapping[str, Any], answer: Callable[[str], Any]) -> None:
    """Serve stdin until it ends.

    Args:
        pipe: the result of answers().
        hello: the value of Served.hello.
        answer: handles a request and returns its seconds, or the result of Served.ask().
    """
    print(json.dumps(hello), file=pipe)
    for line in sys.stdin:
        print(json.dumps(answer(line.strip())), file=pipe)
