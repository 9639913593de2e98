"""axolotl, LLaMA-Factory and ms-swift train with lohan as without: [Note: Frameworks].

[Note: Frameworks] Each framework pins versions of transformers and other libraries that differ from
those of requirements-dev.txt. `make test-frameworks` makes an environment for each
(tools/setup_framework.sh), and runs these tests there. Elsewhere they are skipped with the reason.
"""

from __future__ import annotations

import difflib
import pathlib
import shutil

import pytest
from frameworks_helper import (
    CHANGED,
    EXAMPLES,
    KILLED,
    add,
    copied,
    fail,
    logged,
    make_plain,
    run_program,
    skip_without,
    train,
    without_lohan,
)

FRAMEWORKS = [pytest.param(name, marks=skip_without(name)) for name in CHANGED]
# The lines with which each framework's configuration resumes a run that was interrupted.
RESUME = {
    "axolotl": "auto_resume_from_checkpoints: true",
    "llamafactory": "resume_from_checkpoint: out/checkpoint-3",
    "swift": "resume_from_checkpoint: out/checkpoint-3",
}
RTOL = 1e-5


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    """Return a folder with the examples, a model and data."""
    return copied(tmp_path_factory.mktemp("frameworks") / "made")


@pytest.fixture(scope="module", params=FRAMEWORKS)
def trained(
    request: pytest.FixtureRequest, made: pathlib.Path, tmp_path_factory: pytest.TempPathFactory
) -> tuple[str, pathlib.Path]:
    """Return a framework, and the folder of an uninterrupted run with lohan."""
    folder = tmp_path_factory.mktemp("trained") / "run"
    shutil.copytree(made, folder)
    train(folder, request.param)
    return request.param, folder


@pytest.mark.parametrize(("name", "most"), [("axolotl", 3), ("llamafactory", 2), ("swift", 2)])
def test_lohan_is_switched_on_with_two_or_three_lines(name: str, most: int) -> None:
    text = (EXAMPLES / CHANGED[name]).read_text(encoding="utf-8")
    lines = list(difflib.ndiff(without_lohan(text).splitlines(), text.splitlines()))
    assert len([line for line in lines if line.startswith("+ ")]) == most


@pytest.mark.slow
def test_losses_are_those_of_the_plain_run(
    trained: tuple[str, pathlib.Path], made: pathlib.Path, tmp_path: pathlib.Path
) -> None:
    package, folder = trained
    plain = tmp_path / "plain"
    shutil.copytree(made, plain)
    make_plain(plain, package)
    assert "lohan" not in train(plain, package)
    assert (folder / "store").is_dir() and not (plain / "store").exists()
    ours, theirs = logged(folder), logged(plain)
    assert len(ours["loss"]) == 6
    assert ours["loss"] == pytest.approx(theirs["loss"], rel=RTOL)
    assert ours["grad_norm"] == pytest.approx(theirs["grad_norm"], rel=RTOL)


@pytest.mark.slow
def test_a_killed_run_resumes_with_the_same_losses(
    trained: tuple[str, pathlib.Path], made: pathlib.Path, tmp_path: pathlib.Path
) -> None:
    package, folder = trained
    killed = tmp_path / "killed"
    shutil.copytree(made, killed)
    fail(killed, package, KILLED)
    if package == "axolotl":  # which looks for the last folder; it was not completely written
        (killed / "out" / "checkpoint-4").mkdir()
    name = "llamafactory.yaml" if package == "llamafactory" else CHANGED[package]
    add(killed / name, RESUME[package])
    train(killed, package)
    assert logged(killed) == logged(folder)


@pytest.mark.slow
def test_a_store_of_an_earlier_run_is_not_overwritten(
    trained: tuple[str, pathlib.Path], tmp_path: pathlib.Path
) -> None:
    package, folder = trained
    again = tmp_path / "again"
    shutil.copytree(folder, again)
    shutil.rmtree(again / "out")
    printed = fail(again, package)
    assert "StoreExistsError" in printed and "delete the store's directory" in printed
    if package == "axolotl":
        assert "auto_resume_from_checkpoints: true" in printed


@pytest.mark.slow
@skip_without("axolotl")
def test_axolotl_rejects_wrong_keys_before_it_loads_a_model(made: pathlib.Path) -> None:
    program = """
import yaml
from axolotl.cli.config import load_cfg
from axolotl.utils.dict import DictDefault
plain = yaml.safe_load(open("axolotl.yaml"))
for change in [
    {"lohan_store": None}, {"lohan_host_byte": 1}, {"lohan_lr": 1e-3}, {"lohan_io": "floppy"},
    {"deepspeed": "zero3.json"}, {"fsdp_config": {"fsdp_version": 2}},
]:
    try:
        load_cfg(DictDefault({**plain, **change}))
        print("accepted", change)
    except Exception as error:
        print("rejected", type(error).__name__, error)
"""
    done = run_program(made, program)
    assert done.returncode == 0, done.stderr[-3000:]
    lines = [line for line in done.stdout.splitlines() if line.startswith(("accept", "reject"))]
    expected = [
        ("ModelError", "lohan_store is missing"),
        ("ModelError", "did you mean lohan_host_bytes?"),
        ("ModelError", "set learning_rate instead"),
        ("ModelError", "'floppy'"),
        ("UnsupportedError", "remove either deepspeed or"),
        ("UnsupportedError", "remove either fsdp_config or"),
    ]
    assert len(lines) == len(expected), done.stdout[-3000:]
    for line, (kind, text) in zip(lines, expected, strict=True):
        assert line.startswith(f"rejected {kind}") and text in line, line


@pytest.mark.slow
@skip_without("swift")
@pytest.mark.parametrize(
    ("call", "expected"),
    [
        ('register(host_bytes="1GB")', "needs store="),
        ('register(store="store", host_byte="1GB")', "did you mean host_bytes=?"),
        ('register(store="store", lr=1e-3)', "set it in TrainingArguments (learning_rate)"),
    ],
)
def test_swift_rejects_wrong_settings_before_it_loads_a_model(
    call: str, expected: str, made: pathlib.Path
) -> None:
    done = run_program(made, f"import lohan.hf.swift\nlohan.hf.swift.{call}\n")
    assert "ModelError" in done.stderr and expected in done.stderr
