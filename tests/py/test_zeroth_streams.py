"""The length of a zeroth-order step: exactly where it can be derived by hand, else bounds."""

from __future__ import annotations

import dataclasses
import random
from typing import Any

import pytest
from lab import streams
from lab.streams import Block, Schedule
from lohan.errors import MachineError

SLOW_COMPUTE = Block(upload=60, compute=90, update=10, offload=70, alloc=5)
SLOW_LINK = Block(upload=100, compute=30, update=10, offload=70, alloc=5)


def small(block: Block, **changes: Any) -> Schedule:
    """Equal blocks use three slots, and nothing else is on the device."""
    return Schedule([block] * 12, **{"slot_count": 3, "looks_ahead": True, **changes})


def step_ns(block: Block, **changes: Any) -> int:
    return streams.step(small(block, **changes)).step_ns


def test_where_blocks_compute_longer_than_they_move_a_step_takes_what_computing_takes() -> None:
    found = streams.step(small(SLOW_COMPUTE))
    assert (found.step_ns, found.bound_by) == (12 * (90 + 10), "compute")
    assert step_ns(SLOW_COMPUTE, embedding_ns=7, head_ns=11) == 12 * (90 + 10) + 7 + 11


def test_where_blocks_move_longer_than_they_compute_a_step_takes_uploads_or_offloads() -> None:
    found = streams.step(small(SLOW_LINK))
    assert (found.step_ns, found.bound_by) == (12 * 100, "upload")
    found = streams.step(small(SLOW_LINK._replace(offload=130)))
    assert (found.step_ns, found.bound_by) == (12 * 130, "offload")


def test_with_nothing_to_move_a_step_takes_what_the_device_computes() -> None:
    assert streams.step(Schedule([], 3, embedding_ns=1234)).step_ns == 1234


def test_an_upload_that_waits_for_the_last_steps_losses_hides_behind_the_embedding_only() -> None:
    computed = 12 * (90 + 10)
    for embedding, expected in ((0, computed + 60), (20, computed + 60), (80, computed + 80)):
        found = step_ns(SLOW_COMPUTE, looks_ahead=False, embedding_ns=embedding)
        assert found == expected


def test_slots_are_taken_in_turn() -> None:
    every = 60 + 90 + 10 + 70
    assert step_ns(SLOW_COMPUTE, slot_count=1) == 12 * every
    # A block passes while another one computes: half of its way a block.
    assert step_ns(SLOW_COMPUTE, slot_count=2) == 12 * every / 2
    even = Block(upload=100, compute=100, update=0, offload=100, alloc=0)
    for count in (3, streams.SLOT_COUNT_MAX):
        assert step_ns(even, slot_count=count) == 12 * 100


def test_without_overlap_a_step_takes_the_sum_of_everything() -> None:
    found = step_ns(SLOW_LINK, has_overlap=False, embedding_ns=7, head_ns=11)
    assert found == 7 + 12 * (100 + 30 + 10 + 70) + 11


def test_without_deferral_blocks_are_moved_once_more_for_updates() -> None:
    even = SLOW_COMPUTE._replace(offload=60)
    found = streams.step(small(even, has_deferral=False, looks_ahead=False))
    # After the losses: uploads for updates, the next step's first upload, and its forwards.
    assert found.step_ns == 12 * 60 + 60 + 12 * 90
    assert found.busy_ns[streams.UPLOAD] == 2 * 12 * 60
    assert step_ns(SLOW_LINK, has_deferral=False) == 2 * 12 * 100


def test_without_reuse_nothing_of_the_next_block_is_there_while_one_computes() -> None:
    found = streams.step(small(SLOW_COMPUTE, has_reuse=False))
    # Each block's allocation, upload (beside an offload) and computation, and the last offload.
    assert found.step_ns == 12 * (5 + 60 + 90 + 10) + 70
    assert found.alloc_ns == 12 * 5


def test_a_step_takes_its_busiest_stream_to_the_sum_of_all_and_more_slots_never_cost() -> None:
    rng = random.Random(5)
    for _ in range(200):
        blocks = [
            Block(*(rng.randrange(most) for most in (100, 100, 20, 100, 50)))
            for _ in range(rng.randint(1, 12))
        ]
        made = Schedule(
            blocks,
            1,
            embedding_ns=rng.randrange(300),
            head_ns=rng.randrange(300),
            has_deferral=rng.random() < 0.5,
            looks_ahead=rng.random() < 0.5,
        )
        last: float = float("inf")
        for slots in (1, 2, 4, 8, 16):
            here = dataclasses.replace(made, slot_count=slots)
            step = streams.step(here)
            assert max(step.busy_ns) <= step.step_ns <= min(sum(step.busy_ns), last)
            last = step.step_ns
            allocating = streams.step(dataclasses.replace(here, has_reuse=False))
            assert step.step_ns <= allocating.step_ns <= sum(step.busy_ns) + allocating.alloc_ns
        assert streams.step(dataclasses.replace(here, has_overlap=False)).step_ns >= last


def test_numbers_that_no_step_has_are_refused_by_name() -> None:
    for count in (0, streams.SLOT_COUNT_MAX + 1):
        with pytest.raises(MachineError, match=f"{count} slots"):
            step_ns(SLOW_LINK, slot_count=count)
    with pytest.raises(MachineError, match="4097 blocks: at most 4096"):
        streams.step(Schedule([SLOW_LINK] * (streams.BLOCK_COUNT_MAX + 1), 3))
    with pytest.raises(MachineError, match="a time of"):
        step_ns(SLOW_LINK._replace(update=streams.NS_MAX + 1))
    assert step_ns(SLOW_LINK._replace(update=streams.NS_MAX)) > streams.NS_MAX
