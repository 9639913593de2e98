"""lohan plan --largest: the largest model that fits a machine, and what limits the next size."""

from __future__ import annotations

import json
import os

import pytest
from click.testing import CliRunner
from lohan.cli import main
from lohan.commands import _largest
from lohan.errors import BudgetError, MachineError
from lohan.planning import _machines, _plan
from lohan.simulate import Options, check


def machine(*changes: str) -> _machines.Machine:
    return _machines.change(_machines.load("paper-4090"), changes)


def fits(name: str, here: _machines.Machine) -> bool:
    try:
        check(_plan.named_model(name, batch=1), here, Options("auto"))
    except BudgetError:
        return False
    return True


@pytest.mark.parametrize("family", ["gpt", "opt", "dit"])
@pytest.mark.parametrize(
    "changes", [("gpu_bytes=8 GiB",), ("host_bytes=16 GB",), ("ssd_bytes=300 GB", "ssd_count=1")]
)
def test_bisection_finds_what_trying_every_size_finds(
    family: str, changes: tuple[str, ...]
) -> None:
    here = machine(*changes)
    names = [name for name in _plan.model_names() if name.startswith(f"{family}-")]
    fitting = [name for name in names if fits(name, here)]
    found = _largest.find(family, here, 1, 1024)
    sizes = {name: _plan.named_model(name, batch=1).param_count for name in names}
    assert found["param_count"] == max(sizes[name] for name in fitting)
    larger = [name for name in names if sizes[name] > found["param_count"]]
    assert sizes.get(found["next"]) == min((sizes[name] for name in larger), default=None)
    assert (found["why_not"] is None) == (found["next"] is None)


@pytest.mark.skipif(
    "libasan" in os.environ.get("LD_PRELOAD", ""),
    reason="the sanitizer touches the tables for 9 TB of memory, which takes more than 20 GB",
)
def test_each_kind_of_memory_stops_a_model_and_is_named() -> None:
    plenty = ("gpu_bytes=1 TB", "host_bytes=9 TB", "ssd_bytes=900 TB")
    assert _largest.find("gpt", machine(*plenty), 1, 1024)["largest"] == "gpt-805b"
    for change, said in (
        ("gpu_bytes=24 GiB", "gpu_bytes"),
        ("host_bytes=32 GB", "host_bytes"),
        ("ssd_bytes=200 GB", "TB) of SSD"),
    ):
        found = _largest.find("gpt", machine(*plenty, change), 1, 1024)
        assert found["largest"] != "gpt-805b" and said in found["why_not"], change


def test_the_command_answers_in_sizes_of_people() -> None:
    words = ["plan", "--largest", "--gpu", "24GiB", "--ram", "128GiB", "--ssd", "4TB"]
    shown = CliRunner().invoke(main, words)
    assert shown.exit_code == 0, shown.output
    assert "fits: " in shown.stdout and "does not: " in shown.stdout
    found = json.loads(CliRunner().invoke(main, [*words, "--json"]).stdout)
    assert found["param_count"] * 24 < 4e12 < found["param_count"] * 3 * 24


def test_what_no_model_fits_is_refused_with_the_numbers() -> None:
    with pytest.raises(BudgetError, match="gpt-6b does not fit"):
        _largest.find("gpt", machine("gpu_bytes=100 MB"), 1, 1024)
    with pytest.raises(MachineError, match="dit, gpt, opt"):
        _largest.find("mamba", machine(), 1, 1024)
