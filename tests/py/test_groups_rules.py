"""Experts that only some processes have: what the processes send, agree on, and refuse."""

from __future__ import annotations

import json
import pathlib
import shutil
import signal
from typing import Any

import lohan
import pytest
import world_moe
from lohan.common import _meta
from lohan.errors import StoreMismatchError, UnsupportedError
from world_helper import Group, run


def test_gradients_of_experts_are_sent_within_their_group_only(tmp_path: pathlib.Path) -> None:
    for sent, planned, sizes, by_kind in run(tmp_path, 4, world_moe.traffic, str(tmp_path / "a")):
        assert sent == planned
        assert by_kind == {"experts": sizes["experts"], "others": 3 * sizes["others"]}
        assert 0 < sent - sum(by_kind.values()) < sent / 50  # trailers


def test_experts_that_no_other_process_has_are_not_sent(tmp_path: pathlib.Path) -> None:
    for sent, planned, sizes, by_kind in run(tmp_path, 2, world_moe.traffic, str(tmp_path / "a")):
        assert sent == planned
        assert sizes["experts"] > 0
        assert by_kind == {"experts": 0, "others": sizes["others"]}


REFUSED = {
    "share": "UnsupportedError: Parallel(share=True) needs the same modules in all processes of a",
    "mezo": 'UnsupportedError: Parallel(groups=) is not supported with method="mezo"',
    "mesh": "is a DeviceMesh with 2 dimensions ('dp', 'ep')",
    "kind": "must be a torch.distributed.ProcessGroup or a DeviceMesh of one dimension",
    "dict": "must be a dict from names or patterns",
    "unused": "groups= has the pattern 'layers.*.expert.*'",
    "outside": "is a group without this process (rank ",
    "untrained": "UnsupportedError: no parameter outside of groups= is trained",
    "tied": "is tied: 'end.weight' is outside of groups=",
    "twice": "is in two groups of groups=",
}


def test_what_groups_cannot_be_is_refused_by_name(tmp_path: pathlib.Path) -> None:
    for found in run(tmp_path, 2, world_moe.refused, str(tmp_path / "run")):
        assert found.keys() == REFUSED.keys()
        for case, expected in REFUSED.items():
            assert expected in found[case], f"{case}: {found[case]}"


DIFFERENCES = {
    "none": ("only rank 0", "has groups="),
    "group": (
        "'layers.0.experts.0' of rank 2 (host",
        "is in the group of the ranks [0, 2], but rank 0 (host",
        "has no module in this group (it has [0, 1])",
    ),
    "values": (
        "the checksum of the values of 'layers.1.experts.2.0.weight' is",
        "(in the group of the ranks [1, 3])",
    ),
    "shape": (
        "the shape of 'layers.1.experts.2.0.weight' is [128, 64] in rank 1",
        "but [192, 64] in rank 3",
    ),
    "name": ("is 'layers.1.experts.3.0.weight' in rank 1", "but 'layers.1.experts.9.0.weight'"),
    "others": ("the checksum of the values of 'end.bias' is", "in rank 3"),
}


def test_differences_between_the_processes_of_a_group_are_named(tmp_path: pathlib.Path) -> None:
    for found in run(tmp_path, 4, world_moe.differ, str(tmp_path / "run")):
        assert found.keys() == DIFFERENCES.keys()
        for case, expected in DIFFERENCES.items():
            assert found[case].startswith("WorldMismatchError"), f"{case}: {found[case]}"
            assert all(text in found[case] for text in expected), f"{case}: {found[case]}"


@pytest.mark.parametrize("where", ["forward", "agreed"])
def test_a_run_of_which_a_process_was_killed_resumes_with_the_states_of_one(
    tmp_path: pathlib.Path, where: str
) -> None:
    store = str(tmp_path / "run")
    ended = Group(tmp_path, 2, world_moe.die, store, 3, where).wait()
    assert ended[1].code == -signal.SIGKILL
    assert ended[0].error != ""
    row = (store, (6, 2, 2, False), {"resume": True})
    found = [each[0] for each in run(tmp_path, 2, world_moe.train_all, [row])]
    whole = run(tmp_path, 1, world_moe.train_all, [(str(tmp_path / "one"), row[1], {})])[0][0]
    assert found[0][2] | found[1][2] == whole[2]


def test_a_lost_store_is_replaced_by_a_copy_of_one_with_the_same_experts(
    tmp_path: pathlib.Path,
) -> None:
    store = tmp_path / "run"
    args = (2, 4, 2, True)
    run(tmp_path, 4, world_moe.train_all, [(str(store), args, {})])
    shutil.rmtree(store / "rank-00003")
    row = (str(store), (4, *args[1:]), {"resume": True})
    found = [each[0] for each in run(tmp_path, 4, world_moe.train_all, [row])]
    plain = (str(tmp_path / "one"), row[1], {})
    whole = run(tmp_path, 1, world_moe.train_all, [plain])[0][0]
    assert found[0][2] | found[1][2] == found[2][2] | found[3][2] == whole[2]
    for rank in (1, 3):  # no other process has these experts
        shutil.rmtree(store / f"rank-{rank:05d}")
    said = run(tmp_path, 4, world_moe.resume, str(store), 2)
    for rank, other in ((1, 3), (3, 1)):
        assert said[rank].startswith(f"StoreError: rank {rank} (host"), said[rank]
        assert "with the same groups [[1, 3]]" in said[rank]
        assert f"which is rank {other} (host" in said[rank]
    assert all("rank" in each and "has no store of the run at step 4" in each for each in said)


def test_another_number_of_processes_or_other_groups_are_refused(tmp_path: pathlib.Path) -> None:
    store = str(tmp_path / "run")
    run(tmp_path, 2, world_moe.train_all, [(store, (1, 2, 2, False), {})])
    refusal = "of 2 processes, as one with the groups [[0]]"
    said = [
        *run(tmp_path, 4, world_moe.resume, store, 2),
        *run(tmp_path, 1, world_moe.resume, store, 2),
        *run(tmp_path, 2, world_moe.resume, store, 2, None),
    ]
    assert len(said) == 7
    for each in said:
        assert "StoreMismatchError" in each
        assert refusal in each or "[[1]]" in each, each
        assert "resume with 2 processes and the same groups=" in each


def test_a_part_of_the_experts_is_not_exported(tmp_path: pathlib.Path) -> None:
    found = run(tmp_path, 2, world_moe.exported, str(tmp_path / "run"))
    for model, saved, store, reshard, _ in found:
        for said in (model, store):
            assert said.startswith("UnsupportedError: lohan.export is not supported"), said
        assert saved.startswith("UnsupportedError: save_pretrained is not supported"), saved
        assert reshard.startswith("UnsupportedError: "), reshard
        assert "is from a run with groups=" in reshard
    assert [each[-1] for each in found] == ["0,1", "2,3"]


@pytest.mark.parametrize("count", [2, 4])
def test_a_backward_that_fails_in_one_process_is_forgotten_in_all(
    tmp_path: pathlib.Path, count: int
) -> None:
    found = run(tmp_path, count, world_moe.fail_once, str(tmp_path / "run"))
    row = (str(tmp_path / "one"), (world_moe.STEPS_OF_FAIL, count, 2, count > 2), {})
    whole = run(tmp_path, 1, world_moe.train_all, [row])[0][0]
    for rank, (errors, states) in enumerate(found):
        said = "ValueError" if rank == 1 else "PeerStepError: the backward of rank 1 (host"
        assert len(errors) == 1 and errors[0].startswith(said), errors
        assert states.items() <= whole[2].items()


def test_processes_may_change_different_numbers_of_parameters(tmp_path: pathlib.Path) -> None:
    first, second = run(tmp_path, 2, world_moe.edit, str(tmp_path / "run"))
    both = first.keys() & second.keys()
    assert len(first) > len(second) == len(both)
    for name in both:  # a.1 of either process is in a group of its own
        assert (first[name] == second[name]) != name.startswith("a."), name


def test_the_gradients_of_a_backward_are_a_part_of_the_least_memory(
    tmp_path: pathlib.Path,
) -> None:
    for needed, without, sent in run(tmp_path, 2, world_moe.least_bytes, str(tmp_path / "run")):
        # Without groups= each layer is one unit, so the other parts of the memory may be larger.
        assert needed - without == sent > 0


def test_a_trainer_refuses_groups_by_name() -> None:
    with pytest.raises(UnsupportedError, match=r"parallel.groups is not supported by a Trainer"):
        lohan.TrainerCallback(groups={})


@pytest.mark.parametrize(
    ("key", "value"),
    [("processes", 1), ("processes", "2"), ("ranks", None), ("ranks", [[2]]), ("ranks", [0])],
    ids=str,
)
def test_a_damaged_description_of_the_groups_is_named(key: str, value: Any) -> None:
    meta: dict[str, Any] = {
        "lohan": 1,
        "params": [["a", [4], "torch.float32", True]],
        "units": [["a", 1, 2048, 8192]],
        "groups": {"processes": 2, "ranks": [[0], [0, 1]]},
    }
    assert _meta.parse(json.dumps(meta), "here") == meta
    meta["groups"][key] = value
    with pytest.raises(StoreMismatchError, match=r"here: this store has no valid model.*groups"):
        _meta.parse(json.dumps(meta), "here")
