"""benchmarks/gpu.sh: its parts run dry on the CPU, skip without a GPU, and lose no line."""

from __future__ import annotations

import json
import os
import pathlib
import signal
import subprocess
import sys
from typing import Any

import program_server
import pytest
import torch
from patience import ENDS_S, HUNG_S

ROOT = pathlib.Path(__file__).resolve().parent.parent.parent
SCRIPTS = ROOT / "benchmarks" / "py"
sys.path[:0] = [str(SCRIPTS), str(ROOT / "tests" / "cuda")]

import gpu_part  # noqa: E402  (its folder has just been named)
import gpu_parts  # noqa: E402
from gpu_part import Part, Skip  # noqa: E402
from shim_helper import Shim, build  # noqa: E402

program_server.preload("transformers.models.llama.modeling_llama")
# Of each part, cases that a dry run has results of.
CASES = {
    "facts": {"machine", "software", "disks", "device", "build", "doctor"},
    "tests": {
        "test_dev_c",
        "test_dev",
        "test_training",
        "test_activations",
        "test_mezo_gpu",
        "lag",
    },
    "asserts": {
        "streams",
        "data_across_devices",
        "lends",
        "hollow",
        "pinning",
        "events",
        "wrong_device",
        "oom",
    },
    "links": {"alone", "beside_adam", "adam_alone", "torch"},
    "overlap": {
        "plain",
        *(
            f"{name}_{share}"
            for name in ("forward", "optimized", "deferred", "auto")
            for share in ("all", "quarter")
        ),
    },
    "models": {
        "plain",
        "bf16",
        "recompute",
        "swap",
        "swap_small",
        "auto",
        "plain_autocast",
        "autocast",
        "lora",
        "trainer",
        "generate",
        "device_in_the_loop",
    },
    "memory": {"wrap", "steps", "too_large"},
    "mezo": {"plain", "all_blocks", "some_blocks", "some_blocks_written"},
    "features": {"turns", "low_precision", "packed", "no_logits", "pair"},
    "sanitize": {"memcheck", "synccheck", "initcheck"},
    "peers": {"lohan", "torch_adamw_on_cpu"},
}
Line = dict[str, Any]


@pytest.fixture(autouse=True)
def no_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith("LOHAN_GPU")]:
        monkeypatch.delenv(name)


def environment(folder: pathlib.Path, **more: str) -> dict[str, str]:
    stores = {"LOHAN_GPU_STORE": str(folder / "stores"), "PYTHON": sys.executable}
    return {**os.environ, **stores, "OUT": str(folder / "out"), "PYTHONWARNINGS": "ignore", **more}


def start(words: list[str], folder: pathlib.Path, **more: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        words,
        env=environment(folder, **more),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def run_part(part: str, folder: pathlib.Path, *cases: str, **more: str) -> tuple[int, str, str]:
    """Run a part where torch has been imported already."""
    words = [str(SCRIPTS / "gpu_parts.py"), part, *cases]
    done = program_server.run(words, environment(folder, **more))
    return done.returncode, done.stdout, done.stderr


def lines_of(folder: pathlib.Path, part: str) -> list[Line]:
    text = (folder / "out" / f"{part}.jsonl").read_text(encoding="utf-8")
    return [json.loads(line) for line in text.splitlines()]


def test_every_part_has_a_script_and_is_tried_here() -> None:
    assert set(CASES) == set(gpu_parts.PARTS)
    assert {f"gpu_{part}" for part in CASES} <= {path.stem for path in SCRIPTS.glob("gpu_*.py")}
    shell = (ROOT / "benchmarks" / "gpu.sh").read_text(encoding="utf-8")
    assert f"PARTS=({' '.join(gpu_parts.PARTS)})" in shell
    assert all(f"\n#   {part} " in shell for part in CASES)


def check_dry(part: str, store_dir: pathlib.Path, *cases: str) -> None:
    """Run a part dry, or some of its cases."""
    code, out, err = run_part(part, store_dir, *cases, LOHAN_GPU_DRY="1")
    lines = lines_of(store_dir, part)
    assert [line for line in lines if "error" in line or "cut" in line] == []
    assert code == 0, out + err
    assert lines[0]["case"] == "begin" and lines[0]["is_dry"] is True
    assert lines[-1] == {"part": part, "case": "end", "failed": 0}
    assert {line["part"] for line in lines} == {part}
    done = {line["case"] for line in lines if "seconds" in line}
    assert done >= (set(cases) or CASES[part]), "a case that has no result"
    printed = [json.loads(line) for line in out.splitlines() if line.startswith('{"part"')]
    assert printed == lines, "what is printed is what is kept"
    stores = store_dir / "stores"
    assert not stores.exists() or not list(stores.iterdir()), "a store was left behind"


# Each file of tests/cuda takes a process, the pair takes seven, and the models take many.
SOME = {
    "tests": ("test_dev_c", "test_dev"),
    "models": ("plain", "swap", "plain_autocast", "autocast", "lora", "trainer"),
    "features": ("turns", "packed", "no_logits"),
}


@pytest.mark.parametrize("part", CASES)
def test_a_part_runs_dry_on_the_cpu(part: str, store_dir: pathlib.Path) -> None:
    check_dry(part, store_dir, *SOME.get(part, ()))


@pytest.mark.slow
@pytest.mark.parametrize("part", SOME)
def test_all_of_a_long_part_runs_dry_on_the_cpu(part: str, store_dir: pathlib.Path) -> None:
    check_dry(part, store_dir)


def test_without_a_gpu_every_part_says_so_and_that_is_no_error(
    store_dir: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OUT", str(store_dir / "out"))
    for part in CASES:
        assert gpu_parts.main([part]) == 0
        lines = lines_of(store_dir, part)
        assert lines[-1]["part"] == part
        assert lines[-1]["skipped"].startswith(f"no CUDA device: torch {torch.__version__}")
        assert len(lines) == 1 or part == "facts"
    facts = {line.get("case") for line in lines_of(store_dir, "facts")}
    assert {"machine", "software", "disks"} <= facts


def test_the_shell_script_runs_a_part(store_dir: pathlib.Path) -> None:
    process = start([str(ROOT / "benchmarks" / "gpu.sh"), "links"], store_dir)
    out, err = process.communicate(timeout=HUNG_S)
    assert process.returncode == 0, out + err
    assert json.loads(out) == lines_of(store_dir, "links")[0]
    assert "skipped" in json.loads(out)


def test_where_torch_is_missing_a_part_says_so(store_dir: pathlib.Path) -> None:
    code = "import sys; sys.modules['torch'] = None; import gpu_parts; gpu_parts.main(['links'])"
    process = start([sys.executable, "-c", code], store_dir, PYTHONPATH=str(SCRIPTS))
    _, err = process.communicate(timeout=HUNG_S)
    assert process.returncode == 0, err
    (line,) = lines_of(store_dir, "links")
    assert line["skipped"].startswith("no CUDA device: torch cannot be imported")


def test_what_is_no_part_is_refused_with_their_names(store_dir: pathlib.Path) -> None:
    process = start([str(ROOT / "benchmarks" / "gpu.sh"), "everything"], store_dir)
    _, err = process.communicate(timeout=HUNG_S)
    assert process.returncode == 1
    assert "facts, tests, asserts, links" in err
    code, _, err = run_part("links", store_dir, "nothing", LOHAN_GPU_DRY="1")
    assert code == 1
    assert "no case 'nothing': alone, beside_adam" in err


def test_a_part_that_is_cut_keeps_what_it_had(store_dir: pathlib.Path) -> None:
    words = [str(SCRIPTS / "gpu_parts.py"), "overlap"]
    process = program_server.Program(words, environment(store_dir, LOHAN_GPU_DRY="1"))
    for line in process.stdout:
        if '"case": "plain"' in line:
            break
    process.send_signal(signal.SIGTERM)
    out, err = process.communicate(ENDS_S)
    assert process.returncode == 128 + signal.SIGTERM, out + err
    lines = lines_of(store_dir, "overlap")
    assert any(line["case"] == "plain" and "losses" in line for line in lines)
    assert "SIGTERM" in lines[-1]["cut"]
    stores = store_dir / "stores"
    assert not stores.exists() or not list(stores.iterdir()), "its store is gone"


def test_what_there_is_no_time_for_is_named_with_the_way_to_run_it(
    store_dir: pathlib.Path,
) -> None:
    code, *_ = run_part("mezo", store_dir, LOHAN_GPU_DRY="1", LOHAN_GPU_SECONDS="1")
    assert code == 0
    skipped = [line["skipped"] for line in lines_of(store_dir, "mezo") if "skipped" in line]
    assert len(skipped) == len(CASES["mezo"])
    assert all("benchmarks/gpu.sh mezo " in said for said in skipped)


def test_a_case_alone_is_run_alone_by_an_interpreter_of_its_own(store_dir: pathlib.Path) -> None:
    words = [sys.executable, str(SCRIPTS / "gpu_parts.py"), "mezo", "plain"]
    process = start(words, store_dir, LOHAN_GPU_DRY="1")
    out, err = process.communicate(timeout=HUNG_S)
    assert process.returncode == 0, out + err
    assert [line["case"] for line in lines_of(store_dir, "mezo")] == ["begin", "plain", "end"]


def test_an_error_ends_its_case_alone(
    store_dir: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LOHAN_GPU_DRY", "1")
    monkeypatch.setenv("OUT", str(store_dir / "out"))
    monkeypatch.setattr(gpu_part.signal, "signal", lambda *args: None)
    threads = torch.get_num_threads()

    def dies() -> None:
        raise ValueError("as it happens")

    def is_skipped() -> None:
        raise Skip("not here")

    part = Part("links", [])
    part.run({"dies": dies, "is_skipped": is_skipped, "passes": lambda: {"figure": 1 / 3}})
    torch.set_num_threads(threads)
    first, second, third = lines_of(store_dir, "links")
    assert first["error"] == "ValueError: as it happens" and "dies" in " ".join(first["trace"])
    assert second == {"part": "links", "case": "is_skipped", "skipped": "not here"}
    assert third["figure"] == 0.333333 and part.failed == 1


def test_streams_of_copies_move_the_bytes(tmp_path: pathlib.Path) -> None:
    shim = Shim(build(tmp_path))
    nbytes = 1 << 20
    host, there, back, source = (
        torch.randint(0, 255, (nbytes,), dtype=torch.uint8) for _ in range(4)
    )
    try:
        shim.open("emu", 0)
        seconds = shim.stream(((host, there), (back, source)), nbytes, 9)
        assert torch.equal(there, host) and torch.equal(back, source)
        assert all(each > 0 for each in seconds)
        there.zero_()
        only_in = shim.stream(((host, there), None), nbytes, 1)
        assert torch.equal(there, host) and only_in[0] > 0 and only_in[1] == 0
    finally:
        shim.close()
    refused = Shim(tmp_path / "shim.so")
    try:
        with pytest.raises(RuntimeError, match=r"open: .*libcuda"):
            refused.open("cuda", 0)
    finally:
        refused.close()


def test_tests_for_a_gpu_are_collected_where_pytest_and_torch_are_all_that_there_is() -> None:
    code = "import pytest, sys; sys.exit(pytest.main(sys.argv[1:]))"
    options = ["-q", "-rs", "-p", "no:cacheprovider", "-o", "addopts=", "-o", "filterwarnings="]
    done = subprocess.run(
        [
            sys.executable,
            "-W",
            "ignore",
            str(ROOT / "tests" / "py" / "import_worker.py"),
            "torch,pytest",
            code,
            *options,
            str(ROOT / "tests" / "cuda"),
        ],
        env={**os.environ, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"},
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=HUNG_S,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "skipped" in done.stdout and "error" not in done.stdout.lower(), done.stdout
