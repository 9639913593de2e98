"""Changes of parameters, gradients and groups from outside are exact, or refused by name."""

from __future__ import annotations

import signal
from typing import Any

import lohan
import pytest
import torch
from lohan.common._inside import inside
from lohan.errors import (
    HyperParameterError,
    OffloadedGradientError,
    StaleGraphError,
    UnsupportedError,
    ZeroGradError,
)
from lohan.session import _training
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

# --- Wrapping ------------------------------------------------------------------------------------


class Scaled(Stack):
    """A learned factor without dimensions, as CLIP's logit_scale, and one that is never trained."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(2.0))
        self.shift = nn.Parameter(torch.tensor(0.5), requires_grad=False)
        self.inner = nn.ModuleList(nn.PReLU() for _ in range(2))
        for layer in self.inner:
            layer.weight = nn.Parameter(torch.tensor(0.25))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = super().forward(x) * self.scale.exp() + self.shift
        for layer in self.inner:
            y = y * layer.weight + y.tanh()
        return y


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_parameter_without_dimensions_is_trained_as_any_other(
    dtype: torch.dtype, workshop: Workshop
) -> None:
    def flat() -> nn.Module:
        """Return the same model, with one dimension of size one for each scalar."""
        model = Scaled().to(dtype)
        model.scale = nn.Parameter(model.scale.detach().reshape(1))
        for layer in model.inner:
            layer.weight = nn.Parameter(layer.weight.detach().reshape(1))
        return model

    model = workshop.follow(lambda: Scaled().to(dtype))
    state = model.state_dict()
    assert state["scale"].shape == () and state["scale"] != torch.tensor(2.0, dtype=dtype)
    expected = workshop.train(range(3), flat, host_bytes="minimal")
    assert_same_state({n: v.reshape(expected[n].shape) for n, v in state.items()}, expected)
    assert dict(model.named_parameters())["scale"].dim() == 0


def test_a_parameter_without_dimensions_is_made_by_init_and_resumed(workshop: Workshop) -> None:
    def fill(module: nn.Module) -> None:
        for tensor in module._parameters.values():
            assert tensor is not None
            nn.init.constant_(tensor, 0.5)

    with lohan.empty():
        model = Scaled()
    model = workshop.wrap(model, init=fill)
    train_step(model, 0)
    state = dict(model.state_dict())
    assert state["scale"].shape == () and state["shift"] == 0.5
    model.lohan.close()
    with lohan.empty():
        again = Scaled()
    again = lohan.wrap(again, store=workshop.folder / "store0", resume=True, weights="unused")
    workshop.made.append(again)
    assert_same_state(again.state_dict(), state)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("place", ["named", "temporary"])
def test_a_wrap_that_fails_leaves_the_model_its_values(
    place: str, dtype: torch.dtype, workshop: Workshop, monkeypatch: pytest.MonkeyPatch
) -> None:
    def planned(*args: Any) -> None:
        raise MemoryError("planned")

    store = workshop.folder / "failing" if place == "named" else None
    model = build(Scaled).to(dtype)
    model.blocks[2].requires_grad_(False)
    expected = {name: value.clone() for name, value in model.state_dict().items()}
    for name in ("hollow", "nan_array", "unit_tuples"):
        monkeypatch.setattr(_training, name, planned)
        with pytest.raises(MemoryError, match="planned") as failed:
            lohan.wrap(model, store=store)
        assert store is None or "resume=True" in failed.value.__notes__[0]
        monkeypatch.undo()
        assert_same_state(model.state_dict(), expected)
        if store is not None:
            (store / "lohan.data").unlink()
    square_loss(model, 0).backward()
    assert model.scale.grad is not None


class Pair(nn.Module):
    """A model that contains others."""

    def __init__(self, first: nn.Module, second: nn.Module) -> None:
        super().__init__()
        self.first, self.second = first, second

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.first(x) + self.second(x)
        return y


@pytest.mark.parametrize("is_closed", [False, True])
def test_what_is_partly_wrapped_is_not_wrapped_again(is_closed: bool, workshop: Workshop) -> None:
    model = build()
    parent = Pair(model, build())
    workshop.wrap(model)
    train_step(model, 0)
    if is_closed:
        model.lohan.close()
    other = build()
    other.head = model.head
    tied = build()
    tied.blocks[1].up.weight = model.blocks[2].up.weight
    for again in (model.blocks[0], parent, other, tied):
        with pytest.raises(UnsupportedError, match=r"already wrapped: call lohan\.unwrap"):
            lohan.wrap(again, store=workshop.folder / "again")
    assert not (workshop.folder / "again").exists()
    if not is_closed:
        train_step(model, 1)
        assert_same_state(model.state_dict(), workshop.train(range(2)))


def test_a_trainable_parameter_that_is_added_after_wrap_is_refused(workshop: Workshop) -> None:
    model = workshop.wrap(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)))
    batch = torch.ones(1, 4)
    for _ in range(2):
        model(batch).sum().backward()
        model.optimizer.step()
    model[0].extra = nn.Linear(4, 4)
    model[0].extra.requires_grad_(False)
    model(batch)  # frozen parameters need no training
    model[0].extra.weight.requires_grad_(True)
    with torch.no_grad():
        model(batch)
    for _ in range(2):
        with pytest.raises(UnsupportedError, match=r"'0\.extra\.weight' was added after"):
            model(batch)
    assert model.lohan.step == 2
    lohan.unwrap(model)  # the remedy that the message names
    model = workshop.wrap(model)
    assert "0.extra.weight" in {param.name for param in inside(model).layout.params}
    model(batch).sum().backward()
    model.optimizer.step()


def test_an_adapter_that_is_added_after_wrap_is_refused(workshop: Workshop) -> None:
    from peft import LoraConfig, get_peft_model

    model = workshop.wrap(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)))
    adapted = get_peft_model(model, LoraConfig(target_modules=["0"], r=2))
    with pytest.raises(UnsupportedError, match=r"lora_A.*was added after lohan\.wrap\(\)"):
        adapted(torch.ones(1, 4))


def test_what_was_unwrapped_may_be_part_of_another_model(workshop: Workshop) -> None:
    model = workshop.wrap(build())
    session = model.lohan  # a reference to it must not keep others from using the parameters
    lohan.unwrap(model)
    workshop.made.clear()
    pair = lohan.wrap(Pair(model, build()), store=workshop.folder / "pair")
    workshop.made.append(pair)
    train_step(pair, 0)
    assert "closed" in repr(session) and pair.state_dict()["first.head.weight"].isfinite().all()


def test_the_parts_of_a_wrapped_model_go_with_it(workshop: Workshop) -> None:
    """A module that outlives its wrapped model is hollow: it is refused, not stored as NaN."""
    model = workshop.wrap(build())
    block = model.blocks[0]
    workshop.made.clear()
    del model
    with pytest.raises(UnsupportedError, match="already wrapped"):
        lohan.wrap(block, store=workshop.folder / "again")


# --- Gradients -----------------------------------------------------------------------------------


@pytest.fixture
def trained(workshop: Workshop) -> nn.Module:
    """A wrapped model after one step."""
    model = workshop.wrap(build())
    train_step(model, 0)
    return model


def assert_continues(model: nn.Module, workshop: Workshop, steps: list[int]) -> None:
    """Train one more step, as if nothing had been refused."""
    train_step(model, 9)
    assert_same_state(model.state_dict(), workshop.train([*steps, 9]))


@pytest.mark.parametrize("edit", ["none", "replaced"])
def test_an_edit_of_a_gradient_after_backward_is_refused(
    edit: str, trained: nn.Module, workshop: Workshop
) -> None:
    square_loss(trained, 1).backward()
    weight = trained.blocks[2]._modules["up"]._parameters["weight"]
    weight.grad = None if edit == "none" else torch.ones(weight.shape)
    with pytest.raises(
        OffloadedGradientError, match=rf"blocks\.2\.up\.weight.*(?i:{edit})"
    ) as told:
        trained.optimizer.step()
    assert "register_hook" in str(told.value)
    trained.optimizer.step()  # the step undoes the edit
    assert weight.grad is None
    assert_continues(trained, workshop, [0, 1])


@pytest.mark.parametrize("unused", ["frozen", "trainable"])
def test_a_gradient_set_by_hand_is_refused(
    unused: str, trained: nn.Module, workshop: Workshop
) -> None:
    bias = trained.head._parameters["bias"]
    bias.requires_grad_(unused == "trainable")
    bias.grad = torch.ones(10)
    with pytest.raises(OffloadedGradientError, match=r"head\.bias.*was set"):
        trained.optimizer.step()
    if unused == "frozen":  # torch would update it with the existing gradient
        square_loss(trained, 1).backward()
        with pytest.raises(OffloadedGradientError, match=r"head\.bias.*replaced"):
            trained.optimizer.step()
        trained.optimizer.step()
        return
    trained.blocks[0].zero_grad()
    with pytest.raises(OffloadedGradientError, match=r"head\.bias.*zero_grad"):
        trained.optimizer.step()
    for forget in (trained.zero_grad, trained.head.zero_grad, trained.optimizer.zero_grad):
        bias.grad = torch.ones(10)
        forget()
        assert bias.grad is None
    trained.optimizer.step()
    assert_continues(trained, workshop, [0])


@pytest.mark.filterwarnings("ignore:grad and param do not obey")
def test_a_gradient_set_before_backward_is_added_to_as_torch_does(workshop: Workshop) -> None:
    def train(model: nn.Module, optimizer: torch.optim.Optimizer) -> nn.Module:
        for step in range(2):
            model.head._parameters["bias"].grad = torch.ones(10)
            weight = model.head._parameters["weight"]
            values = torch.linspace(-1, 1, weight.numel())
            weight.grad = values.view(weight.shape[::-1]).t()  # a gradient with different strides
            square_loss(model, step).backward()
            optimizer.step()
            optimizer.zero_grad()
        return model

    plain = build()
    train(plain, torch.optim.AdamW(plain.parameters(), lr=1e-2, foreach=False))
    model = workshop.wrap(build())
    state = train(model, model.optimizer).state_dict()
    expected = plain.state_dict()
    for name, value in state.items():
        torch.testing.assert_close(value, expected[name], rtol=1e-5, atol=1e-6)


def test_gradients_of_ones_own_reach_the_optimizer_through_autograd(workshop: Workshop) -> None:
    """The remedy that the refusal names works after a step, and as the very first call."""
    expected = workshop.wrap(build())
    model = workshop.wrap(build())
    names, tensors = zip(*nn.Module.named_parameters(model), strict=True)
    for step in range(3):
        taken = torch.autograd.grad(square_loss(expected, step), [*nn.Module.parameters(expected)])
        train_step(expected, step)
        torch.autograd.backward(tensors, taken)
        model.optimizer.step()
        assert_same_state(model.state_dict(), expected.state_dict())
    assert len(names) == len(taken)


def test_no_part_of_a_model_forgets_its_gradients_in_a_step(
    trained: nn.Module, workshop: Workshop
) -> None:
    square_loss(trained, 1).backward()
    for module in (trained.blocks[0], trained.blocks[0].up, trained.blocks, trained.head):
        with pytest.raises(ZeroGradError, match="updates of this step have begun"):
            module.zero_grad()
    trained.optimizer.step()
    trained.blocks[0].zero_grad()
    assert_continues(trained, workshop, [0, 1])


def test_a_hook_behind_accumulation_is_refused(workshop: Workshop) -> None:
    seen: list[torch.Tensor] = []
    model = build()
    weight = model.head.weight
    weight.register_post_accumulate_grad_hook(lambda param: seen.append(param.grad.clone()))
    model = workshop.wrap(model)
    with pytest.raises(UnsupportedError, match=r"head\.weight.*register_hook"):
        weight.register_post_accumulate_grad_hook(lambda param: None)
    weight.register_hook(lambda gradient: seen.append(gradient.clone()))
    train_step(model, 0)
    assert len(seen) == 2 and torch.equal(*seen) and seen[0].any()
    assert_same_state(model.state_dict(), workshop.train([0]))
    lohan.unwrap(model)
    workshop.made.remove(model)
    weight.register_post_accumulate_grad_hook(lambda param: None).remove()


def test_a_backward_that_keeps_its_graph_is_refused_by_name(
    trained: nn.Module, workshop: Workshop
) -> None:
    with pytest.raises(UnsupportedError, match="create_graph=True"):
        square_loss(trained, 1).backward(create_graph=True)
    trained.optimizer.zero_grad()
    assert_continues(trained, workshop, [0])


def test_a_penalty_on_a_gradient_is_the_plain_models(workshop: Workshop) -> None:
    """This is the remedy that the refusal names."""

    def penalty(model: nn.Module, step: int) -> torch.Tensor:
        x = vectors(step).requires_grad_()
        loss = model(x).square().mean()
        (gradient,) = torch.autograd.grad(loss, x, create_graph=True)
        total: torch.Tensor = loss + gradient.square().sum()
        return total

    workshop.follow(loss_of=penalty, host_bytes=None)


# --- Parameter groups ----------------------------------------------------------------------------


def split(model: nn.Module) -> list[dict[str, Any]]:
    """Two groups: matrices and all other parameters."""
    params = [*model.parameters()]
    return [
        {"params": [p for p in params if p.dim() == 2], "weight_decay": 0.5},
        {"params": [p for p in params if p.dim() != 2]},
    ]


def remove_one(groups: list[dict[str, Any]]) -> str:
    del groups[0]["params"][1]
    return "group 0 has other parameters"


def move_one(groups: list[dict[str, Any]]) -> str:
    groups[1]["params"].append(groups[0]["params"].pop())
    return "group 0 has other parameters"


def delete_group(groups: list[dict[str, Any]]) -> str:
    del groups[1]
    return "1 parameter groups instead of 2"


def append_group(groups: list[dict[str, Any]]) -> str:
    groups.append({**groups[0], "params": [nn.Parameter(torch.ones(1))]})
    return "3 parameter groups instead of 2"


@pytest.mark.parametrize("schedule", ["optimized", "serial"])
@pytest.mark.parametrize("edit", [remove_one, move_one, delete_group, append_group])
def test_the_members_of_groups_are_fixed_at_wrap(
    edit: Any, schedule: str, workshop: Workshop
) -> None:
    def train(with_edit: bool) -> nn.Module:
        model = build()
        model = workshop.wrap(model, params=split(model), schedule=schedule)
        train_step(model, 0)
        loss = square_loss(model, 1)
        if with_edit:
            whole = [{**g, "params": [*g["params"]]} for g in model.optimizer.param_groups]
            said = edit(model.optimizer.param_groups)
            with pytest.raises(HyperParameterError, match=said):
                loss.backward()
            model.optimizer.param_groups[:] = whole
            model.optimizer.zero_grad()
            loss = square_loss(model, 1)
        loss.backward()
        if with_edit:
            whole = [{**g, "params": [*g["params"]]} for g in model.optimizer.param_groups]
            said = edit(model.optimizer.param_groups)
            with pytest.raises(HyperParameterError, match=said):
                model.optimizer.step()
            model.optimizer.param_groups[:] = whole
        for group in model.optimizer.param_groups:
            group["params"].reverse()  # this does not change the set of members
        model.optimizer.step()
        train_step(model, 2)
        return model

    assert_same_state(train(True).state_dict(), train(False).state_dict())


@pytest.mark.parametrize("key", ["amsgrad", "maximize", "momentum"])
def test_a_group_that_asks_for_another_rule_is_refused(key: str, workshop: Workshop) -> None:
    model = build()
    off: Any = 0 if key == "momentum" else False
    for value in (0.5,) if key == "momentum" else (True, 0.5):
        with pytest.raises(UnsupportedError, match=f"{key}={value}"):
            workshop.wrap(model, params=[{"params": [*model.parameters()], key: value}])
    groups = [{"params": [*model.parameters()], key: off, "name": "all", "foreach": True}]
    model = workshop.wrap(model, params=groups)
    model.optimizer.param_groups[0][key] = value
    with pytest.raises(UnsupportedError, match=f"{key}={value}"):
        square_loss(model, 0).backward()
    model.optimizer.param_groups[0][key] = off
    train_step(model, 0)
    assert_same_state(model.state_dict(), workshop.train([0]))


# --- Parameters, inside a forward ----------------------------------------------------------------


@pytest.mark.parametrize("kind", [nn.Embedding, nn.EmbeddingBag])
@pytest.mark.parametrize("trainable", [True, False])
def test_rows_that_the_forward_limits_in_place_are_refused(
    kind: Any, trainable: bool, workshop: Workshop
) -> None:
    model = nn.Sequential(kind(16, WIDTH, max_norm=1.0), nn.Linear(WIDTH, 4))
    model[0].requires_grad_(trainable)
    with pytest.raises(UnsupportedError, match=rf"0 is an {kind.__name__} with max_norm=1\.0"):
        workshop.wrap(model)
    with pytest.raises(UnsupportedError, match="the model is"):
        workshop.wrap(model[0])
    model[0].max_norm = None
    workshop.wrap(model)


class Clamped(Stack):
    """Changes a parameter in place inside its forward on request."""

    where = ""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(WIDTH))
        for block in self.blocks:
            block.norm.register_forward_pre_hook(lambda module, args: self.clamp("norm", module))

    def clamp(self, where: str, module: nn.Module) -> None:
        if where == self.where:
            with torch.no_grad():
                module.weight.mul_(0.5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.where == "root":
            with torch.no_grad():
                self.scale.mul_(0.5)
        y: torch.Tensor = super().forward(x * self.scale)
        if self.where == "norm" and self.fails:
            raise ValueError("planned")
        return y

    fails = False


@pytest.mark.parametrize("host_bytes", ["minimal", None])
@pytest.mark.parametrize("where", ["norm", "root"])
@pytest.mark.parametrize("grad", [True, False])
def test_a_change_in_place_inside_a_forward_is_refused_and_forgotten(
    grad: bool, where: str, host_bytes: Any, workshop: Workshop
) -> None:
    expected = workshop.train(range(3), Clamped)
    model = workshop.wrap(build(Clamped), host_bytes=host_bytes)
    for step in range(2):
        kept = square_loss(model, step) if step == 0 else None
        model.lohan.flush()  # otherwise the change may reach an update that is being written
        model.where = where
        name = r"scale" if where == "root" else r"blocks\.0\.norm\.weight"
        with torch.set_grad_enabled(grad):
            with pytest.raises(UnsupportedError, match=f"{name}' was changed in place"):
                model(vectors(7))
            model.fails = where == "norm"
            with pytest.raises(ValueError if model.fails else UnsupportedError):
                model(vectors(7))
        model.where, model.fails = "", False
        if step == 0:
            state = model.state_dict()
            assert torch.equal(state["scale"], torch.ones(WIDTH))
            assert torch.equal(state["blocks.1.norm.weight"], torch.ones(WIDTH))
        del kept
        train_step(model, step)
    model.lohan.flush()
    model.where = "norm"
    with pytest.raises(UnsupportedError, match=r"blocks\.2\.norm\.weight"):
        model.blocks[2](vectors(7))  # a forward of only a part
    model.where = ""
    train_step(model, 2)
    assert_same_state(model.state_dict(), expected)


def test_a_graph_from_before_a_change_in_place_does_not_see_it(workshop: Workshop) -> None:
    model = workshop.wrap(build(Clamped))
    train_step(model, 0)
    model.lohan.flush()
    loss = square_loss(model, 1)
    model.where = "norm"
    with pytest.raises(UnsupportedError):
        model(vectors(7))
    model.where = ""
    try:
        loss.backward()
        model.optimizer.step()
    except StaleGraphError:  # it may be refused, but must never run with changed values
        train_step(model, 1)
    assert_same_state(model.state_dict(), workshop.train([0, 1], Clamped))


def test_changes_in_place_between_steps_stay(workshop: Workshop) -> None:
    model = workshop.wrap(build(Clamped))
    train_step(model, 0)
    with torch.no_grad():
        for param in model.parameters():
            param.clamp_(-0.01, 0.01)
    assert all(value.abs().max() <= 0.01 for value in model.state_dict().values())
    train_step(model, 1)


# --- Writing from outside, interrupted -----------------------------------------------------------


class Interrupted:
    """An engine whose pause() is interrupted by a Ctrl-C."""

    def __init__(self, engine: Any, where: str) -> None:
        self.engine, self.where = engine, where

    def __getattr__(self, name: str) -> Any:
        return getattr(self.engine, name)

    def pause(self, units: list[int], commit: bool) -> None:
        """Pause, or not, and be interrupted."""
        if self.where == "behind":
            self.engine.pause(units, commit)
        elif self.where == "inside":
            signal.raise_signal(signal.SIGINT)
            self.engine.pause(units, commit)
        raise KeyboardInterrupt


@pytest.mark.parametrize("where", ["before", "inside", "behind"])
def test_a_write_that_is_interrupted_leaves_the_engine_awake(
    where: str, workshop: Workshop
) -> None:
    model = workshop.wrap(build())
    train_step(model, 0)
    engine = inside(model).engine
    for _ in range(2):
        others = {name: value * 2 for name, value in model.state_dict().items()}
        inside(model).engine = Interrupted(engine, where)
        with pytest.raises(KeyboardInterrupt):
            model.load_state_dict(others)
        inside(model).engine = engine
    train_step(model, 1)
    assert_same_state(model.state_dict(), workshop.train([0, 1]))
