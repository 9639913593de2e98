"""Blocks may take and return other values than tensors, with every way of keeping activations."""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import functools
import pathlib
from collections.abc import Callable
from typing import Any, NamedTuple

import lohan
import pytest
import torch
from lohan.config import POLICIES
from lohan.errors import RecomputeError
from torch import nn
from transformers import BatchEncoding
from transformers.modeling_outputs import BaseModelOutputWithPast

WIDTH = 64
ROWS = 32  # a block's tensors have two pages, so they are not kept as small ones
BLOCK_COUNT = 3
WAYS: dict[str, dict[str, Any]] = {
    "recompute": {"activations": "recompute"},
    "layers": {"activations": {"*.up": "keep", "*": "recompute"}},
    "swap": {
        "activations": {"*": "swap"},
        "swap_bytes": "64MB",
        "swap_ssd_bytes": "64MB",
        "device": "emu",
    },
    **{name: {"activations": name, "device": "emu", "swap_bytes": "256MB"} for name in POLICIES},
    "auto on the CPU": {"activations": "auto"},
}


class Checked(NamedTuple):
    """A named tuple."""

    hidden: torch.Tensor
    rest: Any = None


class Careful(Checked):
    """A named tuple whose constructor expects tensors, and that has a value besides its items."""

    def __new__(cls, hidden: torch.Tensor, rest: Any = None) -> Careful:
        made = super().__new__(cls, hidden, rest)
        made.note = hidden.device.type
        return made


@dataclasses.dataclass
class Data:
    """A dataclass."""

    hidden: torch.Tensor
    rest: Any = None


@dataclasses.dataclass(frozen=True, slots=True)
class Frozen:
    """One that cannot be changed, and has no `__dict__`."""

    hidden: torch.Tensor
    rest: Any = None


class Listed(list[Any]):
    """A list of a subclass."""


class Pairs(tuple[Any, ...]):
    """A tuple of a subclass."""


class Named(dict[str, Any]):
    """A dict of a subclass whose constructor takes other arguments."""

    def __init__(self, hidden: torch.Tensor) -> None:
        super().__init__(hidden=hidden)


class Holder:
    """An object of an unknown class."""

    def __init__(self, hidden: torch.Tensor) -> None:
        self.hidden = hidden


def _careful_out(value: Any) -> torch.Tensor:
    assert value.note == "cpu"
    return value.hidden + value.rest[0]["more"]


# How a tensor is put into a container, and how it is taken out again.
KINDS: dict[str, tuple[Any, Any]] = {
    "named tuple": (lambda x: Checked(x, None), lambda c: c.hidden),
    "careful": (lambda x: Careful(x, [{"more": x * 0.5}]), _careful_out),
    "nested": (
        lambda x: {"a": [Checked(x, {"b": (x * 2, None)})]},
        lambda c: c["a"][0].hidden + c["a"][0].rest["b"][0],
    ),
    "ordered": (lambda x: collections.OrderedDict(hidden=x), lambda c: c["hidden"]),
    "default": (
        lambda x: collections.defaultdict(list, hidden=[x]),
        lambda c: c["hidden"][0],
    ),
    "data": (lambda x: Data(x, [x * 2]), lambda c: c.hidden + c.rest[0]),
    "frozen": (lambda x: Frozen(x, {"more": x}), lambda c: c.hidden + c.rest["more"]),
    "list": (lambda x: Listed([x, None]), lambda c: c[0]),
    "tuple": (lambda x: Pairs([x, 1.0]), lambda c: c[0] * c[1]),
    "dict": (lambda x: Named(x), lambda c: c["hidden"]),
    "user dict": (lambda x: collections.UserDict(hidden=x), lambda c: c["hidden"]),
    "model output": (
        lambda x: BaseModelOutputWithPast(last_hidden_state=x),
        lambda c: c.last_hidden_state,
    ),
    "encoding": (lambda x: BatchEncoding({"hidden": x}), lambda c: c["hidden"]),
    "object": (lambda x: Holder(x), lambda c: c.hidden),
    "return type": (lambda x: torch.max(x[None], dim=0), lambda c: c.values),
}


class Block(nn.Module):
    """Takes and returns a container; its layer is given one as a keyword, and returns one, too."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.make, self.take = KINDS[kind]
        self.up = Layer(kind)
        self.down = nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, given: Any, *, again: Any) -> Any:
        hidden = self.take(given) + 0.1 * self.take(again)
        inner = self.take(self.up(given=self.make(torch.tanh(hidden))))
        return self.make(hidden + self.down(torch.sin(inner)))


class Layer(nn.Module):
    """A layer that takes and returns containers."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.make, self.take = KINDS[kind]
        self.linear = nn.Linear(WIDTH, 2 * WIDTH)
        self.dropout = nn.Dropout(0.1)

    def forward(self, given: Any) -> Any:
        return self.make(self.dropout(torch.exp(-self.linear(self.take(given)).square())))


class Model(nn.Module):
    """Passes a container from block to block."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.make, self.take = KINDS[kind]
        self.blocks = nn.ModuleList([Block(kind) for _ in range(BLOCK_COUNT)])

    def forward(self, given: Any) -> torch.Tensor:
        first = given
        for block in self.blocks:
            given = block(given, again=first)
        out: torch.Tensor = self.take(given)
        return out


class Packed(nn.Module):
    """An LSTM and a layer on sequences of several lengths."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(WIDTH, WIDTH, 2, batch_first=True, dropout=0.1)
        self.up = nn.Linear(WIDTH, WIDTH)

    def forward(self, packed: Any) -> Any:
        out, _ = self.lstm(packed)
        return out._replace(data=torch.tanh(self.up(out.data)))


class Recurrent(nn.Module):
    """Runs packed sequences of several lengths through two blocks of LSTMs."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Packed() for _ in range(2)])
        self.out = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        lengths = torch.tensor([9, 16, 4, 11])
        packed = nn.utils.rnn.pack_padded_sequence(
            x.view(4, 16, WIDTH), lengths, batch_first=True, enforce_sorted=False
        )
        for block in self.blocks:
            packed = block(packed)
        return self.out(nn.utils.rnn.pad_packed_sequence(packed, batch_first=True)[0])


def _build(kind: str) -> nn.Module:
    torch.manual_seed(0)
    return Recurrent() if kind == "packed" else Model(kind)


def _batch(kind: str, step: int) -> Any:
    generator = torch.Generator().manual_seed(step)
    if kind == "packed":
        return torch.randn(64, WIDTH, generator=generator)
    return KINDS[kind][0](torch.randn(ROWS, WIDTH, generator=generator))


def _losses_and_state(model: nn.Module, kind: str, steps: int) -> tuple[list[float], Any]:
    losses = []
    with contextlib.closing(model.lohan):
        for step in range(steps):
            torch.manual_seed(step)
            loss = model(_batch(kind, step)).square().mean()
            loss.backward()
            model.optimizer.step()
            losses.append(loss.item())
        return losses, {name: value.clone() for name, value in model.state_dict().items()}


# Every way for two kinds, and for each kind the ways that differ in what they do with containers.
_EACH = ("recompute", "layers", "swap", "lohan", "auto on the CPU")
_CASES = [
    (kind, way)
    for kind in ["packed", *KINDS]
    for way in (WAYS if kind in ("packed", "nested") else _EACH)
]


@pytest.fixture(scope="module")
def kept(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], tuple[list[float], Any]]:
    """Return a function that trains with kept activations, once for each kind."""
    settings: dict[str, Any] = {"lr": 1e-2, "allow_tmpfs": True}

    @functools.cache
    def get(kind: str) -> tuple[list[float], Any]:
        model = lohan.wrap(_build(kind), store=tmp_path_factory.mktemp(kind), **settings)
        return _losses_and_state(model, kind, 4)

    return get


@pytest.mark.parametrize(("kind", "way"), _CASES)
def test_blocks_with_any_container_train_to_the_bits_of_kept_activations(
    kind: str,
    way: str,
    kept: Callable[[str], tuple[list[float], Any]],
    store_dir: pathlib.Path,
) -> None:
    wanted = kept(kind)
    model = lohan.wrap(_build(kind), store=store_dir / "other", lr=1e-2, **WAYS[way])
    losses, state = _losses_and_state(model, kind, 4)
    assert losses == wanted[0]
    for name, value in wanted[1].items():
        assert torch.equal(state[name], value), name


@pytest.mark.parametrize("kind", ["packed", *KINDS])
def test_the_first_forward_and_its_gradients_have_plain_torch_s_bits(
    kind: str, store_dir: pathlib.Path
) -> None:
    plain = _build(kind)
    torch.manual_seed(5)
    wanted = plain(_batch(kind, 0))
    wanted.square().mean().backward()
    gradients = {name: p.grad for name, p in plain.named_parameters()}
    model = lohan.wrap(_build(kind), store=store_dir, activations="recompute")
    seen: dict[str, torch.Tensor] = {}
    for name, param in nn.Module.named_parameters(model):
        param.register_hook(lambda grad, name=name: seen.update({name: grad.clone()}))
    torch.manual_seed(5)
    out = model(_batch(kind, 0))
    out.square().mean().backward()
    model.lohan.close()
    assert torch.equal(out, wanted)
    assert seen.keys() == gradients.keys()
    for name, gradient in gradients.items():
        assert torch.equal(seen[name], gradient), name


class Doubles(nn.Module):
    """Changes its argument in place, which its operations do not notice."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, given: Any) -> Any:
        return Data(torch.tanh(self.linear(given.hidden.mul_(2))))


class Doubled(nn.Module):
    """Takes and returns a container as well."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Doubles()])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.blocks[0](Data(x + 1)).hidden
        return out


def test_a_tensor_in_a_dataclass_that_is_changed_in_place_is_refused_and_not_computed_from(
    store_dir: pathlib.Path,
) -> None:
    model = lohan.wrap(Doubled(), store=store_dir, activations="recompute")
    with contextlib.closing(model.lohan):
        with pytest.raises(RecomputeError, match="changed in place"):
            model(torch.randn(ROWS, WIDTH)).sum().backward()
