"""A contestant in a process of its own, which takes its turn when it is asked over a pipe.

It says in one JSON object what it is as soon as it is ready; from then on it answers each line that
it reads with the seconds that this took, by its own clock.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TextIO


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
        "MASTER_PORT": "29501",
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
        RuntimeError: it ended before it was ready; the message has the end of what it said.
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
        self.hello: dict[str, Any] = json.loads(self._answer())

    def _answer(self) -> str:
        line = self.process.stdout.readline()
        if line:
            return line
        code = self.process.wait()
        self.complaints.seek(0)
        end = self.complaints.read()[-1000:].strip()
        raise RuntimeError(f"{self.process.args[0]} ended with code {code}: {end}")

    def seconds(self, request: str) -> float:
        """Have request done; the seconds it took."""
        self.process.stdin.write(request + "\n")
        self.process.stdin.flush()
        return float(self._answer())

    def close(self) -> None:
        """End the process."""
        self.process.stdin.close()
        self.process.wait()
        self.complaints.close()


def answers() -> TextIO:
    """Where the answering side writes. What anyone else prints goes to stderr from here on."""
    pipe = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    return pipe


def answer_all(pipe: TextIO, hello: Mapping[str, Any], seconds: Callable[[str], float]) -> None:
    """Serve stdin until it ends.

    Args:
        pipe: from answers().
        hello: what the asking side finds in Served.hello.
        seconds: does what a line asks for and returns how long it took.
    """
    print(json.dumps(hello), file=pipe)
    for line in sys.stdin:
        print(seconds(line.strip()), file=pipe)
