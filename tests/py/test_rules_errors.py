"""What lohan cannot do correctly it refuses, with a named error and before any damage."""

from __future__ import annotations

import itertools
from typing import Any

import lohan
import pytest
import torch
from lohan.common._inside import inside
from lohan.errors import (
    BudgetError,
    FrozenParameterError,
    GradientError,
    HyperParameterError,
    LentError,
    ModelError,
    OffloadedGradientError,
    SecondBackwardError,
    SessionError,
    StaleGraphError,
    StepError,
    UnsupportedError,
    ZeroGradError,
)
from rules_helper import (
    WIDTH,
    Stack,
    Workshop,
    assert_same_state,
    build,
    square_loss,
    train_step,
    vectors,
)
from torch import nn


@pytest.fixture
def trained(workshop: Workshop) -> nn.Module:
    """A wrapped model after one step."""
    model = workshop.wrap(build())
    train_step(model, 0)
    return model


def assert_continues(model: nn.Module, workshop: Workshop, steps: Any = (0, 1, 2)) -> None:
    """Two more steps, after which the model is as if nothing had been refused."""
    train_step(model, 1)
    train_step(model, 2)
    assert_same_state(model.state_dict(), workshop.train(steps))


def test_clipping_finds_no_gradients(trained: nn.Module, workshop: Workshop) -> None:
    square_loss(trained, 1).backward()
    for foreach in (None, True, False):
        with pytest.raises(OffloadedGradientError, match=r"^\w+_norm reads .* clip_grad_norm_"):
            nn.utils.clip_grad_norm_(trained.parameters(), 1.0, foreach=foreach)
    with pytest.raises(OffloadedGradientError):
        nn.utils.clip_grad_value_(trained.parameters(), 1.0)
    trained.optimizer.step()
    assert_continues_from(trained, workshop, [0, 1])


def assert_continues_from(model: nn.Module, workshop: Workshop, steps: list[int]) -> None:
    """Train one more step after these."""
    train_step(model, 9)
    assert_same_state(model.state_dict(), workshop.train([*steps, 9]))


def test_reading_a_gradient_says_where_it_went(trained: nn.Module) -> None:
    square_loss(trained, 1).backward()
    gradient = trained.head._parameters["weight"].grad
    assert gradient.shape == (10, WIDTH) and gradient.dtype == torch.float32
    assert "HollowGradient" in repr(gradient)
    reads = [
        lambda: gradient.norm(),
        lambda: gradient + 1,
        lambda: gradient.mul_(0.5),
        lambda: gradient.detach(),
        lambda: torch._foreach_norm([gradient]),
        lambda: gradient.sum().item(),
        lambda: gradient.tolist(),
        lambda: gradient.numpy(),
    ]
    for read in reads:
        with pytest.raises(OffloadedGradientError, match="sent to the optimizer"):
            read()
    trained.optimizer.step()


def test_a_gradient_scaler_is_refused(trained: nn.Module) -> None:
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(square_loss(trained, 1)).backward()
    with pytest.raises(OffloadedGradientError, match="GradScaler"):
        scaler.step(trained.optimizer)
    disabled = torch.amp.GradScaler("cpu", enabled=False)
    disabled.step(trained.optimizer)


def test_another_optimizer_is_refused(trained: nn.Module, workshop: Workshop) -> None:
    others = [torch.optim.AdamW(trained.parameters()), torch.optim.SGD([*trained.parameters()])]
    for other in others:
        with pytest.raises(OffloadedGradientError, match=r"use model\.optimizer"):
            other.step()
    square_loss(trained, 1).backward()
    for other in others:
        with pytest.raises(OffloadedGradientError, match=r"blocks\.0\.gain"):
            other.step()
    trained.optimizer.step()
    assert_continues_from(trained, workshop, [0, 1])
    free = build()
    torch.optim.AdamW(free.parameters()).step()


def test_a_second_backward_is_refused(trained: nn.Module, workshop: Workshop) -> None:
    loss = square_loss(trained, 1)
    loss.backward(retain_graph=True)
    with pytest.raises(SecondBackwardError, match="second backward"):
        loss.backward()
    trained.optimizer.zero_grad()
    assert_continues(trained, workshop)


def test_a_second_backward_of_a_bias_alone_is_refused(workshop: Workshop) -> None:
    model = workshop.wrap(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 1)))
    x = vectors(0)
    losses = [model(x).sum(), model(x).sum()]
    losses[0].backward()
    with pytest.raises(SecondBackwardError, match="second backward"):
        losses[1].backward()


def test_a_forward_before_step_is_refused(trained: nn.Module, workshop: Workshop) -> None:
    square_loss(trained, 1).backward()
    for forward in (lambda: square_loss(trained, 2), lambda: trained.blocks[0](vectors(0))):
        with pytest.raises(SecondBackwardError, match=r"optimizer\.step\(\)"):
            forward()
    with pytest.raises(StepError, match=r"optimizer\.step\(\)"):
        trained.state_dict()
    trained.optimizer.step()
    assert_continues_from(trained, workshop, [0, 1])


def test_zero_grad_after_backward_is_refused(trained: nn.Module, workshop: Workshop) -> None:
    square_loss(trained, 1).backward()
    for zero_grad in (trained.optimizer.zero_grad, trained.zero_grad):
        with pytest.raises(ZeroGradError, match="updates of this step have begun"):
            zero_grad()
    trained.optimizer.step()
    assert_continues_from(trained, workshop, [0, 1])


def test_hyper_parameters_cannot_change_in_a_step(trained: nn.Module, workshop: Workshop) -> None:
    group = trained.optimizer.param_groups[0]
    square_loss(trained, 1).backward()
    for name, value in {"lr": 0.5, "weight_decay": 0.9, "betas": (0.1, 0.2), "eps": 1.0}.items():
        old, group[name] = group[name], value
        with pytest.raises(HyperParameterError, match="changed between backward and step"):
            trained.optimizer.step()
        group[name] = old
    trained.optimizer.step()
    assert_continues_from(trained, workshop, [0, 1])


def test_hyper_parameters_out_of_range_are_refused(trained: nn.Module, workshop: Workshop) -> None:
    group = trained.optimizer.param_groups[0]
    for name, value in {"lr": -1.0, "eps": float("nan"), "betas": (0.9, 1.0)}.items():
        old, group[name] = group[name], value
        with pytest.raises(HyperParameterError):
            square_loss(trained, 1).backward()
        group[name] = old
    assert_continues(trained, workshop)


def test_a_sparse_gradient_is_refused(workshop: Workshop) -> None:
    model = workshop.wrap(nn.Sequential(nn.Embedding(64, WIDTH, sparse=True), nn.Linear(WIDTH, 4)))
    with pytest.raises(GradientError, match=r"0\.weight.*sparse"):
        model(torch.tensor([[1, 2]])).sum().backward()


def test_several_processes_without_a_rendezvous_are_refused_by_name(
    monkeypatch: pytest.MonkeyPatch, workshop: Workshop
) -> None:
    for name in ("RANK", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ModelError, match="but RANK, MASTER_ADDR, MASTER_PORT is not set"):
        workshop.wrap(build())
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("MASTER_PORT", "29500")
    with pytest.raises(ModelError, match=r"WORLD_SIZE is 2, but MASTER_ADDR is not set.*torchrun"):
        workshop.wrap(build())
    with monkeypatch.context() as build_of_torch:
        build_of_torch.setattr(torch.distributed, "is_available", lambda: False)
        with pytest.raises(UnsupportedError, match=r"WORLD_SIZE=2 needs torch\.distributed, which"):
            workshop.wrap(build())
    monkeypatch.setenv("WORLD_SIZE", "1")
    workshop.wrap(build())


def test_a_compiled_model_is_refused_with_the_plain_one_named(workshop: Workshop) -> None:
    def refuses(model: Any, said: str) -> None:
        with pytest.raises(UnsupportedError, match=said) as told:
            workshop.wrap(model)
        if "scripted" not in said:
            assert "A wrapped model runs uncompiled, also if torch.compile() is" in str(told.value)

    refuses(torch.compile(build()), r"the model was compiled .* module, model\._orig_mod, instead")
    in_place = build()
    in_place.compile()
    refuses(in_place, r"the model was compiled before lohan\.wrap\(\): .* without the call of comp")
    inside = build()
    inside.blocks[1] = torch.compile(inside.blocks[1])
    refuses(inside, r"'blocks\.1' was compiled .*model\.blocks\.1\._orig_mod")
    inside = build()
    inside.blocks[1].compile()
    refuses(inside, r"'blocks\.1' was compiled")
    refuses(torch.jit.script(nn.Linear(2, 2)), "the model is scripted")


def test_a_model_is_wrapped_once(workshop: Workshop) -> None:
    model = workshop.wrap(build())
    with pytest.raises(UnsupportedError, match="already wrapped"):
        lohan.wrap(model, store=workshop.folder / "again")


def test_a_view_that_was_kept_is_named(workshop: Workshop) -> None:
    class Keeping(Stack):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y: torch.Tensor = super().forward(x)
            if self.keeps:
                self.kept = self.blocks[2]._forward_view
            return y

        keeps = False

    model = build(Keeping)
    model.blocks[2].register_forward_hook(
        lambda module, args, output: setattr(
            module, "_forward_view", module.up.weight.detach()[0] if model.keeps else None
        )
    )
    model = workshop.wrap(model)
    train_step(model, 0)
    model.keeps = True
    square_loss(model, 1).backward()
    with pytest.raises(LentError, match=r"blocks\.2"):
        model.optimizer.step()
    model.keeps = False
    model.kept = model.blocks[2]._forward_view = None
    model.optimizer.step()
    assert_same_state(model.state_dict(), workshop.train([0, 1]))


def test_a_graph_from_before_step_is_stale(workshop: Workshop) -> None:
    model = workshop.wrap(build())
    old = square_loss(model, 5)
    train_step(model, 0)
    with pytest.raises(StaleGraphError, match="step"):
        old.backward()
    del old
    assert_continues(model, workshop)


def test_a_frozen_parameter_cannot_be_thawed(workshop: Workshop) -> None:
    model = build()
    model.blocks[1].requires_grad_(False)
    model = workshop.wrap(model)
    train_step(model, 0)
    model.blocks[1].up.requires_grad_(True)
    with pytest.raises(FrozenParameterError, match=r"blocks\.1\.up\.weight"):
        square_loss(model, 1)
    model.blocks[1].up.requires_grad_(False)
    train_step(model, 1)


def test_a_frozen_parameter_keeps_its_value_if_a_loop_changes_it(workshop: Workshop) -> None:
    model = build()
    model.blocks[1].requires_grad_(False)
    model = workshop.wrap(model)
    before = square_loss(model, 5).item()
    with (
        pytest.raises(FrozenParameterError, match=r"blocks\.1\.gain'.* cannot be written again"),
        torch.no_grad(),
    ):
        for name, param in model.named_parameters():
            if name.startswith("blocks.1."):
                param.add_(1)
    assert square_loss(model, 5).item() == before
    train_step(model, 0)


def test_a_trained_parameter_may_be_frozen_later(workshop: Workshop) -> None:
    model = workshop.wrap(build(), weight_decay=0.1)
    train_step(model, 0)
    model.blocks[1].requires_grad_(False)
    before = model.state_dict()
    train_step(model, 1)
    for name, value in model.state_dict().items():
        assert torch.equal(value, before[name]) == (".1." in name), name
    model.blocks[1].requires_grad_(True)
    train_step(model, 2)
    assert not torch.equal(model.state_dict()["blocks.1.gain"], before["blocks.1.gain"])


def test_a_closed_session_says_so(trained: nn.Module) -> None:
    trained.lohan.close()
    calls = [
        lambda: square_loss(trained, 1),
        lambda: trained.state_dict(),
        lambda: trained.optimizer.step(),
        lambda: trained.lohan.commit(),
        lambda: trained.blocks[0](vectors(0)),
    ]
    for call in calls:
        with pytest.raises(SessionError, match="closed"):
            call()


def test_every_refusal_names_a_way_out() -> None:
    """Errors of a step derive from one class, and from the built-in that torch would raise."""
    kinds = [OffloadedGradientError, SecondBackwardError, StaleGraphError, ZeroGradError, LentError]
    assert all(issubclass(kind, StepError) for kind in kinds)
    assert issubclass(StepError, RuntimeError)
    assert not any(issubclass(a, b) for a, b in itertools.permutations(kinds, 2))


def test_a_read_that_the_budget_refuses_leaves_the_session_as_it_was(workshop: Workshop) -> None:
    model = workshop.wrap(build(Stack), host_bytes="minimal")
    train_step(model, 0)
    for _ in range(3):
        with pytest.raises(BudgetError, match=r"needs \d+ bytes .* in one piece, and \d+ units"):
            nn.utils.parameters_to_vector(model.parameters())
    train_step(model, 1)
    lends: list[torch.Tensor] = []
    with pytest.raises(BudgetError):  # only as many as have room, wherever they are placed
        lends.extend(
            inside(model).parameters.lend(i) for i in range(len(inside(model).layout.params))
        )
    with pytest.raises(BudgetError, match="delete tensors"):
        model(vectors(2))
    del lends
    model.optimizer.zero_grad()
    train_step(model, 2)
    assert_same_state(dict(model.state_dict()), workshop.train(range(3)))
    assert model.lohan.step == 3


class Shared(nn.Module):
    """A block that reads a parameter of the surrounding model, and has a large one itself."""

    def __init__(self, scale: nn.Parameter) -> None:
        super().__init__()
        self.scale = scale
        self.own = nn.Parameter(torch.full(scale.shape, 2.0))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.scale * self.own


class Forgiving(nn.Module):
    """A model that continues without the blocks for which there is no room."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.full((1 << 16,), 3.0))
        self.blocks = nn.ModuleList(Shared(self.scale) for _ in range(8))
        self.refused_count = 0
        self.kinds: set[type] = set()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x * self.scale
        for block in self.blocks:
            try:
                x = block(x)
            except BudgetError:
                self.refused_count += 1
                self.kinds.add(type(self.scale))
        return x


def test_a_block_that_is_refused_leaves_the_units_of_the_scope_around_it(
    workshop: Workshop,
) -> None:
    model = workshop.wrap(Forgiving(), host_bytes="minimal")
    lends = [inside(model).parameters.lend(i) for i in (3, 4, 5)]
    with torch.no_grad():
        y = model(torch.ones(1 << 16))
    del lends
    assert model.refused_count == 5
    assert model.kinds == {nn.Parameter}
    assert torch.equal(y, torch.full((1 << 16,), 3.0 * 6.0**3))
