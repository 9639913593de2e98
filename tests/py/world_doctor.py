"""What each process of tests/py/test_doctor_network.py does: `lohan doctor` of one machine."""

from __future__ import annotations

import os
import signal
from typing import Any

import lohan
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


def ends(directories: list[str], where: str, how: str) -> tuple[int, str]:
    """Run the command; rank 1 ends in a function of the network's part, killed or by an error."""

    def end(*given: Any, **more: Any) -> Any:
        if how == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        raise lohan.errors.StoreError("planned")

    if rank_and_count()[0] == 1:
        setattr(_doctor_network, where, end)
    return doctor(directories)
