"""Events around a step: exceptions, interrupts, evaluation, the optimizer's own methods."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers
from lohan.common._inside import inside
from lohan.errors import StoreMismatchError, UnsupportedError
from rules_helper import (
    Stack,
    Workshop,
    assert_same_state,
    build,
    square_loss,
    train_step,
    vectors,
)
from torch import nn

# --- A step that dies ----------------------------------------------------------------------------


class Bomb(torch.autograd.Function):
    """Raises the given error in backward."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, error: BaseException) -> torch.Tensor:
        ctx.error = error
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        raise ctx.error


class Failing(Stack):
    """Raises `error` after block 1, in the forward or in the backward."""

    error: BaseException | None = None
    in_forward = True

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for index, block in enumerate(self.blocks):
            x = block(x)
            if index == 1 and self.error is not None:
                if self.in_forward:
                    raise self.error
                x = Bomb.apply(x, self.error)
        y: torch.Tensor = self.head(x)
        return y


def fail(model: nn.Module, error: BaseException, in_forward: bool) -> None:
    model.error, model.in_forward = error, in_forward
    with pytest.raises(type(error), match="planned"):
        square_loss(model, 77).backward()
    model.error = None


@pytest.mark.parametrize("host_bytes", ["minimal", None])
@pytest.mark.parametrize("in_forward", [True, False])
@pytest.mark.parametrize("error", [ValueError("planned"), KeyboardInterrupt("planned")])
def test_a_batch_that_failed_never_happened(
    error: BaseException, in_forward: bool, host_bytes: Any, workshop: Workshop
) -> None:
    expected = workshop.train(range(4), Failing)
    model = workshop.wrap(build(Failing), host_bytes=host_bytes)
    fail(model, error, in_forward)  # this includes the very first forward
    for step in range(4):
        train_step(model, step)
        fail(model, error, in_forward)
        if step == 1:
            fail(model, error, in_forward)
            model.optimizer.zero_grad()
        if step == 2:
            model.lohan.commit()
    assert model.lohan.step == 4
    assert_same_state(model.state_dict(), expected)
    model.optimizer.step()  # there is no step to close
    assert model.lohan.step == 4 and model.lohan.status()["pins"] == 0


@pytest.mark.parametrize("error", [ValueError("planned"), KeyboardInterrupt("planned")])
def test_a_failed_forward_of_a_submodule_leaves_nothing_behind(
    error: BaseException, workshop: Workshop
) -> None:
    expected = workshop.train(range(2))
    model = workshop.wrap(build())
    train_step(model, 0)

    def explode(module: nn.Module, args: Any) -> None:
        raise error

    handle = model.blocks[1].up.register_forward_pre_hook(explode)
    with pytest.raises(type(error), match="planned"):
        model.blocks[1](vectors(0))
    handle.remove()
    model.blocks[2](vectors(0))
    train_step(model, 1)
    assert_same_state(model.state_dict(), expected)


# --- Evaluation ----------------------------------------------------------------------------------


@pytest.mark.parametrize("context", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("host_bytes", ["minimal", None])
def test_an_evaluation_in_between_changes_nothing(
    context: Any, host_bytes: Any, workshop: Workshop
) -> None:
    def make() -> nn.Module:
        return nn.Sequential(Stack(), nn.Dropout(0.5), nn.Linear(10, 10))

    expected = workshop.train(range(3), make)
    model = workshop.wrap(build(make), host_bytes=host_bytes)
    plain = build(make)
    torch.manual_seed(0)
    state = torch.get_rng_state()
    for step in range(3):
        plain.load_state_dict(model.state_dict())
        with context():
            for module in (model.eval(), plain.eval()):
                module(vectors(50))
            assert torch.equal(model(vectors(51)), plain(vectors(51)))
        model.train()
        torch.set_rng_state(state)
        loss = square_loss(model, step)
        state = torch.get_rng_state()
        with context():  # this is between a forward and its backward
            model.eval()(vectors(52))
            model.train()
        loss.backward()
        model.optimizer.step()
    torch.manual_seed(0)
    again = workshop.wrap(build(make), host_bytes=host_bytes)
    torch.manual_seed(0)
    for step in range(3):
        train_step(again, step)
    assert_same_state(model.state_dict(), again.state_dict())
    assert expected.keys() == again.state_dict().keys()


class Across(nn.Linear):
    """torch chooses the kernel by whether the weight requires a gradient."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x.transpose(1, 2).contiguous().transpose(1, 2))


@pytest.mark.parametrize("context", [torch.no_grad, torch.inference_mode])
def test_an_evaluation_has_the_plain_model_s_kernels(context: Any, workshop: Workshop) -> None:
    def make() -> nn.Module:
        return nn.Sequential(Across(48, 10, bias=False), nn.Linear(10, 10))

    plain, model = build(make), workshop.wrap(build(make))
    x = torch.randn(2, 16, 48, generator=torch.Generator().manual_seed(1))
    with context():
        assert torch.equal(model(x), plain(x))


@pytest.mark.parametrize("host_bytes", ["minimal", None])
def test_generation_in_between_is_the_plain_models(host_bytes: Any, workshop: Workshop) -> None:
    def make() -> nn.Module:
        config = transformers.GPT2Config(
            n_embd=32,
            n_layer=3,
            n_head=4,
            n_positions=32,
            vocab_size=128,
            bos_token_id=0,
            eos_token_id=0,
        )
        return transformers.GPT2LMHeadModel(config)

    tokens = torch.randint(1, 128, (2, 8))

    def loss_of(model: nn.Module, step: int) -> torch.Tensor:
        torch.manual_seed(step)
        loss: torch.Tensor = model(input_ids=tokens, labels=tokens).loss
        return loss

    def generate(model: nn.Module) -> torch.Tensor:
        model.eval()
        with torch.no_grad():
            made: torch.Tensor = model.generate(
                tokens, max_new_tokens=8, do_sample=False, pad_token_id=0
            )
        model.train()
        return made

    expected = workshop.train(range(2), make, loss_of)
    model = workshop.wrap(build(make), host_bytes=host_bytes, lr=1e-2)
    plain = build(make)
    for step in range(2):
        assert torch.equal(generate(model), generate(plain))
        train_step(model, step, loss_of)
        plain.load_state_dict(model.state_dict())
    assert torch.equal(generate(model), generate(plain))
    assert_same_state(model.state_dict(), expected)


# --- The optimizer -------------------------------------------------------------------------------


def test_groups_have_their_own_hyper_parameters(workshop: Workshop) -> None:
    def groups(model: nn.Module) -> list[dict[str, Any]]:
        decayed = [p for p in model.parameters() if p.dim() == 2]
        others = [p for p in model.parameters() if p.dim() != 2]
        return [
            {"params": decayed, "lr": 1e-2, "weight_decay": 0.5},
            {"params": others, "lr": 1e-3, "weight_decay": 0.0, "betas": (0.8, 0.9), "eps": 1e-6},
        ]

    plain = build()
    reference = torch.optim.AdamW(groups(plain), foreach=False)
    model = build()
    model = workshop.wrap(model, params=groups(model))
    assert [g["lr"] for g in model.optimizer.param_groups] == [1e-2, 1e-3]
    for step in range(3):
        train_step(model, step)
        square_loss(plain, step).backward()
        reference.step()
        reference.zero_grad()
        for name, value in model.state_dict().items():
            torch.testing.assert_close(value, plain.state_dict()[name], rtol=1e-5, atol=1e-6)


def test_a_scheduler_sets_the_learning_rate(workshop: Workshop) -> None:
    def train(with_scheduler: bool) -> dict[str, torch.Tensor]:
        model = workshop.wrap(build(), lr=1e-2)
        rates = [1e-2, 5e-3, 2.5e-3]
        scheduler = torch.optim.lr_scheduler.ExponentialLR(model.optimizer, 0.5)
        for step in range(3):
            if not with_scheduler:
                model.optimizer.param_groups[0]["lr"] = rates[step]
            assert model.optimizer.param_groups[0]["lr"] == rates[step]
            train_step(model, step)
            if with_scheduler:
                scheduler.step()
        return dict(model.state_dict())

    assert_same_state(train(True), train(False))


def test_step_calls_a_closure(workshop: Workshop) -> None:
    expected = workshop.train(range(2))
    model = workshop.wrap(build())
    for step in range(2):

        def closure(step: int = step) -> torch.Tensor:
            model.optimizer.zero_grad()
            loss = square_loss(model, step)
            loss.backward()
            return loss

        with torch.no_grad():
            assert model.optimizer.step(closure).item() > 0
    assert_same_state(model.state_dict(), expected)


def test_zero_grad_where_torch_has_it_does_nothing(workshop: Workshop) -> None:
    expected = workshop.train(range(2))
    model = workshop.wrap(build())
    for step in range(2):
        model.optimizer.zero_grad()
        model.zero_grad(set_to_none=True)
        loss = square_loss(model, step)
        model.optimizer.zero_grad()
        loss.backward()
        model.optimizer.step()
        model.optimizer.zero_grad()
    assert_same_state(model.state_dict(), expected)


def test_the_optimizers_state_dict_carries_groups_and_its_place(workshop: Workshop) -> None:
    model = workshop.wrap(build())
    train_step(model, 0)
    state = model.optimizer.state_dict()
    assert state["lohan"] == {"store": inside(model).uuid, "step": 1} and state["state"] == {}
    state["param_groups"][0]["lr"] = 0.0
    state["param_groups"][0]["weight_decay"] = 0.0
    model.optimizer.load_state_dict(state)
    before = model.state_dict()
    train_step(model, 1)  # this uses the learning rate that was loaded
    assert_same_state(model.state_dict(), before)
    with pytest.raises(StoreMismatchError, match="step"):
        model.optimizer.load_state_dict(state)
    with pytest.raises(StoreMismatchError, match="not that of a wrapped model"):
        model.optimizer.load_state_dict(torch.optim.AdamW(build().parameters()).state_dict())
    with pytest.raises(UnsupportedError, match="params="):
        model.optimizer.add_param_group({"params": [nn.Parameter(torch.ones(1))]})


def test_gradients_go_without_a_step_are_those_of_the_last_batch(workshop: Workshop) -> None:
    """A forward whose loss is discarded is not a step."""
    expected = workshop.train(range(2))
    model = workshop.wrap(build(), host_bytes="minimal")
    for step in range(2):
        square_loss(model, step + 10)
        train_step(model, step)
        model.optimizer.step()
    assert model.lohan.step == 2
    assert_same_state(model.state_dict(), expected)
