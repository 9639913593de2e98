"""Processes on nodes of their own whose network fails: outages, cuts, lost packets, few bytes."""

from __future__ import annotations

import contextlib
import pathlib
import sys
import time
from collections.abc import Iterator
from typing import Any

import pytest
import world_adamw
import world_worker
from patience import HUNG_S, slowness
from test_world_ends import wait_for
from world_helper import Group, run

ROOT = pathlib.Path(__file__).resolve().parent.parent.parent
sys.path.insert(0, str(ROOT / "tools"))

import namespaces  # noqa: E402  (its folder has just been named)

TIMEOUT_S = 10.0
CUT_TIMEOUT_S = 5.0  # where the network stays away
# What the processes run: zeroth-order training, and AdamW.
STEPS = 60
WORKERS = pytest.mark.parametrize("worker", [world_worker, world_adamw], ids=["mezo", "adamw"])


@contextlib.contextmanager
def two_nodes(rate: str | None, *programs: str) -> Iterator[list[str]]:
    reason = namespaces.why_not(*programs)
    if reason:
        pytest.skip(reason)
    with namespaces.nodes(2, rate) as names:
        yield names


def start(
    folder: pathlib.Path,
    names: list[str],
    steps: int,
    worker: Any = world_worker,
    timeout_s: float = TIMEOUT_S,
) -> tuple[Group, list[pathlib.Path]]:
    marker = folder / "ready"
    group = Group(
        folder,
        2,
        worker.slow_train_for,
        str(folder / "run"),
        steps,
        str(marker),
        timeout_s,
        nodes=2,
        spaces=names,
        address=namespaces.address(0),
    )
    return group, [pathlib.Path(f"{marker}.{rank}") for rank in range(2)]


def digest_of_one(folder: pathlib.Path, steps: int, worker: Any) -> str:
    return str(run(folder, 1, worker.train, str(folder / "whole"), steps)[0][1])


@pytest.mark.parametrize(
    "worker",
    [
        pytest.param(world_worker, id="mezo", marks=pytest.mark.slow),
        pytest.param(world_adamw, id="adamw"),
    ],
)
def test_an_outage_that_is_shorter_than_the_timeout_changes_nothing(
    tmp_path: pathlib.Path, worker: Any
) -> None:
    with two_nodes(None) as names:
        group, ready = start(tmp_path, names, STEPS, worker)
        wait_for(ready)
        time.sleep(0.2)
        namespaces.set_link(names[1], is_up=False)
        time.sleep(3.0)
        namespaces.set_link(names[1], is_up=True)
        ended = group.wait()
    whole = digest_of_one(tmp_path, STEPS, worker)
    assert [each.value for each in ended] == [(STEPS, whole)] * 2, ended


@WORKERS
def test_a_network_that_is_cut_is_named_on_both_sides_after_the_timeout(
    tmp_path: pathlib.Path, worker: Any
) -> None:
    with two_nodes(None) as names:
        group, ready = start(tmp_path, names, 1000 * STEPS, worker, CUT_TIMEOUT_S)
        wait_for(ready)
        time.sleep(0.2)
        namespaces.set_link(names[1], is_up=False)
        cut_at = time.monotonic()
        ended = group.wait(HUNG_S)
    assert [each.error for each in ended] == ["PeerLostError"] * 2, ended
    assert "rank 1 (host" in ended[0].text
    assert "rendezvous store" in ended[1].text and "rank 0 (host" in ended[1].text
    for each in ended:
        assert each.ended_at - cut_at <= (CUT_TIMEOUT_S + 2) * slowness()


@pytest.mark.parametrize(
    "worker",
    [
        pytest.param(world_worker, id="mezo"),
        pytest.param(world_adamw, id="adamw", marks=pytest.mark.slow),
    ],
)
def test_lost_packets_change_no_bit(tmp_path: pathlib.Path, worker: Any) -> None:
    with two_nodes(None, "nft") as names:
        for name in names:
            namespaces.lose(name, 1)
        group, _ = start(tmp_path, names, STEPS, worker)
        ended = group.wait()
    whole = digest_of_one(tmp_path, STEPS, worker)
    assert [each.value for each in ended] == [(STEPS, whole)] * 2, ended


def test_a_step_sends_less_than_two_kilobytes(tmp_path: pathlib.Path) -> None:
    with two_nodes("1mbit") as names:
        group, ready = start(tmp_path, names, 100)
        wait_for(ready)
        before = [namespaces.sent_bytes(name) for name in names]
        began = time.monotonic()
        ended = group.wait()
        seconds = time.monotonic() - began
        after = [namespaces.sent_bytes(name) for name in names]
    assert [each.error for each in ended] == [""] * 2, ended
    for last, first in zip(after, before, strict=True):
        # Signs of life are sent by time, not by step: two rounds of some 600 bytes a second.
        assert (last - first - 1500 * seconds) / 100 <= 2000


def test_a_step_of_adamw_sends_the_planned_bytes(tmp_path: pathlib.Path) -> None:
    steps = 8
    with two_nodes(None) as names:
        group = Group(
            tmp_path,
            2,
            world_adamw.train_between,
            str(tmp_path / "run"),
            steps,
            str(tmp_path),
            nodes=2,
            spaces=names,
            address=namespaces.address(0),
        )
        wait_for([tmp_path / f"ready.{rank}" for rank in range(2)])
        before = [namespaces.sent_bytes(name) for name in names]
        (tmp_path / "go").touch()
        wait_for([tmp_path / f"done.{rank}" for rank in range(2)])
        after = [namespaces.sent_bytes(name) for name in names]
        (tmp_path / "end").touch()
        ended = group.wait()
    for each, last, first in zip(ended, after, before, strict=True):
        sent, planned = each.value
        assert sent == planned
        # Headers of TCP, acknowledgements, control messages and signs of life come on top.
        assert planned <= last - first <= 1.005 * planned + steps * 16_384
