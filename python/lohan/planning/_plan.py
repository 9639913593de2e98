"""Machines and models for csrc/plan, and the papers' models by name.

`lohan._core` takes plain dicts, which `as_core()` makes. Every number is an integer:

    machine   gpu_flop_per_s, gpu_bytes, link_in_bytes_per_s, link_out_bytes_per_s, host_bytes,
              adam_params_per_s, ssd_count, ssd_bytes, ssd_read_bytes_per_s,
              ssd_write_bytes_per_s, ssd_total_bytes_per_s
    model     param_bytes, residual_bytes, blocks: a list in forward order of (and, if it is not
              that of AdamW in fp32, moment_block_bytes; 0: the update rule has no moments)
      block   shared_block: None, or the index of a block whose parameters this one also uses;
              layers: a list in forward order of
        layer param_count, forward_flop, activation_bytes, working_bytes, is_inter_block (a bool),
              and, of frozen parameters, frozen_bytes, frozen_read_bytes, frozen_flop; of a rule of
              matrices, others_count and products_count

Other keys are ignored, and those of moments and of frozen parameters may be missing.
csrc/plan/machine.h and model.h define what each means.

`plan(model, machine, policy)` returns a dict of the policy's choices and the predicted step.
`plan_step(model, machine, fates, blocks=None, schedule="optimized", master_bytes=None,
must_fit=True)` returns the same dict for given choices: fates is "keep", "host", "ssd" or
"recompute" for each layer; blocks is a dict of is_deferred, has_host_p16, has_host_master and
has_host_moments for each block (None: all False); master_bytes is 4 (the papers' master) or None
(the model's residual). An invalid argument raises ValueError or TypeError; a model that does not
fit raises MemoryError.
"""

from __future__ import annotations

import dataclasses
import itertools
from typing import Any

from lohan.common import _loss_pieces
from lohan.common._rules import RULES, Rule
from lohan.errors import ModelError
from lohan.planning import _base

# The bytes of an activation, a parameter or a gradient in 16-bit computation.
HALF_BYTES = 2
# The bytes that extend a bf16 parameter to its fp32 master: docs/internals/numerics.md.
RESIDUAL_BYTES = 2
# A DiT sees an image of 512 x 512 as 64 x 64 latents of 4 channels in patches of 2 x 2.
DIT_TOKENS = 1024
DIT_PATCH_VALUES = 16
DIT_FREQUENCIES = 256
DIT_CLASSES = 1001
# csrc/plan/model.h: the moments of as many parameters have a whole number of bytes.
_MOMENT_BLOCK = 64
# The FLOP per second of a thread in products of matrices, those that symmetry saves included: one
# core of an AMD EPYC with AVX-512 takes 0.22 s for a matrix of 768 x 3072.
THREAD_PRODUCT_FLOP_PER_S = 185_000_000_000
# How a head and its loss are computed: with all logits, or some tokens at a time.
LOSSES = ("logits", "linear_cross_entropy")


@dataclasses.dataclass(frozen=True)
class Machine:
    """The rates (per second) and capacities (bytes) of a machine.

    All values are positive, except where the meaning of 0 is stated.

    Attributes:
        gpu_flop_per_s: the rate that the GPU sustains on this kind of model (THP_G).
        gpu_bytes: the GPU's memory.
        link_in_bytes_per_s: the sustained rate from main memory to the GPU (BW_G).
        link_out_bytes_per_s: the sustained rate from the GPU to main memory.
        host_bytes: the main memory that may be used.
        adam_params_per_s: the number of parameters that AdamW updates per second on the CPU.
        ssd_count: the number of SSDs.
        ssd_read_bytes_per_s: the read rate of one SSD.
        ssd_write_bytes_per_s: the write rate of one SSD.
        ssd_total_bytes_per_s: the limit for all SSDs together, in one direction; 0: their sum.
        ssd_bytes: the capacity of one SSD; 0: not checked.
    """

    gpu_flop_per_s: int
    gpu_bytes: int
    link_in_bytes_per_s: int
    link_out_bytes_per_s: int
    host_bytes: int
    adam_params_per_s: int
    ssd_count: int
    ssd_read_bytes_per_s: int
    ssd_write_bytes_per_s: int
    ssd_total_bytes_per_s: int = 0
    ssd_bytes: int = 0

    def as_core(self) -> dict[str, int]:
        """Return the dict that `lohan._core` takes."""
        return dataclasses.asdict(self)


@dataclasses.dataclass(frozen=True)
class Layer:
    """A unit that is kept, swapped or recomputed as a whole; figures are for the whole batch.

    Attributes:
        name: the layer's name within its block.
        param_count: the number of parameters that no earlier layer has.
        forward_flop: the FLOP of one forward; recomputation costs as much.
        activation_bytes: all bytes that are saved for backward, the layer's output included.
        working_bytes: the GPU memory needed while the layer computes, besides activations.
        is_inter_block: whether the activations are the next block's input (never recomputed).
        packed_count: the number of frozen parameters that files have in the model's base format.
        plain_count: the number of other frozen parameters.
        frozen_flop: the FLOP of products with frozen parameters, whose backward takes one product
            instead of two.
        matrices: the rows and columns of each trained matrix, if they are known; the rest are
            vectors, or tensors that no rule updates as matrices.
        is_outer: whether the layer is an embedding or a head, which Muon leaves to AdamW.
    """

    name: str
    param_count: int
    forward_flop: int
    activation_bytes: int
    working_bytes: int = 0
    is_inter_block: bool = False
    packed_count: int = 0
    plain_count: int = 0
    frozen_flop: int = 0
    matrices: tuple[tuple[int, int], ...] = ()
    is_outer: bool = False

    @property
    def backward_flop(self) -> int:
        """The FLOP of one backward, without recomputation."""
        return 2 * self.forward_flop - self.frozen_flop

    @property
    def factor_count(self) -> int:
        """The floats of Adafactor's factors; 0 if no shapes are known.

        [Note: Factors] in csrc/compute/factor.h has the definition.
        """
        if not self.matrices:
            return 0
        in_matrices = sum(rows * columns for rows, columns in self.matrices)
        return sum(map(sum, self.matrices)) + len(self.matrices) + self.param_count - in_matrices

    def others_count(self, rule: Rule) -> int:
        """Return how many parameters have AdamW's moments, because the rule is of matrices only."""
        if not rule.others:
            return 0
        own = 0 if self.is_outer else sum(rows * columns for rows, columns in self.matrices)
        return max(self.param_count - own, 0)

    def products_flop(self, rule: Rule) -> int:
        """Return the FLOP of products of matrices in an update."""
        if not rule.others or self.is_outer:
            return 0
        return sum(itertools.starmap(_product_flop, self.matrices))


def _product_flop(rows: int, columns: int) -> int:
    """Return the FLOP of the Newton-Schulz iterations of a matrix, without those of symmetry."""
    least, most = sorted((rows, columns))
    return 20 * least**2 * most + 10 * least**3


@dataclasses.dataclass(frozen=True)
class Block:
    """A block of a model.

    Attributes:
        layers: the layers in forward order, at least one.
        shared_block: the index of an earlier block whose parameters this block also uses, as a
            tied head does; None if there is no such block.
    """

    layers: tuple[Layer, ...]
    shared_block: int | None = None


@dataclasses.dataclass(frozen=True)
class Model:
    """A model at one batch size.

    Attributes:
        name: the name that is shown to the user.
        blocks: the blocks in forward order.
        tokens: the number of tokens in a batch, which throughput counts.
        param_bytes: the size of a parameter in computation.
        residual_bytes: the bytes that extend a parameter to its fp32 master: 2 (bf16), 4 (fp16)
            or 0 (fp32).
        states: how moments are stored, as lohan.wrap(moments=) names it.
        rule: the update rule: a key of RULES.
        base: the format of packed frozen parameters: one of _base.NAMES.
        product_flop_per_param: the FLOP of products of matrices in the time in which AdamW updates
            a parameter.
    """

    name: str
    blocks: tuple[Block, ...]
    tokens: int
    param_bytes: int = HALF_BYTES
    residual_bytes: int = RESIDUAL_BYTES
    states: str = "fp32"
    rule: str = "adamw"
    base: str = _base.PLAIN
    product_flop_per_param: int = 500

    def as_core(self) -> dict[str, Any]:
        """Return the dict that `lohan._core` takes."""
        blocks = [
            {
                "layers": [self._layer_as_core(layer) for layer in block.layers],
                "shared_block": block.shared_block,
            }
            for block in self.blocks
        ]
        return {
            "param_bytes": self.param_bytes,
            "residual_bytes": self.residual_bytes,
            "moment_block_bytes": self.moment_bytes(_MOMENT_BLOCK),
            "blocks": blocks,
        }

    def _layer_as_core(self, layer: Layer) -> dict[str, Any]:
        return {
            **vars(layer),
            "others_count": layer.others_count(RULES[self.rule]),
            "products_count": self.products_count(layer),
            "frozen_bytes": self.frozen_bytes(layer.packed_count, layer.plain_count),
            "frozen_read_bytes": self.frozen_read_bytes(layer.packed_count, layer.plain_count),
        }

    def on(self, threads: int, adam_params_per_s: int) -> Model:
        """Return the model for a machine with as many threads for updates, and AdamW's rate."""
        found = threads * THREAD_PRODUCT_FLOP_PER_S // adam_params_per_s
        return dataclasses.replace(self, product_flop_per_param=max(found, 1))

    def with_rule(self, rule: str, states: str) -> Model:
        """Return the model with the moments of a rule, and with the factors that it may have.

        A unit has factors behind its parameters, where they take as much as parameters do.

        Args:
            rule: the update rule: a key of RULES.
            states: how moments are stored.
        """
        made = dataclasses.replace(self, states=states, rule=rule)
        if rule == self.rule or not RULES[rule].has_factors:
            return made

        def with_factors(layer: Layer) -> Layer:
            more = -(-layer.factor_count * 4 // self.param_bytes)
            return dataclasses.replace(layer, param_count=layer.param_count + more)

        blocks = (
            dataclasses.replace(block, layers=tuple(map(with_factors, block.layers)))
            for block in self.blocks
        )
        return dataclasses.replace(made, blocks=tuple(blocks))

    def block_moment_bytes(self, block: Block) -> int:
        """Return the bytes of the moments of a block."""
        rule = RULES[self.rule]
        count = sum(layer.param_count for layer in block.layers)
        others = sum(layer.others_count(rule) for layer in block.layers)
        found = self.moment_bytes(count - others)
        return found + (RULES[rule.others].moment_bytes(others, "fp32") if others else 0)

    @property
    def all_moment_bytes(self) -> int:
        """The bytes of all moments."""
        return sum(map(self.block_moment_bytes, self.blocks))

    def products_count(self, *layers: Layer) -> int:
        """Return how many parameters AdamW updates in the time of products of matrices."""
        flop = sum(layer.products_flop(RULES[self.rule]) for layer in layers)
        return flop // self.product_flop_per_param

    def moment_bytes(self, count: int) -> int:
        """Return the bytes of the rule's moments of parameters, with the scales of 8-bit ones."""
        return RULES[self.rule].moment_bytes(count, self.states)

    def frozen_bytes(self, packed_count: int, plain_count: int) -> int:
        """Return the memory of frozen parameters: the decoded ones, and their scales."""
        scales = _base.part_bytes(self.base, packed_count)
        return (packed_count + plain_count) * self.param_bytes + scales

    def frozen_read_bytes(self, packed_count: int, plain_count: int) -> int:
        """Return the bytes that a load of frozen parameters reads."""
        return _base.read_bytes(self.base, packed_count) + plain_count * self.param_bytes

    @property
    def layers(self) -> tuple[Layer, ...]:
        """All layers in forward order."""
        return tuple(layer for block in self.blocks for layer in block.layers)

    @property
    def param_count(self) -> int:
        """The number of trained parameters; tied ones count once."""
        return sum(layer.param_count for layer in self.layers)

    @property
    def frozen_count(self) -> int:
        """The number of frozen parameters."""
        return sum(layer.packed_count + layer.plain_count for layer in self.layers)

    @property
    def forward_flop(self) -> int:
        """The FLOP of one forward of the batch. A step's throughput counts three times as many."""
        return sum(layer.forward_flop for layer in self.layers)

    @property
    def backward_flop(self) -> int:
        """The FLOP of one backward of the batch, without recomputation."""
        return sum(layer.backward_flop for layer in self.layers)

    @property
    def activation_bytes(self) -> int:
        """The size of all layers' activations."""
        return sum(layer.activation_bytes for layer in self.layers)

    @property
    def inter_block_bytes(self) -> int:
        """The size of the activations between blocks."""
        return sum(layer.activation_bytes for layer in self.layers if layer.is_inter_block)


def _transformer_layers(hidden: int, seq: int, batch: int) -> tuple[Layer, ...]:
    """Make a block's five layers, which include norms and activation functions.

    The layers save, in units of tokens * hidden * 2 bytes: qkv 3 and the norm before it 1; the
    output of attention 1; the output of its projection, with the residual added, 1; h to 4h 4, its
    norm 1 and its activation function 4; the block's output 1.

    Source: Fuyou table 2 (the layers), LoHan IV-D
    """
    tokens = batch * seq
    unit = tokens * hidden * HALF_BYTES
    square = hidden * hidden
    return (
        _matrix_layer("qkv", hidden, 3 * hidden, 5 * hidden, 6 * tokens * square, 4 * unit),
        Layer("attention", 0, 4 * tokens * seq * hidden, unit),
        _matrix_layer("h_to_h", hidden, hidden, hidden, 2 * tokens * square, unit),
        _matrix_layer("h_to_4h", hidden, 4 * hidden, 6 * hidden, 8 * tokens * square, 9 * unit),
        dataclasses.replace(
            _matrix_layer("4h_to_h", 4 * hidden, hidden, hidden, 8 * tokens * square, unit),
            is_inter_block=True,
        ),
    )


def _matrix_layer(
    name: str, rows: int, columns: int, vectors: int, forward_flop: int, activation_bytes: int
) -> Layer:
    """Return a layer with one matrix, and with vectors of some elements."""
    count = rows * columns + vectors
    return Layer(name, count, forward_flop, activation_bytes, matrices=((rows, columns),))


def head_bytes(loss: str, tokens: int, hidden: int, vocab: int, trained: bool = True) -> int:
    """Return the GPU memory that a head and its loss need beyond hidden states and parameters.

    With "logits", these take 16 bits, and their softmax fp32. `linear_cross_entropy` has the logits
    of some tokens, and the gradients of the hidden states and of the head in fp32 until backward.

    Args:
        loss: one of LOSSES.
        tokens: the number of tokens in the batch.
        hidden: the width.
        vocab: the number of entries of the vocabulary.
        trained: whether the head has a gradient.

    Raises:
        ModelError: the loss is unknown.
    """
    if loss not in LOSSES:
        raise ModelError(f"loss {loss!r}: must be one of {', '.join(LOSSES)}")
    if loss == "logits":
        return tokens * vocab * (HALF_BYTES + 4)
    return _loss_pieces.working_bytes(tokens, hidden, vocab, HALF_BYTES, trained=trained)


def decoder(
    name: str,
    *,
    layers: int,
    hidden: int,
    vocab: int,
    seq: int,
    batch: int,
    loss: str = "logits",
) -> Model:
    """Return a decoder-only transformer: embedding, `layers` blocks, a head tied to the embedding.

    The number of heads is not needed: it changes neither bytes nor FLOP, because backward
    recomputes attention's matrix. Attention is counted in full, not only its causal half, as the
    papers' throughput counts it.

    Args:
        name: the model's name.
        layers: the number of blocks.
        hidden: the width.
        vocab: the number of entries of the embedding.
        seq: the number of tokens in a sequence, and of position embeddings.
        batch: the number of sequences.
        loss: how the head and the loss are computed: one of LOSSES.
    """
    tokens = batch * seq
    tables = ((vocab, hidden), (seq, hidden))
    embedding = Layer("embedding", (vocab + seq) * hidden, 0, 0, matrices=tables, is_outer=True)
    working = head_bytes(loss, tokens, hidden, vocab)
    head = Layer("head", 2 * hidden, 2 * tokens * vocab * hidden, 0, working_bytes=working)
    block = Block(_transformer_layers(hidden, seq, batch))
    return Model(
        name,
        (Block((embedding,)), *[block] * layers, Block((head,), shared_block=0)),
        tokens=tokens,
    )


def dit(name: str, *, layers: int, hidden: int, batch: int, tokens: int = DIT_TOKENS) -> Model:
    """Return a diffusion transformer: blocks with a modulation per sample (adaLN), no tied head.

    Args:
        name: the model's name.
        layers: the number of blocks.
        hidden: the width.
        batch: the number of images.
        tokens: the number of patches in an image.
    """
    square = hidden * hidden
    embedded = DIT_PATCH_VALUES + DIT_FREQUENCIES + hidden + DIT_CLASSES
    embedding = Layer(
        "embedding",
        embedded * hidden,
        2 * batch * hidden * (tokens * DIT_PATCH_VALUES + DIT_FREQUENCIES + hidden),
        0,
    )
    saved = 6 * batch * hidden * HALF_BYTES
    modulation = _matrix_layer(
        "modulation", hidden, 6 * hidden, 6 * hidden, 12 * batch * square, saved
    )
    block = Block((modulation, *_transformer_layers(hidden, tokens, batch)))
    final = Layer(
        "final",
        2 * square + 2 * DIT_PATCH_VALUES * hidden,
        4 * batch * hidden * (hidden + tokens * DIT_PATCH_VALUES),
        0,
    )
    return Model(
        name, (Block((embedding,)), *[block] * layers, Block((final,))), tokens=batch * tokens
    )


# (layers, heads, hidden) of each model. Source: LoHan table IV, Fuyou table 4
GPT_SHAPES = {
    "gpt-6b": (28, 32, 4096),
    "gpt-13b": (40, 40, 5120),
    "gpt-30b": (48, 56, 7168),
    "gpt-33b": (60, 52, 6656),
    "gpt-65b": (80, 64, 8192),
    "gpt-70b": (80, 64, 8192),
    "gpt-135b": (88, 88, 11264),
    "gpt-175b": (96, 96, 12288),
    "gpt-276b": (112, 112, 14336),
    "gpt-412b": (128, 128, 16384),
    "gpt-805b": (160, 160, 20480),
}
# Source: ZO2 table 1
OPT_SHAPES = {
    "opt-1.3b": (24, 32, 2048),
    "opt-2.7b": (32, 32, 2560),
    "opt-6.7b": (32, 32, 4096),
    "opt-13b": (40, 40, 5120),
    "opt-30b": (48, 56, 7168),
    "opt-66b": (64, 72, 9216),
    "opt-175b": (96, 96, 12288),
}
# Source: LoHan table VI
DIT_SHAPES = {
    "dit-0.67b": (28, 16, 1152),
    "dit-0.9b": (30, 16, 1280),
    "dit-1.4b": (32, 16, 1536),
    "dit-10b": (28, 32, 4096),
    "dit-20b": (40, 40, 5120),
    "dit-40b": (48, 56, 7168),
}
GPT_VOCAB = 50257
OPT_VOCAB = 50272


def model_names() -> tuple[str, ...]:
    """Return the names that `named_model` takes."""
    return (*GPT_SHAPES, *OPT_SHAPES, *DIT_SHAPES)


def named_model(name: str, *, batch: int, seq: int = 1024, loss: str = "logits") -> Model:
    """Return one of the papers' models.

    Args:
        name: `gpt-13b`, `opt-1.3b`, `dit-10b`, ...
        batch: the number of sequences or images.
        seq: the number of tokens in a sequence; ignored for a DiT, whose tokens are patches.
        loss: how a decoder's head and loss are computed: one of LOSSES.

    Raises:
        ModelError: no model has that name, or batch or seq is below 1.
    """
    if batch < 1 or seq < 1:
        raise ModelError(f"batch {batch} and seq {seq} must be at least 1")
    if name in DIT_SHAPES:
        layers, _, hidden = DIT_SHAPES[name]
        return dit(name, layers=layers, hidden=hidden, batch=batch)
    for shapes, vocab in ((GPT_SHAPES, GPT_VOCAB), (OPT_SHAPES, OPT_VOCAB)):
        if name in shapes:
            layers, _, hidden = shapes[name]
            sizes = {"layers": layers, "hidden": hidden, "vocab": vocab}
            return decoder(name, **sizes, seq=seq, batch=batch, loss=loss)
    raise ModelError(
        f"unknown model {name!r}: pass one of {', '.join(model_names())}, or a transformers"
        " config.json, or a transformers class such as GPT2LMHeadModel, or a model's name on the"
        " Hugging Face Hub such as Qwen/Qwen3-8B"
    )
