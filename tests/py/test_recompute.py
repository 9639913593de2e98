"""Recomputed blocks: the same bits as with kept activations, with less memory."""

from __future__ import annotations

import contextlib
import gc
import pathlib
import weakref
from collections.abc import Callable
from typing import Any

import kit as helper
import lohan
import pytest
import torch
from lohan.activations import _blocks
from lohan.activations._frame import Frame
from lohan.common._inside import inside
from lohan.errors import ModelError, RecomputeError, StaleGraphError, UnsupportedError
from lohan.torch_glue._recompute_state import Surroundings
from recompute_helper import (
    KINDS,
    MODES,
    ROWS,
    STEPS,
    TENSOR_BYTES,
    WIDTH,
    Body,
    Normed,
    Plain,
    Tower,
    batch_of,
    build,
    loss_in,
    watch,
    wrap,
)
from torch import nn


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


def test_sums_of_gradients_over_forwards_that_overlap_are_the_same_bits(
    store_dir: pathlib.Path,
) -> None:
    """After two forwards, each backward recomputes its blocks as they were in its own forward."""
    runs = []
    for activations in ("keep", "recompute"):
        model = wrap(build(Normed), store_dir, activations, accumulate=2)
        loss_of = loss_in(torch.float32, False)
        with contextlib.closing(model.lohan):
            for step in STEPS:
                losses = [loss_of(model, 2 * step), loss_of(model, 2 * step + 1)]
                random = torch.get_rng_state()
                for loss in losses:
                    loss.backward()
                assert torch.equal(random, torch.get_rng_state())
                model.optimizer.step()
            runs.append(helper.values(model))
    helper.assert_same_state(runs[1], runs[0])
    assert runs[0]["blocks.0.count"] == 2 * len(STEPS)


def test_modules_are_computed_again_in_the_mode_of_their_forward(store_dir: pathlib.Path) -> None:
    runs = []
    for activations in ("keep", "recompute"):
        model = wrap(build(Normed), store_dir, activations)
        with contextlib.closing(model.lohan):
            model.blocks[1].eval()
            loss = loss_in(torch.float32, False)(model, 0)
            model.blocks[1].train()
            model.blocks[2].eval()
            loss.backward()
            assert not model.blocks[2].dropout.training
            model.optimizer.step()
            runs.append(helper.values(model))
    helper.assert_same_state(runs[1], runs[0])


def test_a_forward_keeps_the_inputs_of_blocks_and_backward_the_rest_of_one(
    store_dir: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Counted by the emulated device: what the loss saves is the output of the last block."""
    kept, peaks = [], []
    for activations in ("keep", "recompute"):
        model = wrap(build(Plain), store_dir, activations, device="emu")
        meter = inside(model).saving.meter
        seen = watch(meter, monkeypatch)
        with contextlib.closing(model.lohan):
            loss = model(batch_of(0))
            kept.append(meter.kept_bytes)
            loss.backward()
            peaks.append(max(seen))
            assert meter.kept_bytes == 0
    assert kept == [(3 * 5 + 1) * TENSOR_BYTES, (3 + 1) * TENSOR_BYTES]
    # The loss is done when the last block is recomputed.
    assert peaks == [kept[0], (3 + 4) * TENSOR_BYTES]


def test_a_block_is_computed_again_once_and_not_where_nothing_is_differentiated(
    store_dir: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = wrap(build(Plain), store_dir, "recompute")
    frames = []
    monkeypatch.setattr(_blocks, "Frame", lambda *given: frames.append(given) or Frame(*given))
    with contextlib.closing(model.lohan):
        Plain.calls = 0
        with torch.no_grad():
            model(batch_of(0))
        assert (Plain.calls, len(frames)) == (3, 0)
        model(batch_of(0)).backward()
        assert (Plain.calls, len(frames)) == (3 + 6, 3)


class Affine(Plain):
    """Saves only its input."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        type(self).calls += 1
        return self.up(x)[:, :WIDTH]


def test_a_block_that_saves_its_input_alone_is_not_computed_again(store_dir: pathlib.Path) -> None:
    model = wrap(build(Affine), store_dir, "recompute")
    with contextlib.closing(model.lohan):
        Affine.calls = 0
        model(batch_of(0)).backward()
        assert Affine.calls == 3


def test_computing_again_stops_where_everything_is_there(store_dir: pathlib.Path) -> None:
    ends = []

    class Stops(Plain):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = super().forward(x)
            ends.append(y.shape)
            return y

    model = wrap(build(Stops), store_dir, "recompute")
    with contextlib.closing(model.lohan):
        model(batch_of(0)).backward()
        assert len(ends) == 3


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
        assert inside(model).saving.meter.kept_bytes > 0
        del batch, loss
        assert alive() is None
        assert inside(model).saving.meter.kept_bytes == 0
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


class Forgetful(Body):
    """Computes something else the second time."""

    is_second = False

    def forward(self, x: torch.Tensor) -> Any:
        rows = x[: ROWS // 2] if self.is_second else x
        self.is_second = True
        return self.inner(rows)


class Growing(Body):
    """Changes an object that it was given."""

    def forward(self, x: torch.Tensor) -> Any:
        self.__dict__.setdefault("cache", []).append(x)
        return self.inner(torch.cat(self.__dict__["cache"]))


class Shrinking(Body):
    is_second = False

    def forward(self, x: torch.Tensor) -> Any:
        y = torch.tanh(x) if self.is_second else self.inner(torch.tanh(x))
        self.is_second = True
        return y


class Probing(Body):
    """Runs a backward inside its forward."""

    def forward(self, x: torch.Tensor) -> Any:
        y = torch.tanh(torch.exp(x))
        (slope,) = torch.autograd.grad(y.sum(), x)
        return self.inner(y + slope)


CHANGED = r"an input of block 'blocks\.0'.*a clone\(\)"
UNLIKE = r"block 'blocks\.1'.*use_cache=False"


@pytest.mark.parametrize(
    ("make", "said"),
    [
        pytest.param(lambda: Tower(Changes), CHANGED, id="an-input-changed-in-place-inside"),
        pytest.param(lambda: ChangesLater(Body), CHANGED, id="an-input-changed-in-place-behind"),
        pytest.param(lambda: Tower(Forgetful, 2), UNLIKE, id="a-block-with-other-shapes"),
        pytest.param(lambda: Tower(Growing, 2), UNLIKE, id="a-block-that-changes-an-object"),
        pytest.param(lambda: Tower(Shrinking, 2), UNLIKE, id="a-block-that-saves-less"),
    ],
)
def test_a_block_that_cannot_be_recomputed_is_refused_by_name(
    make: Callable[[], nn.Module], said: str, store_dir: pathlib.Path
) -> None:
    model = wrap(make(), store_dir, "recompute")
    with contextlib.closing(model.lohan), pytest.raises(RecomputeError, match=said):
        model(batch_of(0)).backward()


def test_a_backward_inside_a_blocks_forward_is_refused_by_name(store_dir: pathlib.Path) -> None:
    model = wrap(build(Probing), store_dir, "recompute")
    said = r"inside the forward of block 'blocks\.0'"
    with contextlib.closing(model.lohan), pytest.raises(UnsupportedError, match=said):
        model(batch_of(0).requires_grad_())


def test_a_graph_of_an_older_step_is_refused_as_ever(store_dir: pathlib.Path) -> None:
    model = wrap(build(Body), store_dir, "recompute")
    with contextlib.closing(model.lohan):
        old = model(batch_of(0))
        model(batch_of(1)).backward()
        model.optimizer.step()
        with pytest.raises(StaleGraphError):
            old.backward()


def test_a_word_that_is_no_choice_is_refused_by_name(store_dir: pathlib.Path) -> None:
    with pytest.raises(ModelError, match="activations 'forget': must be 'keep', 'recompute'"):
        wrap(build(Body), store_dir, "forget")


def test_statistics_on_an_accelerator_count_as_changed() -> None:
    """A batch norm's kernel gives no new version, and values there are not looked at."""
    module = nn.Module()
    module.register_buffer("mean", torch.zeros(4096, device="meta"))
    module.register_buffer("mask", torch.zeros(8192, dtype=torch.bool, device="meta"))
    surroundings = Surroundings(module, torch.device("cpu"), ())
    surroundings.settle()
    assert [name for _, name, _ in surroundings.buffers] == ["mean"]
