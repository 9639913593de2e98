"""Tensors in files, and how those that are quantized are decoded.

csrc/compute/unpack.h defines the formats and the decoded values; [Note: Packed units] in
csrc/sched/in_place.h defines where the parts of such a parameter are in memory.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

from lohan import _core

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import torch

    from lohan.layout._conversion import Made

# The numbers of enum lh_unpack_format, enum lh_unpack_order, enum lh_dtype and enum
# lh_unpack_scale.
FORMATS = {"raw": 0, "f8_e4m3": 1, "i8": 2, "nibbles": 3, "e2m1": 4}
FORMATS |= {"q8_0": 5, "q4_k": 6, "q6_k": 7, "f32": 8, "bf16": 9, "f16": 10}
FORMATS |= {"u4": 11, "u8": 12, "iq4_nl": 13, "iq4_xs": 14, "mxfp4": 15}
ORDERS = {"rows": 0, "words": 1, "transposed": 2, "awq": 3}
_DTYPES = {"torch.float32": 0, "torch.bfloat16": 1, "torch.float16": 2}
_SCALES = {"F32": 0, "BF16": 1, "F16": 2, "U8": 3, "F8_E8M0": 4, "F8_E4M3": 5}
_SCALES |= {"F8_E4M3_TIMES": 6}
# The elements and bytes of a grain.
GRAINS = dict.fromkeys(FORMATS, (1, 1)) | {"nibbles": (2, 1), "e2m1": (2, 1)}
GRAINS |= {"q8_0": (32, 34), "q4_k": (256, 144), "q6_k": (256, 210)}
GRAINS |= {"f32": (1, 4), "bf16": (1, 2), "f16": (1, 2), "u4": (2, 1)}
GRAINS |= {"iq4_nl": (32, 18), "iq4_xs": (256, 136), "mxfp4": (32, 17)}
TABLE_COUNT = 16
NESTED_TABLE_COUNT = 256


@dataclasses.dataclass(frozen=True)
class Entry:
    """A tensor in a file.

    Attributes:
        file: the index in Folder.files.
        offset: the offset of the first byte in the file.
        nbytes: the number of bytes in the file.
        dtype: the name in safetensors.
        shape: the shape of the values, even if the file packs several of them into an element.
        packed: how the values are decoded; None: they are stored as they are.
        rest: the entries of the further parts of the values, if they are in several places; then
            `nbytes` is that of the first part.
        name: the tensor's name in the file, for messages.
        made: how the values are computed from several entries; then the place is that of the first.
    """

    file: int
    offset: int
    nbytes: int
    dtype: str
    shape: tuple[int, ...]
    packed: Packed | None = None
    rest: tuple[Entry, ...] = ()
    name: str = dataclasses.field(default="", compare=False)
    made: Made | None = None

    @property
    def places(self) -> list[Entry]:
        """The places of the values in the files, one after the other."""
        return [dataclasses.replace(self, rest=()), *self.rest]

    @property
    def is_quantized(self) -> bool:
        """Whether the values, or those that they are computed from, must be decoded."""
        sources = () if self.made is None else self.made.sources
        return self.packed is not None or any(entry.is_quantized for _, entry in sources)

    @property
    def is_joinable(self) -> bool:
        """Whether the values can be read in place although they are in several places."""
        *others, last = self.places
        return last.nbytes > 0 and all(p._least_bytes % _core.IN_PLACE_ALIGN == 0 for p in others)

    @property
    def _least_bytes(self) -> int:
        """The number of bytes that values of this place have at least in a model."""
        return self.nbytes if self.packed is None else 2 * self.packed.count


@dataclasses.dataclass(frozen=True)
class Packed:
    """How a parameter is quantized.

    Attributes:
        format: a key of FORMATS.
        rounding: the dtype to which a product is rounded first.
        rows: the rows of the matrix of values.
        columns: its columns.
        block: the rows and columns that share a scale.
        scales: the scales, unless the format has them in its grains; dtype "U8": they are
            quantized, "F8_E8M0": powers of two, "F8_E4M3": to be divided by the one of `nested`,
            "F8_E4M3_TIMES": to be multiplied by it.
        table: for "nibbles": the 16 values.
        nested: if the scales are quantized: their scales; with "F8_E4M3" a divisor.
        nested_table: if the scales are quantized: their 256 values.
        nested_block: the number of scales that share an element of nested.
        nested_offset: the number that is added to each scale.
        group_rows: the rows of a group whose rows are in another order; 0: all are in order.
        order: a key of ORDERS.
        zeros: for "u4" and "u8": the packed zeros, if they are not all `zero`.
        index: for "u4" and "u8": the group of each column, if groups are not consecutive.
        zero: what is subtracted from the values' bits, or added to those of `zeros`.
        rounds_scale: whether scales are rounded to the dtype of the result first.
    """

    format: str
    rounding: torch.dtype
    rows: int
    columns: int
    block: tuple[int, int]
    scales: Entry | None
    table: Entry | None = None
    nested: Entry | None = None
    nested_table: Entry | None = None
    nested_block: int = 1
    nested_offset: float = 0.0
    group_rows: int = 0
    order: str = "rows"
    zeros: Entry | None = None
    index: Entry | None = None
    zero: int = 0
    rounds_scale: bool = False

    @property
    def parts(self) -> tuple[Entry | None, ...]:
        """What the values are decoded with, in the order of struct lh_in_place_pack."""
        return self.scales, self.table, self.nested, self.nested_table, self.zeros, self.index

    @property
    def count(self) -> int:
        """The number of values."""
        return self.rows * self.columns

    def nbytes(self, count: int) -> int:
        """Return the number of packed bytes of `count` values."""
        elements, nbytes = GRAINS[self.format]
        return -(-count // elements) * nbytes

    @property
    def group(self) -> int:
        """The number of values in a group of rows, or 0."""
        return self.group_rows * self.columns

    def span(self, first: int, count: int) -> tuple[int, int]:
        """Return the offset and the number of the packed bytes that some values need."""
        step = self.group or GRAINS[self.format][0]
        begin = self.nbytes(first // step * step)
        end = min(self.count, -(-(first + count) // step) * step)
        return begin, self.nbytes(end) - begin

    def moved(self, file: Callable[[int], int]) -> Packed:
        """Return the same with other numbers of files."""
        made: dict[str, Any] = {
            name: None if part is None else dataclasses.replace(part, file=file(part.file))
            for name, part in zip(_PARTS, self.parts, strict=True)
        }
        return dataclasses.replace(self, **made)

    def native(self, dtype: torch.dtype) -> tuple[Any, ...]:
        """Return the description for the C core, for a result of this dtype."""
        return (
            FORMATS[self.format],
            _DTYPES[str(dtype)],
            _DTYPES[str(self.rounding)],
            self.rows,
            self.columns,
            *self.block,
            0 if self.scales is None else _SCALES[self.scales.dtype],
            self.nested_block,
            self.nested_offset,
            self.group_rows,
            ORDERS[self.order],
            int(self.zeros is not None),
            int(self.index is not None),
            self.zero,
            int(self.rounds_scale),
        )

    def decode(
        self,
        first: int,
        packed: torch.Tensor,
        parts: Sequence[torch.Tensor | None],
        out: torch.Tensor,
    ) -> None:
        """Decode values into a contiguous tensor.

        Args:
            first: the number of the first value; for formats of 4 bits, even.
            packed: the bytes of span().
            parts: the bytes of `parts`.
            out: the result, of any shape.
        """
        scales, table, nested, nested_table, zeros, index = (
            0 if part is None else part.data_ptr() for part in parts
        )
        _core.unpack(
            self.native(out.dtype),
            first,
            out.numel(),
            packed.data_ptr(),
            scales,
            table,
            nested,
            nested_table,
            zeros,
            index,
            out.data_ptr(),
        )

    # --- The store's meta ---------------------------------------------------------------------

    def describe(self) -> dict[str, Any]:
        """Return the form that a store's meta has; see `in_place` in docs/store-format.md."""
        made = {name: getattr(self, name) for name in _PLAIN}
        made["rounding"] = str(self.rounding)
        if self.scales is not None:
            made["scale_dtype"] = self.scales.dtype
        for name, usual in _OPTIONAL.items():
            if getattr(self, name) != usual:
                made[name] = getattr(self, name)
        for name, part in zip(_PARTS, self.parts, strict=True):
            if part is not None:
                made[name] = [part.file, part.offset, part.nbytes]
        return made


_PLAIN = ("format", "rows", "columns", "block", "nested_block", "nested_offset")
_OPTIONAL = {"group_rows": 0, "order": "rows", "zero": 0, "rounds_scale": False}
_PARTS = ("scales", "table", "nested", "nested_table", "zeros", "index")


def restored(said: dict[str, Any], dtype: Callable[[str], torch.dtype]) -> Packed:
    """Return what Packed.describe() described.

    Args:
        said: a description that _meta.py has checked.
        dtype: the dtype of a name.
    """
    made: dict[str, Any] = {name: said[name] for name in _PLAIN}
    made["block"] = tuple(said["block"])
    made["scales"] = None
    made |= {name: said.get(name, usual) for name, usual in _OPTIONAL.items()}
    for name in _PARTS:
        if name in said:
            file, offset, nbytes = said[name]
            kind = said["scale_dtype"] if name == "scales" else "F32"
            made[name] = Entry(file, offset, nbytes, kind, ())
    return Packed(rounding=dtype(said["rounding"]), **made)
