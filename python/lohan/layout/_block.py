"""Find the blocks of a module, and lay their parameters out in units.

[Note: Blocks and units] A block is a module whose parameters move together: a child of a
ModuleList or Sequential, or one of the remaining parts (embeddings, final norm, head). Every
block is a scope: its units are resident from its forward pre-hook to its forward hook. A module
that owns parameters directly and has blocks below it is also a scope; its units are resident while
its forward runs, during which its blocks are loaded and evicted. A unit is one array of those
parameters of one block that have the same dtype and requires_grad, one after the other. Parameters
that are read in place, those that zeroth-order training updates, and those of each group of
processes ([Note: Groups] in replicas/_groups.py) are in separate units.

[Note: Strides] Torch chooses some kernels by a parameter's strides (channels_last convolutions),
and different kernels round differently. A unit therefore stores the elements of a dense parameter
in the order in which they were in memory at wrap, and lends them with the same strides; gradients
and moments are put into that order. Files, and code that reads values by shape, have the elements
in contiguous order. A store records its parameters' strides, and a resumed run computes with them.
Parameters with gaps, parameters that are read in place and those that zeroth-order training updates
are made contiguous, and a note is printed once.
"""

from __future__ import annotations

import dataclasses
import zlib
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from lohan import _core
from lohan.common import _storage_formats
from lohan.common._rules import RULES
from lohan.common._states import BLOCK_ELEMENTS as BLOCK_ELEMENTS
from lohan.common._states import STATES as STATES
from lohan.errors import ModelError
from lohan.layout import IS_BLOCK

if TYPE_CHECKING:
    from lohan.layout._in_place import InPlace
    from lohan.layout._origins import Origin
    from lohan.layout._packed import Entry

DTYPE_CODES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
BYTES_CODE = 3
# Bytes per element that a trainable parameter needs in addition for an fp32 master: none for fp32,
# a 16-bit residual for bf16, the master itself for fp16.
RESIDUAL_BYTES = {torch.float32: 0, torch.bfloat16: 2, torch.float16: 4}


@dataclasses.dataclass(frozen=True)
class Run:
    """Consecutive whole blocks of a file. An in-place unit is its runs, one after the other."""

    file: int
    file_offset: int
    offset: int  # the offset in the unit
    nbytes: int

    @property
    def checksum_count(self) -> int:
        """The number of checksums, of which the last may cover fewer bytes."""
        return -(-self.nbytes // _core.CHECKSUM_BYTES)


@dataclasses.dataclass(frozen=True)
class Move:
    """A parameter's move, from where it was read to a place with torch's alignment; in bytes."""

    begin: int
    to: int
    nbytes: int


@dataclasses.dataclass(frozen=True)
class Pack:
    """Where a parameter of a packed unit and what it is decoded with are read; in bytes.

    Attributes:
        begin: the offset of its packed bytes in the unit.
        parts: the offsets of Packed.parts; 0: there is no such part.
        rest: the same of Entry.rest.
    """

    begin: int
    parts: tuple[int, ...] = (0,) * 6
    rest: tuple[Pack, ...] = ()


@dataclasses.dataclass
class Param:
    """A parameter of the model; tied parameters count as one."""

    name: str
    tensor: nn.Parameter
    unit: int
    first: int  # the offset in the unit: in elements if trainable, otherwise in bytes
    index: int
    source: Entry | None = None  # the entry in the files of weights=
    stream: int | None = None  # the number of its stream of z; None: no zeroth-order updates
    z_first: int = 0  # the element of that stream that its first element has
    decays: bool = True  # whether zeroth-order training applies weight decay to the parameter
    kept: str | None = None  # the format of its stored form; None: no separate stored form
    value_first: int = 0  # with `kept`: the offset in bytes of the values for computation
    strides: tuple[int, ...] | None = None  # None: contiguous; see [Note: Strides]
    factor_first: int = 0  # under a rule with factors: the element of the unit where these begin
    lr_ratio: float = (
        0.0  # of a matrix: what its shape makes of the learning rate; 0: not updated so
    )
    is_slice: bool = False  # whether it is an expert's slice of a parameter ([Note: Experts apart])

    @property
    def count(self) -> int:
        """The number of elements."""
        return self.tensor.numel()

    @property
    def row_elements(self) -> int:
        """The elements of a row that has a second moment of its own under some rules.

        [Note: Second moments of rows] in csrc/compute/rule.h has the definition. A slice is a row
        of the parameter that it is a part of.
        """
        if self.is_slice:
            return max(self.count, 1)
        if self.tensor.dim() < 2 or self.order[0] != 0 or self.count == 0:
            return max(self.count, 1)
        each = self.count // self.tensor.shape[0]
        return each if each >= BLOCK_ELEMENTS else self.count

    @property
    def matrix(self) -> tuple[int, int]:
        """The rows and columns of the matrices whose second moments may have factors; (0, 0): none.

        [Note: Factors] in csrc/compute/factor.h has the definition.
        """
        shape = self.tensor.shape
        return (shape[-2], shape[-1]) if len(shape) > 1 and self.count > 0 else (0, 0)

    @property
    def factor_count(self) -> int:
        """The number of floats of its factors, or of its second moments if it has no matrices."""
        rows, columns = self.matrix
        return self.count // (rows * columns) * (rows + columns + 1) if rows else self.count

    @property
    def number(self) -> int:
        """What selects the random bits that round its moments.

        It is a function of the name alone, because the bits must not depend on units, whose number
        and order depend on blocks= and on the budget.
        """
        return zlib.crc32(self.name.encode())

    @property
    def order(self) -> tuple[int, ...]:
        """The dimensions, sorted by decreasing stride."""
        strides = self.strides or contiguous_strides(self.tensor.shape)
        return tuple(sorted(range(len(strides)), key=lambda i: -strides[i]))

    def flat(self, values: torch.Tensor) -> torch.Tensor:
        """Return values of the parameter's shape in the unit's order."""
        return values if self.strides is None else values.permute(self.order).reshape(-1)

    def shaped(self, flat: torch.Tensor) -> torch.Tensor:
        """Return a view of values in the unit's order with the parameter's shape and strides."""
        strides = self.strides or contiguous_strides(self.tensor.shape)
        return flat.as_strided(self.tensor.shape, strides)

    @property
    def engine_first(self) -> int:
        """The offset of the values for computation, in the form that the engine takes."""
        return self.first if self.kept is None else self.value_first


def source_of(param: Param) -> Entry:
    """Return the file entry of a parameter that is read in place."""
    assert param.source is not None
    return param.source


@dataclasses.dataclass
class Unit:
    """Parameters of one block that move together."""

    name: str
    dtype: torch.dtype  # the storage dtype
    trainable: bool
    params: list[Param]
    elements: int = 0  # the number of elements, padded; 0: frozen
    nbytes: int = 0  # size of the parameters in memory and on SSD, padded
    value_bytes: int = 0  # size of separate values for computation, if Param.kept is set
    always: bool = False
    announced: bool = False  # uses are planned only where the session announces them
    family: int = 0  # trained experts with the same number are parts of the same tensors
    has_states: bool = True  # False: trained, but another process has the optimizer's states
    states: str = "fp32"  # how moments are stored: a key of STATES
    rule: str = "adamw"  # how it is updated: a key of RULES
    is_averaged: bool = False  # whether the run has averages of the parameters (ema=)
    # The sources of the bytes if the unit is read in place (_in_place.py); empty: the store has it.
    runs: list[Run] = dataclasses.field(default_factory=list)
    moves: list[Move] = dataclasses.field(default_factory=list)
    packs: dict[str, Pack] = dataclasses.field(default_factory=dict)  # by parameter, in order

    @property
    def value_elements(self) -> int:
        """The number of elements before the factors of a rule that has them; otherwise all."""
        return self.params[0].factor_first if RULES[self.rule].has_factors else self.elements

    @property
    def place_bytes(self) -> int:
        """The size of the unit's place in the memory of the computing device."""
        return self.nbytes + self.value_bytes

    @property
    def read_bytes(self) -> int:
        """The number of bytes that a load reads."""
        return sum(run.nbytes for run in self.runs) if self.runs else self.nbytes

    @property
    def gradient_bytes(self) -> int:
        """The size of all gradients in the parameters' dtype."""
        return sum(p.count for p in self.params) * self.dtype.itemsize if self.trainable else 0

    @property
    def residual_bytes(self) -> int:
        """The bytes per element that an exact master takes in addition to the parameter."""
        return RESIDUAL_BYTES[self.dtype] if self.trainable and self.has_states else 0

    @property
    def moment_bytes(self) -> int:
        """The bytes per element of each array of moments."""
        return STATES[self.states] if self.trainable and self.has_states else 0

    @property
    def moments(self) -> list[str]:
        """The arrays of moments that the store has: none, if another process has the states."""
        return [*RULES[self.rule].arrays(self.states)] if self.moment_bytes else []

    @property
    def has_average(self) -> bool:
        """Whether the store has averages of the parameters, which are where the states are."""
        return self.is_averaged and self.has_states

    @property
    def block_bytes(self) -> int:
        """The bytes of the states of a block: scales, or second moments of rows; 0: none."""
        return RULES[self.rule].block_bytes(self.states) if self.moment_bytes else 0

    @property
    def scale_parts(self) -> list[int]:
        """The bytes of each extent with the states of blocks; empty: there are none."""
        if self.block_bytes == 0:
            return []
        firsts = range(0, self.elements, _core.SCALES_ELEMENTS)
        counts = (min(_core.SCALES_ELEMENTS, self.elements - first) for first in firsts)
        return [count // BLOCK_ELEMENTS * self.block_bytes for count in counts]


@dataclasses.dataclass
class Scope:
    """A module and the units that its forward needs."""

    name: str
    module: nn.Module | None  # None after the hooks are registered
    units: list[int]
    is_innermost: bool = True  # whether the scope contains no other scope


@dataclasses.dataclass
class Layout:
    """All parameters and units, and the scopes that need them.

    Attributes:
        buffer_bytes: the size of persistent buffers that every commit includes.
        about: further entries of the store's meta, for readers without the model.
        method: the method entry of the store's meta, for zeroth-order training.
        part: which part of the optimizer's states this process has, and the number of parts.
        cut: statistics of weights that are rounded when the store is filled.
        made_contiguous: names of parameters whose strides are not preserved.
        other_strides: names of parameters whose strides in the store differ from the model's.
        groups: what the store's meta says of the process's groups; None without groups=.
        ranks_of: by the index of a parameter of a group, the ranks that have it.
        among: by the index of a unit of a group, the parts of the states that can have its own.
        owes_idle: whether units of a family owe the steps in which they have no gradient.
        fills_idle: whether they have a gradient of zeros in these steps instead.
        averages_idle: whether only their averages take these steps, at once.
        origins: where each parameter's value came from, by its name; filling the store sets it.
        new_rows: by the index of a parameter, the rows that its file lacks ([Note: New tokens] in
            _resized.py), and where they come from.
        in_place: the files that frozen parameters are read from; make_layout() sets it.
    """

    params: list[Param]
    units: list[Unit]
    scopes: list[Scope]
    buffer_bytes: int = 0
    about: dict[str, Any] = dataclasses.field(default_factory=dict)
    method: dict[str, Any] | None = None
    part: tuple[int, int] = (0, 1)
    groups: dict[str, Any] | None = None
    ranks_of: dict[int, tuple[int, ...]] = dataclasses.field(default_factory=dict)
    among: dict[int, tuple[int, ...]] = dataclasses.field(default_factory=dict)
    cut: _storage_formats.Cut = dataclasses.field(default_factory=_storage_formats.Cut)
    made_contiguous: list[str] = dataclasses.field(default_factory=list)
    other_strides: list[str] = dataclasses.field(default_factory=list)
    owes_idle: bool = False
    fills_idle: bool = False
    averages_idle: bool = False
    origins: dict[str, Origin] = dataclasses.field(default_factory=dict)
    new_rows: dict[int, tuple[torch.Tensor, str]] = dataclasses.field(default_factory=dict)
    in_place: InPlace = dataclasses.field(init=False)

    @property
    def states(self) -> str:
        """How moments are stored: a key of STATES."""
        return self.units[0].states if self.units else "fp32"

    @property
    def rule(self) -> str:
        """The update rule: a key of RULES; the one with others, if units have both."""
        rules = {unit.rule for unit in self.units}
        return next((rule for rule in rules if RULES[rule].others), self._first_rule)

    @property
    def _first_rule(self) -> str:
        return self.units[0].rule if self.units else "adamw"

    @property
    def others(self) -> list[int]:
        """The indices of units that have the rule of a rule's others instead."""
        return [i for i, unit in enumerate(self.units) if unit.rule != self.rule]

    @property
    def is_settled(self) -> bool:
        """Whether the engine changes units of a family in steps without a gradient."""
        return self.owes_idle or self.averages_idle

    @property
    def has_averages(self) -> bool:
        """Whether the run has averages of trained parameters."""
        return any(unit.is_averaged for unit in self.units)


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
    """A search of the module tree that collects (name, module) in `blocks`, in definition order."""

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

    def add_owner(self, name: str, module: nn.Module) -> None:
        """Add a module that owns parameters itself, and is descended into."""
        if any(param is not None for param in module._parameters.values()):
            self.add(name, module)

    def visit(self, name: str, module: nn.Module) -> None:
        """Descend into a module that is not a block."""
        if id(module) in self.seen:
            return
        self.add_owner(name, module)
        for child_name, child in module.named_children():
            full = f"{name}.{child_name}" if name else child_name
            if _own_bytes(child) == 0:
                continue
            if isinstance(child, nn.ModuleList | nn.Sequential | nn.ModuleDict):
                self.add_owner(full, child)
                for item_name, item in child.named_children():
                    self.element(f"{full}.{item_name}", item)
            else:
                self.element(full, child)

    def element(self, name: str, module: nn.Module) -> None:
        """Add a module as a block, or descend into it."""
        nbytes = _own_bytes(module)
        if nbytes == 0:
            return
        children = any(_own_bytes(c) > 0 for c in module.children())
        children = children and IS_BLOCK not in module.__dict__
        inner = sum(_own_bytes(m) for m in _lists_below(module))
        is_tower = 2 * inner >= nbytes and 4 * nbytes > self.total
        if children and (nbytes > self.block_bytes_max or is_tower):
            self.visit(name, module)
        else:
            self.add(name, module)


def find_blocks(
    model: nn.Module, block_bytes_max: int, given: Sequence[nn.Module] | None = None
) -> list[tuple[str, nn.Module]]:
    """Find the blocks of a model by its structure.

    Args:
        model: the module to be wrapped.
        block_bytes_max: a block with more bytes of parameters is split at its children.
        given: modules that are blocks regardless of their structure.

    Returns:
        (name, module) of each block, and of each module above blocks that owns parameters.

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
        finder.add_owner(name, module)
        for child_name, child in module.named_children():
            walk(f"{name}.{child_name}" if name else child_name, child)

    walk("", model)
    return finder.blocks


def named(model: nn.Module, names: Collection[str]) -> list[nn.Module]:
    """Return the modules with these unit names, except modules that contain another of them."""
    modules = dict(model.named_modules())
    around = {name[:at] for name in names for at in range(len(name)) if name[at] == "."}
    return [modules[name] for name in {*names} - around if name in modules]


def scope_of_modules(
    model: nn.Module, blocks: list[tuple[str, nn.Module]]
) -> dict[int, tuple[str, nn.Module]]:
    """Return the scope of each module's own parameters: the innermost block around it."""
    by_id = {id(m): (n, m) for n, m in blocks}
    found: dict[int, tuple[str, nn.Module]] = {}

    # A stack instead of a recursive nested function, whose reference cycle would keep the model
    # alive until the garbage collector runs.
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
    """Return the strides of a contiguous tensor."""
    strides = [1]
    for size in reversed(shape[1:]):
        strides.append(strides[-1] * size)
    return tuple(reversed(strides))[-len(shape) :] if len(shape) > 0 else ()


def is_in_order(shape: Sequence[int], strides: Sequence[int]) -> bool:
    """Return whether elements are in contiguous order; strides of single indices do not matter."""
    expected = contiguous_strides(shape)
    each = zip(shape, strides, expected, strict=True)
    return all(size == 1 or step == of_contiguous for size, step, of_contiguous in each)


def is_dense(shape: Sequence[int], strides: Sequence[int]) -> bool:
    """Return whether the elements fill a range of memory without gaps or overlap."""
    expected = 1
    for step, size in sorted((step, size) for size, step in zip(shape, strides, strict=True)):
        if size > 1 and step != expected:
            return False
        expected *= size
    return True


def _align(value: int, alignment: int) -> int:
    return -(-value // alignment) * alignment


def place(unit: Unit) -> None:
    """Lay the unit's parameters out one after the other, with alignment."""
    at = 0
    for param in unit.params:
        param.first = at
        size = param.count if unit.trainable else param.count * unit.dtype.itemsize
        at = _align(at + size, _core.PARAM_ALIGN if unit.trainable else 128)
    if unit.trainable:
        for param in unit.params if RULES[unit.rule].has_factors else ():
            param.factor_first = at
            at += _factor_elements(unit, param)
        unit.elements = elements_with(unit, unit.states, unit.rule)
        unit.nbytes = unit.elements * unit.dtype.itemsize
    else:
        unit.nbytes = _align(max(at, 1), _core.BLOCK_BYTES)


def elements_with(unit: Unit, states: str, rule: str) -> int:
    """Return the padded number of elements of a trained unit with moments of a rule."""
    last = unit.params[-1]
    end = _align(last.first + last.count, _core.PARAM_ALIGN)
    if RULES[rule].has_factors:
        end += sum(_factor_elements(unit, param) for param in unit.params)
    is_scaled = RULES[rule].block_bytes(states) > 0  # these, too, fill whole blocks on SSD
    return _align(max(end, 1), _core.SCALED_ALIGN if is_scaled else _core.ELEMENT_ALIGN)


def _factor_elements(unit: Unit, param: Param) -> int:
    """Return the elements of the unit that a parameter's factors take."""
    return _align(-(-param.factor_count * 4 // unit.dtype.itemsize), _core.PARAM_ALIGN)


def place_values(unit: Unit) -> None:
    """Lay out the values for computation after the stored forms, if the parameters have these."""
    if unit.params[0].kept is None:
        return
    at = unit.nbytes
    for param in unit.params:
        param.value_first = at
        at = _align(at + param.count * param.tensor.element_size(), 128)
    unit.value_bytes = _align(at, _core.BLOCK_BYTES) - unit.nbytes


def parts_of(
    units: Sequence[Unit], part_count: int, among: Mapping[int, Sequence[int]] | None = None
) -> list[int]:
    """Divide the states of trained units into parts of about equal size.

    The largest unit goes first, each to the part with the fewest elements so far. Units that only
    some processes have are divided apart from the others: all that have a unit agree on its part,
    although they have different units.

    Args:
        units: the units of a layout.
        part_count: the number of parts.
        among: by the index of a unit that only some processes have, the parts of these.

    Returns:
        The part of each unit; the first one for frozen units, which have no states.
    """
    among, parts = among or {}, [0] * len(units)
    sizes: dict[Sequence[int], dict[int, int]] = {}
    for index in sorted(range(len(units)), key=lambda i: (-units[i].elements, i)):
        choices = among.get(index, range(part_count))
        size = sizes.setdefault(choices, dict.fromkeys(choices, 0))
        parts[index] = min(size, key=size.__getitem__) if units[index].trainable else choices[0]
        size[parts[index]] += units[index].elements
    return parts


def divide_states(layout: Layout, part: int, part_count: int) -> None:
    """Mark the units whose states another process has; see parts_of()."""
    layout.part = (part, part_count)
    parts = parts_of(layout.units, part_count, layout.among)
    for unit, its in zip(layout.units, parts, strict=True):
        unit.has_states = its == part or not unit.trainable


def checksum_count(unit: Unit) -> int:
    """Return the number of checksums of an in-place unit."""
    return sum(run.checksum_count for run in unit.runs)


def checksum_bytes(units: Sequence[Unit]) -> int:
    """Return the bytes on SSD for the checksums of all in-place units."""
    count = sum(checksum_count(unit) for unit in units)
    return _align(count * 4, _core.BLOCK_BYTES)


# The names of the dtypes, in the order in which the safetensors library lays tensors out.
NAMES = {
    torch.uint64: "U64",
    torch.int64: "I64",
    torch.float64: "F64",
    torch.complex64: "C64",
    torch.float32: "F32",
    torch.uint32: "U32",
    torch.int32: "I32",
    torch.bfloat16: "BF16",
    torch.float16: "F16",
    torch.uint16: "U16",
    torch.int16: "I16",
    torch.float8_e5m2fnuz: "F8_E5M2FNUZ",
    torch.float8_e4m3fnuz: "F8_E4M3FNUZ",
    torch.float8_e8m0fnu: "F8_E8M0",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
