"""A driver that refuses to page-lock main memory changes no bit, and the note names the refusal."""

from __future__ import annotations

import pathlib
import re
from typing import Any

import lag_models as models
import late
import pytest
from lag_models import Task
from lohan import _core
from lohan.planning import _hardware
from lohan.session import _notes
from torch import nn

PLACES: dict[str, dict[str, Any]] = {
    "optimized": {},
    "deferred": {"schedule": "deferred"},
    "swap": models.SWAP,
    "sums": {"accumulate": 2},
}


class Run:
    """A run of a small model in few slots, with a limit of page-locked memory."""

    def __init__(self, place: str, device: late.Late, folder: pathlib.Path) -> None:
        settings = dict(PLACES[place])
        self.task = Task("tower", accumulate=settings.pop("accumulate", 1))
        self.device, self.folder = device, folder
        self.settings = {"device_param_bytes": models.least_slots(self.task, folder), **settings}

    def wrap(self, limit_bytes: int) -> nn.Module:
        self.device.limit_registered(limit_bytes)
        store = self.folder / f"store-{limit_bytes}"
        return models.wrap(self.task, store, **self.settings)

    def train(self, limit_bytes: int, order: str) -> tuple[str, int]:
        """Compare with plain torch; return the note and the number of copies of pageable memory."""
        expected = models.expected(self.task, (0.0,) * self.task.steps)
        before = self.device.pageable_count
        model = self.wrap(limit_bytes)
        note = str(model.lohan.status()["device_note"])
        self.device.tune(order, 60, 3, piece_bytes=4096)
        models.assert_same(models.train(self.task, model), expected)
        return note, self.device.pageable_count - before


def numbers(note: str) -> tuple[int, int, int]:
    """Return the bytes in a note: page-locked, to be copied, of the staging memory."""
    found = re.search(r"only (\d+) of the (\d+) bytes .* copied through (\d+) bytes", note)
    assert found, note
    return int(found[1]), int(found[2]), int(found[3])


@pytest.mark.parametrize("order", late.ORDERS[1:])
@pytest.mark.parametrize("place", PLACES)
def test_a_limit_changes_no_bit_and_no_copy_is_of_pageable_memory(
    place: str, order: str, device: late.Late, tmp_path: pathlib.Path
) -> None:
    run = Run(place, device, tmp_path)
    model = run.wrap(1)
    _, copied, staging = numbers(model.lohan.status()["device_note"])
    model.lohan.close()
    room = copied // 3
    note, pageable_count = run.train(staging + room, order)
    pinned, _, _ = numbers(note)
    assert 0 < pinned <= room
    assert f"{staging} bytes of page-locked memory" in note
    assert pageable_count == 0


@pytest.mark.parametrize("place", PLACES)
def test_a_driver_that_refuses_all_changes_no_bit_and_the_note_names_pageable_copies(
    place: str, device: late.Late, tmp_path: pathlib.Path
) -> None:
    note, pageable_count = Run(place, device, tmp_path).train(1, "copies last")
    pinned, _, staging = numbers(note)
    assert pinned == 0 and f"{staging} bytes of pageable memory" in note
    assert pageable_count > 0


@pytest.mark.parametrize("place", PLACES)
def test_without_a_limit_there_is_no_note_and_no_copy_of_pageable_memory(
    place: str, device: late.Late, tmp_path: pathlib.Path
) -> None:
    assert Run(place, device, tmp_path).train(0, "any") == ("", 0)


@pytest.mark.parametrize(
    ("limit_mib", "pinned_mib"), [(0, 70), (70, 70), (69, 64), (40, 32), (31, 0)]
)
def test_doctors_probe_finds_the_limit_and_leaves_nothing_registered(
    limit_mib: int, pinned_mib: int, device: late.Late
) -> None:
    """Memory is registered in pieces of 32 MiB; the last one is of 6."""
    device.limit_registered(limit_mib << 20)
    for _ in range(2):
        assert _core.probe_pins(0, 70 << 20) == pinned_mib << 20


def test_the_refusal_and_the_remedy_are_printed_once(
    device: late.Late,
    tmp_path: pathlib.Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(_notes, "_told_of_pins", False)
    run = Run("optimized", device, tmp_path)
    told = []
    for limit_bytes in (0, 1, 2):
        model = run.wrap(limit_bytes)
        told += [line for line in capsys.readouterr().err.splitlines() if "page-lock" in line]
        note = model.lohan.status()["device_note"]
        model.lohan.close()
    assert len(told) == 1 and "lower host_bytes" in told[0]
    assert note.endswith(_hardware.pin_remedy()) and note.startswith("the driver page-locks only 0")
