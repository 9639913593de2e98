"""lohan.reshard: the optimizer's states of a run in another number of parts, in new stores."""

from __future__ import annotations

import json
import os
import pathlib
import shutil
import signal
import subprocess
import sys
from typing import Any

import lohan
import pytest
import world_adamw
import world_divided
from click.testing import CliRunner
from lohan.cli import main
from lohan.errors import StoreError, StoreExistsError, StoreLockedError, UnsupportedError
from lohan.replicas import _reshard
from world_helper import run

DIVIDED = {world_adamw.REPLICAS: "parameters"}
BF16 = ("bfloat16", {"weight_decay": 0.1})


def train(
    folder: pathlib.Path, store: pathlib.Path, count: int, steps: int, row: Any = BF16, **more: Any
) -> tuple[int, str]:
    """Train up to a step in several processes that divide the states; return what all have."""
    dtype, settings = row
    env = DIVIDED if count > 1 else {}
    table = [(str(store), steps, dtype, {**settings, **more})]
    found = [each[0] for each in run(folder, count, world_adamw.train_all, table, env=env)]
    assert found == [found[0]] * count
    return found[0]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[int, pathlib.Path]:
    """Return the stores of a run of 4 steps, by the number of parts."""
    folder = tmp_path_factory.mktemp("runs")
    found = {count: folder / f"run-{count}" for count in (1, 2, 3)}
    told = {train(folder, store, count, 4) for count, store in found.items()}
    assert len(told) == 1
    return found


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> tuple[int, str]:
    """Return the states after 7 steps of one process."""
    folder = tmp_path_factory.mktemp("whole")
    return train(folder, folder / "run", 1, 7)


@pytest.mark.parametrize(("before", "after"), [(2, 3), (3, 1), (1, 2), (2, 1), (3, 2)])
def test_another_number_of_processes_continues_with_the_same_bits(
    before: int, after: int, runs: Any, whole: Any, tmp_path: pathlib.Path
) -> None:
    made = lohan.reshard(runs[before], tmp_path / "new", parts=after)
    assert made.step == 4 and len(made.directories) == after
    assert train(tmp_path, tmp_path / "new", after, 7, resume=True) == whole
    for directory in made.directories:
        assert lohan.verify(directory).is_whole


@pytest.mark.parametrize(
    "row",
    [
        ("float32", {"change": "absent"}),
        ("float16", {}),
        *(("bfloat16", {"method": method}) for method in ("adam_mini", "adafactor", "muon")),
    ],
    ids=str,
)
def test_every_dtype_rule_and_absent_gradients_keep_their_bits(
    row: Any, tmp_path: pathlib.Path
) -> None:
    expected = train(tmp_path, tmp_path / "whole", 1, 6, row)
    train(tmp_path, tmp_path / "run", 2, 2, row)
    train(tmp_path, tmp_path / "run", 2, 3, row, resume=True)
    lohan.reshard(tmp_path / "run", tmp_path / "new", parts=3)
    assert train(tmp_path, tmp_path / "new", 3, 6, row, resume=True) == expected


def test_a_whole_store_goes_to_processes_with_all_states(
    runs: Any, whole: Any, tmp_path: pathlib.Path
) -> None:
    lohan.reshard(runs[3], tmp_path / "new", parts=1)
    table = [(str(tmp_path / "new"), 7, *BF16[:1], {**BF16[1], "resume": True})]
    for found in run(tmp_path, 2, world_adamw.train_all, table):
        assert found[0] == whole


def test_several_directories_of_each_store_are_read_and_written(
    whole: Any, tmp_path: pathlib.Path
) -> None:
    old = [str(tmp_path / name) for name in ("a", "b")]
    new = [str(tmp_path / name) for name in ("c", "d", "e")]
    dtype, settings = BF16
    run(tmp_path, 2, world_divided.train_striped, old, 4, dtype, settings, env=DIVIDED)
    answer = CliRunner().invoke(
        main, ["reshard", *old, new[0], "--and", new[1], "--and", new[2], "--parts", "3", "--json"]
    )
    assert answer.exit_code == 0, answer.output
    said = json.loads(answer.output)
    assert said["step"] == 4 and said["directories"][0] == new
    assert said["directories"][2] == [os.path.join(name, "rank-00002") for name in new]
    resumed = {**settings, "resume": True}
    found = run(tmp_path, 3, world_divided.train_striped, new, 7, dtype, resumed, env=DIVIDED)
    assert found == [whole] * 3


def test_stores_whose_newest_steps_differ_are_taken_at_the_step_of_all(
    tmp_path: pathlib.Path,
) -> None:
    store = tmp_path / "run"
    train(tmp_path, store, 2, 3)
    shutil.copytree(store / "rank-00001", tmp_path / "old")
    train(tmp_path, store, 2, 4, resume=True)
    shutil.rmtree(store / "rank-00001")
    shutil.move(tmp_path / "old", store / "rank-00001")
    assert lohan.reshard(store, tmp_path / "new", parts=1).step == 3
    expected = train(tmp_path, tmp_path / "whole", 1, 5)
    assert train(tmp_path, tmp_path / "new", 1, 5, resume=True) == expected


def test_what_an_earlier_number_of_processes_left_is_not_used(
    runs: Any, whole: Any, tmp_path: pathlib.Path
) -> None:
    store = tmp_path / "run"
    lohan.reshard(runs[3], store, parts=1)
    shutil.copytree(runs[3] / "rank-00002", store / "rank-00002")
    train(tmp_path, store, 1, 6, resume=True)
    lohan.reshard(store, tmp_path / "new", parts=2)
    assert train(tmp_path, tmp_path / "new", 2, 7, resume=True) == whole


def test_a_missing_part_and_a_wrong_place_are_named(runs: Any, tmp_path: pathlib.Path) -> None:
    store = tmp_path / "run"
    shutil.copytree(runs[3], store)
    shutil.rmtree(store / "rank-00001")
    with pytest.raises(StoreError, match=r"part 2 of 3 .* is missing: .*run/rank-00001"):
        lohan.reshard(store, tmp_path / "new", parts=2)
    assert not (tmp_path / "new").exists()
    with pytest.raises(StoreError, match="nothing has no store"):
        lohan.reshard(tmp_path / "nothing", tmp_path / "new", parts=2)
    with pytest.raises(StoreExistsError, match="is in a directory of the run: choose one outside"):
        lohan.reshard(runs[2], runs[2] / "new", parts=2)
    with pytest.raises(StoreExistsError, match="run-2 has a store already: choose another OUT"):
        lohan.reshard(runs[3], runs[2], parts=2)
    for parts in (0, -1, True, 1.5, 1025):
        with pytest.raises(ValueError, match=r"must be a number from 1 to 1024"):
            lohan.reshard(runs[2], tmp_path / "new", parts=parts)  # type: ignore[arg-type]


def test_a_run_that_is_training_and_one_without_states_are_refused(tmp_path: pathlib.Path) -> None:
    model = world_adamw.build()
    model = lohan.wrap(model, store=tmp_path / "run", lr=1e-3)
    with pytest.raises(StoreLockedError, match="run"):
        lohan.reshard(tmp_path / "run", tmp_path / "new", parts=2)
    model.lohan.close()
    zeroth = lohan.wrap(world_adamw.build(), method="mezo", store=tmp_path / "zeroth", lr=1e-3)
    zeroth.lohan.close()
    with pytest.raises(UnsupportedError, match='method="mezo", which has no optimizer states'):
        lohan.reshard(tmp_path / "zeroth", tmp_path / "new", parts=2)


def test_a_failed_call_leaves_nothing_and_an_interrupted_one_can_be_repeated(
    runs: Any, whole: Any, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(done: int, total: int) -> None:
        if done > total // 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        lohan.reshard(runs[3], tmp_path / "new", parts=2, progress=fail)
    assert not (tmp_path / "new").exists()
    code = (
        "import os, lohan\n"
        "def die(done, total):\n"
        f"    if done > total // 2: os.kill(os.getpid(), {int(signal.SIGKILL)})\n"
        f"lohan.reshard({str(runs[3])!r}, {str(tmp_path / 'new')!r}, parts=2, progress=die)"
    )
    ended = subprocess.run([sys.executable, "-c", code], check=False)
    assert ended.returncode == -signal.SIGKILL
    assert list((tmp_path / "new").rglob("lohan.data"))
    lohan.reshard(runs[3], tmp_path / "new", parts=2)
    assert train(tmp_path, tmp_path / "new", 2, 7, resume=True) == whole


def test_the_stores_of_a_run_are_described_with_their_part(
    runs: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    answer = CliRunner().invoke(main, ["inspect", str(runs[3] / "rank-00001")])
    assert "optimizer states: part 2 of 3, those of" in answer.output
    written = []
    for store in (runs[1], *(_reshard._places.of_number(n, [str(runs[3])])[0] for n in range(3))):
        found = json.loads(CliRunner().invoke(main, ["inspect", str(store), "--json"]).output)
        states = [unit["bytes"] for unit in found["units"]]
        written.append(found["written_bytes_per_step"] - found["commit_bytes"] - sum(states))
    assert sum(written[1:]) == written[0] > 0
