"""torch.distributed beside a wrapped model: what is not supported is named at once."""

from __future__ import annotations

import pathlib
from collections.abc import Callable, Iterator
from typing import Any

import lohan
import pytest
import torch
from lohan.errors import UnsupportedError
from torch import nn
from torch.distributed.checkpoint import state_dict as dcp
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

CALLS: dict[str, Callable[[Any, Any], Any]] = {
    "get_optimizer_state_dict": dcp.get_optimizer_state_dict,
    "get_state_dict": dcp.get_state_dict,
    "set_optimizer_state_dict": lambda model, optimizer: dcp.set_optimizer_state_dict(
        model, optimizer, {"state": {}, "param_groups": []}
    ),
}


def step(model: Any) -> float:
    loss = model(torch.ones(2, 8)).pow(2).mean()
    loss.backward()
    model.optimizer.step()
    return loss.item()


@pytest.mark.parametrize("given", [False, True])
@pytest.mark.parametrize("name", CALLS)
def test_states_are_refused_before_torch_has_changed_anything(
    name: str, given: bool, tmp_path: pathlib.Path
) -> None:
    torch.manual_seed(0)
    model: Any = nn.Linear(8, 8)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    hyper: dict[str, Any] = {"optimizer": optimizer} if given else {"lr": 1e-3}
    lohan.wrap(model, store=tmp_path / "store", **hyper)
    losses = []
    for each in [model.optimizer, *[optimizer] * given] * 2:
        with pytest.raises(UnsupportedError, match=r"snapshot\(FOLDER\).*Nothing was changed"):
            CALLS[name](model, each)
        assert each.param_groups[0]["lr"] == 1e-3
        assert all(param.grad is None for param in model.parameters())
        losses.append(step(model))
    assert losses == sorted(losses, reverse=True) and losses[0] > losses[-1]
    assert not model.optimizer.state and len(model.optimizer.state) == 0
    found = dcp.get_model_state_dict(model)
    model.lohan.snapshot(tmp_path / "copy").wait()
    lohan.unwrap(model)
    assert isinstance(optimizer.state[model.weight].get("step"), torch.Tensor) == given
    other: Any = lohan.wrap(nn.Linear(8, 8), store=tmp_path / "copy", resume=True)
    assert other.lohan.step == len(losses)
    torch.testing.assert_close(dict(other.state_dict()), dict(found), rtol=0, atol=0)
    other.lohan.close()


class Twice(nn.Module):
    """A layer that two checkpoints use."""

    def __init__(self, is_reentrant: bool) -> None:
        """Make the layers."""
        super().__init__()
        self.first, self.shared, self.is_reentrant = nn.Linear(8, 8), nn.Linear(8, 8), is_reentrant

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Call the shared layer twice."""
        x = self.first(x)
        for _ in range(2):
            x = checkpoint(self.shared, x, use_reentrant=self.is_reentrant)
        return x


@pytest.mark.parametrize("schedule", ["auto", "deferred"])
def test_a_layer_of_two_reentrant_checkpoints_is_refused_with_a_way_out(
    schedule: Any, tmp_path: pathlib.Path
) -> None:
    model: Any = lohan.wrap(Twice(True), store=tmp_path / "one", lr=1e-3, schedule=schedule)
    with pytest.raises(lohan.LohanError, match=r"shared.*reentrant checkpoints.*reentrant=False"):
        step(model)
    model = lohan.wrap(Twice(False), store=tmp_path / "two", lr=1e-3, schedule=schedule)
    assert step(model) > step(model)
    model.lohan.close()


@pytest.fixture
def group(tmp_path: pathlib.Path) -> Iterator[None]:
    store = torch.distributed.FileStore(str(tmp_path / "meeting"), 1)  # type: ignore[attr-defined]
    torch.distributed.init_process_group("gloo", rank=0, world_size=1, store=store)
    yield
    torch.distributed.destroy_process_group()


WRAPPERS: dict[str, tuple[Callable[[Any], Any], str]] = {
    "DDP": (DistributedDataParallel, "DistributedDataParallel cannot wrap.*use the wrapped model"),
    "DDP of a block": (lambda m: DistributedDataParallel(m[0]), "DistributedDataParallel cannot"),
    "DDP of a module around it": (
        lambda m: DistributedDataParallel(nn.ModuleDict({"a": nn.Linear(2, 2), "b": m})),
        "DistributedDataParallel cannot",
    ),
    "fully_shard": (fully_shard, r"fully_shard\(\) and.*use the model as it is"),
    "fully_shard of a block": (lambda m: fully_shard(m[0]), r"fully_shard\(\) and"),
    "FSDP": (
        lambda m: FullyShardedDataParallel(m, device_id=torch.device("cpu")),
        "FullyShardedDataParallel cannot shard a wrapped model",
    ),
}


@pytest.mark.parametrize("name", WRAPPERS)
def test_wrappers_of_torch_are_refused_when_they_are_made(
    name: str, group: None, tmp_path: pathlib.Path
) -> None:
    make, said = WRAPPERS[name]
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    model: Any = lohan.wrap(plain, store=tmp_path / "store", lr=1e-3)
    with pytest.raises(UnsupportedError, match=said):
        make(model)
    assert step(model) > step(model)
    model = lohan.unwrap(model)
    if name == "DDP":
        make(model)(torch.ones(2, 8)).sum().backward()
