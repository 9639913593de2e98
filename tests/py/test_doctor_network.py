"""`lohan doctor` in several processes, as torchrun starts it."""

from __future__ import annotations

import json
import pathlib

import pytest
import world_doctor
from patience import slowness
from test_world_links import namespaces, two_nodes
from world_helper import Group, run


def test_processes_of_one_machine_are_measured_and_rank_0_prints(store_dir: pathlib.Path) -> None:
    places = [str(store_dir)] * 3
    found = run(store_dir, 3, world_doctor.doctor, places, "--json")
    assert [code for code, _ in found] == [0, 0, 0]
    assert [said for _, said in found[1:]] == ["", ""]
    said = json.loads(found[0][1])
    assert said["ok"] and len(said["directories"]) == 1
    (machine,) = said["processes"]["machines"]
    assert machine["ranks"] == [0, 1, 2]
    connections = said["processes"]["connections"]
    assert [each["ranks"] for each in connections] == [[0, 1], [0, 2], [1, 2]]
    assert all(1e6 < each["bytes_per_s"] < 1e11 for each in connections)
    assert all(1e-7 < each["latency_s"] < 1.0 for each in connections)


@pytest.mark.parametrize(
    ("rate", "least", "most"), [("100mbit", 0.85, 1.02), ("10mbit", 0.8, 1.4)], ids=["fast", "slow"]
)
def test_the_network_between_machines_is_measured(
    rate: str, least: float, most: float, store_dir: pathlib.Path
) -> None:
    """The limit lets a quarter of a megabyte pass at once."""
    with two_nodes(rate) as names:
        ended = Group(
            store_dir,
            2,
            world_doctor.doctor,
            [str(store_dir)] * 2,
            "--json",
            nodes=2,
            spaces=names,
            address=namespaces.address(0),
        ).wait()
    assert [each.code for each in ended] == [0, 0], ended
    said = json.loads(ended[0].value[1])
    assert [each["ranks"] for each in said["processes"]["machines"]] == [[0], [1]]
    found = said["processes"]["connections"][0]["bytes_per_s"]
    assert least / slowness() < found * 8e-6 / int(rate.removesuffix("mbit")) < most
    slow = [each for each in said["problems"] if "ranks 0 and 1 carries only" in each["what"]]
    assert len(slow) == (rate == "10mbit") or slowness() > 3
    assert all("GLOO_SOCKET_IFNAME" in each["fix"] and not each["needed"] for each in slow)


def test_a_problem_of_another_machine_is_reported_with_its_rank(store_dir: pathlib.Path) -> None:
    places = [str(store_dir), str(store_dir / "missing" / "too")]
    found = run(store_dir, 2, world_doctor.doctor, places, nodes=2)
    assert [code for code, _ in found] == [1, 1] and found[1][1] == ""
    said = found[0][1]
    assert "(rank 1): " in said and str(store_dir / "missing") in said
    assert "ranks" in said and "0 - 1" in said and "MB/s" in said


@pytest.mark.parametrize("where", ["_measure", "_pair"])
@pytest.mark.parametrize("how", ["killed", "failed"])
def test_a_process_that_ends_early_is_named(store_dir: pathlib.Path, where: str, how: str) -> None:
    ended = Group(store_dir, 2, world_doctor.ends, [str(store_dir)] * 2, where, how).wait()
    code, said = ended[0].value
    assert code == 1 and "rank 1" in said
    if how == "killed":
        assert ended[1].code == -9 and "was killed" in said
    else:
        assert "failed in lohan doctor with StoreError: planned" in said
        assert ended[1].value[0] == 1
