"""Parameters, and what autograd saves of them, outside the forward that uses them."""

from __future__ import annotations

import gc
import os
import pathlib
from collections.abc import Callable
from typing import Any

import lohan
import pytest
import torch
from lohan.errors import LentError, StaleGraphError
from rules_helper import (
    WIDTH,
    Workshop,
    assert_same_state,
    build,
    square_loss,
    train_step,
    vectors,
)
from torch import nn


def resident_bytes() -> int:
    """Return the main memory that this process uses now."""
    fields = pathlib.Path("/proc/self/statm").read_text().split()
    return int(fields[1]) * 4096


class Activated(nn.Module):
    """A linear layer and an operation that may save its own output."""

    def __init__(self, activation: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)
        self.activation = activation

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.activation(self.inner(x))
        return y


ACTIVATIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "tanh": torch.tanh,
    "relu": torch.relu,
    "softmax": lambda y: torch.softmax(y, -1),
    "none": lambda y: y,
}


@pytest.mark.skipif(
    "libasan" in os.environ.get("LD_PRELOAD", ""), reason="the sanitizer keeps freed memory"
)
@pytest.mark.parametrize("name", ACTIVATIONS)
def test_a_graph_that_is_never_run_backward_dies_with_its_output(
    workshop: Workshop, name: str
) -> None:
    model = workshop.wrap(build(lambda: Activated(ACTIVATIONS[name])))
    batch = torch.randn(20000, WIDTH)
    before = 0
    for turn in range(12):
        y = model(batch)
        del y
        assert model.lohan.status()["handles"] == 0
        if turn == 3:
            before = resident_bytes()
    # One output has 2.4 MiB; eight leaked graphs would have 20 and more.
    assert resident_bytes() - before < 10 << 20


def test_the_graph_of_a_forward_that_died_is_freed(workshop: Workshop) -> None:
    model = workshop.wrap(build())

    def die(module: nn.Module, args: Any) -> None:
        raise KeyError("on purpose")

    handle = model.head.register_forward_pre_hook(die)
    for _ in range(3):
        with pytest.raises(KeyError, match="on purpose"):
            model(vectors(0))
    handle.remove()
    gc.collect()  # pytest keeps tracebacks, which hold the frames
    assert model.lohan.status()["handles"] == 0


def test_a_second_derivative_through_saved_outputs_is_the_plain_ones(workshop: Workshop) -> None:
    def second(model: nn.Module) -> torch.Tensor:
        x = vectors(0).requires_grad_()
        y = torch.softmax(model(x), -1).square().sum()
        (first,) = torch.autograd.grad(y, x, create_graph=True)
        (found,) = torch.autograd.grad(first.square().sum(), x)
        return found

    expected = second(build().requires_grad_(False))
    model = workshop.wrap(build().requires_grad_(False))
    assert torch.equal(second(model), expected)


PENALTIES: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "abs": lambda p: p.abs().sum(),
    "square": lambda p: p.square().sum(),
    "power": lambda p: (p**2).sum(),
    "norm": lambda p: p.norm(2),
    "norm1": lambda p: p.norm(1),
    "max": lambda p: p.max(),
    "clamp": lambda p: p.clamp(-0.1, 0.1).sum(),
}


def penalised(
    penalty: Callable[[torch.Tensor], torch.Tensor], is_before: bool
) -> Callable[[nn.Module, int], torch.Tensor]:
    """A loss with a regularizer over the parameters, computed before or after the forward."""

    def loss_of(model: nn.Module, step: int) -> torch.Tensor:
        early = sum(penalty(p) for p in model.parameters()) if is_before else None
        loss = model(vectors(step)).square().mean()
        late = sum(penalty(p) for p in model.parameters()) if early is None else early
        total: torch.Tensor = loss + 1e-2 * late
        return total

    return loss_of


@pytest.mark.parametrize("is_before", [True, False], ids=["before", "after"])
@pytest.mark.parametrize("name", PENALTIES)
def test_a_penalty_over_the_parameters_has_the_plain_gradients(
    workshop: Workshop, name: str, is_before: bool
) -> None:
    model = workshop.follow(loss_of=penalised(PENALTIES[name], is_before))
    assert model.lohan.status()["handles"] == 0


def test_a_loop_that_is_left_half_way_takes_its_hooks_and_no_others(workshop: Workshop) -> None:
    model = workshop.wrap(build())
    packed = []

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        packed.append(tensor)
        return tensor

    x = torch.ones(3, requires_grad=True)
    loop = model.named_parameters()
    next(loop)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        loop.close()
        _ = x * x
        assert len(packed) == 2
    assert torch._C._autograd._top_saved_tensors_default_hooks(True) is None


def write_by_load(model: nn.Module) -> None:
    model.load_state_dict({k: v + 0.1 for k, v in model.state_dict().items()})


def write_in_a_loop(model: nn.Module) -> None:
    with torch.no_grad():
        for p in model.parameters():
            p.add_(0.1)


@pytest.mark.parametrize("write", [write_by_load, write_in_a_loop])
def test_a_backward_through_values_that_were_written_over_is_refused(
    workshop: Workshop, write: Callable[[nn.Module], None]
) -> None:
    model = workshop.wrap(build())
    plain = build()
    losses = [square_loss(model, 0), square_loss(plain, 0)]
    for written in (model, plain):
        write(written)
    with pytest.raises(StaleGraphError, match=r"parameter '\w+.* was changed"):
        losses[0].backward()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        losses[1].backward()
    del losses
    assert_same_state(model.state_dict(), plain.state_dict())
    train_step(model, 1)


def test_a_write_to_one_block_leaves_graphs_through_others(workshop: Workshop) -> None:
    model = workshop.wrap(build())
    x = vectors(0).requires_grad_()
    loss = model.blocks[1](x).square().sum()
    with torch.no_grad():
        for p in model.blocks[2].parameters():
            p.add_(0.1)
    loss.backward()
    model.optimizer.step()
    assert x.grad is not None and x.grad.isfinite().all()


@pytest.mark.parametrize("write", [write_by_load, write_in_a_loop])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_write_while_a_view_is_kept_is_refused_and_changes_nothing(
    workshop: Workshop, write: Callable[[nn.Module], None], dtype: torch.dtype
) -> None:
    model = workshop.wrap(build().to(dtype))
    train_step(model, 0)
    before = model.state_dict()
    kept = [p.data for p in model.parameters()]
    with pytest.raises(LentError, match="views of its parameters"):
        write(model)
    for tensor, (name, value) in zip(kept, before.items(), strict=True):
        assert torch.equal(tensor, value), name
    del kept, tensor
    assert_same_state(model.state_dict(), before)
    model.lohan.close()
    again = lohan.wrap(build().to(dtype), store=workshop.folder / "store0", resume=True)
    workshop.made.append(again)
    assert_same_state(again.state_dict(), before)
    write(again)
    assert not torch.equal(again.state_dict()["head.weight"], before["head.weight"])
    train_step(again, 1)


def test_a_write_inside_a_loop_that_keeps_a_view_is_refused_and_undone(workshop: Workshop) -> None:
    model = workshop.wrap(build())
    before = model.state_dict()
    kept = []
    with pytest.raises(LentError, match="views of its parameters"), torch.no_grad():
        for p in model.parameters():
            kept.append(p.data)
            p.add_(1.0)
    assert torch.equal(kept[0], before["blocks.0.gain"])
    kept.clear()
    assert_same_state(model.state_dict(), before)
