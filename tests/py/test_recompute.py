"""Blocks that are computed again in backward: the bits of kept activations, in less memory."""

from __future__ import annotations

import dataclasses
import gc
import pathlib
import weakref
from collections.abc import Callable
from typing import Any

import lohan
import pytest
import torch
import train_helper as helper
from lohan import _activations
from lohan._activations import Frame
from lohan._device import Meter
from lohan.errors import ModelError, RecomputeError, StaleGraphError, UnsupportedError
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

WIDTH = 64
ROWS = 32  # a tensor of a block is two pages: more than what is kept for being small
STEPS = range(3)


class Body(nn.Module):
    """A block: norm, dropout, a residual; `forward` is what the tests vary."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 2 * WIDTH)
        self.down = nn.Linear(2 * WIDTH, WIDTH)
        self.dropout = nn.Dropout(0.2)

    def inner(self, x: torch.Tensor) -> torch.Tensor:
        return self.dropout(self.down(functional.gelu(self.up(self.norm(x)))))

    def forward(self, x: torch.Tensor) -> Any:
        return x + self.inner(x)


class Attention(Body):
    """Scaled dot products over heads, with dropout where they have it."""

    dropout_p = 0.0

    def forward(self, x: torch.Tensor) -> Any:
        q, k, v = (
            part.view(4, ROWS // 4, 4, WIDTH // 4).transpose(1, 2)
            for part in (self.norm(x), self.down(self.up(x)), x)
        )
        mixed = functional.scaled_dot_product_attention(
            q, k, v, is_causal=True, dropout_p=self.dropout_p
        )
        return x + self.inner(mixed.transpose(1, 2).reshape(ROWS, WIDTH))


class AttentionDropout(Attention):
    dropout_p = 0.1


class Checkpointed(Body):
    """Checkpoints a part of itself."""

    use_reentrant = False

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(WIDTH, 2 * WIDTH)

    def forward(self, x: torch.Tensor) -> Any:
        y = torch.tanh(self.gate(x))
        z = checkpoint(self.inner, x + y[:, :WIDTH], use_reentrant=self.use_reentrant)
        return z * torch.sigmoid(y[:, WIDTH:])


class CheckpointedReentrant(Checkpointed):
    use_reentrant = True


class Normed(Body):
    """Batch norm changes its buffers in the forward, and so does a counter of calls."""

    count: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.batch = nn.BatchNorm1d(WIDTH, momentum=None)
        self.register_buffer("count", torch.zeros(()))
        self.register_buffer("table", torch.linspace(0, 1, ROWS * WIDTH).view(ROWS, WIDTH))

    def forward(self, x: torch.Tensor) -> Any:
        self.count += 1
        return torch.sin(self.batch(self.inner(x)) * self.count.clone()) * self.table


class Shared(Body):
    """Calls the same modules twice."""

    def forward(self, x: torch.Tensor) -> Any:
        return self.inner(torch.tanh(self.inner(x)))


class Frozen(Body):
    """Some parameters require no gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.up.requires_grad_(False)


class InPlace(Body):
    """Changes what it has just computed."""

    def forward(self, x: torch.Tensor) -> Any:
        y = functional.relu(self.up(x), inplace=True)
        return self.dropout(self.down(y)).mul_(0.5).add_(x)


class Custom(Body):
    """A function of torch's that is written in Python, saving what it likes."""

    class Cube(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor, scale: float) -> torch.Tensor:
            ctx.save_for_backward(x, x * x)
            ctx.scale = scale
            return scale * x**3

        @staticmethod
        def backward(ctx: Any, gradient: torch.Tensor) -> Any:
            x, square = ctx.saved_tensors
            return gradient * ctx.scale * (2 * square + x * x), None

    def forward(self, x: torch.Tensor) -> Any:
        return x + self.inner(self.Cube.apply(self.norm(x), 0.5))


class Late(Body):
    """Its gradients are there before its activations are needed."""

    def __init__(self) -> None:
        super().__init__()
        self.shift = nn.Parameter(torch.linspace(-1, 1, WIDTH))
        del self.norm, self.up, self.down

    def forward(self, x: torch.Tensor) -> Any:
        return torch.tanh(x + self.shift.detach()) + self.shift


class Below(Body):
    """Reads a parameter as C++ does, which no class and no module is told of."""

    def forward(self, x: torch.Tensor) -> Any:
        gain = dict.__getitem__(self.norm._parameters, "weight")
        with torch._C.DisableTorchFunctionSubclass():
            x = x * gain
        return self.inner(x)


@dataclasses.dataclass
class Pair:
    first: torch.Tensor
    second: torch.Tensor


class Structured(Body):
    """Takes and returns other things than tensors."""

    def forward(self, x: torch.Tensor, *, options: dict[str, Any], rest: Any = None) -> Any:
        gain, names = options["gain"], options["names"]
        y = self.inner(x * gain[0]) if "inner" in names else x
        return (y, [torch.exp(-y.square()), None]), Pair(x + y, rest)


class StructuredCall(nn.Module):
    """Calls such a block."""

    def __init__(self) -> None:
        super().__init__()
        self.body = Structured()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        options = {"gain": (x.mean() + 2, 7), "names": ["inner"]}
        (y, (z, nothing)), pair = self.body(x, options=options, rest=x.sigmoid())
        assert nothing is None
        made: torch.Tensor = y * z + pair.first * pair.second
        return made


class Tower(nn.Module):
    """Blocks of one kind."""

    def __init__(self, kind: type[nn.Module], depth: int = 3) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(kind() for _ in range(depth))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x.float().square().mean()


KINDS = [
    Body,
    Attention,
    AttentionDropout,
    Checkpointed,
    CheckpointedReentrant,
    Normed,
    Shared,
    Frozen,
    InPlace,
    Custom,
    Late,
    Below,
    StructuredCall,
]


def build(kind: type[nn.Module], dtype: torch.dtype = torch.float32) -> nn.Module:
    torch.manual_seed(0)
    return Tower(kind).to(dtype).train()


def batch_of(step: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    generator = torch.Generator().manual_seed(step)
    return torch.randn(ROWS, WIDTH, generator=generator).to(dtype)


def loss_in(dtype: torch.dtype, has_autocast: bool) -> Callable[[nn.Module, int], torch.Tensor]:
    def loss_of(model: nn.Module, step: int) -> torch.Tensor:
        torch.manual_seed(step)
        with torch.autocast("cpu", torch.bfloat16, enabled=has_autocast):
            loss: torch.Tensor = model(batch_of(step, dtype).requires_grad_())
        return loss

    return loss_of


def wrap(model: nn.Module, folder: pathlib.Path, activations: Any, **settings: Any) -> nn.Module:
    settings = {**helper.HYPER, **settings}
    return lohan.wrap(
        model, store=folder / str(len(list(folder.iterdir()))), activations=activations, **settings
    )


MODES = {
    "fp32": (torch.float32, False),
    "bf16": (torch.bfloat16, False),
    "autocast": (torch.float32, True),
}


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_blocks_that_are_computed_again_train_to_the_bits_of_those_that_are_kept(
    kind: type[nn.Module], mode: str, store_dir: pathlib.Path
) -> None:
    dtype, has_autocast = MODES[mode]
    device = "emu" if mode == "fp32" else "cpu"
    runs = []
    for activations in ("keep", "recompute"):
        model = wrap(build(kind, dtype), store_dir, activations, device=device)
        runs.append(helper.train(model, STEPS, loss_in(dtype, has_autocast)))
    helper.assert_same(runs[1], runs[0])
    assert len(set(runs[0].losses)) == len(STEPS)


def test_without_dropout_and_with_the_least_memory_the_bits_are_the_same(
    store_dir: pathlib.Path,
) -> None:
    runs = []
    for activations in ("keep", "recompute"):
        for schedule in ("optimized", "deferred"):
            model = build(Body)
            for block in model.blocks:
                block.dropout.p = 0.0
            least = helper.host_bytes_min(model, store_dir, schedule=schedule)
            model = wrap(model, store_dir, activations, host_bytes=least, schedule=schedule)
            runs.append(helper.train(model, STEPS, loss_in(torch.float32, False)))
    for run in runs[1:]:
        helper.assert_same(run, runs[0])


def test_sums_of_gradients_over_forwards_that_overlap_are_the_same_bits(
    store_dir: pathlib.Path,
) -> None:
    """Two forwards, then their backwards: each block is computed again as it was in its own."""
    runs = []
    for activations in ("keep", "recompute"):
        model = wrap(build(Normed), store_dir, activations, accumulate=2)
        loss_of = loss_in(torch.float32, False)
        try:
            for step in STEPS:
                losses = [loss_of(model, 2 * step), loss_of(model, 2 * step + 1)]
                random = torch.get_rng_state()
                for loss in losses:
                    loss.backward()
                assert torch.equal(random, torch.get_rng_state())
                model.optimizer.step()
            runs.append({name: value.clone() for name, value in model.state_dict().items()})
        finally:
            model.lohan.close()
    assert all(torch.equal(runs[1][name], value) for name, value in runs[0].items())
    assert runs[0]["blocks.0.count"] == 2 * len(STEPS)


def test_modules_are_computed_again_in_the_mode_of_their_forward(store_dir: pathlib.Path) -> None:
    runs = []
    for activations in ("keep", "recompute"):
        model = wrap(build(Normed), store_dir, activations)
        try:
            model.blocks[1].eval()
            loss = loss_in(torch.float32, False)(model, 0)
            model.blocks[1].train()
            model.blocks[2].eval()
            loss.backward()
            assert not model.blocks[2].dropout.training
            model.optimizer.step()
            runs.append({name: value.clone() for name, value in model.state_dict().items()})
        finally:
            model.lohan.close()
    assert all(torch.equal(runs[1][name], value) for name, value in runs[0].items())


class Plain(nn.Module):
    """Saves its input, then two tensors of twice the width."""

    calls = 0

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, 2 * WIDTH)
        self.down = nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        type(self).calls += 1
        return self.down(functional.gelu(self.up(x)))


TENSOR_BYTES = ROWS * WIDTH * 4


def watch(meter: Meter, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The bytes of saved tensors each time that one comes."""
    seen: list[int] = []
    look = meter.look

    def look_and_note(more: int = 0) -> None:
        seen.append(meter.kept_bytes)
        look(more)

    monkeypatch.setattr(meter, "look", look_and_note)
    return seen


def test_a_forward_keeps_the_inputs_of_blocks_and_backward_the_rest_of_one(
    store_dir: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Counted by the emulated device: what the loss saves is the output of the last block."""
    kept, peaks = [], []
    for activations in ("keep", "recompute"):
        model = wrap(build(Plain), store_dir, activations, device="emu")
        meter = model.lohan.meter
        seen = watch(meter, monkeypatch)
        try:
            loss = model(batch_of(0))
            kept.append(meter.kept_bytes)
            loss.backward()
            peaks.append(max(seen))
            assert meter.kept_bytes == 0
        finally:
            model.lohan.close()
    assert kept == [(3 * 5 + 1) * TENSOR_BYTES, (3 + 1) * TENSOR_BYTES]
    # The loss is done when the last block is computed again.
    assert peaks == [kept[0], (3 + 4) * TENSOR_BYTES]


def test_a_block_is_computed_again_once_and_not_where_nothing_is_differentiated(
    store_dir: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = wrap(build(Plain), store_dir, "recompute")
    frames = []
    monkeypatch.setattr(_activations, "Frame", lambda *given: frames.append(given) or Frame(*given))
    try:
        Plain.calls = 0
        with torch.no_grad():
            model(batch_of(0))
        assert (Plain.calls, len(frames)) == (3, 0)
        model(batch_of(0)).backward()
        assert (Plain.calls, len(frames)) == (3 + 6, 3)
    finally:
        model.lohan.close()


class Affine(Plain):
    """Saves nothing but its input."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        type(self).calls += 1
        return self.up(x)[:, :WIDTH]


def test_a_block_that_saves_its_input_alone_is_not_computed_again(store_dir: pathlib.Path) -> None:
    model = wrap(build(Affine), store_dir, "recompute")
    try:
        Affine.calls = 0
        model(batch_of(0)).backward()
        assert Affine.calls == 3
    finally:
        model.lohan.close()


def test_computing_again_stops_where_everything_is_there(store_dir: pathlib.Path) -> None:
    ends = []

    class Stops(Plain):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = super().forward(x)
            ends.append(y.shape)
            return y

    model = wrap(build(Stops), store_dir, "recompute")
    try:
        model(batch_of(0)).backward()
        assert len(ends) == 3
    finally:
        model.lohan.close()


def test_activations_that_are_kept_cost_no_hook_more(store_dir: pathlib.Path) -> None:
    plain = build(Plain)
    model = wrap(build(Plain), store_dir, "keep")
    again = wrap(build(Plain), store_dir, "recompute")
    try:
        assert not any("forward" in m.__dict__ for m in model.modules())
        names = {name for name, m in again.named_modules() if "forward" in m.__dict__}
        assert names == {"blocks.0", "blocks.1", "blocks.2"}
        assert sum(len(m._forward_hooks) for m in again.modules()) == sum(
            len(m._forward_hooks) for m in model.modules()
        )
    finally:
        model.lohan.close()
        again.lohan.close()
    lohan.unwrap(again)
    assert not any("forward" in m.__dict__ for m in again.modules())
    with torch.no_grad():
        assert torch.equal(again(batch_of(0)), plain(batch_of(0)))


def test_a_graph_that_is_never_run_backward_is_freed_with_its_inputs(
    store_dir: pathlib.Path,
) -> None:
    model = wrap(build(Body), store_dir, "recompute", device="emu")
    try:
        batch = batch_of(0).requires_grad_()
        alive = weakref.ref(batch)
        gc.disable()
        loss = model(batch)
        assert model.lohan.meter.kept_bytes > 0
        del batch, loss
        assert alive() is None
        assert model.lohan.meter.kept_bytes == 0
        assert model.lohan.status()["handles"] == 0
    finally:
        gc.enable()
        model.lohan.close()


class Changes(Body):
    def forward(self, x: torch.Tensor) -> Any:
        return self.inner(x.mul_(2))


class ChangesLater(Tower):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x * 1
        y = self.blocks[0](x)
        x += 1
        loss: torch.Tensor = self.blocks[1](y + x).square().mean()
        return loss


@pytest.mark.parametrize(
    "make", [lambda: Tower(Changes), lambda: ChangesLater(Body)], ids=["inside", "behind"]
)
def test_an_input_that_is_changed_in_place_is_refused_by_name(
    make: Callable[[], nn.Module], store_dir: pathlib.Path
) -> None:
    model = wrap(make(), store_dir, "recompute")
    try:
        with pytest.raises(RecomputeError, match=r"an input of block 'blocks\.0'.*a clone\(\)"):
            model(batch_of(0)).backward()
    finally:
        model.lohan.close()


class Forgetful(Body):
    """Is not the same twice."""

    is_second = False

    def forward(self, x: torch.Tensor) -> Any:
        rows = x[: ROWS // 2] if self.is_second else x
        self.is_second = True
        return self.inner(rows)


class Growing(Body):
    """Is given an object that it changes."""

    def forward(self, x: torch.Tensor) -> Any:
        self.__dict__.setdefault("cache", []).append(x)
        return self.inner(torch.cat(self.__dict__["cache"]))


class Shrinking(Body):
    is_second = False

    def forward(self, x: torch.Tensor) -> Any:
        y = torch.tanh(x) if self.is_second else self.inner(torch.tanh(x))
        self.is_second = True
        return y


@pytest.mark.parametrize("kind", [Forgetful, Growing, Shrinking])
def test_a_block_that_is_not_the_same_again_is_refused_by_name(
    kind: type[nn.Module], store_dir: pathlib.Path
) -> None:
    model = wrap(Tower(kind, 2), store_dir, "recompute")
    try:
        with pytest.raises(RecomputeError, match=r"block 'blocks\.1'.*use_cache=False"):
            model(batch_of(0)).backward()
    finally:
        model.lohan.close()


class Probing(Body):
    """Differentiates inside its forward."""

    def forward(self, x: torch.Tensor) -> Any:
        y = torch.tanh(torch.exp(x))
        (slope,) = torch.autograd.grad(y.sum(), x)
        return self.inner(y + slope)


def test_a_backward_inside_a_blocks_forward_is_refused_by_name(store_dir: pathlib.Path) -> None:
    model = wrap(build(Probing), store_dir, "recompute")
    try:
        with pytest.raises(UnsupportedError, match=r"inside the forward of block 'blocks\.0'"):
            model(batch_of(0).requires_grad_())
    finally:
        model.lohan.close()


def test_a_graph_of_an_older_step_is_refused_as_ever(store_dir: pathlib.Path) -> None:
    model = wrap(build(Body), store_dir, "recompute")
    try:
        old = model(batch_of(0))
        model(batch_of(1)).backward()
        model.optimizer.step()
        with pytest.raises(StaleGraphError):
            old.backward()
    finally:
        model.lohan.close()


def test_a_word_that_is_no_choice_is_refused_by_name(store_dir: pathlib.Path) -> None:
    with pytest.raises(ModelError, match="activations 'forget': 'keep' or 'recompute'"):
        wrap(build(Body), store_dir, "forget")
