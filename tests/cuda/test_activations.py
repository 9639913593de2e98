"""Activations that are offloaded from a GPU or recomputed: the same bits as with kept ones."""

from __future__ import annotations

import pathlib
import sys
from typing import Any

import pytest
import torch

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent))
sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1] / "py"))
from test_training import assert_same, state_of, wrap
from tower_helper import Tower, by_softmax

pytestmark = pytest.mark.usefixtures("deterministic")

WIDTH = 256
DEPTH = 6
# With these, activations are several times the bytes that may be in transit at once.
ROWS = 1024
STEPS = 5
STEPS_TO_PLAN = 3  # a policy measures the machine in the first steps, and has a plan after them


def train(
    store: pathlib.Path, dtype: torch.dtype, **settings: Any
) -> tuple[list[float], dict[str, torch.Tensor], int, Any]:
    """Losses, parameters, what was allocated at most by a plan, the last step's numbers."""
    model = wrap(store, Tower(DEPTH, WIDTH, by_softmax).to(dtype), **settings)
    losses = []
    try:
        for step in range(STEPS):
            torch.manual_seed(step)
            loss = model(torch.randn(ROWS, WIDTH, device="cuda").to(dtype))
            loss.backward()
            model.optimizer.step()
            losses.append(loss.item())
            if step + 1 == STEPS_TO_PLAN:
                torch.cuda.synchronize()
                torch.cuda.reset_peak_memory_stats()
        peak = torch.cuda.max_memory_allocated()
        model.lohan.flush()
        return losses, state_of(model), peak, model.lohan.stats()
    finally:
        model.lohan.close()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    "settings",
    [
        {"activations": "recompute"},
        {"swap_bytes": 256 << 20, "swap_ssd_bytes": 0, "device_bytes": 64 << 20},
        {"swap_bytes": 64 << 20, "swap_ssd_bytes": 1 << 30},
        {"activations": "recompute", "swap_bytes": 64 << 20, "swap_ssd_bytes": 1 << 30},
        {"activations": "lohan", "swap_bytes": 64 << 20, "swap_ssd_bytes": 1 << 30},
    ],
    ids=str,
)
def test_bits_are_those_of_activations_that_stay(
    tmp_path: pathlib.Path, dtype: torch.dtype, settings: dict[str, Any]
) -> None:
    losses, state, peak, _ = train(tmp_path / "a", dtype)
    found, found_state, found_peak, stats = train(tmp_path / "b", dtype, **settings)
    assert found == losses
    assert_same(found_state, state)
    assert found_peak < peak
    assert stats.bytes == stats.planned_bytes
    if "swap_bytes" in settings:
        assert stats.bytes["saved_out"] == stats.bytes["saved_in"] > 0
