"""Simulate a zeroth-order step, whose blocks pass through the GPU, on any machine.

The work of each stream is counted from the model's shape, and streams.py computes how long
the streams take together. A GPU is described by four numbers: its rates of matrix products in fp32
and in 16 bits, of memory traffic in other operations, and of allocation. Each duration is therefore
work divided by a rate.

[Note: What is counted] The operations are torch's eager ones, as MeZO and ZO2 run them (no fused
kernels):

    z           is drawn (1 write), scaled twice (1 read, 1 write each) and added (2 reads, 1
                write): 8 times a parameter's bytes, for each of three moves and one update
    attention   scores are written; mask, clamp and softmax read and write them; the product with
                the values reads them. In 16 bits, softmax returns fp32, which is converted back
    other       norms, biases, residuals, the activation function and concatenated heads read or
                write 28 tensors of tokens * hidden elements in a block's forward
    loss        logits are written, copied without the last position, and passed to log-softmax

Under autocast (`amp`), a forward reads each weight in fp32 and writes it in 16 bits. If the format
on the link is not the stored one, a conversion at each end reads one format and writes the other.

Source: ZO2 alg. 1, ZO2 alg. 2, ZO2 5.2-5.5
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

from lohan.errors import MachineError, ModelError
from lohan.planning import _plan
from lohan.planning._pieces import NS_PER_S

from lab import streams

if TYPE_CHECKING:
    from lohan.planning._machines import Machine

# The features that each policy turns off: fields of streams.Schedule. "mezo" keeps everything on
# the GPU.
POLICIES: dict[str, dict[str, bool]] = {
    "mezo": {},
    "zo2": {},
    "no_overlap": {"has_overlap": False},
    "no_reuse": {"has_reuse": False},
    "no_deferred": {"has_deferral": False},
}
# The bytes of a stored parameter; `amp` computes in 16 bits.
DTYPES = {"fp32": 4, "fp16": 2, "amp": 4}
LINKS = {"fp32": 4, "fp16": 2, "bf16": 2, "fp8": 1}
# See [Note: What is counted].
_Z_ACCESSES = 8
_MOVES = 3
_ATTENTION_BYTES = {"fp32": 32, "fp16": 24, "amp": 24}
_BLOCK_ACCESSES = 28
_LOGITS_ACCESSES = 5
_CAST_BYTES = 6
_FORWARDS = 2
# The bytes per element of the attention matrix that are held at once: the input of softmax, and its
# result in fp32.
_ATTENTION_HELD_BYTES = {"fp32": 8, "fp16": 6, "amp": 6}
# The number of tensors of the logits' size that are held at once: the logits, their copy and their
# log-softmax. ZO2's head holds the logits of both forwards.
_LOGITS_HELD = {"mezo": 3, "zo2": 4}
# The number of tensors of the largest parameter's size that are held at once: z, its scaled copy.
_Z_HELD = 2
_NEEDED = ("gpu_fp32_flop_per_s", "gpu_memory_bytes_per_s", "gpu_alloc_bytes_per_s")


@dataclasses.dataclass(frozen=True)
class Decoder:
    """A decoder-only transformer with a tied head, and the size of its batch.

    Attributes:
        name: the name that is shown to the user.
        layers: the number of blocks.
        heads: the number of attention heads, each of which holds a matrix in memory.
        hidden: the width.
        vocab: the number of entries of the embedding.
        batch: the number of sequences.
        seq: the number of tokens in each sequence.
    """

    name: str
    layers: int
    heads: int
    hidden: int
    vocab: int
    batch: int
    seq: int

    @property
    def tokens(self) -> int:
        """The number of tokens in a step."""
        return self.batch * self.seq

    @property
    def block_params(self) -> int:
        """The number of parameters of one block."""
        return 12 * self.hidden**2 + 13 * self.hidden

    @property
    def end_params(self) -> int:
        """The number of parameters that stay on the GPU: the tied embedding and the last norm."""
        return (self.vocab + self.seq + 2) * self.hidden

    @property
    def block_flop(self) -> int:
        """The FLOP of one forward of a block, with attention in full."""
        return 2 * self.tokens * (12 * self.hidden**2 + 2 * self.seq * self.hidden)

    @property
    def head_flop(self) -> int:
        """The FLOP of one forward of the head."""
        return 2 * self.tokens * self.vocab * self.hidden


def decoder(name: str, *, batch: int = 1, seq: int = 2048) -> Decoder:
    """Return one of the papers' models by its name, as in `_plan.named_model`.

    Args:
        name: `opt-13b`, `gpt-70b`, ...
        batch: the number of sequences.
        seq: the number of tokens in each sequence.

    Raises:
        ModelError: no decoder has that name, or batch or seq is below 1.
    """
    if batch < 1 or seq < 1:
        raise ModelError(f"batch {batch} and seq {seq} must be at least 1")
    for shapes, vocab in (
        (_plan.OPT_SHAPES, _plan.OPT_VOCAB),
        (_plan.GPT_SHAPES, _plan.GPT_VOCAB),
    ):
        if name in shapes:
            return Decoder(name, *shapes[name], vocab, batch, seq)
    raise ModelError(
        f"unknown decoder {name!r}: pass one of {', '.join((*_plan.OPT_SHAPES, *_plan.GPT_SHAPES))}"
    )


@dataclasses.dataclass(frozen=True)
class Options:
    """The settings of a simulated zeroth-order run.

    Attributes:
        policy: a key of POLICIES: all on the GPU, ZO2's schedule, or ZO2's without one feature.
        dtype: a key of DTYPES.
        link: the format in which blocks cross the link, a key of LINKS. None: the stored format.
        slot_count: the number of blocks that the GPU has room for.
        looks_ahead: whether a step's first upload starts before the losses of the previous step.
    """

    policy: str = "zo2"
    dtype: str = "fp32"
    link: str | None = None
    slot_count: int = 3
    looks_ahead: bool = False


@dataclasses.dataclass(frozen=True)
class Step:
    """The figures of a step in the steady state.

    Attributes:
        step_ns: the time from the start of the step to the start of the next one.
        tokens: the number of tokens in the batch.
        busy_ns: the time that each stream ("upload", "compute", "offload") is busy.
        bound_by: the busiest stream.
        link_bytes: the bytes that cross the link in each direction.
        gpu_bytes: the GPU memory that the step needs.
        fits: whether the GPU has that memory.
    """

    step_ns: int
    tokens: int
    busy_ns: dict[str, int]
    bound_by: str
    link_bytes: int
    gpu_bytes: int
    fits: bool

    @property
    def tokens_per_s(self) -> float:
        """The tokens per second. A batch counts once, not per forward, as in the paper."""
        return self.tokens * NS_PER_S / self.step_ns

    def as_dict(self) -> dict[str, Any]:
        """Return the figures as `--json` prints them."""
        return {
            "step_ms": self.step_ns / 1e6,
            "tokens_per_s": self.tokens_per_s,
            "busy_ms": {name: ns / 1e6 for name, ns in self.busy_ns.items()},
            "bound_by": self.bound_by,
            "link_bytes": self.link_bytes,
            "gpu_bytes": self.gpu_bytes,
            "fits": self.fits,
        }


def _ns(work: int, per_s: int) -> int:
    """Return the time of some work in nanoseconds, rounded up."""
    return -(-work * NS_PER_S // per_s)


class _Costs:
    """The time and memory that a model's parts take on a machine."""

    def __init__(self, model: Decoder, machine: Machine, options: Options) -> None:
        self.model, self.machine, self.options = model, machine, options
        self.stored = DTYPES[options.dtype]
        self.crossing = LINKS[options.link] if options.link else self.stored
        self.computed = 2 if options.dtype == "amp" else self.stored
        is_wide = options.dtype == "fp32"
        self.flop_per_s = machine.gpu_fp32_flop_per_s if is_wide else machine.gpu_flop_per_s

    def moved_ns(self, nbytes: int) -> int:
        """Return the time of memory traffic on the GPU."""
        return _ns(nbytes, self.machine.gpu_memory_bytes_per_s)

    def z_ns(self, params: int, times: int) -> int:
        return self.moved_ns(times * _Z_ACCESSES * self.stored * params)

    def cast_bytes(self, params: int) -> int:
        return _CAST_BYTES * params if self.options.dtype == "amp" else 0

    def block_ns(self) -> int:
        """Return the time of a block's two forwards and of its moves, without its update."""
        model = self.model
        matrix = model.batch * model.heads * model.seq**2
        nbytes = (
            matrix * _ATTENTION_BYTES[self.options.dtype]
            + _BLOCK_ACCESSES * self.computed * model.tokens * model.hidden
            + self.cast_bytes(model.block_params)
        )
        return (
            _ns(_FORWARDS * model.block_flop, self.flop_per_s)
            + self.moved_ns(_FORWARDS * nbytes)
            + self.z_ns(model.block_params, _MOVES)
        )

    def update_ns(self) -> int:
        return self.z_ns(self.model.block_params, 1)

    def crossed_ns(self) -> int:
        """Return the time to convert a block to the link's format and back; 0 if both are equal."""
        if self.crossing == self.stored:
            return 0
        return self.moved_ns(2 * (self.stored + self.crossing) * self.model.block_params)

    def embedding_ns(self) -> int:
        """Return the time of the embedding's moves and update; its look-up is negligible."""
        return self.z_ns(self.model.end_params, _MOVES + 1)

    def head_ns(self) -> int:
        model = self.model
        logits = model.tokens * model.vocab * self.computed
        nbytes = _LOGITS_ACCESSES * logits + self.cast_bytes(model.vocab * model.hidden)
        return _ns(_FORWARDS * model.head_flop, self.flop_per_s) + self.moved_ns(_FORWARDS * nbytes)

    def tied_ns(self) -> int:
        """Return the time to move the tied weights again: the embedding restored them."""
        return self.z_ns(self.model.vocab * self.model.hidden, _MOVES)

    def gpu_bytes(self) -> int:
        model, options = self.model, self.options
        is_mezo = options.policy == "mezo"
        params = model.block_params * (model.layers if is_mezo else options.slot_count)
        params += model.end_params
        largest = max(model.vocab * model.hidden, 4 * model.hidden**2)
        matrix = model.batch * model.heads * model.seq**2
        logits = model.tokens * model.vocab * self.computed
        return (
            self.machine.gpu_reserved_bytes
            + (params + _Z_HELD * largest) * self.stored
            + matrix * _ATTENTION_HELD_BYTES[options.dtype]
            + logits * _LOGITS_HELD["mezo" if is_mezo else "zo2"]
        )


def _check(machine: Machine, options: Options) -> None:
    for what, value, known in (
        ("policy", options.policy, POLICIES),
        ("dtype", options.dtype, DTYPES),
        ("link", options.link or "fp32", LINKS),
    ):
        if value not in known:
            raise MachineError(f"{what} {value!r}: must be one of {', '.join(known)}")
    if LINKS.get(options.link or "", 0) > DTYPES[options.dtype]:
        raise MachineError(
            f"link {options.link!r} is wider than {options.dtype} parameters: use a narrower link"
            " format, or omit link to use the parameters' own"
        )
    unknown = [name for name in _NEEDED if getattr(machine, name) == 0]
    if unknown:
        raise MachineError(
            f"{machine.name} does not define {', '.join(unknown)}, which a zeroth-order step"
            " needs: set them, or use the machine paper-zo2"
        )


def _run(costs: _Costs) -> streams.Step:
    model, machine, options = costs.model, costs.machine, costs.options
    embedding_ns, head_ns = costs.embedding_ns(), costs.head_ns()
    blocks: list[streams.Block] = []
    if options.policy == "mezo":
        embedding_ns += model.layers * (costs.block_ns() + costs.update_ns())
    else:
        head_ns += costs.tied_ns()
        crossing = model.block_params * costs.crossing
        block = streams.Block(
            _ns(crossing, machine.link_in_bytes_per_s),
            costs.block_ns() + costs.crossed_ns(),
            costs.update_ns(),
            _ns(crossing, machine.link_out_bytes_per_s),
            _ns(model.block_params * costs.stored, machine.gpu_alloc_bytes_per_s),
        )
        blocks = [block] * model.layers
    schedule = streams.Schedule(
        blocks,
        options.slot_count,
        embedding_ns,
        head_ns,
        looks_ahead=options.looks_ahead,
        **POLICIES[options.policy],
    )
    return streams.step(schedule)


def simulate(model: Decoder, machine: Machine, options: Options | None = None) -> Step:
    """Simulate a step, whether or not the GPU has room for it.

    Args:
        model: the model with its batch.
        machine: the machine, with the four fields that only zeroth-order steps use.
        options: the settings of the run; None means the defaults.

    Raises:
        MachineError: an option is invalid, or the machine lacks a field that is needed.
    """
    options = options or Options()
    _check(machine, options)
    costs = _Costs(model, machine, options)
    found = _run(costs)
    passes = {"mezo": 0, "no_deferred": 2}.get(options.policy, 1)
    return Step(
        step_ns=found.step_ns,
        tokens=model.tokens,
        busy_ns=dict(zip(streams.STREAMS, found.busy_ns, strict=True)),
        bound_by=found.bound_by,
        link_bytes=passes * model.layers * model.block_params * costs.crossing,
        gpu_bytes=costs.gpu_bytes(),
        fits=costs.gpu_bytes() <= machine.gpu_bytes,
    )
