"""What bounds a step is the part of the machine that is slow."""

from __future__ import annotations

import pathlib

import bounds_helper


def test_an_emulated_accelerators_step_is_bound_by_the_part_that_is_slow(
    tmp_path: pathlib.Path,
) -> None:
    found = bounds_helper.bounds_of("emu", tmp_path)
    assert {case: row["bound_by"] for case, row in found.items()} == {
        case: case for case in bounds_helper.CASES
    }, found
