"""The machine that tests run on, measured."""

from __future__ import annotations

import pathlib
import tomllib

import pytest
from lohan import _machines, _measure
from lohan.errors import StoreError


def test_this_machine_is_measured_and_simulated(store_dir: pathlib.Path) -> None:
    machine = _machines.load(f"here:{store_dir}")
    for name, least, most in (
        ("gpu_flop_per_s", 1e9, 1e16),
        ("link_in_bytes_per_s", 1e8, 1e12),
        ("adam_params_per_s", 1e6, 1e11),
        ("ssd_read_bytes_per_s", 1e6, 1e11),
        ("ssd_write_bytes_per_s", 1e6, 1e11),
    ):
        assert least < getattr(machine, name) < most, name
    read = _machines.load(_save(machine, store_dir))
    assert read.as_core() == machine.as_core()
    assert not list(store_dir.glob("*probe*"))


def _save(machine: _machines.Machine, folder: pathlib.Path) -> str:
    path = folder / "machine.toml"
    path.write_text(_measure.as_toml(machine), encoding="utf-8")
    assert tomllib.loads(path.read_text(encoding="utf-8"))["name"]
    return str(path)


def test_a_directory_that_is_not_there_is_named(store_dir: pathlib.Path) -> None:
    with pytest.raises(StoreError, match="nowhere"):
        _machines.load(f"here:{store_dir / 'nowhere'}")
