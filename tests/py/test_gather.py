"""Processes of one machine that gather blocks on their accelerators (gather="shards")."""

from __future__ import annotations

import pathlib
from typing import Any

import pytest
import world_gather
from world_helper import Group, run


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Return the result of one process with the settings of most tests."""
    folder = tmp_path_factory.mktemp("whole")
    return run(folder, 1, world_gather.train_all, [(str(folder / "run"), {})])[0][0]


def test_each_link_moves_its_part_of_each_block_as_planned(tmp_path: pathlib.Path) -> None:
    for gather in ("host", "shards"):
        for steps in run(tmp_path, 2, world_gather.counted, str(tmp_path / gather), gather):
            assert steps
            for moved, planned in steps:
                assert moved == planned and moved["copy_in"] > 0
                assert moved["gathered"] == (moved["copy_in"] if gather == "shards" else 0)


@pytest.mark.parametrize("replicas", ["all", "parameters"])
def test_the_processes_of_each_machine_gather_among_themselves(
    tmp_path: pathlib.Path, whole: Any, replicas: str
) -> None:
    rows = [(str(tmp_path / "run"), {"replicas": replicas})]
    assert run(tmp_path, 4, world_gather.train_all, rows, nodes=2) == [[whole]] * 4
    settings = (str(tmp_path / "counted"), "shards")
    for rank, steps in enumerate(run(tmp_path, 3, world_gather.counted, *settings, nodes=2)):
        for moved, planned in steps:
            assert moved == planned and moved["copy_in"] > 0
            is_alone = rank == 2  # on its machine
            assert moved["gathered"] == (0 if is_alone else moved["copy_in"])


def test_state_dicts_of_all_processes_are_read_in_the_memory_that_they_share(
    tmp_path: pathlib.Path, whole: Any
) -> None:
    (one,) = run(tmp_path, 1, world_gather.reads, str(tmp_path / "one"), "host")
    assert one[0] and one[2] == whole
    for gather in ("host", "shards"):
        assert run(tmp_path, 2, world_gather.reads, str(tmp_path / gather), gather) == [one] * 2


def test_processes_may_use_other_blocks_in_another_order(tmp_path: pathlib.Path) -> None:
    one = run(tmp_path, 1, world_gather.skips, str(tmp_path / "one"))
    for count in (2, 3):
        assert run(tmp_path, count, world_gather.skips, str(tmp_path / str(count))) == one * count


def test_a_process_that_waits_for_another_one_in_a_forward_is_not_waited_for(
    tmp_path: pathlib.Path, whole: Any
) -> None:
    found = run(tmp_path, 2, world_gather.meets, str(tmp_path / "run"))
    assert found == [(True, whole)] * 2


@pytest.mark.parametrize(("who", "count"), [(0, 2), (2, 3)])
def test_a_process_that_is_killed_in_a_gather_is_named(
    tmp_path: pathlib.Path, whole: Any, who: int, count: int
) -> None:
    store = str(tmp_path / "run")
    for rank, each in enumerate(
        Group(tmp_path, count, world_gather.dies, store, who, "SIGKILL").wait()
    ):
        assert each.code == (-9 if rank == who else 0), each.said
        if rank != who:
            assert each.value.startswith(f"PeerLostError: rank {who} (host"), each.value
    assert run(tmp_path, 2, world_gather.resumed, store) == [whole] * 2


def test_a_process_that_is_stopped_in_a_gather_is_named(tmp_path: pathlib.Path) -> None:
    group = Group(tmp_path, 3, world_gather.dies, str(tmp_path / "run"), 1, "SIGSTOP")
    for rank in (0, 2):
        group.processes[rank].join()
    group.kill(1)
    said = [each.value or f"{each.error}: {each.text}" for each in group.wait() if each.code != -9]
    # The first to find out ends, which the other one may see first.
    assert len(said) == 2 and all("PeerLostError: rank 1 (host" in each for each in said), said


def test_without_connections_blocks_are_copied_whole(tmp_path: pathlib.Path, whole: Any) -> None:
    found = run(tmp_path, 2, world_gather.loses_connections, str(tmp_path / "run"))
    assert found == [whole] * 2


@pytest.mark.parametrize(
    ("rate", "way"), [(2_000_000, "shards"), (1 << 45, "host")], ids=["slow", "fast"]
)
def test_auto_gathers_where_that_is_faster_than_whole_copies(
    tmp_path: pathlib.Path, whole: Any, rate: int, way: str
) -> None:
    found = run(tmp_path, 3, world_gather.chosen, str(tmp_path / "run"), rate, nodes=2)
    for rank, (chosen, has_gathered, result) in enumerate(found):
        is_alone = rank == 2  # on its machine
        assert chosen == ("host" if is_alone else way)
        assert has_gathered == (chosen == "shards")
        assert result == found[0][2]
    two = run(tmp_path, 2, world_gather.chosen, str(tmp_path / "two"), rate)
    assert two == [(way, way == "shards", whole)] * 2


@pytest.mark.parametrize(
    ("copy_s", "gather_s", "way"),
    [
        ([1.0, 0.1], [0.3, 0.3], "shards"),  # 0.5 + 0.3: the slowest link counts
        ([1.0, 1.0], [0.1, 0.45], "host"),  # 0.5 + 0.45: and the slowest gather
        ([1.0, 1.0], [0.39, 0.39], "shards"),
    ],
)
def test_processes_that_measured_other_times_choose_the_same_way(
    tmp_path: pathlib.Path, copy_s: list[float], gather_s: list[float], way: str
) -> None:
    assert run(tmp_path, 2, world_gather.decides, copy_s, gather_s) == [way] * 2


@pytest.mark.parametrize("how", ["SIGKILL", "SIGSTOP"])
def test_a_process_that_is_lost_while_gathers_are_measured_is_named(
    tmp_path: pathlib.Path, how: str
) -> None:
    store = str(tmp_path / "run")
    group = Group(tmp_path, 2, world_gather.dies_while_measuring, store, 1, how)
    group.processes[0].join()
    if how == "SIGSTOP":
        group.kill(1)
    other = group.wait()[0]
    assert other.code == 0, other.said
    assert other.value.startswith("PeerLostError: rank 1 (host"), other.value


@pytest.mark.long  # which compares times, and so needs a quiet machine
def test_slow_links_take_less_time_for_parts(tmp_path: pathlib.Path) -> None:
    for each in run(tmp_path, 2, world_gather.timed, str(tmp_path / "run"), ["host", "shards"]):
        assert each["shards"] < 0.8 * each["host"], each


def test_settings_that_do_not_fit_are_refused_at_wrap(tmp_path: pathlib.Path) -> None:
    for said in run(tmp_path, 2, world_gather.refused, str(tmp_path / "run")):
        assert said[0].startswith("ModelError: Parallel(gather='shards') needs share=True")
        assert said[1].startswith("ModelError: Parallel(gather='shards') needs an accelerator")
        assert said[2] == "ModelError: parallel.gather 'some' must be 'host', 'shards' or 'auto'"
        assert said[3].startswith("WorldMismatchError: Parallel(gather=) is 'shards' in rank 0")


def test_the_thread_and_the_connections_of_gathers_end_with_the_session(
    tmp_path: pathlib.Path,
) -> None:
    assert run(tmp_path, 2, world_gather.ends, str(tmp_path / "run")) == [(0, 0)] * 2
