"""Zeroth-order training on a GPU: parameters have the bits that the CPU gives them."""

from __future__ import annotations

import pathlib
import sys
from typing import Any

import pytest
import torch
from torch import nn

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent.parent / "python"))

import lohan

WIDTH = 256
DEPTH = 8
STEPS = 5
BLOCK_BYTES = 4 * 2048 * -(-(WIDTH + 1) * WIDTH // 2048)

Values = dict[str, torch.Tensor]

pytestmark = pytest.mark.usefixtures("deterministic")


class Tower(nn.Module):
    """Equal blocks, whose first weight is used twice."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(DEPTH))
        self.blocks[-1].weight = self.blocks[0].weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = x + torch.tanh(block(x))
        return x.square().mean()


def wrapped(store: pathlib.Path, device: str, **settings: Any) -> Any:
    is_small = settings.pop("is_small", True)
    if device == "cuda" and is_small:
        settings["device_param_bytes"] = 4 * BLOCK_BYTES
    asked = {
        "allow_tmpfs": True,
        "lr": 1e-4,
        "weight_decay": 0.01,
        "eps": 1e-3,
        "seed": 7,
        **settings,
    }
    return lohan.wrap(Tower(), store=store, method="mezo", device=device, **asked)


def trained(model: Any, device: str, *, is_real: bool) -> tuple[list[float], Values]:
    """Return losses and parameters; without is_real, losses are the same numbers on any device."""
    x = torch.linspace(-1, 1, 4 * WIDTH).view(4, WIDTH).to(device)
    numbers = iter([0.25 + 0.5 ** (i % 7) for i in range(4 * STEPS)])

    def closure() -> Any:
        loss = model(x)
        return loss if is_real else next(numbers)

    losses = [float(model.zo_step(closure)) for _ in range(STEPS)]
    return losses, {name: value.cpu() for name, value in model.state_dict().items()}


def assert_same(found: Values, expected: Values) -> None:
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert torch.equal(found[name], value), name


@pytest.mark.parametrize("runs", ["together", "apart"])
@pytest.mark.parametrize("is_small", [True, False], ids=["some blocks", "all blocks"])
def test_parameters_have_the_bits_of_the_cpu(
    tmp_path: pathlib.Path, runs: str, is_small: bool
) -> None:
    model = wrapped(tmp_path / "cpu", "cpu", runs=runs, num_samples=2)
    _, expected = trained(model, "cpu", is_real=False)
    model.lohan.close()
    model = wrapped(tmp_path / "cuda", "cuda", runs=runs, num_samples=2, is_small=is_small)
    _, found = trained(model, "cuda", is_real=False)
    model.lohan.close()
    assert_same(found, expected)


@pytest.mark.parametrize("storage", ["bf16", "fp16", "fp8"])
def test_parameters_in_fewer_bits_have_the_bits_of_the_cpu(
    tmp_path: pathlib.Path, storage: str
) -> None:
    results = []
    for device, more in (("cpu", {}), ("cuda", {"write_every": 2}), ("cuda", {"is_small": False})):
        store = tmp_path / f"{device}{len(results)}"
        # The same order of runs everywhere: the numbers that stand for losses are taken in order.
        asked: dict[str, Any] = {"storage": storage, "runs": "apart", **more}
        if device == "cuda" and asked.setdefault("is_small", True):
            asked |= {"is_small": False, "device_param_bytes": 6 * BLOCK_BYTES}
        model = wrapped(store, device, **asked)
        results.append(trained(model, device, is_real=False)[1])
        model.lohan.close()
    for found in results[1:]:
        assert_same(found, results[0])


def test_which_blocks_are_on_the_gpu_changes_no_bit(tmp_path: pathlib.Path) -> None:
    results = []
    for is_small in (False, True):
        store = tmp_path / str(is_small)
        model = wrapped(store, "cuda", write_every=2 if is_small else "never", is_small=is_small)
        results.append(trained(model, "cuda", is_real=True))
        model.lohan.close()
    assert results[0][0] == results[1][0]
    assert_same(results[1][1], results[0][1])


def test_what_is_written_back_is_what_the_gpu_has(tmp_path: pathlib.Path) -> None:
    model = wrapped(tmp_path / "store", "cuda", write_every=3)
    _, expected = trained(model, "cuda", is_real=True)
    model.optimizer.write_back()
    model.lohan.close()
    for device in ("cuda", "cpu"):
        model = wrapped(tmp_path / "store", device, resume=True)
        assert model.lohan.step == STEPS
        values = {name: value.cpu() for name, value in model.state_dict().items()}
        model.lohan.close()
        assert_same(values, expected)


def test_a_stream_of_the_users_is_where_parameters_are_led(tmp_path: pathlib.Path) -> None:
    model = wrapped(tmp_path / "default", "cuda")
    expected = trained(model, "cuda", is_real=True)
    model.lohan.close()
    model = wrapped(tmp_path / "other", "cuda")
    with torch.cuda.stream(torch.cuda.Stream()):
        found = trained(model, "cuda", is_real=True)
    model.lohan.close()
    assert found[0] == expected[0]
    assert_same(found[1], expected[1])
