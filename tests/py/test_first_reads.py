"""The checksums of a base that wrap() does not read: recorded by first reads, kept by commits."""

from __future__ import annotations

import contextlib
import os
import shutil
from pathlib import Path
from typing import Any

import lohan
import pytest
import torch
from lohan import _core
from lohan.common._inside import inside
from lohan.errors import ChecksumError, LohanError
from lohan.layout._in_place import InPlace
from test_in_place import Tower, X, save, tower, train

SUM_BYTES = _core.CHECKSUM_BYTES


class Failing(Tower):
    """A tower whose backward may fail."""

    fails = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = torch.tanh(block["base"](x)) * (1 + block["scale"](x))
            if self.fails:
                x.register_hook(_fail)
                self.fails = False
        return x


def _fail(_: torch.Tensor) -> None:
    raise RuntimeError("no")


def failing() -> Failing:
    torch.manual_seed(3)
    return Failing()


def wrapped(folder: Path, store: Path, **settings: Any) -> Any:
    return lohan.wrap(failing(), store=store, weights=folder, lr=1e-2, **settings)


def known(model: Any) -> list[int]:
    sums = inside(model).layout.in_place.checksums.values()
    return [value for each in sums for value in each]


def actual(model: Any) -> list[int]:
    """The checksums of the files' bytes, in the order of known()."""
    layout, found = inside(model).layout, []
    for unit in layout.units:
        for run in unit.runs:
            raw = layout.in_place.files[run.file].path.read_bytes()[run.file_offset :]
            raw = raw[: run.nbytes].ljust(run.nbytes, b"\0")
            found += [
                _core.crc32c(raw[at : at + SUM_BYTES]) for at in range(0, len(raw), SUM_BYTES)
            ]
    return found


def spoil(folder: Path) -> None:
    """Change a byte of each file, as a drive would: the file's time stays."""
    for path in folder.glob("*.safetensors"):
        times = (path.stat().st_atime_ns, path.stat().st_mtime_ns)
        with path.open("r+b") as file:
            file.seek(path.stat().st_size - 900_000)
            file.write(b"oh")
        os.utime(path, ns=times)


def test_wrap_reads_nothing_of_a_base_and_its_first_forward_records_everything(
    tmp_path: Path, store_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: Any) -> Any:
        raise AssertionError("the base is read")

    monkeypatch.setattr(InPlace, "_read_blocks", refuse)
    model = wrapped(save(tmp_path / "w"), store_dir)
    assert not any(known(model))
    with torch.no_grad():
        model(X)
    assert known(model) == actual(model)
    assert inside(model).layout.in_place.has_news
    train(model, 1)
    assert not inside(model).layout.in_place.has_news, "they are in the step's commit"
    model.lohan.close()


@pytest.mark.parametrize("commits", [1, 3, "manual", "never"])
def test_what_a_committed_step_has_read_is_verified_by_every_later_run(
    commits: Any, tmp_path: Path, store_dir: Path
) -> None:
    folder = save(tmp_path / "w")
    model = wrapped(folder, store_dir / "s", commit_every=commits)
    train(model, 2)
    model.lohan.commit()
    if commits == "never":  # a store with one slot is only open, or closed
        model.lohan.close()
    shutil.copytree(store_dir / "s", store_dir / "crashed")
    model.lohan.close()
    spoil(folder)
    assert not lohan.verify(store_dir / "crashed").is_whole
    again = lohan.wrap(
        tower(), store=store_dir / "crashed", resume=True, commit_every=commits, lr=1e-2
    )
    assert all(known(again))
    with pytest.raises(ChecksumError, match="changed since"):
        train(again, 1)
    with contextlib.suppress(ChecksumError):
        again.lohan.close()


def test_a_session_that_only_evaluates_keeps_what_it_has_read(
    tmp_path: Path, store_dir: Path
) -> None:
    folder = save(tmp_path / "w")
    wrapped(folder, store_dir).lohan.close()
    said = lohan.verify(store_dir)
    assert said.is_whole and "7 pieces of 1 MiB" in said.note
    model = lohan.wrap(tower(), store=store_dir, resume=True)
    with torch.no_grad():
        model(X)
    model.lohan.close()
    assert lohan.verify(store_dir).note == ""
    spoil(folder)
    again = lohan.wrap(tower(), store=store_dir, resume=True)
    with pytest.raises(ChecksumError), torch.no_grad():
        again(X)
    with pytest.raises(ChecksumError):
        again.lohan.close()


def test_a_step_that_fails_loses_no_checksum(tmp_path: Path, store_dir: Path) -> None:
    folder = save(tmp_path / "w")
    model = wrapped(folder, store_dir / "s")

    model.fails = True
    with pytest.raises(RuntimeError, match="no"):
        model(X).sum().backward()
    model.optimizer.zero_grad()
    train(model, 1)
    model.lohan.flush()
    shutil.copytree(store_dir / "s", store_dir / "crashed")
    model.lohan.close()
    again = lohan.wrap(tower(), store=store_dir / "crashed", resume=True, lr=1e-2)
    assert known(again) == actual(again)
    again.lohan.close()


def test_a_file_that_is_written_to_before_its_first_read_is_named(
    tmp_path: Path, store_dir: Path
) -> None:
    folder = save(tmp_path / "w")
    model = wrapped(folder, store_dir)
    os.utime(folder / "b.safetensors")
    with pytest.raises(ChecksumError, match=r"b\.safetensors.*changed since"):
        model.state_dict()
    with pytest.raises(LohanError):
        train(model, 1)
    with pytest.raises(LohanError):
        model.lohan.close()


def test_zeroth_order_training_reads_the_base_in_wrap(tmp_path: Path, store_dir: Path) -> None:
    model = wrapped(save(tmp_path / "w"), store_dir, method="mezo")
    assert known(model) == actual(model)
    model.lohan.close()
