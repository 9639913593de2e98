"""Processes that a test starts end with the tests, even if those are killed."""

from __future__ import annotations

import os
import select
import signal
import threading


def end_with(pid: int) -> None:
    """Kill this process when process pid ends.

    PR_SET_PDEATHSIG is not enough for a process of a multiprocessing server: the server is its
    parent, and ends with the last of the processes that it has started.
    """
    tests = os.pidfd_open(pid)

    def watch() -> None:
        select.select([tests], [], [])
        os.kill(os.getpid(), signal.SIGKILL)

    threading.Thread(target=watch, daemon=True).start()
