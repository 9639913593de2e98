"""What all commands of lohan have in common, `lohan plan --store`, and `lohan trace`."""

from __future__ import annotations

import errno
import io
import json
import os
import pathlib
import re
import subprocess
import sys
import tomllib

import click
import crash_worker
import lohan
import program_server
import pytest
from click.testing import CliRunner, Result
from lohan import cli
from lohan.cli import main
from lohan.common import _console, _timeline
from lohan.errors import SessionError, StoreError, TraceError
from lohan.session import _trace
from patience import HUNG_S
from rich.console import Console

PACKAGE_PARENT = str(pathlib.Path(lohan.__file__).parent.parent)
ENVIRONMENT = {**os.environ, "PYTHONPATH": PACKAGE_PARENT}
STEPS = 4


def run(*words: str, **environment: str) -> Result:
    return CliRunner().invoke(main, list(words), env=environment, prog_name="lohan")


def module(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "lohan", *words],
        env=ENVIRONMENT,
        capture_output=True,
        text=True,
        timeout=HUNG_S,
    )


def test_help_names_every_policy() -> None:
    shown = " ".join(run("simulate", "--help").output.split())
    refused = run("simulate", "--model", "gpt-13b", "--policy", "none").output
    for name in refused.partition("one of ")[2].split(", "):
        assert name.strip() in shown


def test_every_command_has_json_and_says_what_it_is_for() -> None:
    assert {"doctor", "inspect", "trace", "simulate", "plan", "demo"} <= set(main.commands)
    for name, command in main.commands.items():
        options = {option for param in command.params for option in param.opts}
        assert "--json" in options, f"lohan {name} has no --json"
        assert command.help, f"lohan {name} has no help"


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_completion_prints_a_script_for_the_shell(shell: str) -> None:
    answer = run(_LOHAN_COMPLETE=f"{shell}_source")
    assert answer.exit_code == 0, answer.output
    assert "_LOHAN_COMPLETE" in answer.stdout and "complete" in answer.stdout


def test_completion_knows_the_commands() -> None:
    answer = run(_LOHAN_COMPLETE="bash_complete", COMP_WORDS="lohan do", COMP_CWORD="1")
    assert answer.stdout.split() == ["plain,doctor"]


def test_python_m_lohan_is_lohan() -> None:
    answer = module("--help")
    assert answer.returncode == 0
    assert answer.stdout.startswith("Usage: lohan ")
    assert " ".join(answer.stdout.split()).endswith(" ".join(cli.STATUSES.split()))


@pytest.mark.parametrize(
    ("words", "status", "kind", "said"),
    [
        (("inspect", "/no/such/store"), 1, "StoreError", "there is no store: /no/such/store/"),
        (("simulate", "--model", "gpt-14b"), 1, "ModelError", "unknown model 'gpt-14b'"),
        (("trace", "/no/such/file"), 1, "TraceError", "/no/such/file"),
        (("inspect",), 2, "MissingParameter", "STORE"),
        (("plan", "--model", "opt-1.3b", "--batch", "0"), 2, "BadParameter", "x>=1"),
        (("plan",), 2, "UsageError", "--largest"),
    ],
)
def test_an_error_with_json_is_one_object_on_stdout(
    words: tuple[str, ...], status: int, kind: str, said: str
) -> None:
    answer = run(*words, "--json")
    found = json.loads(answer.stdout)
    assert found.keys() == {"error"} and found["error"].keys() == {"type", "message"}
    assert found["error"]["type"] == kind and said in found["error"]["message"]
    assert answer.exit_code == status and "Error: " in answer.stderr
    plain = run(*words)
    assert plain.stdout == "" and plain.exit_code == status
    assert plain.stderr == answer.stderr


def test_the_errors_of_a_command_whose_json_is_a_file_are_text(tmp_path: pathlib.Path) -> None:
    (tmp_path / "file").write_text("")
    store = tmp_path / "full"
    store.mkdir()
    (store / "other").write_text("")
    answer = run("demo", "--store", str(store), "--json", str(tmp_path / "numbers.json"))
    assert answer.exit_code == 1 and answer.stdout == "" and "is not empty" in answer.stderr


def test_exit_statuses_are_those_that_help_says(
    store_dir: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert run("--help").exit_code == 0
    assert run("inspect", str(store_dir)).exit_code == 1
    for wrong in (["inspect"], ["nothing"], ["simulate", "--batch", "many", "--model", "opt-1.3b"]):
        assert run(*wrong).exit_code == 2

    def interrupted(**words: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setitem(main.commands, "inspect", click.Command("inspect", callback=interrupted))
    answer = run("inspect")
    assert answer.exit_code == 130 and "interrupted" in answer.output


@pytest.mark.parametrize("name, status", [("missing/numbers.json", 2), (".", 2)])
def test_a_demo_whose_numbers_have_no_place_does_not_begin(
    name: str, status: int, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("lohan.commands._demo.run", lambda *args: pytest.fail("it began"))
    done = run("demo", "--json", str(tmp_path / name), "--out", str(tmp_path / "out"))
    assert done.exit_code == status and "--json" in done.output
    (tmp_path / "file").touch()
    assert run("demo", "--out", str(tmp_path / "file")).exit_code == 2


def test_an_answer_that_cannot_be_written_is_an_error_in_a_sentence(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*args: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device", "/dev/full")

    monkeypatch.setattr("lohan.commands._inspect.describe", full)
    done = run("inspect", str(tmp_path))
    assert done.exit_code == 1 and isinstance(done.exception, SystemExit)
    assert "No space left on device: '/dev/full'" in done.output


def test_the_command_line_reads_sizes_with_the_same_words() -> None:
    answer = run("demo", "--tiny", "--host-bytes", "lots")
    assert answer.exit_code == 2 and '"16GiB"' in answer.output


def test_progress_is_for_terminals_and_never_in_the_answer() -> None:
    shown = io.StringIO()
    with _console.spinner(Console(file=shown, force_terminal=True)) as tell:
        tell("measuring [/nvme0]")
    assert "measuring [/nvme0]" in shown.getvalue()
    hidden = io.StringIO()
    with _console.spinner(Console(file=hidden)) as tell:
        tell("measuring")
    assert hidden.getvalue() == ""


# --- doctor -------------------------------------------------------------------------------------

BLOCKED = """
import sys, test_bad_input
from lohan.cli import main
test_bad_input.forbid_io_uring()
main(["doctor", "--json", sys.argv[1]])
"""


def test_doctor_names_the_filter_that_blocks_io_uring_and_the_flag_that_lets_it_through(
    store_dir: pathlib.Path,
) -> None:
    here = str(pathlib.Path(__file__).parent)
    paths = {"PYTHONPATH": os.pathsep.join([PACKAGE_PARENT, here])}
    answer = program_server.run(["-c", BLOCKED, str(store_dir)], paths)
    found = json.loads(answer.stdout)
    assert answer.returncode == 0 and found["ok"], answer.stderr
    assert found["io_uring_blocker"] == "seccomp"
    (problem,) = [one for one in found["problems"] if one["what"].startswith("io_uring on")]
    assert "--security-opt seccomp=unconfined" in problem["fix"] and not problem["needed"]


# --- plan ---------------------------------------------------------------------------------------


def test_plan_measures_the_directories_of_store_and_predicts_a_step(
    store_dir: pathlib.Path,
) -> None:
    places = [store_dir / "a", store_dir / "b"]
    for place in places:
        place.mkdir()
    saved = store_dir / "machine.toml"
    words = ["--model", "opt-1.3b", "--batch", "1", "--seq", "128", "--save", str(saved)]
    # The step is of a machine with room for the model: what is tested is that it was measured.
    room = ["--gpu", "24GiB", "--ram", "64GiB", "--ssd", "4TB"]
    stores = [word for place in places for word in ("--store", str(place))]
    answer = run("plan", *stores, *words, *room, "--json")
    assert answer.exit_code == 0, answer.output
    found = json.loads(answer.stdout)
    assert found["step_ms"] > 0
    machine = tomllib.loads(saved.read_text())
    assert machine["adam_params_per_s"] > 1e6 and machine["ssd_count"] == 2
    assert min(machine["ssd_read_bytes_per_s"], machine["ssd_write_bytes_per_s"]) > 1e6
    assert [list(place.iterdir()) for place in places] == [[], []]


def test_a_directory_that_is_not_there_is_named_with_mkdir(store_dir: pathlib.Path) -> None:
    answer = run("plan", "--model", "opt-1.3b", "--store", str(store_dir / "no such"))
    assert answer.exit_code == 1
    assert f"mkdir -p '{store_dir}/no such'" in answer.output


# --- trace --------------------------------------------------------------------------------------


def traced(store: pathlib.Path, out: pathlib.Path, **settings: object) -> list[lohan.StepStats]:
    """Train STEPS steps, save the timeline; the steps' statistics."""
    model = lohan.wrap(crash_worker.build(), store=store, lr=1e-2, **settings)
    found = []
    for step in range(STEPS):
        crash_worker.train_step(model, step)
        model.lohan.flush()
        found.append(model.lohan.stats())
    model.lohan.save_trace(out)
    model.lohan.close()
    return found


def test_a_timeline_has_the_bytes_of_each_step_and_a_bottleneck(store_dir: pathlib.Path) -> None:
    file = store_dir / "trace.json"
    stats = traced(store_dir / "s", file, trace_events=100_000)
    answer = run("trace", str(file), "--json")
    assert answer.exit_code == 0, answer.output
    steps = json.loads(answer.stdout)["steps"]
    assert [step["step"] for step in steps] == [one.step for one in stats]
    for step, one in zip(steps, stats, strict=True):
        assert step["read_bytes"] == one.read_bytes
        assert step["written_bytes"] == one.written_bytes - one.bytes["commit_write"]
        assert set(step["busy"]) == set(one.busy)
        assert all(0 <= share <= 1 for share in step["busy"].values())
        assert step["bound_by"] == max(step["busy"], key=step["busy"].get)
        assert list(step["phases"]) == ["forward", "backward", "step"]
        within = sum(phase["wall_ns"] for phase in step["phases"].values())
        assert 0 < within <= step["wall_ns"]
    # Each step ends where the next one begins, so that together they are the whole time.
    spans, _ = _trace.load(file)
    first = min(span.start_ns for span in spans if span.name == "forward")
    last = max(span.end_ns for span in spans)
    assert sum(step["wall_ns"] for step in steps) == last - first
    events = json.loads(file.read_text())["traceEvents"]
    assert {"X", "M"} == {event["ph"] for event in events}
    shown = run("trace", str(file)).output
    assert re.search(r"^ backward +\d+\.\d ", shown, re.M)
    assert "steps are bound by" in shown and "bound by" in shown.splitlines()[0]


def test_what_a_phase_was_busy_with_is_that_of_its_own_time() -> None:
    def span(lane: str, name: str, step: int, begin: int, end: int) -> _timeline.Span:
        return _timeline.Span(lane, 0, name, -1, step, begin, end, 10)

    spans = [
        span(_timeline.TRAINING, "forward", 1, 0, 100),
        span(_timeline.TRAINING, "backward", 1, 100, 300),
        span(_timeline.TRAINING, "step", 1, 300, 400),
        span(_timeline.TRAINING, "forward", 2, 400, 500),
        span(_timeline.WAITS, "a", 1, 100, 250),
        span(_trace.SSD_READS[0], "a", 1, 0, 50),
        span(_trace.SSD_READS[0], "b", 1, 25, 75),
        span(_trace.SSD_WRITES[0], "a", 1, 100, 290),
        span(_trace.OPTIMIZER, "a", 1, 200, 300),
    ]
    first, second = _trace.summarise(spans, threads=2)
    assert (first["wall_ns"], first["waited_ns"], second["wall_ns"]) == (400, 150, 100)
    assert first["busy"] == {"compute": 1 - 150 / 400, "ssd": 265 / 400, "optimizer": 50 / 400}
    assert (first["read_bytes"], first["written_bytes"]) == (20, 10)
    forward, backward, step = first["phases"].values()
    assert forward["busy"] == {"compute": 1.0, "ssd": 0.75, "optimizer": 0.0}
    assert backward["busy"] == {"compute": 0.25, "ssd": 0.95, "optimizer": 0.25}
    assert (forward["bound_by"], backward["bound_by"], first["bound_by"]) == (
        "compute",
        "ssd",
        "ssd",
    )
    assert step["busy"]["ssd"] == 0.0


def test_a_step_that_is_remembered_in_part_is_left_out(store_dir: pathlib.Path) -> None:
    whole, part = store_dir / "whole.json", store_dir / "part.json"
    traced(store_dir / "a", whole, trace_events=100_000)
    count = sum(e["ph"] == "X" for e in json.loads(whole.read_text())["traceEvents"])
    traced(store_dir / "b", part, trace_events=count // 2)
    steps = [step["step"] for step in _trace.summarise(*_trace.load(part))]
    assert steps and steps[-1] == STEPS and steps[0] > 1


def test_what_is_no_timeline_is_refused_by_name(store_dir: pathlib.Path) -> None:
    model = lohan.wrap(crash_worker.build(), store=store_dir / "s")
    with pytest.raises(SessionError, match=r"Debug\(trace_events=100_000\)"):
        model.lohan.save_trace(store_dir / "t.json")
    model.lohan.close()
    assert not (store_dir / "t.json").exists()
    for name, text in (("a", "no json"), ("b", "[]"), ("c", '{"traceEvents": []}')):
        (store_dir / name).write_text(text)
        with pytest.raises(TraceError, match=str(store_dir / name)):
            _trace.load(store_dir / name)
        assert run("trace", str(store_dir / name)).exit_code == 1
    with pytest.raises(TraceError, match="No such file"):
        _trace.load(store_dir / "nothing")


# --- wear ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_inspect_foresees_what_a_step_writes(store_dir: pathlib.Path, dtype: str) -> None:
    import torch

    def build() -> torch.nn.Module:
        torch.manual_seed(3)
        layers = torch.nn.Linear(512, 256), torch.nn.Linear(256, 512)
        model = torch.nn.Sequential(*layers).to(getattr(torch, dtype))
        model[0].bias.requires_grad_(False)
        return model

    model = lohan.wrap(build(), store=store_dir / "s", lr=1e-3)
    for _ in range(2):
        model(torch.ones(2, 512, dtype=getattr(torch, dtype))).float().mean().backward()
        model.optimizer.step()
    model.lohan.flush()
    stats = model.lohan.stats()
    model.lohan.close()
    found = json.loads(run("inspect", "--json", str(store_dir / "s")).stdout)
    assert found["written_bytes_per_step"] == stats.written_bytes
    assert stats.tbw(1_000_000) == pytest.approx(stats.written_bytes / 1e6)
    assert "in 1,000 steps" in run("inspect", str(store_dir / "s")).output


def test_a_store_error_of_the_command_line_has_no_errno(store_dir: pathlib.Path) -> None:
    with pytest.raises(StoreError):
        lohan.wrap(crash_worker.build(), store=store_dir / "none", resume=True)
    assert "[Errno" not in run("inspect", str(store_dir / "none")).output
