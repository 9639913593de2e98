"""A contestant in a process of its own, which takes its turn when it is asked over a pipe.

It says in one JSON object what it is as soon as it is ready; from then on it answers each line that
it reads with one JSON value: the seconds that this took, by its own clock, or whatever it serves.
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

# A turn takes seconds, a start that compiles some minutes; what hangs is to end all the same.
DEADLINE_S = 900
END_DEADLINE_S = 60


def free_port() -> int:
    """A TCP port that nobody has now: DeepSpeed's processes must not meet on one."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


def deepspeed_environment(python: str) -> dict[str, str]:
    """What DeepSpeed needs in the environment; extensions where tools/setup_deepspeed.sh put them.

    Args:
        python: interpreter of an environment with DeepSpeed.
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
    """The asking side.

    Args:
        command: the program and its arguments.
        environment: of the program; None: this process's.

    Raises:
        RuntimeError: it ended before it was ready, or was not ready within DEADLINE_S and was
            killed; the message has the end of what it said.
        OSError: it cannot be run at all.
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
        """Have request done; its answer. RuntimeError as at the start."""
        with contextlib.suppress(BrokenPipeError):  # it has ended: _answer says how
            self.process.stdin.write(request + "\n")
            self.process.stdin.flush()
        return json.loads(self._answer())

    def seconds(self, request: str) -> float:
        """Have request done; the seconds it took."""
        return float(self.ask(request))

    def close(self) -> None:
        """End the process; what does not end by itself is killed. Idempotent."""
        with contextlib.suppress(BrokenPipeError):
            self.process.stdin.close()
        try:
            self.process.wait(END_DEADLINE_S)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        self.complaints.close()


def answers() -> TextIO:
    """Where the answering side writes. What anyone else prints goes to stderr from here on."""
    pipe = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    return pipe


def answer_all(pipe: TextIO, hello: Mapping[str, Any], answer: Callable[[str], Any]) -> None:
    """Serve stdin until it ends.

    Args:
        pipe: from answers().
        hello: what the asking side finds in Served.hello.
        answer: does what a line asks for and returns how long it took, or what Served.ask returns.
    """
    print(json.dumps(hello), file=pipe)
    for line in sys.stdin:
        print(json.dumps(answer(line.strip())), file=pipe)
