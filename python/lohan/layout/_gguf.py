"""The headers of GGUF files, and the names that their tensors have in transformers.

Everything here comes from the file, so every length is checked against the file's size before it is
used. See [Note: Grains] and [Note: Groups of rows] in csrc/compute/unpack.h for the values.
"""

from __future__ import annotations

import dataclasses
import math
import re
import struct
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import BinaryIO

MAGIC = b"GGUF"
_VERSIONS = (2, 3)
_CHUNK = 1 << 20
_NAME_BYTES_MAX = 1 << 16
_DIMENSION_COUNT_MAX = 4
# The types of metadata: unsigned and signed integers, floats and booleans, by number.
_SCALARS = {
    0: "B",
    1: "b",
    2: "H",
    3: "h",
    4: "I",
    5: "i",
    6: "f",
    7: "B",
    10: "Q",
    11: "q",
    12: "d",
}
_TEXT, _ARRAY = 8, 9
# The types of tensors: the name, the elements of a block and its bytes (0: not supported).
_TYPES = {
    0: ("F32", 1, 4),
    1: ("F16", 1, 2),
    2: ("Q4_0", 32, 0),
    3: ("Q4_1", 32, 0),
    6: ("Q5_0", 32, 0),
    7: ("Q5_1", 32, 0),
    8: ("Q8_0", 32, 34),
    10: ("Q2_K", 256, 0),
    11: ("Q3_K", 256, 0),
    12: ("Q4_K", 256, 144),
    13: ("Q5_K", 256, 0),
    14: ("Q6_K", 256, 210),
    20: ("IQ4_NL", 32, 18),
    23: ("IQ4_XS", 256, 136),
    30: ("BF16", 1, 2),
    39: ("MXFP4", 32, 17),
}
ARCHITECTURES = ("llama", "qwen2", "qwen3")
_OUTER = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
_INNER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_PLACE = re.compile(r"blk\.(0|[1-9]\d{0,8})\.(\w+)\.(weight|bias)")


@dataclasses.dataclass(frozen=True)
class Tensor:
    """A tensor in a file.

    Attributes:
        name: its name in the file.
        type: the name of its type.
        shape: the shape, as torch has it.
        offset: the offset of its bytes after the header.
        nbytes: the number of its bytes; 0 if the type is not supported.
    """

    name: str
    type: str
    shape: tuple[int, ...]
    offset: int
    nbytes: int


@dataclasses.dataclass(frozen=True)
class Header:
    """A header.

    Attributes:
        raw: its bytes.
        begin: the offset in the file at which the tensors' bytes begin.
        values: the numbers and texts of its metadata, by key.
        tensors: the tensors.
    """

    raw: bytes
    begin: int
    values: dict[str, Any]
    tensors: list[Tensor]


class _Reader:
    """A reader of a header that reads no more of a file than the header has."""

    def __init__(self, file: BinaryIO, end: int, read: bytes) -> None:
        self.file, self.end, self.raw, self.at = file, end, bytearray(read), 0

    def skip(self, nbytes: int) -> int:
        """Advance by some bytes, and return where they begin."""
        at = self.at
        if nbytes > self.end - at:
            raise ValueError(f"its header has {nbytes} bytes at {at}, but can end at {self.end}")
        while len(self.raw) < at + nbytes:
            piece = self.file.read(min(max(_CHUNK, at + nbytes - len(self.raw)), self.end))
            if not piece:
                raise ValueError(f"its header was cut at {len(self.raw)}")
            self.raw += piece
        self.at = at + nbytes
        return at

    def number(self, form: str) -> Any:
        size = struct.calcsize(f"<{form}")
        return struct.unpack_from(f"<{form}", self.raw, self.skip(size))[0]

    def text(self, nbytes_max: int) -> str:
        nbytes = self.number("Q")
        if nbytes > nbytes_max:
            raise ValueError(f"its header has a text of {nbytes} bytes at {self.at}")
        at = self.skip(nbytes)
        return bytes(self.raw[at : at + nbytes]).decode()

    def value(self, kind: int) -> Any:
        """Return a value of metadata, or None for an array."""
        if kind in _SCALARS:
            return self.number(_SCALARS[kind])
        if kind == _TEXT:
            return self.text(self.end)
        if kind != _ARRAY:
            raise ValueError(f"its metadata has a value of type {kind}")
        inner, count = self.number("I"), self.number("Q")
        if inner in _SCALARS:
            self.skip(count * struct.calcsize(f"<{_SCALARS[inner]}"))
        elif inner == _TEXT and count <= (self.end - self.at) // 8:
            for _ in range(count):
                self.skip(self.number("Q"))
        else:
            raise ValueError(f"its metadata has an array of {count} values of type {inner}")
        return None


def parse(file: BinaryIO, read: bytes, end: int) -> Header:
    """Parse a header.

    Args:
        file: the file.
        read: what has been read from it, which begins with MAGIC.
        end: the last offset at which a header can end.

    Raises:
        ValueError: it is not valid, or not supported.
    """
    reader = _Reader(file, end, read)
    reader.skip(len(MAGIC))
    version = reader.number("I")
    if version not in _VERSIONS:
        raise ValueError(f"its version is {version}, and 2 and 3 are supported, in little endian")
    tensor_count, value_count = reader.number("Q"), reader.number("Q")
    for count, least in ((tensor_count, 24), (value_count, 13)):
        if count > end // least:
            raise ValueError(f"its header has {count} entries, but can end at {end}")
    values: dict[str, Any] = {}
    for _ in range(value_count):
        key = reader.text(_NAME_BYTES_MAX)
        if key in values:
            raise ValueError(f"{key!r} occurs twice in its header")
        values[key] = reader.value(reader.number("I"))
    align = values.get("general.alignment", 32)
    if type(align) is not int or not 0 < align <= 1 << 20 or align & (align - 1):
        raise ValueError(f"its alignment is {align!r}")
    tensors: dict[str, Tensor] = {}
    for _ in range(tensor_count):
        tensor = _tensor(reader, align)
        if tensor.name in tensors:
            raise ValueError(f"{tensor.name!r} occurs twice in its header")
        tensors[tensor.name] = tensor
    raw = bytes(reader.raw[: reader.at])
    return Header(raw, -(-len(raw) // align) * align, values, [*tensors.values()])


def _tensor(reader: _Reader, align: int) -> Tensor:
    name = reader.text(_NAME_BYTES_MAX)
    count = reader.number("I")
    if count > _DIMENSION_COUNT_MAX:
        raise ValueError(f"{name!r} has {count} dimensions")
    shape = tuple(reader.number("Q") for _ in range(count))[::-1]
    number, offset = reader.number("I"), reader.number("Q")
    kind, elements, nbytes = _TYPES.get(number, (f"GGUF type {number}", 1, 0))
    if math.prod(shape) >= 1 << 60 or max(shape, default=0) >= 1 << 60 or offset >= 1 << 60:
        raise ValueError(f"{name!r} is {list(shape)} at {offset}")
    if offset % align or (shape[-1] if shape else 1) % elements:
        raise ValueError(f"{name!r} is {kind} {list(shape)} at {offset}: a part of a block")
    return Tensor(name, kind, shape, offset, math.prod(shape) // elements * nbytes)


def name_of(name: str) -> str:
    """Return the name that a tensor has in transformers, or the same name if it is not known."""
    stem, _, end = name.rpartition(".")
    if stem in _OUTER and end == "weight":
        return f"{_OUTER[stem]}.{end}"
    found = _PLACE.fullmatch(name)
    if found is None or found[2] not in _INNER:
        return name
    return f"model.layers.{found[1]}.{_INNER[found[2]]}.{found[3]}"


def check(header: Header, refuse: Callable[[str], Exception]) -> None:
    """Raise an error if the header is of a kind of file that is not supported.

    Args:
        header: the header.
        refuse: makes the error from a reason.
    """
    kind, parts = header.values.get("general.architecture"), header.values.get("split.count")
    if kind not in ARCHITECTURES:
        raise refuse(f"its architecture is {kind!r}, not one of {', '.join(ARCHITECTURES)}")
    if parts not in (None, 0, 1):
        raise refuse(f"it is one of {parts} files: merge them (llama-gguf-split --merge)")
    for tensor in header.tensors:
        if "_exps." in tensor.name:
            raise refuse(f"{tensor.name} has several experts, which is not supported")


def groups(header: Header, refuse: Callable[[str], Exception]) -> dict[str, int]:
    """Return the rows of a group, by the names of tensors whose rows are not in order.

    These are the queries and keys of Llama: see [Note: Groups of rows].
    """
    if header.values["general.architecture"] != "llama":
        return {}
    made = {}
    for tensor in header.tensors:
        place = _PLACE.fullmatch(tensor.name)
        if place is None or place[2] not in ("attn_q", "attn_k"):
            continue
        heads = header.values.get("llama.attention.head_count")
        if place[2] == "attn_k":
            heads = header.values.get("llama.attention.head_count_kv", heads)
        rows = tensor.shape[0] if tensor.shape else 0
        if type(heads) is not int or heads <= 0 or rows % (2 * heads):
            raise refuse(f"{tensor.name} has {rows} rows for {heads!r} heads")
        made[tensor.name] = rows // heads
    return made
