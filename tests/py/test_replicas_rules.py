"""AdamW in several processes: what they must share, and what happens if they do not."""

from __future__ import annotations

import pathlib
import shutil

import pytest
import world_adamw
import world_commits
from world_helper import run

DIFFERENCES = {
    "lr": "lr of parameter group 0 is 0.001 in rank 0",
    "betas": "betas of parameter group 0 is [0.9, 0.999] in rank 0",
    "weight_decay": "weight_decay of parameter group 0 is 0.01 in rank 0",
    "accumulate": "gradient_accumulation_steps= is 2 in rank 0",
    "max_grad_norm": "max_grad_norm= is None in rank 0",
    "commit_every": "commit_every= is 'auto' in rank 0",
    "loss_scaling": "loss_scaling= is False in rank 0",
    "groups": "the number of parameter groups is 1 in rank 0",
    "frozen": "whether 'layers.1.weight' is trained is True in rank 0",
    "values": "the checksum of the values of 'begin.weight' is ",
    "method": "method= is 'adamw' in rank 0",
    "optimizer": "the checksum of the values of 'step of begin.weight' is ",
}


def test_every_difference_at_wrap_is_named_with_both_values(tmp_path: pathlib.Path) -> None:
    found = run(tmp_path, 2, world_adamw.differ, list(DIFFERENCES), str(tmp_path))
    for case, expected in DIFFERENCES.items():
        for each in found:
            name, text = each[case]
            assert name == "WorldMismatchError", f"{case}: {name}: {text}"
            assert expected in text, f"{case}: {text}"
            assert "in rank 1 (host" in text, f"{case}: {text}"


@pytest.mark.parametrize(("name", "value"), [("lr", 0.001), ("momentum", 0.9)])
def test_schedules_that_differ_are_named_and_no_process_keeps_the_step(
    name: str, value: float, tmp_path: pathlib.Path
) -> None:
    differs = f"WorldMismatchError: {name} of parameter group 0 is {value} in rank 0"
    for said in run(tmp_path, 2, world_adamw.schedules_differ, str(tmp_path / "run"), name):
        assert said.startswith(differs), said
        assert f"but {value / 2} in rank 1" in said


def test_a_process_that_alone_changes_parameters_is_named(tmp_path: pathlib.Path) -> None:
    for said in run(tmp_path, 2, world_adamw.one_loads, str(tmp_path / "one"), False):
        assert said.startswith("WorldMismatchError: the number of writes to parameters outside"), (
            said
        )
        assert "in rank 1 (host" in said
    first, second = run(tmp_path, 2, world_adamw.one_loads, str(tmp_path / "all"), True)
    assert first == second
    assert len(first) == 16


@pytest.mark.parametrize("share", ["off", "on"])
@pytest.mark.parametrize("who", [0, 1])
def test_a_gradient_that_one_process_changed_is_rejected_and_the_step_forgotten_in_all(
    tmp_path: pathlib.Path, share: str, who: int
) -> None:
    env = {world_adamw.SHARE: share}
    told = run(tmp_path, 2, world_commits.change_a_gradient, str(tmp_path / "run"), who, env=env)
    for rank, (said, step, _) in enumerate(told):
        expected = "OffloadedGradientError: " if rank == who else "PeerStepError: "
        assert said.startswith(expected), said
        assert step == 3
    assert told[0][2] == told[1][2]


@pytest.mark.parametrize("way", ["replicas", "divided"])
def test_a_state_too_large_for_a_commit_in_one_process_is_an_error_before_any_closes_the_step(
    tmp_path: pathlib.Path, way: str
) -> None:
    store = str(tmp_path / "run")
    whole = run(tmp_path, 1, world_adamw.train, str(tmp_path / "whole"), 3)[0]
    found = run(tmp_path, 2, world_commits.register_too_much, store, **world_adamw.WAYS[way])
    zero, one = (said for said, _ in found)
    assert zero.startswith("PeerStepError: rank 1 (host") and "discarded step 3" in zero, zero
    assert one.startswith("UnsupportedError: the registered states take"), one
    assert [states for _, states in found] == [whole[1]] * 2


@pytest.mark.parametrize("who", [0, 1])
def test_a_wrap_that_fails_in_one_process_gives_the_model_of_each_its_values(
    tmp_path: pathlib.Path, who: int
) -> None:
    found = run(tmp_path, 2, world_commits.fail_in_wrap, str(tmp_path / "run"), who)
    for rank, each in enumerate(found):
        for said, has_values in each:
            expected = "ArithmeticError: " if rank == who else ""
            assert said.startswith(expected) and has_values, (rank, each)


def test_a_close_that_was_interrupted_before_its_commit_can_only_be_repeated(
    tmp_path: pathlib.Path,
) -> None:
    found = run(tmp_path, 2, world_adamw.interrupt_close, str(tmp_path / "run"))
    for said, step, is_told in found:
        assert said.startswith("SessionError: this process no longer exchanges gradients"), said
        assert (step, is_told) == (2, True)


@pytest.mark.parametrize(
    ("share", "who", "calls"),
    [
        ("off", 1, "step"),
        ("on", 0, "step"),
        ("tree", 1, "step"),
        pytest.param("on", 1, "step", marks=pytest.mark.slow),
        pytest.param("off", 1, "commit", marks=pytest.mark.slow),
        pytest.param("on", 0, "commit", marks=pytest.mark.slow),
        pytest.param("on", 1, "commit", marks=pytest.mark.slow),
    ],
)
def test_a_process_that_makes_fewer_backwards_is_named(
    tmp_path: pathlib.Path, share: str, who: int, calls: str
) -> None:
    args = str(tmp_path / "run"), who, calls
    env = world_adamw.TREE if share == "tree" else {world_adamw.SHARE: share}
    said = run(tmp_path, 2, world_adamw.backwards_differ, *args, env=env)
    assert said[1 - who].startswith(f"WorldMismatchError: rank {who} (host"), said
    assert "the same number of backwards per step" in said[1 - who]
    assert said[who] != ""


def test_a_flipped_bit_is_named_with_the_parameter(tmp_path: pathlib.Path) -> None:
    found = run(tmp_path, 2, world_adamw.flip_a_bit, str(tmp_path / "run"))
    said, *later, step = found[0]
    assert said.startswith("NetworkError: gradients from rank 1 (host"), said
    assert "in backward 1 of step 2" in said
    assert "'end.bias'" in said
    # The gradients of the step are incomplete: nothing may be trained with them.
    assert all(each.startswith("StepError: ") for each in later), later
    assert "restart all processes with resume=True" in later[1]
    assert step == 1


def test_a_gradient_of_another_dtype_is_rejected_by_name(tmp_path: pathlib.Path) -> None:
    for said in run(tmp_path, 2, world_adamw.other_dtype, str(tmp_path / "run")):
        assert said.startswith("GradientError: the gradient of '0.weight' has dtype torch.float32")


def test_ddp_around_a_wrapped_model_is_refused_by_name(tmp_path: pathlib.Path) -> None:
    for said, loss in run(tmp_path, 2, world_adamw.in_ddp, str(tmp_path / "run")):
        assert said.startswith("UnsupportedError: DistributedDataParallel cannot wrap a model"), (
            said
        )
        assert "evaluation_mode=True" in said and loss > 0


def test_an_older_step_is_resumed_in_all_processes(tmp_path: pathlib.Path) -> None:
    store = str(tmp_path / "run")
    run(tmp_path, 2, world_adamw.train, store, 5)
    four = run(tmp_path, 1, world_adamw.train, str(tmp_path / "whole"), 4)[0]
    assert run(tmp_path, 2, world_adamw.resume_step, store, "step 4") == [four, four]
    for said in run(tmp_path, 2, world_adamw.resume_step, store, "step 1"):
        assert isinstance(said, str) and "step 1" in said


def test_an_old_copy_of_a_replica_is_replaced_and_no_step_is_lost(tmp_path: pathlib.Path) -> None:
    store = tmp_path / "run"
    run(tmp_path, 2, world_adamw.train, str(store), 2)
    shutil.copytree(store / "rank-00001", tmp_path / "old")
    row = (str(store), 6, "float32", {"resume": True})
    six = run(tmp_path, 2, world_adamw.train_all, [row])
    shutil.rmtree(store / "rank-00001")
    shutil.move(tmp_path / "old", store / "rank-00001")
    # Rank 0's store has the steps 6 and 5, the copy 2 and 1: none that both have.
    assert run(tmp_path, 2, world_adamw.resume_for, str(store), 0) == [six[0][0]] * 2


@pytest.mark.parametrize("share", ["off", "on"])
def test_the_stats_of_a_step_have_the_network_and_the_waits_for_others(
    tmp_path: pathlib.Path, share: str
) -> None:
    env = {world_adamw.SHARE: share}
    found = run(tmp_path, 2, world_adamw.network_stats, str(tmp_path / "run"), env=env)
    traffic = [stats.traffic for stats, *_ in found]
    for rank, (stats, planned, said) in enumerate(found):
        assert stats.step == 3 and traffic[rank].sent_bytes == planned
        assert traffic[rank].received_bytes == traffic[1 - rank].sent_bytes
        assert 0.0 <= stats.busy["network"] < 1.0 and stats.busy["compute"] < 1.0
        assert f"{planned / 1e6:.1f} MB sent" in said and "network" in said
    late_ns = world_adamw.LATE_S * 1e9
    assert 0.9 * late_ns < traffic[0].peer_wait_ns <= found[0][0].wall_ns
    assert traffic[1].peer_wait_ns < traffic[0].peer_wait_ns
    assert "for other processes" in found[0][2]
