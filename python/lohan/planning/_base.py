"""Frozen bases: a model of which only adapters (LoRA) are trained, read from files in any format.

A frozen base has neither states nor gradients. If its files are quantized, a load reads the packed
bytes, and workers decode them on arrival: main memory and the accelerator's link carry the decoded
parameters, together with their scales ([Note: Packed units] in csrc/sched/in_place.h).

What `adapt()` assumes of a model: in its blocks, the matrices that every token is multiplied with
are quantized (FLOP / 2 / tokens parameters of a layer), and all other parameters are not: biases,
norms, embeddings, the head. Adapters are spread over these matrices. Backward takes one product for
each product with a frozen matrix instead of two. The tensors that a layer saves are those of full
fine-tuning, which is more than LoRA saves.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

from lohan.errors import MachineError
from lohan.layout._packed import FORMATS as PACKED_FORMATS
from lohan.layout._packed import GRAINS, NESTED_TABLE_COUNT, TABLE_COUNT, Entry, Packed

if TYPE_CHECKING:
    from lohan.planning._plan import Block, Layer, Model

# The format in which the model computes. It needs no decoding.
PLAIN = "bf16"
# Dtypes by their names, so that plans need not import torch.
_DTYPE: Any = "torch.bfloat16"
_DTYPE_BYTES = 2
_FLOAT_BYTES = 4
_SCALE_BYTES = {"F32": 4, "U8": 1, "F8_E8M0": 1, "F8_E4M3": 1}


@dataclasses.dataclass(frozen=True)
class _Format:
    """How a matrix is packed.

    Attributes:
        name: a key of _packed.FORMATS.
        rounding: the dtype to which a product with a scale is rounded first.
        group: the number of values that share a scale; 0: scales are among the values.
        scale: the dtype of a scale.
        nested_group: the number of scales that share a second scale; 0 if scales have none.
    """

    name: str
    rounding: Any = "torch.float32"
    group: int = 0
    scale: str = ""
    nested_group: int = 0

    def packed(self, count: int) -> Packed:
        """Return the description of `count` values, as layout/_quantized.py makes it of files."""
        group = self.group or 1
        scale_count = -(-count // group) if self.group else 0
        scales = table = nested = nested_table = None
        if self.group:
            scales = _floats(scale_count * _SCALE_BYTES[self.scale], self.scale)
        if self.name == "nibbles":
            table = _floats(TABLE_COUNT * _FLOAT_BYTES)
        if self.nested_group:
            nested = _floats(-(-scale_count // self.nested_group) * _FLOAT_BYTES)
            nested_table = _floats(NESTED_TABLE_COUNT * _FLOAT_BYTES)
        elif self.scale == "F8_E4M3":
            nested = _floats(_FLOAT_BYTES)
        blocks = (1, group)
        parts = (scales, table, nested, nested_table, self.nested_group or 1)
        return Packed(self.name, self.rounding, 1, count, blocks, *parts)


def _floats(nbytes: int, dtype: str = "F32") -> Entry:
    return Entry(0, 0, nbytes, dtype, (nbytes,))


# What `lohan quantize` writes (nf4, fp8), and other formats that docs/lora.md describes.
_FORMATS = {
    "nf4": _Format("nibbles", _DTYPE, 64, "U8", 256),
    "fp8": _Format("f8_e4m3", "torch.float32", 128 * 128, "F32"),
    "mxfp4": _Format("e2m1", _DTYPE, 32, "F8_E8M0"),
    "nvfp4": _Format("e2m1", _DTYPE, 16, "F8_E4M3"),
    "q8_0": _Format("q8_0"),
    "q4_k": _Format("q4_k"),
    "q6_k": _Format("q6_k"),
}
NAMES = (PLAIN, *_FORMATS)


def part_bytes(base: str, count: int) -> int:
    """Return the bytes of the scales and tables of `count` packed parameters."""
    if count == 0 or base == PLAIN:
        return 0
    return sum(part.nbytes for part in _FORMATS[base].packed(count).parts if part is not None)


def read_bytes(base: str, count: int) -> int:
    """Return the bytes that a load of `count` packed parameters reads."""
    if count == 0 or base == PLAIN:
        return count * _DTYPE_BYTES
    return _FORMATS[base].packed(count).nbytes(count) + part_bytes(base, count)


def packs(base: str, packed_count: int, plain_count: int) -> list[tuple[Any, ...]]:
    """Return the parameters of a unit for `_core.simulate`; an empty list: none is packed."""
    if base == PLAIN or packed_count == 0:
        return []
    made = [_FORMATS[base].packed(packed_count).native(_DTYPE)]
    if plain_count:
        raw = (PACKED_FORMATS["raw"], 0, 0, 1, plain_count * _DTYPE_BYTES)
        made.append((*raw, 0, 0, 0, 0, 0.0, 0, 0, 0, 0, 0, 0))
    return made


def _adapted(layer: Layer, base: str, tokens: int, is_inside: bool) -> Layer:
    """Return a layer whose parameters are frozen."""
    grain = 1 if base == PLAIN else GRAINS[_FORMATS[base].name][0]
    matrices = min(layer.forward_flop // (2 * tokens), layer.param_count) if is_inside else 0
    packed = matrices // grain * grain
    # An embedding and a head have products with frozen parameters alone.
    frozen_flop = 2 * tokens * matrices if is_inside else layer.forward_flop
    return dataclasses.replace(
        layer,
        param_count=0,
        packed_count=packed,
        plain_count=layer.param_count - packed,
        frozen_flop=frozen_flop,
    )


def _blocks(model: Model, base: str) -> list[Block]:
    made = []
    for block in model.blocks:
        is_inside = any(layer.is_inter_block for layer in block.layers)
        layers = (_adapted(layer, base, model.tokens, is_inside) for layer in block.layers)
        made.append(dataclasses.replace(block, layers=tuple(layers)))
    return made


def adapt(model: Model, base: str, adapter_params: int) -> Model:
    """Return a model of which only adapters are trained.

    Args:
        model: the model at one batch size.
        base: the format of the files that the frozen parameters are read from: one of NAMES.
        adapter_params: the number of trained parameters.

    Raises:
        MachineError: the format is unknown, or the model cannot have adapters.
    """
    if base not in NAMES:
        raise MachineError(f"base {base!r}: must be one of {', '.join(NAMES)}")
    blocks = _blocks(model, base)
    places = [
        (i, j)
        for i, block in enumerate(blocks)
        for j, layer in enumerate(block.layers)
        if layer.packed_count > 0
    ]
    if not places or adapter_params < len(places):
        raise MachineError(
            f"{adapter_params:,} parameters of adapters for {len(places)} layers of {model.name}:"
            " each layer needs at least one"
        )
    for number, (i, j) in enumerate(places):
        count = (number + 1) * adapter_params // len(places)
        count -= number * adapter_params // len(places)
        layers = list(blocks[i].layers)
        flop = layers[j].forward_flop + 2 * model.tokens * count
        layers[j] = dataclasses.replace(layers[j], param_count=count, forward_flop=flop)
        blocks[i] = dataclasses.replace(blocks[i], layers=tuple(layers))
    return dataclasses.replace(model, blocks=tuple(blocks), base=base)
