"""What each process of tests/py/test_doctor_network.py does: `lohan doctor` of one machine."""

from __future__ import annotations

import os
import signal
from typing import Any

from click.testing import CliRunner
from lohan.cli import main
from lohan.commands import _doctor_network
from world_worker import rank_and_count


def doctor(directories: list[str], *words: str) -> tuple[int, str]:
    """Run the command on this rank's directory; return the exit status and the output."""
    rank, _ = rank_and_count()
    done = CliRunner().invoke(main, ["doctor", directories[rank], *words])
    assert done.exception is None or isinstance(done.exception, SystemExit), done.exception
    return done.exit_code, done.output


def dies(directories: list[str]) -> tuple[int, str]:
    """Run the command; rank 1 is killed before it measures the network."""

    def measure(*given: Any) -> Any:
        os.kill(os.getpid(), signal.SIGKILL)

    if rank_and_count()[0] == 1:
        _doctor_network._measure = measure
    return doctor(directories)
