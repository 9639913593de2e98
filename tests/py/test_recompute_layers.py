"""Layers of a block that are kept, recomputed or swapped, each as configured."""

from __future__ import annotations

import contextlib
import gc
import pathlib
from typing import Any

import kit as helper
import lohan
import pytest
import torch
from lohan.activations import _offloaded
from lohan.activations._frame import Frame
from lohan.common._inside import inside
from lohan.errors import ModelError
from recompute_helper import (
    KINDS,
    MODES,
    STEPS,
    TENSOR_BYTES,
    WIDTH,
    Body,
    Plain,
    Split,
    Tower,
    batch_of,
    build,
    loss_in,
    wrap,
)
from torch import nn
from torch.nn import functional

CHOICES: dict[str, dict[str, str]] = {
    "norms again": {"*.norm": "recompute"},
    "all but one again": {"*.up": "keep", "*": "recompute"},
    "dropout kept": {"*.dropout": "keep", "*.batch": "keep", "*": "recompute"},
    "layers kept": {"*.norm": "keep", "*.up": "keep", "*.down": "keep", "*": "recompute"},
    "swapped": {"*": "swap"},
    "all three": {"*.down": "swap", "*.norm": "keep", "*.dropout": "swap", "*": "recompute"},
    "own operations kept": {"*.up": "recompute", "*.dropout": "recompute", "*": "swap"},
    "one block": {"*.2": "keep", "*.1": "swap", "*": "recompute"},
}


SWAP: dict[str, Any] = {"swap_bytes": 128 << 20, "swap_ssd_bytes": 0}


@pytest.fixture
def put(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The bytes of each storage that leaves: any may."""
    seen: list[int] = []
    plain = _offloaded.Swap._put

    def noted(self: _offloaded.Swap, storage: Any, *rest: Any) -> Any:
        seen.append(storage.nbytes())
        return plain(self, storage, *rest)

    monkeypatch.setattr(_offloaded, "LEAST_BYTES", 1)
    monkeypatch.setattr(_offloaded.Swap, "_put", noted)
    return seen


EXPECTED: dict[tuple[type[nn.Module], str], helper.Trained] = {}


def expected(kind: type[nn.Module], mode: str, folder: pathlib.Path) -> helper.Trained:
    if (kind, mode) not in EXPECTED:
        dtype, has_autocast = MODES[mode]
        model = wrap(build(kind, dtype), folder, "keep")
        EXPECTED[kind, mode] = helper.train(model, STEPS, loss_in(dtype, has_autocast))
    return EXPECTED[kind, mode]


# Every other pair: each choice occurs with half of the kinds, each kind with half of the choices.
PAIRS = [
    (kind, choice)
    for i, kind in enumerate(KINDS)
    for j, choice in enumerate(CHOICES)
    if (i + j) % 2 == 0 or kind is Body
]


@pytest.mark.parametrize("kind, choice", PAIRS, ids=lambda value: getattr(value, "__name__", value))
def test_every_choice_trains_to_the_bits_of_activations_that_are_kept(
    kind: type[nn.Module], choice: str, put: list[int], store_dir: pathlib.Path
) -> None:
    mode = [*MODES][[*CHOICES].index(choice) % len(MODES)]
    dtype, has_autocast = MODES[mode]
    said = CHOICES[choice]
    model = build(kind, dtype)
    names = [name for name, _ in model.named_modules()]
    said = {key: value for key, value in said.items() if any(n.endswith(key[1:]) for n in names)}
    swap = SWAP if "swap" in said.values() else {}
    model = wrap(model, store_dir, said, device="emu", **swap)
    meter = inside(model).saving.meter
    trained = helper.train(model, STEPS, loss_in(dtype, has_autocast))
    helper.assert_same(trained, expected(kind, mode, store_dir))
    assert meter.kept_bytes == 0
    assert put or choice != "swapped"


class Counted(nn.Linear):
    """Counts its calls."""

    calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return super().forward(x)


class Chain(nn.Module):
    """Three linear layers; an activation saves its input, and the next layer saves its output."""

    def __init__(self) -> None:
        super().__init__()
        self.a = Counted(WIDTH, WIDTH)
        self.b = Counted(WIDTH, WIDTH)
        self.c = Counted(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = functional.gelu(self.a(x))
        x = functional.gelu(self.b(x))
        return functional.gelu(self.c(x))


@pytest.mark.parametrize(
    "said, calls, kept",
    [
        ({"*": "recompute"}, (2, 2, 2), 1),
        # Kept are x, a, b, c and two results.
        ({"*.none": "keep", "*": "keep"}, (1, 1, 1), 6),
        ({"*.a": "recompute"}, (2, 1, 1), 5),
        ({"*.c": "recompute"}, (1, 1, 2), 5),
        ({"*.a": "keep", "*": "recompute"}, (1, 2, 2), 2),
        # b saved a tensor that was computed outside of it and dropped; it is needed to save it
        # again.
        ({"*.b": "keep", "*": "recompute"}, (2, 2, 2), 2),
        # c's output is kept, and nothing after it is missing.
        ({"*.a": "recompute", "*.b": "recompute"}, (2, 2, 1), 4),
    ],
)
def test_a_layer_is_skipped_where_its_output_and_what_it_saved_are_there(
    said: dict[str, str],
    calls: tuple[int, int, int],
    kept: int,
    store_dir: pathlib.Path,
) -> None:
    model = Tower(Chain, 1)
    said = {key: value for key, value in said.items() if key != "*.none"}
    model = wrap(model, store_dir, said, device="emu", blocks=[model.blocks[0]])
    block = model.blocks[0]
    with contextlib.closing(model.lohan):
        loss = model(batch_of(0))
        # The loss keeps the block's output as well.
        assert inside(model).saving.meter.kept_bytes == (kept + 1) * TENSOR_BYTES
        loss.backward()
        assert (block.a.calls, block.b.calls, block.c.calls) == calls


class Ending(Chain):
    """Ends with a layer whose output no operation saves."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.c(functional.gelu(self.b(functional.gelu(self.a(x))))) + 1


def test_an_output_behind_which_nothing_is_missing_is_not_kept(store_dir: pathlib.Path) -> None:
    model = Tower(Ending, 1)
    said = {"*.a": "recompute"}
    model = wrap(model, store_dir, said, device="emu", blocks=[model.blocks[0]])
    with contextlib.closing(model.lohan):
        loss = model(batch_of(0))
        # The saved tensors are x, a's result, b's two, and the loss's.
        assert inside(model).saving.meter.kept_bytes == 5 * TENSOR_BYTES
        loss.backward()
        assert [layer.calls for layer in model.blocks[0].children()] == [2, 1, 1]


def test_a_part_that_is_kept_as_a_whole_keeps_its_last_output_alone(
    store_dir: pathlib.Path,
) -> None:
    class Whole(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            layers = (Counted(WIDTH, WIDTH), nn.Dropout(0.5), Counted(WIDTH, WIDTH))
            self.part = nn.Sequential(*layers)
            self.last = Counted(WIDTH, WIDTH)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return functional.gelu(self.last(functional.gelu(self.part(x) + x)))

    model = Tower(Whole, 1)
    said = {"*.part": "keep", "*": "recompute"}
    model = wrap(model, store_dir, said, device="emu", blocks=[model.blocks[0]])
    with contextlib.closing(model.lohan):
        loss = model(batch_of(0))
        # x; of the part dropout's mask, what its last layer saves, and its output, which nobody
        # does; the loss. Not what its first layer computed.
        assert inside(model).saving.meter.kept_bytes == 5 * TENSOR_BYTES
        loss.backward()
        assert model.blocks[0].part[0].calls == 1
        assert model.blocks[0].last.calls == 2


def test_what_is_swapped_leaves_once_and_comes_back(
    put: list[int], store_dir: pathlib.Path
) -> None:
    model = wrap(build(Plain), store_dir, {"*": "swap"}, device="emu", **SWAP)
    with contextlib.closing(model.lohan):
        loss = model(batch_of(0))
        # Three blocks save five each; one more is the loss's.
        assert sum(put) == (3 * 5 + 1) * TENSOR_BYTES
        loss.backward()
        assert len(put) == 3 * 3 + 1
        del loss
        assert inside(model).saving.meter.kept_bytes == 0


def test_where_activations_leave_a_block_that_is_computed_again_leaves_its_input_alone(
    put: list[int], store_dir: pathlib.Path
) -> None:
    model = wrap(build(Plain), store_dir, "recompute", device="emu", **SWAP)
    with contextlib.closing(model.lohan):
        model(batch_of(0)).backward()
        assert put == 4 * [TENSOR_BYTES]


def test_where_activations_leave_those_of_a_layer_that_is_kept_stay(
    put: list[int], store_dir: pathlib.Path
) -> None:
    model = wrap(build(Plain), store_dir, {"blocks.*": "keep"}, device="emu", **SWAP)
    with contextlib.closing(model.lohan):
        loss = model(batch_of(0))
        assert put == [TENSOR_BYTES]  # saved by the loss
        assert inside(model).saving.meter.kept_bytes >= 3 * 5 * TENSOR_BYTES
        del loss


def test_views_of_one_tensor_leave_once(put: list[int], store_dir: pathlib.Path) -> None:
    model = Tower(Split, 1)
    said = {"*.up": "swap", "blocks.*": "keep"}
    model = wrap(model, store_dir, said, device="emu", blocks=[model.blocks[0]], **SWAP)
    with contextlib.closing(model.lohan):
        loss = model(batch_of(0))
        assert put == [2 * TENSOR_BYTES, TENSOR_BYTES]  # the second one is saved by the loss
        loss.backward()


def frames() -> list[Frame]:
    """Return all frames, which keeps alive those that earlier tests have left in tracebacks."""
    return [one for one in gc.get_objects() if type(one) is Frame]


def test_a_graph_that_is_never_run_backward_is_freed(
    put: list[int], store_dir: pathlib.Path
) -> None:
    said = {"*.up": "swap", "*.norm": "keep", "*.2": "swap", "*": "recompute"}
    model = wrap(build(Body), store_dir, said, device="emu", **SWAP)
    try:
        gc.collect()
        gc.disable()
        before = frames()
        loss = model(batch_of(0))
        assert put and len(frames()) > len(before)
        del loss
        assert (len(frames()), model.lohan.status()["handles"]) == (len(before), 0)
    finally:
        gc.enable()
        model.lohan.close()


class Borrowing(Body):
    """Contains a layer of another block."""

    def __init__(self, up: nn.Module | None = None) -> None:
        super().__init__()
        self.up = up if up is not None else self.up


def test_a_layer_of_two_blocks_is_what_each_block_needs(store_dir: pathlib.Path) -> None:
    def make() -> nn.Module:
        torch.manual_seed(0)
        tower = Tower(Borrowing, 1)
        tower.blocks.append(Borrowing(tower.blocks[0].up))
        return tower.train()

    runs = []
    said = {"blocks.0.norm": "keep", "blocks.1.down": "keep", "*": "recompute"}
    for activations in ("keep", said):
        model = wrap(make(), store_dir, activations)
        runs.append(helper.train(model, STEPS, loss_in(torch.float32, False)))
        lohan.unwrap(model)
        assert not any("forward" in module.__dict__ for module in model.modules())
    helper.assert_same(runs[1], runs[0])


def test_only_blocks_and_layers_that_need_it_have_a_forward_of_ours(
    store_dir: pathlib.Path,
) -> None:
    model = wrap(build(Body), store_dir, {"blocks.1.up": "recompute", "blocks.2": "recompute"})
    with contextlib.closing(model.lohan):
        ours = {name for name, module in model.named_modules() if "forward" in module.__dict__}
        layers = {f"blocks.1.{name}" for name in ("norm", "up", "down", "dropout")}
        assert ours == {"blocks.1", "blocks.2"} | layers


@pytest.mark.parametrize(
    "said, error, words",
    [
        ({"*.up": "forget"}, ModelError, r"\{'\*\.up': 'forget'\}: each item must"),
        ({3: "keep"}, ModelError, "activations {3: 'keep'}"),
        ({"*.down": "keep", "*.middle": "recompute"}, ModelError, r"'\*\.middle' matches no layer"),
        ({"*": "keep", "*.up": "recompute"}, ModelError, r"'\*\.up' matches no layer"),
        (
            {"*.up": "swap"},
            ModelError,
            r"'blocks\.0\.up' cannot be swapped: set activation_offload_bytes",
        ),
    ],
)
def test_choices_that_cannot_be_are_refused_by_name(
    said: dict[Any, str], error: type[Exception], words: str, store_dir: pathlib.Path
) -> None:
    model = build(Body)
    with pytest.raises(error, match=words):
        wrap(model, store_dir, said)
    assert model(batch_of(0)).isfinite()  # the model still works
