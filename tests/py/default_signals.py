"""The signals with which a test process and all that it starts begin.

A shell starts background jobs with SIGINT ignored, and a runner may ignore or block more signals;
whatever a process ignores or blocks, the processes that it starts ignore or block, too.
"""

from __future__ import annotations

import signal

# SIGHUP stays as it is: `nohup make test` must survive the end of its terminal.
_DEFAULT = ("SIGTERM", "SIGCHLD", "SIGALRM", "SIGUSR1", "SIGUSR2", "SIGQUIT")


def restore() -> None:
    """Handle signals as a Python that a terminal has started, and block none.

    Thread: the main one.
    """
    signal.signal(signal.SIGINT, signal.default_int_handler)
    for name in _DEFAULT:
        number = getattr(signal, name)
        if signal.getsignal(number) is signal.SIG_IGN:
            signal.signal(number, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_SETMASK, ())
