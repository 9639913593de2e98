"""Features that change the states of a run, in each way of running several processes.

The bits are those of one process that runs all micro-batches, also after a resume. test_bits.py
combines those that its table has with all other settings.
"""

from __future__ import annotations

import functools
import operator
import pathlib
from typing import Any

import lohan
import pytest
import world_adamw
import world_features
from lohan.errors import StoreMismatchError, UnsupportedError
from world_adamw import WAYS
from world_helper import Group, run

Row = tuple[str, dict[str, Any]]
# For each feature: the dtype of a model, and what wrap() is given, also in a resumed run.
FEATURES: dict[str, Row] = {
    "states 8bit": ("bfloat16", {"states": "8bit"}),
    "states bf16": ("float32", {"states": "bf16", "change": "absent"}),
    "ema": ("bfloat16", {"ema": 0.9}),
    "skip": ("float16", {"on_nan": "skip"}),
}
# What rank 1 passes instead, and the setting that the error names.
OTHER: dict[str, tuple[dict[str, Any], str]] = {
    "states 8bit": ({"states": "fp32"}, "moments= is '8bit' in rank 0"),
    "ema": ({"ema": 0.5}, "ema= is 0.9 in rank 0"),
    "skip": ({"on_nan": "raise"}, "on_nan= is 'skip' in rank 0"),
}


def train(
    folder: pathlib.Path, count: int, steps: int, way: str, **more: Any
) -> list[list[tuple[int, str]]]:
    """Train with each feature up to a step; return by process the steps and states of all."""
    rows = [
        (str(folder / name), steps, dtype, {**settings, **more})
        for name, (dtype, settings) in FEATURES.items()
    ]
    return run(folder, count, world_adamw.train_all, rows, **WAYS[way])


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> list[tuple[int, str]]:
    """Return the states of one process after 4 steps, by feature."""
    found = train(tmp_path_factory.mktemp("whole"), 1, 4, "replicas")[0]
    assert len(set(found)) == len(FEATURES)
    return found


@pytest.mark.parametrize("way", WAYS)
def test_a_resumed_run_of_several_processes_has_the_bits_of_one(
    way: str, whole: Any, tmp_path: pathlib.Path
) -> None:
    count = 4 if way == "machines" else 2
    train(tmp_path, count, 2, way)
    assert train(tmp_path, count, 4, way, resume=True) == [whole] * count
    for name in FEATURES:
        assert lohan.verify(tmp_path / name).is_whole


def test_a_run_of_one_process_continues_in_several_and_back(
    whole: Any, tmp_path: pathlib.Path
) -> None:
    for count, steps in enumerate((1, 3)):
        train(tmp_path, count + 1, steps, "replicas", resume=count > 0)
    assert train(tmp_path, 1, 4, "replicas", resume=True) == [whole]


def test_divided_states_are_divided_again(whole: Any, tmp_path: pathlib.Path) -> None:
    train(tmp_path, 2, 2, "divided")
    (tmp_path / "new").mkdir()
    for name in FEATURES:
        lohan.reshard(tmp_path / name, tmp_path / "new" / name, parts=3)
        assert lohan.verify(tmp_path / "new" / name).is_whole
    assert train(tmp_path / "new", 3, 4, "divided", resume=True) == [whole] * 3


def test_a_process_without_a_part_of_the_averages_says_that_they_are_divided(
    tmp_path: pathlib.Path,
) -> None:
    for said in run(tmp_path, 2, world_features.averages_of_one_block, str(tmp_path / "run")):
        assert said.startswith("UnsupportedError: lohan.ema(model) is not supported with"), said


def test_divided_moments_are_converted_as_the_error_says(tmp_path: pathlib.Path) -> None:
    found = []
    for count, way in ((1, "replicas"), (2, "divided")):
        run(tmp_path, count, world_adamw.train, str(tmp_path / way), 2, **WAYS[way])
        store = tmp_path / way
        if way == "divided":
            with pytest.raises(UnsupportedError, match="reshard STORE NEW --parts 1"):
                lohan.convert(store, tmp_path / "refused", states="8bit")
            lohan.reshard(store, tmp_path / "whole", parts=1)
            store = tmp_path / "whole"
        lohan.convert(store, tmp_path / f"{way}-8bit", states="8bit")
        store = tmp_path / f"{way}-8bit"
        if way == "divided":
            lohan.reshard(store, tmp_path / "parts", parts=2)
            store = tmp_path / "parts"
        rows = [(str(store), 3, "float32", {"states": "8bit", "resume": True})]
        found += run(tmp_path, count, world_adamw.train_all, rows, **WAYS[way])
    assert found[1:] == [found[0]] * 2


def test_an_export_of_averages_that_no_part_has_does_not_ask_for_the_parts(
    tmp_path: pathlib.Path,
) -> None:
    run(tmp_path, 2, world_adamw.train, str(tmp_path / "run"), 1, **WAYS["divided"])
    with pytest.raises(UnsupportedError, match="wrapped without ema="):
        lohan.export(tmp_path / "run", tmp_path / "out", ema=True)


def test_a_setting_that_differs_is_named(tmp_path: pathlib.Path) -> None:
    rows = []
    for name, (other, _) in OTHER.items():
        settings = {key: value for key, value in FEATURES[name][1].items() if key != "change"}
        rows.append((settings, {**settings, **other}))
    for told in run(tmp_path, 2, world_features.differing, str(tmp_path / "run"), rows):
        for said, (_, names) in zip(told, OTHER.values(), strict=True):
            assert said.startswith("WorldMismatchError: ") and names in said, said


@pytest.mark.parametrize(
    "settings",
    [
        {"on_nan": "skip"},
        {"on_nan": "skip", "max_grad_norm": 0.5},
        {"on_nan": "raise", "max_grad_norm": 0.5},
    ],
    ids=str,
)
@pytest.mark.parametrize("way", WAYS)
def test_a_gradient_that_is_not_finite_in_one_process_is_discarded_by_all(
    way: str, settings: dict[str, Any], tmp_path: pathlib.Path
) -> None:
    one = run(tmp_path, 1, world_features.skip, str(tmp_path / "one"), settings)
    assert one[0][:2] == (4, [False, True, False, False, False])
    count = 4 if way == "machines" else 2
    found = run(tmp_path, count, world_features.skip, str(tmp_path / "run"), settings, **WAYS[way])
    assert found == one * count


def test_clipping_by_torch_and_a_skipped_step_go_together(tmp_path: pathlib.Path) -> None:
    for name, count in (("one", 1), ("run", 2)):
        for _, skipped, _ in run(
            tmp_path, count, world_features.skip, str(tmp_path / name), {"on_nan": "skip"}, True
        ):
            assert skipped == [False, True, False, False, False]


@pytest.mark.parametrize("way", ["replicas", "shared", "divided"])
def test_a_process_that_dies_as_all_skip_a_step_is_named(way: str, tmp_path: pathlib.Path) -> None:
    store = str(tmp_path / "run")
    other, dead = Group(tmp_path, 2, world_features.die_in_skip, store, **WAYS[way]).wait()
    assert dead.code == 9
    assert other.error == "PeerLostError" and "rank 1 (host" in other.text, other


def _files(folder: pathlib.Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.glob("*.safetensors")}


@pytest.mark.parametrize("way", WAYS)
def test_averages_are_read_and_exported_with_the_bits_of_one_process(
    way: str, tmp_path: pathlib.Path
) -> None:
    one = run(tmp_path, 1, world_features.averages, str(tmp_path / "one"))[0]
    count = 4 if way == "machines" else 2
    found = run(tmp_path, count, world_features.averages, str(tmp_path / "run"), **WAYS[way])
    assert [each[1] for each in found] == [one[1]] * count
    said = found[0][0]
    assert said == one[0] if way == "replicas" else said.startswith("UnsupportedError: lohan.ema(")
    store = tmp_path / "run"
    if way in ("divided", "machines"):
        with pytest.raises(StoreMismatchError, match="has part 1 of 2 of the averages"):
            lohan.export(store, tmp_path / "refused", ema=True)
        lohan.reshard(store, tmp_path / "new", parts=1)
        store = tmp_path / "new"
    for name, path in (("expected", tmp_path / "one"), ("found", store)):
        lohan.export(path, tmp_path / name, dtype="float32", ema=True)
    assert _files(tmp_path / "found") == _files(tmp_path / "expected") != {}


# Whether the experts are trained, and further settings of wrap().
EXPERTS: dict[str, tuple[bool, dict[str, Any]]] = {
    "frozen": (False, {}),
    "skip": (True, {"idle": "skip"}),
    "skip, averages": (True, {"idle": "skip", "ema": 0.9}),
    "exact": (True, {}),
    "exact 8bit": (True, {"states": "8bit", "max_grad_norm": 0.5}),
}


@pytest.mark.parametrize("name", EXPERTS)
def test_experts_apart_have_the_bits_of_one_process_also_after_a_resume(
    name: str, tmp_path: pathlib.Path
) -> None:
    trains, settings = EXPERTS[name]
    call = world_features.experts, str(tmp_path / "one"), 4, trains, settings
    (_, one, losses), *_ = run(tmp_path, 1, *call)
    ways = ("replicas", "shared", *(("gathered", "machines") if trains else ()))
    for way in ways:
        count, store = (4 if way == "machines" else 2), str(tmp_path / way)
        plain = {
            "share": "off" if way == "replicas" else "on",
            "replicas": "parameters" if way in ("divided", "machines") else "all",
            **({"gather": "shards", "device": "emu"} if way == "gathered" else {}),
            **settings,
        }
        told: list[list[float]] = [[] for _ in range(count)]
        for steps, more in ((2, {}), (4, {"resume": True})):
            given = store, steps, trains, {**plain, **more}
            found = run(tmp_path, count, world_features.experts, *given, **WAYS.get(way, {}))
            for rank, each in enumerate(found):
                told[rank] += each[2]
        assert [each[:2] for each in found] == [(4, one)] * count, way
        assert sorted(functools.reduce(operator.iadd, told, [])) == sorted(losses), way
        assert lohan.verify(store).is_whole


def test_experts_that_owe_updates_make_them_before_a_run_of_several(
    tmp_path: pathlib.Path,
) -> None:
    copy = str(tmp_path / "copy")
    run(tmp_path, 1, world_features.experts, str(tmp_path / "run"), 2, True, {}, copy)
    given = copy, 3, True, {"resume": True}
    for each in Group(tmp_path, 2, world_features.experts, *given).wait():
        assert "resume in one process with idle='exact' and close the session" in each.text, each
