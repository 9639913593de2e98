"""Optimizers of other libraries around or beside torch's: what they hide is found and named."""

from __future__ import annotations

import json
import pathlib
from typing import Any

import lohan
import pytest
import torch
from accelerate import Accelerator
from lohan.errors import UnsupportedError
from lohan.replicas import _join
from torch import nn
from torch.optim import AdamW


def _overridden(mine: Any, number: int, at: int, group: dict[str, Any]) -> dict[str, Any]:
    config = {key: group[key] for key in ("lr", "betas", "eps", "weight_decay")}
    config |= {"optim_bits": 8, "max_unorm": 0.0, "skip_zeros": False}
    return config | mine.overrides.get(id(mine.param_groups[number]["params"][at]), {})


def adamw_of_bitsandbytes(params: Any, overrides: dict[int, Any], **hyper: Any) -> Any:
    """Return an AdamW with torch's rule and the overrides of bitsandbytes 0.50, by id."""
    methods = {"get_config": _overridden, "check_overrides": lambda mine: None}
    kind = type("AdamW8bit", (AdamW,), {"__module__": "bitsandbytes.optim.adamw", **methods})
    kind.__qualname__ = "AdamW8bit"
    made: Any = kind(params, **hyper)
    made.overrides = overrides
    return made


def loss_of(model: Any) -> torch.Tensor:
    loss: torch.Tensor = model(torch.ones(2, 4)).pow(2).mean()
    return loss


@pytest.mark.parametrize(
    ("key", "value", "shown"),
    [("lr", 1e-2, "0.01"), ("weight_decay", 0.5, "0.5"), ("betas", (0.5, 0.9), r"\(0.5, 0.9\)")],
)
def test_an_override_of_one_parameter_is_refused_until_it_is_in_a_group(
    key: str, value: Any, shown: str, tmp_path: pathlib.Path
) -> None:
    torch.manual_seed(0)
    model: Any = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))
    weight, overrides = model[1].weight, {id(model[1].weight): {key: value}}
    optimizer = adamw_of_bitsandbytes(model.parameters(), overrides, lr=1e-3)
    with pytest.raises(
        UnsupportedError,
        match=rf"{key} of parameter 2 of group 0 \(shape \(2, 4\)\): {shown} instead.*initialize",
    ):
        lohan.wrap(model, optimizer=optimizer, store=tmp_path / "store")
    (group,) = optimizer.param_groups  # the way out
    group["params"] = [param for param in group["params"] if param is not weight]
    optimizer.param_groups.append({**group, "params": [weight], key: value})
    overrides.clear()
    lohan.wrap(model, optimizer=optimizer, store=tmp_path / "store")
    assert [each[key] for each in model.optimizer.param_groups] == [group[key], value]
    loss_of(model).backward()
    model.optimizer.step()
    model.lohan.close()


def test_an_override_of_the_format_of_moments_changes_nothing(tmp_path: pathlib.Path) -> None:
    model: Any = nn.Linear(4, 4)
    overrides = {id(model.weight): {"optim_bits": 32}}
    optimizer = adamw_of_bitsandbytes(model.parameters(), overrides, lr=1e-3)
    lohan.wrap(model, optimizer=optimizer, store=tmp_path / "store").lohan.close()


def test_a_prepared_optimizer_is_refused_with_the_one_inside(tmp_path: pathlib.Path) -> None:
    model: Any = nn.Linear(4, 4)
    optimizer = AdamW(model.parameters(), lr=1e-3)
    loss_of(model).backward()
    optimizer.step()
    optimizer.zero_grad()
    prepared = Accelerator(cpu=True).prepare(optimizer)
    with pytest.raises(UnsupportedError, match=r"pass its \.optimizer.*AdamW inside.*rounded"):
        lohan.wrap(model, optimizer=prepared, store=tmp_path / "store")
    lohan.wrap(model, optimizer=prepared.optimizer, store=tmp_path / "store")
    loss_of(model).backward()
    model.optimizer.step()
    lohan.unwrap(model)
    assert [int(state["step"]) for state in optimizer.state.values()] == [2, 2]


def test_a_learning_rate_that_is_a_tensor_can_be_compared_by_processes(
    tmp_path: pathlib.Path,
) -> None:
    model: Any = nn.Linear(4, 4)
    optimizer = AdamW(model.parameters(), lr=torch.tensor(0.5))
    lohan.wrap(model, optimizer=optimizer, store=tmp_path / "store")
    facts = _join.facts_of_groups(model.optimizer)
    assert ["lr of parameter group 0", 0.5] in json.loads(json.dumps(facts))
    model.lohan.close()
