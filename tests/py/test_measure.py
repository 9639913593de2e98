"""Measurements of the machine on which the tests run."""

from __future__ import annotations

import json
import pathlib
import types
from typing import Any

import pytest
from click.testing import CliRunner, Result
from lohan.cli import main
from lohan.errors import StoreError
from lohan.planning import _machines, _measure
from lohan.store import _store


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
    assert list(store_dir.iterdir()) == []
    _machines.save(machine, store_dir / "machine.toml")
    assert _machines.load(str(store_dir / "machine.toml")) == machine


def plan(*words: str) -> Result:
    return CliRunner().invoke(main, ["plan", *words])


def test_a_plan_is_the_simulation_of_the_machine_that_was_measured(
    store_dir: pathlib.Path,
) -> None:
    path = store_dir / "machine.toml"
    (store_dir / "b").mkdir()
    ssds = ["--store", str(store_dir), "--store", str(store_dir / "b")]
    shape = ["--model", "opt-1.3b", "--batch", "1", "--policy", "lohan"]
    enough = ["--gpu", "8GiB", "--ram", "16GiB", "--ssd", "4TB", "--set", "ssd_latency_ns=1us"]
    planned = plan(*shape, *ssds, *enough, "--save", str(path), "--json")
    assert planned.exit_code == 0, planned.output
    found = json.loads(planned.stdout)
    changes = ["gpu_bytes=8GiB", "host_bytes=16GiB", "ssd_bytes=2TB", "ssd_latency_ns=1us"]
    sets = [word for change in changes for word in ("--set", change)]
    words = ["simulate", *shape, "--machine", str(path), *sets, "--json"]
    assert json.loads(CliRunner().invoke(main, words).stdout) == found
    assert found["machine"]["ssd_count"] == 2 and found["step_ms"] > 0
    shown = plan(*shape, "--machine", str(path), *enough)
    assert shown.exit_code == 0 and "bound by: " in shown.stdout
    assert "2 x SSD" in shown.stdout and "million parameters/s" in shown.stdout


def test_a_plan_is_of_a_model_or_of_the_largest_and_of_one_machine() -> None:
    for words in ([], ["--model", "gpt-13b", "--largest"]):
        assert "pass either --model NAME" in plan(*words).output
    both = plan("--model", "gpt-13b", "--store", ".", "--machine", "laptop")
    assert both.exit_code == 2 and "--store names SSDs to measure" in both.output
    nowhere = plan("--model", "gpt-13b", "--store", "/nowhere/at/all")
    assert nowhere.exit_code == 1 and "/nowhere/at/all" in nowhere.output


def test_a_directory_that_is_not_there_is_named(store_dir: pathlib.Path) -> None:
    with pytest.raises(StoreError, match="nowhere"):
        _machines.load(f"here:{store_dir / 'nowhere'}")


MIB = 1 << 20


@pytest.mark.parametrize(
    ("rates", "weights"),
    [
        ({"a": (3000, 4000), "b": (1000, 900)}, [3000, 900]),
        ({"a": (1000, 2000), "b": (1200, 2000)}, []),  # less than a quarter apart
    ],
)
def test_stripes_of_different_file_systems_follow_their_bandwidth(
    rates: dict[str, tuple[int, int]],
    weights: list[int],
    store_dir: pathlib.Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def measure(raiser: object, directory: str, probe_bytes: int) -> tuple[int, ...]:
        return tuple(rate * MIB for rate in rates[pathlib.Path(directory).name])

    monkeypatch.setattr(_store, "_device_of", hash)
    monkeypatch.setattr(_store._core, "store_measure", measure)
    assert _store.measure_weights([str(store_dir / name) for name in rates]) == weights


def test_directories_on_one_file_system_are_striped_equally_without_a_measurement(
    store_dir: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_store._core, "store_measure", None)
    assert _store.measure_weights([str(store_dir / "a"), str(store_dir / "b")]) == []
    assert (store_dir / "a").stat().st_mode & 0o777 == 0o700


def test_a_file_system_is_measured_once(
    store_dir: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str] = []

    def measure(raiser: object, directory: str, probe_bytes: int) -> tuple[int, int]:
        asked.append(directory)
        return 2, 1

    monkeypatch.setattr(_measure, "_measured", {})
    monkeypatch.setattr(_measure._core, "store_measure", measure)
    for name in ("a", "b"):
        (store_dir / name).mkdir()
        stats: Any = types.SimpleNamespace(step=0)
        assert _measure.ssd_rates([str(store_dir / name)], stats) == (2, 1)
    assert asked == [str(store_dir / "a")]
