"""What holds for every wrapped model: residency, frozen parameters, any structure, values."""

from __future__ import annotations

import contextlib
import copy
import gc
import os
import pathlib
import pickle
import time
import weakref
from collections import Counter
from typing import Any

import lohan
import pytest
import torch
import torch.nn.functional as F
from lohan.common._inside import inside
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
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils.checkpoint import checkpoint

# --- Residency -----------------------------------------------------------------------------------


class Probe(torch.autograd.Function):
    """Calls `seen` in backward."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, seen: Any) -> torch.Tensor:
        ctx.seen = seen
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        ctx.seen()
        return gradient, None


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_a_block_computed_again_is_resident_until_its_backward_ends(
    use_reentrant: bool, workshop: Workshop
) -> None:
    pins: list[int] = []

    class Probed(Block):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = Probe.apply(self.up(self.norm(x)), lambda: pins.append(count()))
            out: torch.Tensor = self.down(torch.tanh(y)) * self.gain
            return out

    class Outer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList(Probed() for _ in range(4))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for block in self.blocks:
                x = checkpoint(block, x.requires_grad_(), use_reentrant=use_reentrant)
            return x

    model = workshop.wrap(build(Outer), host_bytes="minimal")

    def count() -> int:
        return int(model.lohan.status()["pins"])

    for step in range(2):
        square_loss(model, step).backward()
        assert len(pins) == 4 and min(pins) > 0
        pins.clear()
        model.optimizer.step()
        assert count() == 0


def test_parameters_hold_nan_of_their_shape_outside_of_forward(workshop: Workshop) -> None:
    model = workshop.wrap(build())
    shapes = [p.shape for p in build().parameters()]
    params = [p for m in model.modules() for p in m._parameters.values() if p is not None]
    inside: list[bool] = []
    model.blocks[0].up.register_forward_hook(
        lambda module, args, output: inside.append(bool(module.weight.isfinite().all()))
    )

    def all_are_nan() -> bool:
        # Their class refuses to be read: this is what C++ sees.
        with torch._C.DisableTorchFunctionSubclass():
            return all(p.isnan().all() and p.untyped_storage().nbytes() < 4096 for p in params)

    assert sorted(map(str, shapes)) == sorted(str(p.shape) for p in params)
    assert all_are_nan()
    loss = square_loss(model, 0)
    assert inside == [True] and all_are_nan()
    loss.backward()
    assert all_are_nan()
    model.optimizer.step()
    assert all_are_nan()
    with torch.no_grad():
        square_loss(model, 0)
    assert inside == [True, True] and all_are_nan()


def test_saving_a_hollow_parameter_is_refused_by_its_name(workshop: Workshop) -> None:
    class Late(Stack):
        late = False

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y: torch.Tensor = super().forward(x)
            # Below Python, nothing checks before a read.
            with torch._C.DisableTorchFunctionSubclass():
                return y @ self.blocks[1].down.weight[:10, :WIDTH] if self.late else y

    model = workshop.wrap(build(Late))
    train_step(model, 0)
    model.late = True
    with pytest.raises(HollowParameterError, match=r"blocks\.1\.down\.weight"):
        square_loss(model, 1)
    model.late = False
    train_step(model, 1)


def test_writing_to_a_hollow_parameter_is_refused_by_its_name(workshop: Workshop) -> None:
    model = workshop.wrap(build())
    with torch.no_grad(), torch._C.DisableTorchFunctionSubclass():  # this bypasses Python's check
        model.blocks[1].gain.zero_()
        with pytest.raises(RuntimeError, match="more than one element"):
            model.blocks[1].gain.copy_(torch.ones(WIDTH))
    with pytest.raises(HollowParameterError, match=r"blocks\.1\.gain.*was written"):
        square_loss(model, 0)
    assert torch.equal(model.state_dict()["blocks.1.gain"], build().blocks[1].gain)
    train_step(model, 0)


def test_a_block_that_runs_no_longer_holds_the_gradients_of_its_last_update(
    workshop: Workshop,
) -> None:
    model = workshop.wrap(build(), schedule="deferred")
    storages: dict[int, list[StorageWeakRef]] = {i: [] for i in range(len(model.blocks))}
    held: list[tuple[int, bool]] = []

    def look(i: int) -> None:
        held.extend((i, not each.expired()) for each in storages[i])
        storages[i].clear()

    for i, block in enumerate(model.blocks):
        for p in block.parameters():
            p.register_hook(lambda g, i=i: storages[i].append(StorageWeakRef(g.untyped_storage())))
        block.register_forward_pre_hook(lambda module, args, i=i: look(i))
    for step in range(3):
        train_step(model, step)
    assert len(held) == 2 * sum(len(list(block.parameters())) for block in model.blocks)
    assert not any(is_held for _, is_held in held)


# --- Frozen parameters ---------------------------------------------------------------------------


class Adapted(nn.Module):
    """A frozen matrix with a trainable low-rank one beside it."""

    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Linear(WIDTH, WIDTH).requires_grad_(False)
        self.a = nn.Parameter(torch.randn(4, WIDTH))
        self.b = nn.Parameter(torch.randn(WIDTH, 4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.base(x) + F.linear(F.linear(x, self.a), self.b)
        return torch.tanh(y)


def frozen_biases() -> nn.Module:
    model = Stack()
    for name, param in model.named_parameters():
        param.requires_grad_(not name.endswith("bias"))
    return model


def frozen_block() -> nn.Module:
    model = Stack()
    model.blocks[1].requires_grad_(False)
    return model


def all_but_the_head() -> nn.Module:
    model = Stack()
    model.blocks.requires_grad_(False)
    return model


def low_rank() -> nn.Module:
    return nn.Sequential(*(Adapted() for _ in range(4)))


@pytest.mark.parametrize("make", [frozen_biases, frozen_block, all_but_the_head, low_rank])
def test_frozen_parameters_stay_and_are_not_written(make: Any, workshop: Workshop) -> None:
    initial = build(make).state_dict()
    model = workshop.follow(make)
    model.lohan.flush()
    layout, stats = inside(model).layout, model.lohan.stats()
    trained = [unit for unit in layout.units if unit.trainable]
    assert 0 < len(trained) < len(layout.units)
    assert stats.updated_params == sum(len(unit.params) for unit in trained)
    assert stats.bytes["param_write"] == sum(unit.nbytes for unit in trained)
    assert stats.bytes["state_write"] == sum(8 * unit.elements for unit in trained)
    assert len(inside(model).extents.table) == 3 * len(trained) + len(layout.units) - len(trained)
    for param in layout.params:
        same = torch.equal(model.state_dict()[param.name], initial[param.name])
        assert same != layout.units[param.unit].trainable, param.name


# --- Structure -----------------------------------------------------------------------------------


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(4))
        self.blocks[3].up.weight = self.blocks[0].up.weight
        self.blocks[2].down = self.blocks[1].down

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x


def test_a_tied_parameter_is_one_parameter_with_all_its_names(workshop: Workshop) -> None:
    model = workshop.follow(Tied)
    state = model.state_dict()
    assert torch.equal(state["blocks.3.up.weight"], state["blocks.0.up.weight"])
    assert torch.equal(state["blocks.2.down.weight"], state["blocks.1.down.weight"])
    assert state.keys() == build(Tied).state_dict().keys()
    assert len(list(model.parameters())) == len(list(build(Tied).parameters()))


def test_buffers_are_the_modules_own(workshop: Workshop) -> None:
    def make() -> nn.Module:
        layers = [[nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH)] for _ in range(3)]
        return nn.Sequential(*(layer for pair in layers for layer in pair))

    plain = build(make)
    for step in range(3):
        square_loss(plain, step)  # with lr=0 below, running statistics depend only on the batches
    model = workshop.wrap(build(make), lr=0.0, weight_decay=0.0)
    for step in range(3):
        train_step(model, step)
    assert_same_state(model.state_dict(), plain.state_dict())
    model[1].reset_running_stats()
    assert model[1].running_mean.eq(0).all()
    model.load_state_dict(plain.state_dict())
    assert torch.equal(model[1].running_mean, plain[1].running_mean)


class Elsewhere(nn.Module):
    """Parameters that are used outside the forward of the module that owns them."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.attention = nn.MultiheadAttention(WIDTH, 4, batch_first=True)
        self.list = nn.ParameterList(torch.eye(WIDTH) for _ in range(3))
        self.dict = nn.ModuleDict({"a": nn.Linear(WIDTH, WIDTH), "b": nn.Linear(WIDTH, WIDTH)})

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = F.linear(torch.tanh(self.blocks[0](x)), self.blocks[2].weight)
        x = self.blocks[1](x @ self.blocks[3].weight.T)
        x = x + self.attention(x[None], x[None], x[None])[0][0]
        x = F.linear(x, self.dict["a"].weight, self.dict["b"].bias) @ self.dict["b"].weight
        y: torch.Tensor = self.blocks[2](x @ self.list[1]) + self.blocks[3](x) + self.dict["a"](x)
        return y


def test_parameters_may_be_used_outside_their_modules_forward(workshop: Workshop) -> None:
    # They stay for the whole forward, so the smallest budget does not fit.
    workshop.follow(Elsewhere, host_bytes=None)


def test_an_attention_that_is_the_model_itself_works(workshop: Workshop) -> None:
    def loss_of(model: nn.Module, step: int) -> torch.Tensor:
        x = vectors(step)[None]
        return model(x, x, x)[0].square().mean()

    workshop.follow(lambda: nn.MultiheadAttention(WIDTH, 4, batch_first=True), loss_of)


def test_a_recurrent_layer_works_also_when_computed_again_without_hooks(workshop: Workshop) -> None:
    class Recurrent(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.rnn = nn.LSTM(WIDTH, WIDTH, batch_first=True)
            self.norm = nn.LayerNorm(WIDTH)

        def inner(self, x: torch.Tensor) -> torch.Tensor:
            return x + self.norm(self.rnn(x[:, None])[0][:, 0])

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y: torch.Tensor = checkpoint(self.inner, x.requires_grad_(), use_reentrant=False)
            return y

    workshop.follow(lambda: nn.Sequential(*(Recurrent() for _ in range(4))))


def test_modules_may_be_skipped_or_called_twice(workshop: Workshop) -> None:
    class Dropped(Stack):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            order = self.order[self.calls % len(self.order)]
            self.calls += 1
            for index in order:
                x = self.blocks[index](x)
            y: torch.Tensor = self.head(x)
            return y

        calls = 0
        order = ([0, 1, 2, 3], [0, 2], [3, 3, 1], [1, 0, 1, 0], [0, 1, 2, 3])

    model = workshop.follow(Dropped, steps=5)
    # Adam counts the steps of each parameter on its own: a skipped block is not touched.
    assert model.lohan.stats().updated_params <= len(list(build().parameters()))


def test_a_skipped_block_is_not_touched(workshop: Workshop) -> None:
    class Skipping(Stack):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for block in (self.blocks[0], self.blocks[3]):
                x = block(x)
            y: torch.Tensor = self.head(x)
            return y

    initial = build(Skipping).state_dict()
    model = workshop.follow(Skipping)
    for name, value in model.state_dict().items():
        assert torch.equal(value, initial[name]) == (".1." in name or ".2." in name), name


def test_a_submodule_may_be_called_directly(workshop: Workshop) -> None:
    def loss_of(model: nn.Module, step: int) -> torch.Tensor:
        x = vectors(step)
        for block in model.blocks[1:]:
            x = block(x)
        return model.head(x).square().mean() + model.head(model.blocks[0](x)).mean()

    workshop.follow(loss_of=loss_of)


def test_a_submodule_that_uses_a_foreign_parameter_may_be_called_directly(
    workshop: Workshop,
) -> None:
    class Foreign(nn.Module):
        def __init__(self, other: nn.Module) -> None:
            super().__init__()
            self.own = nn.Linear(WIDTH, WIDTH)
            object.__setattr__(self, "other", other)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return F.linear(self.own(x), self.other.weight)

    def make() -> nn.Module:
        first = nn.Linear(WIDTH, WIDTH)
        return nn.Sequential(first, Foreign(first), nn.Linear(WIDTH, WIDTH), Foreign(first))

    def loss_of(model: nn.Module, step: int) -> torch.Tensor:
        loss: torch.Tensor = model[2](model[3](model[1](vectors(step)))).square().mean()
        return loss

    model = workshop.follow(make, loss_of)
    assert model.lohan.status()["pins"] == 0


def test_several_forwards_may_share_one_backward(workshop: Workshop) -> None:
    def loss_of(model: nn.Module, step: int) -> torch.Tensor:
        return square_loss(model, step) + square_loss(model, step + 100)

    workshop.follow(loss_of=loss_of)


def test_gradients_of_inputs_may_be_asked_for(workshop: Workshop) -> None:
    def loss_of(model: nn.Module, step: int) -> torch.Tensor:
        x = vectors(step).requires_grad_()
        y = model(x).square().mean()
        (gradient,) = torch.autograd.grad(y, x, retain_graph=True)
        return y * (1 + gradient.square().sum())

    workshop.follow(loss_of=loss_of)


# --- Values --------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_state_dict_and_named_parameters_give_real_values(
    dtype: torch.dtype, workshop: Workshop
) -> None:
    plain = build().to(dtype)
    model = workshop.wrap(build().to(dtype))
    assert_same_state(model.state_dict(), plain.state_dict())
    assert_same_state(model.blocks[1].up.state_dict(), plain.blocks[1].up.state_dict())
    assert_same_state(model.blocks.state_dict(prefix="x."), plain.blocks.state_dict(prefix="x."))
    for module, expected in ((model, plain), (model.blocks[2], plain.blocks[2])):
        pairs = zip(module.named_parameters(), expected.named_parameters(), strict=True)
        for (name, param), (expected_name, value) in pairs:
            assert name == expected_name and torch.equal(param, value)
    train_step(model, 0)
    state = model.state_dict()
    train_step(model, 1)
    # the state dict is a copy
    assert not torch.equal(state["head.weight"], model.state_dict()["head.weight"])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_load_state_dict_takes_values_and_keeps_moments(
    dtype: torch.dtype, workshop: Workshop
) -> None:
    def make() -> nn.Module:
        return Stack().to(dtype)

    initial = build(make).state_dict()
    # Moments of one step at the initial values, in both; the values come back in one of them.
    still = workshop.wrap(build(make), lr=0.0, weight_decay=0.0)
    train_step(still, 0)
    moved = workshop.wrap(build(make), lr=1e-2, weight_decay=0.0)
    train_step(moved, 0)
    assert not torch.equal(moved.state_dict()["head.weight"], initial["head.weight"])
    assert moved.load_state_dict(initial).missing_keys == []
    assert_same_state(moved.state_dict(), initial)
    still.optimizer.param_groups[0]["lr"] = 1e-2
    for step in (1, 2):
        train_step(still, step)
        train_step(moved, step)
        assert_same_state(moved.state_dict(), still.state_dict())


def test_a_submodule_loads_its_state(workshop: Workshop) -> None:
    plain = build()
    model = workshop.wrap(build())
    train_step(model, 0)
    model.blocks[1].load_state_dict(plain.blocks[1].state_dict())
    model.head.load_state_dict(plain.head.state_dict())
    assert_same_state(model.blocks[1].state_dict(), plain.blocks[1].state_dict())
    assert torch.equal(model.state_dict()["head.weight"], plain.head.weight)
    assert not torch.equal(model.state_dict()["blocks.0.gain"], plain.blocks[0].gain)
    with pytest.raises(RuntimeError, match="unexpected"):
        model.head.load_state_dict(plain.blocks[1].state_dict())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_parameters_may_be_changed_in_a_loop_over_them(
    dtype: torch.dtype, workshop: Workshop
) -> None:
    plain = build().to(dtype)
    model = workshop.wrap(build().to(dtype), host_bytes="minimal")
    train_step(model, 0)
    plain.load_state_dict(model.state_dict())
    for module in (plain, model):
        torch.manual_seed(1)
        for name, param in module.blocks.named_parameters():
            if name.endswith("bias"):
                param.data = param.data + 1
            elif "up" in name:
                torch.nn.init.normal_(param)
        with torch.no_grad():
            for param in module.head.parameters():
                param.fill_(0.25)
    assert_same_state(model.state_dict(), plain.state_dict())
    torch.testing.assert_close(square_loss(model, 1), square_loss(plain, 1), rtol=0, atol=0)
    with pytest.raises(UnsupportedError, match=r"gain.*place"):
        for _, param in model.named_parameters():
            param.data = torch.zeros(3)


def test_conversions_are_refused_and_moves_do_nothing(workshop: Workshop) -> None:
    model = workshop.wrap(build())
    before = model.state_dict()
    assert model.to("cpu") is model and model.to(torch.float32) is model
    assert model.float() is model and model.cpu() is model
    for convert in ("half", "bfloat16", "double"):
        with pytest.raises(UnsupportedError, match="dtype"):
            getattr(model, convert)()
        with pytest.raises(UnsupportedError, match="dtype"):
            getattr(model.blocks[0], convert)()
    with pytest.raises(UnsupportedError, match="deepcopy"):
        copy.deepcopy(model)
    with pytest.raises(UnsupportedError, match="deepcopy"):
        copy.deepcopy(model.blocks[0])
    with pytest.raises(UnsupportedError, match="pickle"):
        pickle.dumps(model)
    assert_same_state(model.state_dict(), before)
    train_step(model, 0)


def test_unwrap_gives_a_module_as_it_was(workshop: Workshop) -> None:
    model = workshop.wrap(build())
    train_step(model, 0)
    state = model.state_dict()
    assert lohan.unwrap(model) is model
    workshop.made.clear()
    assert_same_state(model.state_dict(), state)
    copied = copy.deepcopy(model).half()
    assert copied.head.weight.dtype == torch.float16 and not hasattr(model, "lohan")
    square_loss(model, 0).backward()
    assert all(p.grad is not None for p in model.parameters())
    assert all(type(m._parameters) is dict for m in model.modules())


def _files_and_threads(folder: pathlib.Path) -> Counter[str]:
    """What a session holds in this process: files below `folder`, io_uring rings, its threads."""
    names = []
    for entry in pathlib.Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):  # closed since the folder was listed
            names.append(os.readlink(entry))
    for entry in pathlib.Path("/proc/self/task").iterdir():
        with contextlib.suppress(OSError):  # ended since
            names.append((entry / "comm").read_text())
    marks = (str(folder), "anon_inode:[io_uring]", "lohan-", "iou-")
    found = [name.strip() for name in names if name.startswith(marks)]
    return Counter(found)


@pytest.mark.parametrize("make", [Stack, Block])  # Block is a root with its own parameters
def test_a_deleted_model_is_gone_with_its_threads_and_files(make: Any, workshop: Workshop) -> None:
    def use(index: int) -> weakref.ref[nn.Module]:
        model = lohan.wrap(build(make), store=workshop.folder / f"gone{index}")
        train_step(model, 0)
        held = _files_and_threads(workshop.folder)
        assert str(workshop.folder / f"gone{index}" / "lohan.data") in held
        assert "lohan-engine" in held
        return weakref.ref(model)

    before = _files_and_threads(workshop.folder)
    for index in range(3):
        reference = use(index)
        gc.collect()
        assert reference() is None
        gc.collect()  # parameters are freed with the model, their session one collection later
        # The kernel lists a thread for a moment after it was joined, and ends the threads of a
        # ring that was closed in its own time.
        deadline = time.monotonic() + 30
        while left := _files_and_threads(workshop.folder) - before:
            assert time.monotonic() < deadline, f"left after 30 s: {left}"
            time.sleep(0.01)


class Activated(nn.Module):
    """A layer with a function of activation that other models have, too."""

    def __init__(self, shared: nn.Module) -> None:
        super().__init__()
        self.layer, self.act = nn.Linear(4, 4), shared

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.act(self.layer(x))


def test_a_module_without_tensors_that_models_share_stays_as_it_is(store_dir: pathlib.Path) -> None:
    shared = nn.ReLU()  # some classes of transformers have one function of activation per process
    first, second = nn.Sequential(Activated(shared)), Activated(shared)
    wrapped = lohan.wrap(first, store=store_dir / "store")
    assert isinstance(copy.deepcopy(second).act, nn.ReLU)
    with pytest.raises(UnsupportedError, match="deepcopy"):
        copy.deepcopy(wrapped)
    wrapped.lohan.close()
