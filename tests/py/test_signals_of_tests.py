"""Tests pass however they were started: with signals that are ignored, or blocked."""

from __future__ import annotations

import os
import pathlib
import signal
import subprocess
import sys
import textwrap

import pytest
from patience import HUNG_S

ROOT = pathlib.Path(__file__).resolve().parents[2]
IGNORED = [signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGPIPE, signal.SIGCHLD]
BLOCKED = [*IGNORED[:-1], signal.SIGALRM, signal.SIGUSR1]
# A test of each way in which a program under test starts, each of which Ctrl-C or SIGTERM must end.
INNER = """
    import os, pathlib, signal, subprocess, sys, threading, time
    import program_server, world_helper
    import pytest

    SLEEP = "import time; print('begun', flush=True); time.sleep(1000)"

    def test_this_process() -> None:
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(60)

    @pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
    def test_a_program(number: int) -> None:
        for start in (program_server.Program, popen):
            program = start(["-c", SLEEP])
            assert program.stdout.readline() == "begun\\n"
            program.send_signal(number)
            assert program.wait(60) == -number
            program.stdout.close()

    def popen(words):
        return subprocess.Popen([sys.executable, *words], stdout=subprocess.PIPE, text=True)

    def test_a_process_of_a_group(tmp_path: pathlib.Path) -> None:
        group = world_helper.Group(tmp_path, 1, time.sleep, 1000)
        while not (tmp_path / "group-0" / "said.0").exists():
            time.sleep(0.01)
        time.sleep(0.5)
        group.kill(0, signal.SIGINT)
        assert group.wait(60)[0].error == "KeyboardInterrupt"
"""


@pytest.mark.parametrize("how", ["ignored", "blocked"])
def test_programs_under_test_end_by_signals_that_the_tests_were_started_without(
    how: str, tmp_path: pathlib.Path
) -> None:
    here = ROOT / "tests" / "py"
    (tmp_path / "test_inner.py").write_text(textwrap.dedent(INNER))
    start = f"""
        import os, signal, sys
        if {how!r} == "ignored":
            for number in {[int(each) for each in IGNORED]}:
                signal.signal(number, signal.SIG_IGN)
        else:
            signal.pthread_sigmask(signal.SIG_BLOCK, {[int(each) for each in BLOCKED]})
        os.execv(sys.executable, [sys.executable, "-m", "pytest", *sys.argv[1:]])
    """
    words = ["-n0", "-q", "-p", "no:cacheprovider", f"--rootdir={tmp_path}", "-p", "conftest"]
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(start), *words, str(tmp_path / "test_inner.py")],
        env={**os.environ, "PYTHONPATH": str(here)},
        capture_output=True,
        text=True,
        timeout=HUNG_S,
        check=False,
    )
    assert done.returncode == 0 and "4 passed" in done.stdout, done.stdout + done.stderr
