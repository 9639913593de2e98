"""replicas="parameters": the optimizer's states are divided among the processes.

That the results are those of one process is in test_bits.py.
"""

from __future__ import annotations

import json
import pathlib
import shutil
from typing import Any

import lohan
import pytest
import torch
import world_adamw
import world_divided
from lohan.common import _meta
from lohan.errors import StoreMismatchError
from lohan.layout._block import Unit, parts_of
from world_adamw import DIVIDED, WAYS
from world_helper import Group, run


def test_each_process_moves_the_bytes_of_its_part_of_the_states(tmp_path: pathlib.Path) -> None:
    settings = {"host_bytes": 14_000_000, "schedule": "serial"}
    (_, one), *_ = run(tmp_path, 1, world_adamw.traffic, str(tmp_path / "one"), settings)
    for count in (2, 3):
        store = str(tmp_path / f"run-{count}")
        found = run(tmp_path, count, world_adamw.traffic, store, settings, env=DIVIDED)
        moved = [nbytes for _, nbytes in found]
        assert sum(each["state_write"] for each in moved) == one["state_write"] > 0
        # 5 equal units and 2 small ones, so the parts differ by less than a unit.
        least, most = sorted(each["state_write"] for each in moved)[:: count - 1]
        assert 0 < least <= most <= least + one["state_write"] / 3
        assert all(each["param_write"] == one["param_write"] for each in moved)


def test_each_machine_moves_the_bytes_of_its_part_of_the_states(
    tmp_path: pathlib.Path,
) -> None:
    settings = {"host_bytes": 14_000_000, "schedule": "serial"}
    apart = run(
        tmp_path, 2, world_adamw.traffic, str(tmp_path / "a"), settings, nodes=2, env=DIVIDED
    )
    found = run(tmp_path, 4, world_adamw.traffic, str(tmp_path / "b"), settings, **WAYS["machines"])
    for machine in range(2):
        owner, mate = found[2 * machine][1], found[2 * machine + 1][1]
        assert set(mate.values()) == {0}
        for link in ("state_write", "param_write"):
            assert owner[link] == apart[machine][1][link] > 0


def test_parts_differ_by_at_most_the_largest_unit() -> None:
    units = [
        Unit(str(i), torch.bfloat16, i % 5 != 0, [], elements=i * 37 % 23 * 2048 * (i % 5 != 0))
        for i in range(40)
    ]
    for count in range(1, 7):
        parts = parts_of(units, count)
        sizes = [
            sum(u.elements for u, p in zip(units, parts, strict=True) if p == part)
            for part in range(count)
        ]
        assert max(sizes) - min(sizes) <= max(unit.elements for unit in units)
        assert all(part == 0 for unit, part in zip(units, parts, strict=True) if not unit.trainable)


def test_the_bytes_on_the_wire_are_those_of_the_plan(tmp_path: pathlib.Path) -> None:
    found = run(tmp_path, 2, world_adamw.network_stats, str(tmp_path / "run"), env=DIVIDED)
    whole = run(tmp_path, 2, world_adamw.network_stats, str(tmp_path / "whole"))
    traffic = [stats.traffic for stats, *_ in found]
    for rank, (_, planned, _) in enumerate(found):
        assert traffic[rank].sent_bytes == planned
        assert traffic[rank].received_bytes == traffic[1 - rank].sent_bytes
    # With several micro-batches a step, half of the gradients and half of the parameters are less
    # than all gradients.
    assert sum(each.sent_bytes for each in traffic) < sum(planned for _, planned, _ in whole)


def test_parameters_without_a_gradient_are_not_sent(tmp_path: pathlib.Path) -> None:
    found = run(tmp_path, 2, world_divided.bytes_of_absent, str(tmp_path / "run"), env=DIVIDED)
    for saved, unsent in found:
        assert saved == unsent
    assert sum(unsent for _, unsent in found) > 0


def test_parameters_that_all_processes_load_are_trained(tmp_path: pathlib.Path) -> None:
    whole = run(tmp_path, 2, world_adamw.one_loads, str(tmp_path / "whole"), True)
    assert (
        run(tmp_path, 2, world_adamw.one_loads, str(tmp_path / "run"), True, env=DIVIDED) == whole
    )
    for said in run(tmp_path, 2, world_adamw.one_loads, str(tmp_path / "one"), False, env=DIVIDED):
        assert said.startswith("WorldMismatchError: the number of writes to parameters outside")


def test_a_flipped_bit_of_a_new_parameter_is_named(tmp_path: pathlib.Path) -> None:
    said = run(tmp_path, 2, world_divided.flip_a_value, str(tmp_path / "run"), env=DIVIDED)
    assert said[0].startswith("NetworkError: new values from rank 1 (host"), said
    assert "in step 2 (" in said[0] and "from element 0 on" in said[0]
    assert said[1].startswith("PeerStepError: rank 0 (host"), said


def test_a_process_that_dies_between_its_new_parameters_costs_one_step(
    tmp_path: pathlib.Path,
) -> None:
    store = str(tmp_path / "run")
    other, dead = Group(tmp_path, 2, world_divided.die_between_values, store, env=DIVIDED).wait()
    assert dead.code == 9
    assert other.error == "PeerLostError" and "rank 1 (host" in other.text
    resumed = run(tmp_path, 2, world_adamw.resume_for, store, 2, env=DIVIDED)
    assert resumed[0][0] == 4  # the third step was lost
    assert resumed == run(tmp_path, 1, world_adamw.train, str(tmp_path / "whole"), 4) * 2


def test_a_process_that_dies_while_its_store_is_copied_costs_one_step(
    tmp_path: pathlib.Path,
) -> None:
    store, out = str(tmp_path / "run"), str(tmp_path / "copy")
    other, dead = Group(
        tmp_path, 2, world_divided.die_in_a_snapshot, store, out, env=DIVIDED
    ).wait()
    assert dead.code == 9 and other.error == "PeerLostError"
    resumed = run(tmp_path, 2, world_adamw.resume_for, store, 2, env=DIVIDED)
    whole = run(tmp_path, 1, world_adamw.train, str(tmp_path / "whole"), resumed[0][0])
    assert resumed == whole * 2


def test_one_process_may_make_a_snapshot_while_all_train(tmp_path: pathlib.Path) -> None:
    store, out = str(tmp_path / "run"), str(tmp_path / "copy")
    whole = run(tmp_path, 1, world_adamw.train, str(tmp_path / "whole"), 4)[0]
    zero, one = run(tmp_path, 2, world_divided.copy_alone, store, out, env=DIVIDED)
    assert zero == (0, whole[1]) and one[1] == whole[1] and one[0] in (0, 1)
    assert lohan.verify(out).is_whole


def test_what_a_part_of_the_states_does_not_allow_is_refused_by_name(
    tmp_path: pathlib.Path,
) -> None:
    for rank, said in enumerate(run(tmp_path, 2, world_divided.refused, str(tmp_path))):
        assert said["master"].startswith(f"StoreMismatchError: this store has part {rank + 1} of 2")
        assert said["unwrap"].startswith("UnsupportedError: the optimizer's states cannot be ret")
        assert f"the store has part {rank + 1} of 2 of the optimizer's states, but" in said["all"]
        assert "Parallel(shard_optimizer=True) is not supported with method" in said["mezo"]


def test_stores_that_do_not_fit_the_processes_are_refused_by_name(tmp_path: pathlib.Path) -> None:
    store = tmp_path / "run"
    run(tmp_path, 2, world_adamw.train, str(store), 2, env=DIVIDED)
    said = run(tmp_path, 1, world_divided.resume, str(store))
    assert (
        "the store has part 1 of 2 of the optimizer's states, but this process needs all" in said[0]
    )
    said = run(tmp_path, 3, world_divided.resume, str(store))
    assert "rank 2 (host" in said[2] and "no other one has the same part" in said[2], said
    shutil.move(store / "rank-00001", tmp_path / "away")
    shutil.copytree(store, tmp_path / "copy")
    shutil.move(tmp_path / "copy", store / "rank-00001")
    said = run(tmp_path, 2, world_divided.resume, str(store))
    assert "the store has part 1 of 2 of the optimizer's states, but" in said[1], said
    assert "needs part 2 of 2" in said[1]


def test_one_process_needs_no_division(tmp_path: pathlib.Path) -> None:
    whole = run(tmp_path, 1, world_adamw.train, str(tmp_path / "whole"), 2)
    assert run(tmp_path, 1, world_adamw.train, str(tmp_path / "run"), 2, env=DIVIDED) == whole


def test_a_process_that_clips_alone_is_named_and_one_that_discards_may_continue(
    tmp_path: pathlib.Path,
) -> None:
    said = run(tmp_path, 2, world_divided.clip_alone, str(tmp_path / "run"), env=DIVIDED)
    assert said[0][0].startswith("PeerStepError: rank 1 (host"), said
    assert "discarded step 1" in said[0][0]
    assert said[0][1].startswith("WorldMismatchError: rank 0 (host"), said
    assert "clips or unscales the gradients of step 2, but rank 1 (host" in said[0][1]
    assert said[1][0] != ""


def test_an_interrupt_before_the_new_parameters_makes_no_process_wait(
    tmp_path: pathlib.Path,
) -> None:
    store = str(tmp_path / "run")
    zero, one = run(tmp_path, 2, world_divided.interrupted_between, store, env=DIVIDED)
    assert one[0] == "KeyboardInterrupt: "
    assert "step 2 cannot be finished" in one[1], one
    assert all(each != "" for each in zero), zero
    resumed = run(tmp_path, 2, world_adamw.resume_for, store, 2, env=DIVIDED)
    assert resumed == run(tmp_path, 1, world_adamw.train, str(tmp_path / "whole"), 3) * 2


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("part", None),
        ("part", [2, 2]),
        ("part", [0, 1]),
        ("part", 5),
        ("given", [0, 0]),
        ("given", [9]),
        ("given", [1]),
        ("given", ["0"]),
        ("given", None),
    ],
    ids=str,
)
def test_a_damaged_description_of_the_part_is_named(key: str, value: Any) -> None:
    meta: dict[str, Any] = {
        "lohan": 1,
        "params": [["a", [4], "torch.float32", True], ["b", [4], "torch.float32", False]],
        "units": [["a", 1, 2048, 8192], ["b", 1, 0, 4096]],
        "part": [1, 2],
        "given": [0],
    }
    assert _meta.parse(json.dumps(meta), "here") == meta
    meta[key] = value
    with pytest.raises(StoreMismatchError, match=rf"here: this store has no valid model.*{key} is"):
        _meta.parse(json.dumps(meta), "here")
