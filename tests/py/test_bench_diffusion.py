"""benchmarks/py/bench_diffusion.py reports its three rows, and refuses what is not comparable."""

from __future__ import annotations

import json
import pathlib
import subprocess
import sys
from typing import Any

import pytest
from patience import HUNG_S

pytest.importorskip("diffusers")

ROOT = pathlib.Path(__file__).resolve().parents[2]
SCRIPTS = ROOT / "benchmarks" / "py"
sys.path.insert(0, str(SCRIPTS))

import bench_diffusion  # noqa: E402  (its folder has just been named)

TINY = ("--layers=4", "--width=256", "--latent=8", "--text=4", "--batch=1", "--rounds=1")
BUDGETS = ("--host-bytes=60000000", "--device-bytes=20000000")


class Trained:
    """What the check of first losses reads of a contestant."""

    def __init__(self, *losses: float) -> None:
        self.losses = [*losses]


@pytest.mark.parametrize("changed", [{"digest": "b"}, {"losses": [1.0, 3.0]}])
def test_budgets_with_different_bits_end_the_run(changed: dict[str, Any]) -> None:
    one = {"digest": "a", "losses": [1.0, 2.0], "read_bytes": 1}
    bench_diffusion.check_bits({"10": one, "20": {**one, "read_bytes": 2}})
    with pytest.raises(SystemExit, match="depend on the budget"):
        bench_diffusion.check_bits({"10": one, "20": {**one, **changed}})


def test_a_contestant_with_another_first_loss_ends_the_run() -> None:
    same: Any = {"lohan": Trained(1.0, 2.0), "computation": Trained(1.0, 3.0)}
    bench_diffusion.check_first_loss(same, 1.0)
    with pytest.raises(SystemExit, match=r"the first loss of lohan is 1\.0, and that of"):
        bench_diffusion.check_first_loss(same, 1.5)


@pytest.mark.slow
def test_a_tiny_run_reports_time_memory_and_the_bits_of_several_budgets(
    store_dir: pathlib.Path,
) -> None:
    words = [sys.executable, str(SCRIPTS / "bench_diffusion.py"), *TINY, *BUDGETS]
    done = subprocess.run(
        [*words, f"--directory={store_dir}"],
        capture_output=True,
        text=True,
        check=False,
        timeout=HUNG_S,
    )
    assert done.returncode == 0, done.stderr
    rows = {row["name"]: row for row in map(json.loads, done.stdout.splitlines())}
    assert [*rows] == ["diffusion_bits", "diffusion_step", "diffusion_memory"]
    bits, step, memory = rows.values()
    assert bits["value"] == len(set(bits["host_bytes"])) >= 2
    assert bits["read_bytes"][0] > bits["read_bytes"][-1], "the budgets have the same effect"
    assert len(set(bits["losses"])) > 1
    assert step["n"] == 1 and step["ratio"] > 0 and step["written_bytes"] > 12 * step["params"]
    assert step["tokens"] == 4 * 4 + 4
    assert memory["ratio"] > 0 and memory["peak_bytes"] >= memory["value"]
    assert not any(store_dir.iterdir())
