"""Finds the blocks of a module and lays their parameters out in units.

[Note: Blocks and units] A block is a module whose parameters move together: a child of a
ModuleList or Sequential, or a part of what is left over (embeddings, final norm, head). Every
block is a scope: its units are resident from its forward pre-hook to its forward hook. A module
that owns parameters directly and has blocks below it is a scope, too; its units are resident as
long as its forward runs, that is, while its blocks come and go. A unit holds the parameters of
one block with one dtype and one requires_grad, one after the other, so that it is one array; those
that are read in place are units of their own.

[Note: Strides] Torch chooses some kernels by a parameter's strides (channels_last convolutions),
and different kernels round differently. A unit therefore stores the elements of a dense parameter
in the order in which they were in memory at wrap, and lends them with the same strides; gradients
and moments are put into that order. Files, and readers that go by shape, have them in the usual
order. A store records the strides of its parameters, and a resumed run computes with those.
Parameters with gaps, parameters that are read in place and those that zeroth-order training moves
are made contiguous, which is said once.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from lohan import _core
from lohan.common import _storage_formats
from lohan.errors import ModelError

if TYPE_CHECKING:
    from lohan.layout._files import Entry
    from lohan.layout._in_place import InPlace

DTYPE_CODES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
BYTES_CODE = 3
# Bytes an element of what makes a trainable parameter an fp32 master: nothing, the 16-bit residual
# of a bf16 one, the master itself of an fp16 one.
RESIDUAL_BYTES = {torch.float32: 0, torch.bfloat16: 2, torch.float16: 4}


@dataclasses.dataclass(frozen=True)
class Run:
    """Whole blocks of a file; a unit's runs are its bytes, one behind the other."""

    file: int
    file_offset: int
    offset: int  # in the unit
    nbytes: int

    @property
    def checksum_count(self) -> int:
        """One for each of so many bytes, the last one for what is left."""
        return -(-self.nbytes // _core.CHECKSUM_BYTES)


@dataclasses.dataclass(frozen=True)
class Move:
    """A parameter, from where it is read to where torch would have aligned it."""

    begin: int
    to: int
    nbytes: int


@dataclasses.dataclass
class Param:
    """One parameter, tied ones once."""

    name: str
    tensor: nn.Parameter
    unit: int
    first: int  # element in its unit where trainable, else byte
    index: int
    source: Entry | None = None  # in the files of weights=
    stream: int | None = None  # its number, where zeroth-order training moves it
    decays: bool = True  # weight decay, there
    kept: str | None = None  # in which format it is kept there, if not where it is computed with
    value_first: int = 0  # where it is computed with then: byte in its unit's place
    strides: tuple[int, ...] | None = None  # None: contiguous; see [Note: Strides]

    @property
    def count(self) -> int:
        """Elements."""
        return self.tensor.numel()

    @property
    def order(self) -> tuple[int, ...]:
        """Its dimensions, from the one with the largest steps in memory on."""
        strides = self.strides or contiguous_strides(self.tensor.shape)
        return tuple(sorted(range(len(strides)), key=lambda i: -strides[i]))

    def flat(self, values: torch.Tensor) -> torch.Tensor:
        """Values of the parameter's shape, in the order in which the unit has them."""
        return values if self.strides is None else values.permute(self.order).reshape(-1)

    def shaped(self, flat: torch.Tensor) -> torch.Tensor:
        """Values in the unit's order, seen with the parameter's shape and strides."""
        strides = self.strides or contiguous_strides(self.tensor.shape)
        return flat.as_strided(self.tensor.shape, strides)

    @property
    def engine_first(self) -> int:
        """Where the engine finds what is computed with."""
        return self.first if self.kept is None else self.value_first


@dataclasses.dataclass
class Unit:
    """Parameters of one block that move together."""

    name: str
    dtype: torch.dtype  # of what is kept
    trainable: bool
    params: list[Param]
    elements: int = 0  # padded; 0: frozen
    nbytes: int = 0  # of parameters in memory and on SSD, padded
    value_bytes: int = 0  # of values beside them, where they are computed with
    always: bool = False
    # Where its bytes are if they are read in place (_in_place.py); none: in the store.
    runs: list[Run] = dataclasses.field(default_factory=list)
    moves: list[Move] = dataclasses.field(default_factory=list)

    @property
    def place_bytes(self) -> int:
        """Bytes where they are computed with."""
        return self.nbytes + self.value_bytes

    @property
    def gradient_bytes(self) -> int:
        """Bytes of all gradients in the parameters' dtype."""
        return sum(p.count for p in self.params) * self.dtype.itemsize if self.trainable else 0

    @property
    def residual_bytes(self) -> int:
        """Bytes an element of what is kept besides the parameter for an exact master."""
        return RESIDUAL_BYTES[self.dtype] if self.trainable else 0


@dataclasses.dataclass
class Scope:
    """A module and the units that its forward needs."""

    name: str
    module: nn.Module | None  # None once the hooks are on
    units: list[int]
    is_innermost: bool = True  # no other scope is inside


@dataclasses.dataclass
class Layout:
    """Everything that moves, and when it must be there.

    Attributes:
        buffer_bytes: of persistent buffers that every commit carries.
        about: what the store's meta says besides, for who has no model.
        method: of zeroth-order training, as the store's meta says it.
        cut: of weights that are rounded when the store is filled.
        made_contiguous: names of parameters whose strides are not kept.
        other_strides: names of those that the store has with other strides than the model.
        in_place: the files that frozen parameters are read from; make_layout() sets it.
    """

    params: list[Param]
    units: list[Unit]
    scopes: list[Scope]
    buffer_bytes: int = 0
    about: dict[str, Any] = dataclasses.field(default_factory=dict)
    method: dict[str, Any] | None = None
    cut: _storage_formats.Cut = dataclasses.field(default_factory=_storage_formats.Cut)
    made_contiguous: list[str] = dataclasses.field(default_factory=list)
    other_strides: list[str] = dataclasses.field(default_factory=list)
    in_place: InPlace = dataclasses.field(init=False)


def _own_bytes(module: nn.Module) -> int:
    owned = (part._parameters.values() for part in module.modules())
    return sum({id(p): p.nbytes for each in owned for p in each if p is not None}.values())


def _lists_below(module: nn.Module) -> Iterator[nn.Module]:
    for child in module.modules():
        if child is module or not isinstance(child, nn.ModuleList | nn.Sequential):
            continue
        if sum(1 for c in child.children() if _own_bytes(c) > 0) >= 2:
            yield child


class _Finder:
    """Walks the tree once; `blocks` gets (name, module) in order of definition."""

    def __init__(self, model: nn.Module, block_bytes_max: int) -> None:
        self.model = model
        self.total = max(_own_bytes(model), 1)
        self.block_bytes_max = block_bytes_max
        self.blocks: list[tuple[str, nn.Module]] = []
        self.seen: set[int] = set()

    def add(self, name: str, module: nn.Module) -> None:
        if id(module) not in self.seen:
            self.seen.add(id(module))
            self.blocks.append((name, module))

    def visit(self, name: str, module: nn.Module) -> None:
        """Descend into a module that is not a block itself."""
        if id(module) in self.seen:
            return
        if module._parameters and any(p is not None for p in module._parameters.values()):
            self.add(name, module)
        for child_name, child in module.named_children():
            full = f"{name}.{child_name}" if name else child_name
            if _own_bytes(child) == 0:
                continue
            if isinstance(child, nn.ModuleList | nn.Sequential | nn.ModuleDict):
                for item_name, item in child.named_children():
                    self.element(f"{full}.{item_name}", item)
            else:
                self.element(full, child)

    def element(self, name: str, module: nn.Module) -> None:
        """Decide whether module is a block or is looked into."""
        nbytes = _own_bytes(module)
        if nbytes == 0:
            return
        children = any(_own_bytes(c) > 0 for c in module.children())
        inner = sum(_own_bytes(m) for m in _lists_below(module))
        is_tower = 2 * inner >= nbytes and 4 * nbytes > self.total
        if children and (nbytes > self.block_bytes_max or is_tower):
            self.visit(name, module)
        else:
            self.add(name, module)


def find_blocks(
    model: nn.Module, block_bytes_max: int, given: Sequence[nn.Module] | None = None
) -> list[tuple[str, nn.Module]]:
    """Find the blocks of a model by structure.

    Args:
        model: the module to be wrapped.
        block_bytes_max: a block with more bytes of parameters is split at its children.
        given: modules that are blocks whatever their structure.

    Returns:
        (name, module) of each block and of each module that owns parameters above them.

    Raises:
        ModelError: a given block is not a submodule of the model.
    """
    finder = _Finder(model, block_bytes_max)
    if given is None:
        finder.visit("", model)
        return finder.blocks
    names = {id(m): n for n, m in model.named_modules()}
    for module in given:
        if id(module) not in names:
            raise ModelError(f"blocks= has a {type(module).__name__} that is not in the model")
    chosen = {id(m) for m in given}

    def walk(name: str, module: nn.Module) -> None:
        if id(module) in chosen:
            finder.add(name, module)
            return
        below = any(id(m) in chosen for m in module.modules())
        if not below and module is not model:
            finder.element(name, module)
            return
        if any(p is not None for p in module._parameters.values()):
            finder.add(name, module)
        for child_name, child in module.named_children():
            walk(f"{name}.{child_name}" if name else child_name, child)

    walk("", model)
    return finder.blocks


def named(model: nn.Module, names: Collection[str]) -> list[nn.Module]:
    """The modules that units are named after, without those that others of them lie in."""
    modules = dict(model.named_modules())
    around = {name[:at] for name in names for at in range(len(name)) if name[at] == "."}
    return [modules[name] for name in {*names} - around if name in modules]


def scope_of_modules(
    model: nn.Module, blocks: list[tuple[str, nn.Module]]
) -> dict[int, tuple[str, nn.Module]]:
    """The scope that each module's own parameters belong to: the innermost block around it."""
    by_id = {id(m): (n, m) for n, m in blocks}
    found: dict[int, tuple[str, nn.Module]] = {}

    # A stack instead of a nested function: one that calls itself is a cycle, which would hold the
    # model until the collector comes by.
    left: list[tuple[nn.Module, tuple[str, nn.Module] | None]] = [(model, None)]
    while left:
        module, scope = left.pop()
        scope = by_id.get(id(module), scope)
        if scope is not None:
            if found.get(id(module)) == scope:
                continue
            found.setdefault(id(module), scope)
        left.extend((child, scope) for child in reversed([*module.children()]))
    return found


def contiguous_strides(shape: Sequence[int]) -> tuple[int, ...]:
    """The steps between elements of a tensor in the usual order."""
    strides = [1]
    for size in reversed(shape[1:]):
        strides.append(strides[-1] * size)
    return tuple(reversed(strides))[-len(shape) :] if len(shape) > 0 else ()


def is_dense(shape: Sequence[int], strides: Sequence[int]) -> bool:
    """The elements fill one stretch of memory, each place once, in some order of dimensions."""
    expected = 1
    for step, size in sorted((step, size) for size, step in zip(shape, strides, strict=True)):
        if size > 1 and step != expected:
            return False
        expected *= size
    return True


def _align(value: int, alignment: int) -> int:
    return -(-value // alignment) * alignment


def place(unit: Unit) -> None:
    """Lay the unit's parameters out one after the other, aligned."""
    at = 0
    for param in unit.params:
        param.first = at
        size = param.count if unit.trainable else param.count * unit.dtype.itemsize
        at = _align(at + size, _core.PARAM_ALIGN if unit.trainable else 128)
    if unit.trainable:
        unit.elements = _align(max(at, 1), _core.ELEMENT_ALIGN)
        unit.nbytes = unit.elements * unit.dtype.itemsize
    else:
        unit.nbytes = _align(max(at, 1), _core.BLOCK_BYTES)


def place_values(unit: Unit) -> None:
    """Lay out where the values of kept parameters are computed with: behind what is kept."""
    if unit.params[0].kept is None:
        return
    at = unit.nbytes
    for param in unit.params:
        param.value_first = at
        at = _align(at + param.count * param.tensor.element_size(), 128)
    unit.value_bytes = _align(at, _core.BLOCK_BYTES) - unit.nbytes


def checksum_count(unit: Unit) -> int:
    """Of a unit that is read in place."""
    return sum(run.checksum_count for run in unit.runs)


def checksum_bytes(units: Sequence[Unit]) -> int:
    """Of SSD, for the checksums of all units that are read in place."""
    count = sum(checksum_count(unit) for unit in units)
    return _align(count * 4, _core.BLOCK_BYTES)
