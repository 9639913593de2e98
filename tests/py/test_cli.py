"""The command line: what doctor finds, what inspect reads, and a small demo from end to end."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import pathlib
import signal
import subprocess
import sys
import tempfile
import time
from typing import Any

import lohan
import pytest
import torch
from click.testing import CliRunner, Result
from lohan.cli import main
from lohan.common import _timeline
from lohan.common._stats import LINKS
from patience import HUNG_S, slowness

PACKAGE_PARENT = str(pathlib.Path(lohan.__file__).parent.parent)


def run(*words: str) -> Result:
    return CliRunner().invoke(main, list(words))


def environment(tmp: pathlib.Path) -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": PACKAGE_PARENT, "TMPDIR": str(tmp)}


def demo(*words: str, tmp: pathlib.Path) -> list[str]:
    return [sys.executable, "-m", "lohan", "demo", "--tiny", "--sequence", "32", *words]


# --- doctor -------------------------------------------------------------------------------------


def test_doctor_finds_a_working_backend_on_a_disk_and_exits_0(store_dir: pathlib.Path) -> None:
    answer = run("doctor", "--json", str(store_dir))
    found = json.loads(answer.stdout)
    assert answer.exit_code == 0 and found["ok"], found["problems"]
    facts = found["directories"][str(store_dir)]
    assert {"file_system", "free_bytes", "mount_point", "io"} <= facts.keys()
    assert set(facts["io"]) == {"io_uring", "libaio", "threads"}
    for modes in facts["io"].values():
        assert set(modes) == {"direct", "buffered"}
    assert facts["io"]["threads"]["buffered"] == ""
    assert found["torch"]["dlpack_exchange_table"]
    assert found["processor"]["cores_here"] >= 1
    assert found["memory"]["available_bytes"] > 0
    assert list(store_dir.iterdir()) == [], "doctor leaves nothing behind"


def test_doctor_exits_1_and_names_what_fixes_a_directory_that_is_not_there(
    store_dir: pathlib.Path,
) -> None:
    missing = str(store_dir / "missing")
    answer = run("doctor", "--json", missing)
    found = json.loads(answer.stdout)
    assert answer.exit_code == 1 and not found["ok"]
    needed = [problem for problem in found["problems"] if problem["needed"]]
    assert [problem["fix"] for problem in needed] == [f"mkdir -p {missing}"]
    (store_dir / "missing").touch()  # it is a file, so mkdir would not help
    found = json.loads(run("doctor", "--json", missing).stdout)
    needed = [problem for problem in found["problems"] if problem["needed"]]
    assert [problem["fix"] for problem in needed] == ["name a directory on an SSD"]


@pytest.mark.skipif(not os.path.ismount("/dev/shm"), reason="no tmpfs at /dev/shm")
def test_doctor_refuses_main_memory_as_a_place_for_stores() -> None:
    answer = run("doctor", "--json", "/dev/shm")
    needed = [p["what"] for p in json.loads(answer.stdout)["problems"] if p["needed"]]
    assert answer.exit_code == 1 and any("main memory" in what for what in needed)
    shown = run("doctor", "/dev/shm").stdout
    assert "works" not in shown, "a store cannot be in main memory, whatever works there"
    verdict = shown.strip().splitlines()[-1]
    assert "cannot run on this machine" in verdict and "/dev/shm is in main memory" in verdict


def test_doctor_shows_for_people_what_it_says_in_json(store_dir: pathlib.Path) -> None:
    answer = run("doctor", str(store_dir))
    assert answer.exit_code == 0
    for word in ("io_uring", "libaio", "threads", "O_DIRECT", "Everything that lohan needs works"):
        assert word in answer.stdout
    assert "doctor DIR" not in answer.stdout


def test_doctor_without_a_directory_says_that_it_chose_one(
    store_dir: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(store_dir))
    answer = run("doctor")
    assert str(store_dir) in answer.stdout.replace("\n", "") and "doctor DIR" in answer.stdout


def test_doctor_speaks_of_the_limit_of_locked_memory_only_where_it_binds(
    store_dir: pathlib.Path,
) -> None:
    found = json.loads(run("doctor", "--json", str(store_dir)).stdout)
    shown = run("doctor", str(store_dir)).stdout
    assert ("can be locked" in shown) == found["memory"]["locked"]
    assert ("ulimit -l" in shown) != found["memory"]["locked"]


# --- inspect ------------------------------------------------------------------------------------


def make_store(folder: pathlib.Path) -> list[tuple[str, int]]:
    """Make a store at step 2; return (name, elements) of the model's parameters."""
    model = torch.nn.Sequential(torch.nn.Linear(32, 64), torch.nn.Linear(64, 16))
    model[1].bias.requires_grad_(False)
    wrapped = lohan.wrap(model, store=folder, lr=0.25, weight_decay=0.5)
    for _ in range(2):
        wrapped(torch.ones(3, 32)).sum().backward()
        wrapped.optimizer.step()
    wrapped.lohan.close()
    return [(name, p.numel()) for name, p in model.named_parameters()]


def digest(folder: pathlib.Path) -> dict[str, str]:
    return {p.name: hashlib.sha256(p.read_bytes()).hexdigest() for p in folder.iterdir()}


def test_inspect_says_step_parameters_and_hyper_parameters_and_changes_no_byte(
    store_dir: pathlib.Path,
) -> None:
    params = make_store(store_dir / "s")
    before = digest(store_dir / "s")
    answer = run("inspect", "--json", str(store_dir / "s"))
    found = json.loads(answer.stdout)
    assert answer.exit_code == 0
    assert found["step"] == 2
    assert [(p["name"], p["count"]) for p in found["params"]] == params
    assert [p["trainable"] for p in found["params"]] == [True, True, True, False]
    assert found["param_count"] - found["trainable_count"] == 16
    assert found["groups"][0]["lr"] == 0.25 and found["groups"][0]["weight_decay"] == 0.5
    assert found["file_bytes"] == sum(file["bytes"] for file in found["files"])
    assert found["commit_bytes"] > 0
    assert digest(store_dir / "s") == before
    shown = run("inspect", str(store_dir / "s"))
    assert shown.exit_code == 0 and "step 2" in shown.stdout


def test_inspect_of_what_is_no_store_is_a_sentence_and_exit_status_1(
    store_dir: pathlib.Path,
) -> None:
    answer = run("inspect", str(store_dir))
    assert answer.exit_code == 1
    assert answer.output.startswith("Error: there is no store: ")
    assert "resume=True" not in answer.output, "a remedy that does not exist on the command line"


def test_inspect_of_a_store_in_use_says_how_to_look_at_it(store_dir: pathlib.Path) -> None:
    model = lohan.wrap(torch.nn.Linear(8, 8), store=store_dir / "s")
    answer = run("inspect", str(store_dir / "s"))
    assert answer.exit_code == 1 and "is in use by this process" in answer.output
    assert "lohan snapshot STORE OUT makes a copy" in answer.output
    model.lohan.close()


# --- demo ---------------------------------------------------------------------------------------

KEYS = {
    "losses",
    "reference_losses",
    "host_budget_bytes",
    "host_peak_bytes",
    "process_peak_bytes",
    "baseline_peak_bytes",
    "reference_peak_bytes",
    "ssd_read_bytes_per_step",
    "ssd_written_bytes_per_step",
    "planned_ssd_read_bytes_per_step",
    "planned_ssd_written_bytes_per_step",
    "step_ms",
    "bound_by",
}


@pytest.mark.slow
def test_the_demo_agrees_with_plain_torch_keeps_its_budget_and_moves_the_planned_bytes(
    store_dir: pathlib.Path,
) -> None:
    pytest.importorskip("transformers")
    out, numbers, tmp = store_dir / "out", store_dir / "numbers.json", store_dir / "tmp"
    tmp.mkdir()
    words = ["--steps", "8", "--out", str(out), "--json", str(numbers)]
    words += ["--store", str(store_dir / "kept")]
    answer = subprocess.run(
        demo(*words, tmp=tmp), env=environment(tmp), capture_output=True, text=True, timeout=HUNG_S
    )
    assert answer.returncode == 0, answer.stdout + answer.stderr
    found = json.loads(numbers.read_text())
    assert found.keys() >= KEYS
    assert len(found["losses"]) == len(found["reference_losses"]) == 8
    for mine, plain in zip(found["losses"], found["reference_losses"], strict=True):
        assert abs(mine - plain) < 1e-2
    assert 0 < found["host_peak_bytes"] <= found["host_budget_bytes"]
    assert found["process_peak_bytes"] > found["baseline_peak_bytes"] > 0
    assert found["steps_as_planned"] == found["steps_measured"] > 0
    for name in ("read", "written"):
        moved = found[f"ssd_{name}_bytes_per_step"]
        assert moved == found[f"planned_ssd_{name}_bytes_per_step"]
    assert found["bound_by"] in {"compute", "ssd", "optimizer"}
    trace = json.loads((out / "timeline.json").read_text())
    assert {"forward", "backward"} <= {event["name"] for event in trace["traceEvents"]}
    assert list(tmp.iterdir()) == [], "what is temporary is gone"
    inspected = json.loads(run("inspect", "--json", str(store_dir / "kept")).stdout)
    assert inspected["step"] == 8


@pytest.mark.slow  # test_left_behind.py kills a demo
def test_ctrl_c_in_the_demo_leaves_nothing_behind(store_dir: pathlib.Path) -> None:
    pytest.importorskip("transformers")
    tmp = store_dir / "tmp"
    tmp.mkdir()
    words = ["--steps", "100000", "--out", str(store_dir / "out"), "--store", str(store_dir / "s")]
    process = subprocess.Popen(
        demo(*words, tmp=tmp),
        env=environment(tmp),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    try:
        assert process.stdout is not None
        said = next((line for line in process.stdout if "lohan step" in line), None)
        assert said is not None, "the demo ended by itself"
        begun = time.monotonic()
        process.send_signal(signal.SIGINT)
        # communicate() would not return what the iteration has read ahead.
        rest = process.stdout.read()
        process.wait(HUNG_S)
    finally:
        process.kill()
        process.wait()
    assert process.returncode == 130, rest
    assert "Traceback" not in rest
    assert time.monotonic() - begun < 30 * slowness()
    assert [path.name for path in store_dir.iterdir()] == ["tmp"]
    assert list(tmp.iterdir()) == []


@pytest.mark.slow
def test_the_demo_ends_when_its_seconds_are_over(store_dir: pathlib.Path) -> None:
    pytest.importorskip("transformers")
    numbers = store_dir / "numbers.json"
    words = ["--steps", "100000", "--seconds", "0", "--out", str(store_dir / "out")]
    answer = subprocess.run(
        demo(*words, "--json", str(numbers), tmp=store_dir),
        env=environment(store_dir),
        capture_output=True,
        text=True,
        timeout=HUNG_S,
    )
    assert answer.returncode == 0, answer.stdout + answer.stderr
    assert "lohan: stopped after 4 of 100000 steps" in answer.stdout
    assert "plain torch: stopped after 4 of 10 steps" in answer.stdout
    assert len(json.loads(numbers.read_text())["losses"]) == 4


def test_the_demo_refuses_a_store_directory_that_has_something_in_it(
    store_dir: pathlib.Path,
) -> None:
    (store_dir / "precious").write_text("mine")
    answer = run("demo", "--tiny", "--steps", "2", "--store", str(store_dir))
    assert answer.exit_code == 1 and "is not empty" in answer.output
    assert (store_dir / "precious").read_text() == "mine"


# --- The timeline -------------------------------------------------------------------------------

EVENTS = [
    # Each row has the kind, unit, lane, step, start_ns, end_ns and bytes.
    (0, 0, 0, 1, 100, 300, 4096),
    (0, 1, 1, 1, 200, 400, 4096),
    (0, 0, 0, 1, 300, 500, 4096),
    (3, 1, 0, 1, 250, 350, 64),
    (7, 0xFFFFFFFF, 0, 1, 120, 180, 0),
    (5, 0xFFFFFFFF, 0, 1, 500, 600, 0),
]
MARKS = [("forward", 1, 100, 260), ("backward", 1, 260, 600)]


def test_spans_of_a_lane_that_overlap_have_rows_of_their_own() -> None:
    spans = _timeline.spans_of(EVENTS, ["a", "b"], MARKS)
    assert len(spans) == len(EVENTS) + len(MARKS)
    for one in spans:
        for other in spans:
            if one is not other and (one.lane, one.row) == (other.lane, other.row):
                assert one.end_ns <= other.start_ns or other.end_ns <= one.start_ns
    reads = [s for s in spans if s.lane == _timeline.LANE_OF_KIND[0]]
    assert [s.row for s in reads] == [0, 1, 0]
    assert {s.name for s in spans} == {"a", "b", "commit", "gradients", "forward", "backward"}


def test_a_timeline_is_written_for_perfetto_and_as_a_picture(tmp_path: pathlib.Path) -> None:
    spans = _timeline.spans_of(EVENTS, ["a", "b"], MARKS)
    _timeline.write_perfetto(tmp_path / "t.json", spans)
    events = json.loads((tmp_path / "t.json").read_text())["traceEvents"]
    slices = [event for event in events if event["ph"] == "X"]
    assert len(slices) == len(spans)
    assert min(event["ts"] for event in slices) == 0
    names = {e["tid"]: e["args"]["name"] for e in events if e["name"] == "thread_name"}
    assert {event["tid"] for event in slices} == names.keys()
    pytest.importorskip("matplotlib")
    _timeline.write_png(tmp_path / "t.png", spans, ["a", "b"], (1, 1), "a title")
    assert (tmp_path / "t.png").read_bytes().startswith(b"\x89PNG")


# --- What bounded a step ------------------------------------------------------------------------


def stats_of(**changes: Any) -> lohan.StepStats:
    """Return a step of one microsecond in which nothing happened except the changes."""
    numbers = {f.name: 0 for f in dataclasses.fields(lohan.StepStats)}
    whole: dict[str, Any] = {**numbers, "step": 1, "wall_ns": 1000, "written_ns": 200, "threads": 2}
    return lohan.StepStats(**{**whole, "bytes": {}, "planned_bytes": {}, **changes})


@pytest.mark.parametrize(
    ("wait_ns", "ssd_ns", "update_ns", "bound"),
    [
        (120, 430, 30, "compute"),
        (600, 950, 300, "ssd"),
        (700, 400, 1800, "optimizer"),
        # A step that is followed by a flush ends before what it has begun.
        (0, 1200, 30, "ssd"),
        (0, 1200, 2600, "optimizer"),
    ],
)
def test_a_step_is_bound_by_the_resource_that_was_busy_the_longest(
    wait_ns: int, ssd_ns: int, update_ns: int, bound: str
) -> None:
    stats = stats_of(param_wait_ns=wait_ns, ssd_busy_ns=ssd_ns, update_busy_ns=update_ns)
    assert stats.bound_by == bound


def test_a_step_is_printed_for_people_and_represented_with_every_number() -> None:
    moved = {**dict.fromkeys(LINKS, 0), "param_read": 1_500_000, "state_write": 3_000_000}
    stats = stats_of(
        step=7, wall_ns=40_000_000, param_wait_ns=12_000_000, bytes=moved, planned_bytes=moved
    )
    assert str(stats) == (
        "step 7: 40 ms, bound by compute (compute 70%, ssd 0%, optimizer 0% busy); SSD 1.5 MB read,"
        " 3.0 MB written (as planned); waited 12 ms for parameters"
    )
    assert "not as planned" in str(dataclasses.replace(stats, planned_bytes={}))
    assert "wall: 0.040 s" in repr(stats)
