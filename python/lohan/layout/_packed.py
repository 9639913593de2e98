"""Tensors in files, and how those that are quantized are decoded.

csrc/compute/unpack.h defines the formats and the decoded values; [Note: Packed units] in
csrc/sched/in_place.h defines where the parts of such a parameter are in memory.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

import torch

from lohan import _core

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

# The numbers of enum lh_unpack_format and enum lh_dtype.
FORMATS = {"raw": 0, "f8_e4m3": 1, "i8": 2, "nibbles": 3}
_DTYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
_SCALES = {"F32": 0, "BF16": 1, "F16": 2, "U8": 3}
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
    """

    file: int
    offset: int
    nbytes: int
    dtype: str
    shape: tuple[int, ...]
    packed: Packed | None = None
    rest: tuple[Entry, ...] = ()


@dataclasses.dataclass(frozen=True)
class Packed:
    """How a parameter is quantized.

    Attributes:
        format: a key of FORMATS.
        rounding: the dtype to which a product is rounded first.
        rows: the rows of the matrix of values.
        columns: its columns.
        block: the rows and columns that share a scale.
        scales: the scales.
        table: for "nibbles": the 16 values.
        nested: if the scales are quantized: their scales.
        nested_table: if the scales are quantized: their 256 values.
        nested_block: the number of scales that share an element of nested.
        nested_offset: the number that is added to each scale.
    """

    format: str
    rounding: torch.dtype
    rows: int
    columns: int
    block: tuple[int, int]
    scales: Entry
    table: Entry | None = None
    nested: Entry | None = None
    nested_table: Entry | None = None
    nested_block: int = 1
    nested_offset: float = 0.0

    @property
    def parts(self) -> tuple[Entry | None, ...]:
        """What the values are decoded with, in the order of struct lh_in_place_pack."""
        return self.scales, self.table, self.nested, self.nested_table

    @property
    def count(self) -> int:
        """The number of values."""
        return self.rows * self.columns

    def nbytes(self, count: int) -> int:
        """Return the number of packed bytes of `count` values."""
        return -(-count // 2) if self.format == "nibbles" else count

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
            _DTYPES[dtype],
            _DTYPES[self.rounding],
            self.rows,
            self.columns,
            *self.block,
            _SCALES[self.scales.dtype],
            self.nested_block,
            self.nested_offset,
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
            first: the number of the first value; for "nibbles", even.
            packed: the bytes of the values from it on.
            parts: the bytes of `parts`.
            out: the result, of any shape.
        """
        scales, table, nested, nested_table = (
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
            out.data_ptr(),
        )

    # --- The store's meta ---------------------------------------------------------------------

    def describe(self) -> dict[str, Any]:
        """Return the form that a store's meta has; see `in_place` in docs/store-format.md."""
        made = {name: getattr(self, name) for name in _PLAIN}
        made["rounding"] = str(self.rounding)
        made["scale_dtype"] = self.scales.dtype
        for name, part in zip(_PARTS, self.parts, strict=True):
            if part is not None:
                made[name] = [part.file, part.offset, part.nbytes]
        return made


_PLAIN = ("format", "rows", "columns", "block", "nested_block", "nested_offset")
_PARTS = ("scales", "table", "nested", "nested_table")


def restored(said: dict[str, Any], dtype: Callable[[str], torch.dtype]) -> Packed:
    """Return what Packed.describe() described.

    Args:
        said: a description that _meta.py has checked.
        dtype: the dtype of a name.
    """
    made: dict[str, Any] = {name: said[name] for name in _PLAIN}
    made["block"] = tuple(said["block"])
    for name in _PARTS:
        if name in said:
            file, offset, nbytes = said[name]
            kind = said["scale_dtype"] if name == "scales" else "F32"
            made[name] = Entry(file, offset, nbytes, kind, ())
    return Packed(rounding=dtype(said["rounding"]), **made)
