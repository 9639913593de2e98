"""A parameter that is not in memory refuses to be read or written, by its name."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable
from typing import Any

import lohan
import pytest
import torch
from lohan.errors import HollowParameterError, UnsupportedError
from rules_helper import (
    WIDTH,
    Block,
    Stack,
    Workshop,
    assert_same_state,
    build,
    square_loss,
    train_step,
    vectors,
)
from torch import nn
from torch.nn.utils import parametrizations, prune

functional = torch.nn.functional


class Rooted(Stack):
    """A stack whose root owns parameters, and reads those of its blocks on request."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.full((1,), 1.5))
        self.reads: Callable[[Any, torch.Tensor], torch.Tensor] | None = None
        self.returns_scale = False

    def forward(self, x: torch.Tensor) -> Any:
        for block in self.blocks:
            x = block(x)
        if self.reads is not None:
            x = self.reads(self, x)
        y = self.head(x) * self.scale
        return (y, self.scale) if self.returns_scale else y


def as_dict(model: nn.Module) -> torch.Tensor:
    return {k: t for k, t in model.named_parameters()}["scale"].detach().cpu().clone()


READS: dict[str, Callable[[Any], Any]] = {
    "square": lambda m: m.head.weight.square().sum(),
    "exp": lambda m: m.scale.exp().sum(),
    "item": lambda m: m.scale.item(),
    "float": lambda m: float(m.scale),
    "index": lambda m: m.head.weight[0],
    "transpose": lambda m: m.head.weight.T,
    "data": lambda m: m.head.weight.data,
    "detach": lambda m: m.head.weight.detach(),
    "numpy": lambda m: m.head.weight.numpy(force=True),
    "tolist": lambda m: m.head.weight.tolist(),
    "storage": lambda m: m.head.weight.untyped_storage(),
    "stack": lambda m: torch.stack([m.head.weight, torch.ones(10, WIDTH)]),
    "second": lambda m: torch.ones(1) + m.scale,
    "linear": lambda m: functional.linear(vectors(0), weight=m.head.weight),
    "dict": as_dict,
    "norm": lambda m: torch.nn.utils.get_total_norm(m.parameters()),
    "deepcopy": lambda m: copy.deepcopy(m.head.weight),
    "copy": lambda m: copy.copy(m.head.weight),
    "save": lambda m: torch.save(m.head.weight, io.BytesIO()),
    "pickle of the optimizer": lambda m: pickle.dumps(m.optimizer),
    "prune": lambda m: prune.l1_unstructured(m.head, "weight", amount=0.5),
    "weight_norm": lambda m: parametrizations.weight_norm(m.head),
    "forward": lambda m: m.forward(vectors(0)),
}

WRITES: dict[str, Callable[[Any], Any]] = {
    "data": lambda m: setattr(m.head.weight, "data", torch.full((10, WIDTH), 0.5)),
    "clamp": lambda m: m.scale.clamp_(0, 1),
    "fill": lambda m: m.head.weight.fill_(0.5),
    "index": lambda m: m.head.weight.__setitem__(0, 0.5),
    "add": lambda m: m.scale.__iadd__(1),
    "init": lambda m: nn.init.zeros_(m.head.bias),
    "out": lambda m: torch.add(torch.ones(1), 1, out=m.scale),
}


@pytest.mark.parametrize("name", READS)
def test_a_read_outside_of_any_forward_is_refused_by_name(workshop: Workshop, name: str) -> None:
    model = workshop.wrap(build(Rooted), host_bytes="minimal")
    for turn in range(2):
        with pytest.raises(HollowParameterError, match=r"parameter '(head\.|scale|blocks\.)"):
            READS[name](model)
        if turn == 0 and "weight" not in model.head._forward_pre_hooks:
            train_step(model, turn)


@pytest.mark.parametrize("name", WRITES)
def test_a_write_outside_of_any_loop_is_refused_by_name(workshop: Workshop, name: str) -> None:
    model = workshop.wrap(build(Rooted), host_bytes="minimal")
    before = model.state_dict()
    for turn in range(2):
        with pytest.raises(HollowParameterError, match=r"parameter '(head\.|scale)"):
            with torch.no_grad():
                WRITES[name](model)
        assert_same_state(model.state_dict(), before)
        train_step(model, turn)
        before = model.state_dict()


def test_a_write_between_backward_and_step_is_refused(workshop: Workshop) -> None:
    model = workshop.wrap(build())
    square_loss(model, 0).backward()
    with pytest.raises(HollowParameterError, match=r"'blocks\.0\.gain' between its forward and"):
        for p in model.parameters():
            p.data = p.data * 0.9
    with pytest.raises(HollowParameterError, match=r"would write.*'blocks\.0\.gain'"):
        for p in model.parameters():
            p.data = torch.zeros(WIDTH)
    model.optimizer.step()


def test_a_parameter_that_forward_returns_is_refused_behind_it(workshop: Workshop) -> None:
    model = workshop.wrap(build(Rooted))
    model.returns_scale = True
    y, scale = model(vectors(0))
    with pytest.raises(HollowParameterError, match="'scale'"):
        y.square().mean() + scale
    y.square().mean().backward()
    model.optimizer.step()


def test_a_parameter_tied_outside_of_the_wrapped_module_is_refused(workshop: Workshop) -> None:
    body, head = build(), nn.Linear(WIDTH, 10, bias=False)
    head.weight = body.head.weight
    model = workshop.wrap(body)
    model(vectors(0))
    with pytest.raises(HollowParameterError, match=r"'head\.weight'"):
        head(vectors(0))


def test_what_needs_no_values_is_answered(workshop: Workshop) -> None:
    model = workshop.wrap(build(Rooted))
    p = model.head.weight
    assert isinstance(p, nn.Parameter) and isinstance(p, torch.Tensor)
    assert p.shape == p.size() == (10, WIDTH) and p.dim() == p.ndim == 2 and len(p) == 10
    assert p.numel() == torch.numel(p) == 10 * WIDTH and p.dtype == torch.float32
    assert p.nbytes == p.numel() * p.element_size() and p.device == torch.device("cpu")
    assert p.is_leaf and p.requires_grad and p.grad is None and p.grad_fn is None
    assert torch.is_floating_point(p) and not p.is_complex() and p.layout == torch.strided
    assert torch.equal(torch.zeros_like(p), torch.zeros(10, WIDTH))
    assert type(torch.zeros_like(p)) is torch.Tensor
    assert p.new_zeros(3).tolist() == [0, 0, 0]
    assert vectors(0).double().to(p).dtype == torch.float32
    assert "head.weight" in repr(p) and "head.weight" in f"{p}" and p in {p}
    assert p.requires_grad_(False) is p and not p.requires_grad
    p.requires_grad_(True)
    seen: list[torch.Size] = []
    p.register_hook(lambda gradient: seen.append(gradient.shape))
    train_step(model, 0)
    assert seen == [p.shape]


def test_a_parameter_in_memory_is_a_plain_one(workshop: Workshop) -> None:
    model = workshop.wrap(build())
    types: list[type] = []
    model.blocks[0].register_forward_pre_hook(lambda m, args: types.append(type(m.gain)))
    train_step(model, 0)
    for p in model.parameters():
        assert torch.equal(copy.deepcopy(p), p)
        types.append(type(p))
    assert set(types) == {nn.Parameter}
    assert type(model.head.weight) is not nn.Parameter
    plain = lohan.unwrap(model)
    workshop.made.clear()
    assert {type(p) for p in plain.parameters()} == {nn.Parameter}
    assert plain.head.weight.square().sum().isfinite()
    assert "_save_to_state_dict" not in plain.head.__dict__


def test_a_parameter_in_a_loop_is_saved_and_copied_as_a_plain_one(workshop: Workshop) -> None:
    plain = dict(build().named_parameters())
    model = build()
    model.head.weight.note = "kept"  # type: ignore[attr-defined]
    workshop.wrap(model)
    for name, p in model.named_parameters():
        file = io.BytesIO()
        torch.save(p, file)
        file.seek(0)
        made = [torch.load(file), copy.copy(p), copy.deepcopy(p), pickle.loads(pickle.dumps(p))]
        for other in made:
            assert type(other) is nn.Parameter and torch.equal(other, plain[name])
            other.register_post_accumulate_grad_hook(lambda param: None)
        notes = [getattr(other, "note", None) for other in (p, made[0], made[3])]
        assert notes == ["kept" if name == "head.weight" else None] * 3
        with pytest.raises(UnsupportedError, match="register_hook"):
            p.register_post_accumulate_grad_hook(lambda param: None)


def test_a_closed_session_is_what_a_read_is_refused_with(workshop: Workshop) -> None:
    model = workshop.wrap(build())
    model.lohan.close()
    with pytest.raises(HollowParameterError, match=r"'head\.weight'.*closed"):
        model.head.weight.sum()
    weight = model.head.weight
    del model
    workshop.made.clear()
    assert weight.shape == (10, WIDTH)


FOREIGN: dict[str, Callable[[Any, torch.Tensor], torch.Tensor]] = {
    "add": lambda m, x: x + m.blocks[0].norm.bias,
    "linear": lambda m, x: functional.linear(x, m.blocks[0].up.weight)[:, :WIDTH],
    "keyword": lambda m, x: functional.linear(x, weight=m.blocks[0].up.weight)[:, :WIDTH],
    "transpose": lambda m, x: x @ m.blocks[1].up.weight.T[:, :WIDTH],
    "list": lambda m, x: x + torch.stack([m.blocks[0].gain, m.blocks[1].gain]).sum(0),
    "data": lambda m, x: x * m.blocks[0].gain.data,
    "twice": lambda m, x: x * m.blocks[0].gain + m.blocks[0].gain * m.blocks[0].norm.bias,
    "loop": lambda m, x: x + 1e-3 * sum(p.square().sum() for p in m.blocks.parameters()),
}


@pytest.mark.parametrize("name", FOREIGN)
def test_a_parameter_is_brought_in_where_a_forward_first_reads_it_late(
    workshop: Workshop, name: str
) -> None:
    def loss_of(model: nn.Module, step: int) -> torch.Tensor:
        model.reads = FOREIGN[name] if step > 0 else None
        with torch.no_grad():
            evaluated = model(vectors(step + 100)).sum()
        return square_loss(model, step) + evaluated

    model = workshop.follow(Rooted, loss_of, steps=4)
    status = model.lohan.status()
    assert status["handles"] == 0 and status["pins"] == 0


def test_a_late_read_fits_the_smallest_budget(workshop: Workshop) -> None:
    def loss_of(model: nn.Module, step: int) -> torch.Tensor:
        model.reads = FOREIGN["twice"] if step > 0 else None
        return square_loss(model, step)

    workshop.follow(Rooted, loss_of, steps=4)


class Scaling(torch.autograd.Function):
    """Computes x * gain with its own backward."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, gain: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x, gain)
        return x * gain

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x, gain = ctx.saved_tensors
        return gradients[0] * gain, (gradients[0] * x).sum(0)


def test_a_parameter_is_brought_in_inside_a_function_of_the_user(workshop: Workshop) -> None:
    def loss_of(model: nn.Module, step: int) -> torch.Tensor:
        model.reads = lambda m, x: Scaling.apply(x, m.blocks[0].gain)
        return square_loss(model, step)

    workshop.follow(Rooted, loss_of)


def test_a_forward_hook_that_reads_behind_its_module_has_the_values(workshop: Workshop) -> None:
    model, plain = workshop.wrap(build()), build()
    train_step(model, 0)
    seen: dict[str, list[torch.Tensor]] = {"model": [], "plain": []}

    def watch(name: str) -> Callable[[Block, Any, Any], None]:
        return lambda module, args, output: seen[name].append(module.gain.detach().clone())

    plain.load_state_dict(model.state_dict())
    for name, watched in (("model", model), ("plain", plain)):
        for block in watched.blocks:
            block.register_forward_hook(watch(name))
        square_loss(watched, 1)
    assert len(seen["model"]) == 4
    assert all(map(torch.equal, seen["model"], seen["plain"]))


def test_a_gradient_hook_that_reads_its_parameter_has_the_values(workshop: Workshop) -> None:
    def make() -> nn.Module:
        model = Stack()
        for p in model.parameters():
            p.register_hook(lambda gradient, p=p: gradient + 0.1 * p.detach())
        return model

    workshop.follow(make)
