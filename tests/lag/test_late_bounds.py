"""What bounds a step on a GPU, where the host neither computes nor waits for copies."""

from __future__ import annotations

import pathlib

import bounds_helper


def test_a_gpus_step_is_bound_by_the_part_that_is_slow(tmp_path: pathlib.Path) -> None:
    found = bounds_helper.bounds_of("cuda", tmp_path)
    assert {case: row["bound_by"] for case, row in found.items()} == {
        case: case for case in bounds_helper.CASES
    }, found
    # The device starves for copies, though the host is ahead of it; and it computes while the host
    # waits until there is room for gradients.
    for case, row in found.items():
        waited = sum(row["waits"].values()) / row["wall_ns"]
        assert (waited < 0.5) is (case == "compute"), (case, found)
