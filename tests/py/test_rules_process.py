"""However a process ends, its store is whole, and nothing of it is left: no file, no process."""

from __future__ import annotations

import contextlib
import os
import pathlib
import re
import signal
import subprocess
import tempfile

import lohan
import pytest
from notes_helper import notes
from patience import ENDS_S, HUNG_S
from program_server import Program
from rules_helper import Workshop, assert_same_state, build

HERE = pathlib.Path(__file__).resolve().parent
# What triton, if it is installed, says at the end of a process that was forked after its import,
# and torch's own warnings, for example of torchao's classes when that is imported.
OTHERS = re.compile(
    r"^(?:nanobind: | - (?:leaked|skipped|\.\.\.)|.*refleaks\.html|W\d{4} [\d:.]+ ).*\n?",
    re.MULTILINE,
)


def start(mode: str, store: str, temporary: pathlib.Path) -> Program:
    words = [str(HERE / "rules_worker.py"), mode, store]
    return Program(words, {"TMPDIR": str(temporary)}, own_session=True)


def finish(process: Program) -> tuple[int, str, str]:
    """Return a process's exit status and output; nothing of its session may remain."""
    try:
        out, err = process.communicate(timeout=HUNG_S)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)  # its workers, too, because they have the same pipes
        out, err = process.communicate()
        pytest.fail(f"still running after {HUNG_S} s: wrote {out!r} and {err!r}")
    finally:
        process.kill()
    sessions = []
    for stat in pathlib.Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = stat.read_text().rpartition(")")[2].split()
        except OSError:
            continue
        if fields[0] != "Z":
            sessions.append(int(fields[3]))
    assert process.pid not in sessions
    return process.returncode, out, OTHERS.sub("", err)


def steps_of(store: pathlib.Path, workshop: Workshop) -> int:
    """Return the store's step; its parameters must be those of a run that stopped there."""
    model = lohan.wrap(build(), store=store, resume=True, lr=1e-2)
    step = model.lohan.step
    state = dict(model.state_dict())
    model.lohan.close()
    assert_same_state(state, workshop.train(range(step)))
    return step


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_a_run_with_its_last_step_committed(
    number: signal.Signals, workshop: Workshop
) -> None:
    store = workshop.folder / "run"
    process = start("run_forever", str(store), workshop.folder)
    assert process.stdout is not None
    for _ in range(5):
        line = process.stdout.readline()
    process.send_signal(number)
    if number == signal.SIGINT:
        # Python drops a KeyboardInterrupt in a generator's clean-up; a user presses Ctrl-C again.
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(10)
        if process.poll() is None:
            process.send_signal(number)
    try:
        process.wait(ENDS_S)
    finally:
        process.kill()
    # communicate() would not return what readline() has read ahead.
    lines = [line, *process.stdout.read().splitlines()]
    status, _, err = finish(process)
    last = int(lines[-1].split()[1])
    if number == signal.SIGINT:
        assert status in (-signal.SIGINT, 130) and "KeyboardInterrupt" in err
    else:
        assert status == 128 + signal.SIGTERM and "Traceback" not in err
    assert "lohan:" not in notes(err)
    assert last >= 5 and steps_of(store, workshop) in (last, last + 1)


def test_sigterm_in_a_finalizer_ends_the_run_all_the_same(workshop: Workshop) -> None:
    store = workshop.folder / "run"
    status, out, err = finish(start("finalize", str(store), workshop.folder))
    assert (status, out) == (128 + signal.SIGTERM, "step 3\n")
    assert "ignored" not in err and "Traceback" not in err and "lohan:" not in notes(err)
    assert steps_of(store, workshop) in (3, 4)


@pytest.mark.parametrize("mode", ["leave_open", "leave_in_a_step", "fail"])
def test_an_exit_without_close_commits_what_was_closed(mode: str, workshop: Workshop) -> None:
    store = workshop.folder / "run"
    status, out, err = finish(start(mode, str(store), workshop.folder))
    assert status == (mode == "fail") and out == "step 3\n"
    assert "lohan" not in notes(err).replace(str(HERE.parent.parent), "")
    assert steps_of(store, workshop) == 3


def test_an_interrupt_in_one_close_at_exit_does_not_prevent_the_others(
    workshop: Workshop,
) -> None:
    store = workshop.folder / "run"
    _, out, err = finish(start("interrupt_exits", str(store), workshop.folder))
    assert out == "step 3\n" and "KeyboardInterrupt" in err
    assert [steps_of(store / name, workshop) for name in ("a", "b")] == [3, 3]


def test_a_temporary_store_is_gone_at_exit(workshop: Workshop) -> None:
    before = sorted(workshop.folder.iterdir())
    process = start("run_forever", "", workshop.folder)
    assert process.stdout is not None
    process.stdout.readline()
    assert sorted(workshop.folder.iterdir()) == before  # its files no longer have names
    process.kill()
    finish(process)
    status, _, err = finish(start("leave_open", "", workshop.folder))
    assert status == 0 and "temporary store" in err
    assert sorted(workshop.folder.iterdir()) == before


def test_a_data_loader_may_have_workers(workshop: Workshop) -> None:
    store = workshop.folder / "run"
    # Workers listen on sockets in TMPDIR, whose paths may have 107 bytes: pytest's own is too long.
    with tempfile.TemporaryDirectory(prefix="lohan-") as short:
        status, out, err = finish(start("load_data", str(store), pathlib.Path(short)))
    assert (status, out, notes(err)) == (0, "step 20\n", "")


@pytest.mark.parametrize("mode", ["fork_calls", "fork_calls_same_pid"])
def test_every_call_in_a_forked_child_is_refused_by_name(mode: str, workshop: Workshop) -> None:
    store = workshop.folder / "run"
    status, out, err = finish(start(mode, str(store), workshop.folder))
    assert (status, out, notes(err)) == (0, "child 0\nstep 3\n", "")
    assert steps_of(store, workshop) == 3


@pytest.mark.parametrize("mode", ["fork", "fork_frozen", "fork_one_slot"])
def test_a_forked_child_takes_nothing_with_it(mode: str, workshop: Workshop) -> None:
    store = workshop.folder / "run"
    status, out, err = finish(start(mode, str(store), workshop.folder))
    steps = 0 if mode == "fork_frozen" else 3
    assert (status, out, notes(err)) == (0, f"child 0\nlocked\nstep {steps}\n", "")
    if steps:
        model = lohan.wrap(
            build(),
            store=store,
            resume=True,
            lr=1e-2,
            commit_every="never" if mode == "fork_one_slot" else "auto",
        )
        state = dict(model.state_dict())
        model.lohan.close()
        assert_same_state(state, workshop.train(range(3)))
