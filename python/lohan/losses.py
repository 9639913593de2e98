"""Losses of a head without its logits: what is computed is never larger than a piece of them.

The logits of a language model, one number for each token and each entry of the vocabulary, are
often the largest tensor of a step: 32k tokens and 152k entries take 20 GB in fp32, and torch's
cross entropy holds them three times. `linear_cross_entropy` multiplies the head with some tokens at
a time and keeps nothing but sums.

[Note: Gradients in forward] The gradient of cross entropy by the logits is softmax minus the
target, up to a factor that is the same for all tokens. It is therefore known in the forward, where
the logits of some tokens exist anyway, and their products with the head and with the hidden states
are taken at once. Backward only multiplies the sums by the incoming gradient. To compute the logits
again in backward would cost a fourth product of the head's size; torch takes three. Liger Kernel's
LigerFusedLinearCrossEntropyFunction does the same; the kernels of Cut Cross-Entropy compute the
logits again (Source: CCE alg. 3).

[Note: Sums in fp32] Gradients are summed without the factor and in fp32 (fp64 for fp64) until
backward, where they are multiplied and rounded once. Sums of pieces in 16 bits would round each of
them, and gradients in fp16 that GradScaler's factor has not reached yet would underflow.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from lohan.common._loss_pieces import piece_tokens
from lohan.errors import (
    DeviceMismatchError,
    ModelError,
    SecondBackwardError,
    TargetError,
    UnsupportedError,
)
from lohan.torch_glue._hollow import scope_of

REDUCTIONS = ("mean", "sum", "none")
_DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
# Without gradients, no more tokens than this are multiplied at a time.
_TOKENS_MAX = 1024
# The number of logits that are computed and reduced at a time: on the CPU they stay in its cache.
_TILE_COUNT_CPU = 1 << 20
_TILE_COUNT = 1 << 24


def linear_cross_entropy(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    targets: torch.Tensor,
    *,
    bias: torch.Tensor | None = None,
    ignore_index: int = -100,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    token_chunk: int | None = None,
    vocab_chunk: int | None = None,
) -> torch.Tensor:
    """Return the cross entropy of a linear head, without its logits in memory.

    With logits = hidden @ weight.T + bias of a token, lse = log(sum(exp(logits))) and s =
    label_smoothing, its loss is

        (1 - s) (lse - logits[target]) + s (lse - mean(logits)) + z_loss lse^2

    as of `torch.nn.functional.cross_entropy`, but computed in fp32 (fp64 for fp64) from operands of
    any dtype. Autocast rounds hidden, weight and bias to its dtype. A frozen head gets no gradient.

    `weight` and `bias` may be parameters of a wrapped model, inside a forward of the model or
    outside of one: their block is in memory meanwhile, as if its module had been called. From this
    call to backward, their gradients and that of hidden take 4 bytes an element (8 for fp64).

    Args:
        hidden: the input of the head, floating point, (..., features).
        weight: (vocabulary, features), with the dtype of hidden unless autocast is enabled.
        targets: the target of each token, int64, (...) as in hidden; each from 0 to vocabulary - 1.
        bias: (vocabulary,), with the dtype of weight.
        ignore_index: a target of tokens that have no loss and no gradient.
        reduction: "mean" over the tokens that are not ignored (NaN if there are none), "sum" or
            "none", whose backward computes the logits again.
        label_smoothing: the share of probability that the whole vocabulary gets evenly, 0 to 1.
        z_loss: the factor of lse^2, which keeps logits from growing.
        token_chunk: the number of tokens whose logits exist at a time. None: their logits take a
            quarter of the bytes of hidden and weight, or 32 MiB if that is more.
        vocab_chunk: the number of entries of the vocabulary that are multiplied at a time. None:
            as many as make a million logits (16 million on an accelerator).

    Returns:
        The loss in fp32 (fp64 for fp64): a scalar, or of the shape of targets with "none".

    Raises:
        ModelError: a shape, a dtype or an argument is invalid; the message has both values.
        TargetError: a target is not in the vocabulary. A GPU, which is not waited for, reports it
            with a later error instead, as with torch's cross entropy.
        DeviceMismatchError: the tensors are on different devices.
        HollowParameterError: the session of weight is closed.
        UnsupportedError: backward was called with create_graph=True.
        SecondBackwardError: a second backward after one without retain_graph=True.

    Source: CCE alg. 2
    """
    rule = _Rule(
        ignore_index,
        reduction,
        float(label_smoothing),
        float(z_loss),
        (token_chunk, vocab_chunk),
        _operand_dtype(hidden),
        torch.is_grad_enabled(),
    )
    _check(hidden, weight, targets, bias, rule)
    return _apply(hidden, weight, targets, bias, rule)


@dataclasses.dataclass(frozen=True)
class _Rule:
    """What is computed: the arguments, and the dtype to which operands are rounded."""

    ignore_index: int
    reduction: str
    smoothing: float
    z_loss: float
    chunks: tuple[int | None, int | None]  # tokens, entries of the vocabulary
    dtype: torch.dtype
    is_recorded: bool


def _apply(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    targets: torch.Tensor,
    bias: torch.Tensor | None,
    rule: _Rule,
) -> torch.Tensor:
    """Compute the loss while weight and bias are in memory."""
    rows = hidden.reshape(-1, hidden.shape[-1])
    args = rows, weight, bias, targets.reshape(-1), rule
    scope = scope_of("linear_cross_entropy()", [t for t in (weight, bias) if t is not None])
    if scope is None:
        loss: torch.Tensor = _Loss.apply(*args)  # type: ignore[no-untyped-call]
    else:
        try:
            scope.enter(None)
            loss = _Loss.apply(*args)  # type: ignore[no-untyped-call]
        finally:
            scope.leave()
    return loss.view(targets.shape) if rule.reduction == "none" else loss


def _operand_dtype(hidden: torch.Tensor) -> torch.dtype:
    """Return the dtype that torch.nn.functional.linear would give its operands."""
    is_cast = _is_autocast(hidden.device) and hidden.dtype != torch.float64
    return torch.get_autocast_dtype(hidden.device.type) if is_cast else hidden.dtype


def _is_autocast(device: torch.device) -> bool:
    is_known = torch.amp.is_autocast_available(device.type)
    return is_known and torch.is_autocast_enabled(device.type)


def _check(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    targets: torch.Tensor,
    bias: torch.Tensor | None,
    rule: _Rule,
) -> None:
    """Raise an error by name if the arguments do not fit one another."""
    if weight.dim() != 2 or hidden.dim() < 1 or hidden.shape[-1] != weight.shape[1]:
        raise ModelError(
            f"hidden {tuple(hidden.shape)} must be (..., features), and weight"
            f" {tuple(weight.shape)} (vocabulary, features), with the same number of features"
        )
    if weight.shape[0] < 1:
        raise ModelError(f"weight {tuple(weight.shape)} has no entries: the vocabulary is empty")
    if targets.shape != hidden.shape[:-1]:
        raise ModelError(
            f"targets {tuple(targets.shape)} must have the shape of hidden {tuple(hidden.shape)}"
            f" without its last dimension, {tuple(hidden.shape[:-1])}"
        )
    if targets.dtype != torch.int64:
        raise ModelError(f"targets are {targets.dtype} and must be torch.int64")
    if bias is not None and bias.shape != weight.shape[:1]:
        raise ModelError(
            f"bias {tuple(bias.shape)} must be (vocabulary,), here ({weight.shape[0]},)"
        )
    kinds = {"hidden": hidden, "weight": weight, "bias": bias}
    given = {name: tensor for name, tensor in kinds.items() if tensor is not None}
    is_same = len({tensor.dtype for tensor in given.values()}) == 1
    if not is_same and not _is_autocast(hidden.device):
        found = ", ".join(f"{name} {tensor.dtype}" for name, tensor in given.items())
        raise ModelError(f"{found}: must have one dtype, unless autocast is enabled")
    if any(tensor.dtype not in _DTYPES for tensor in given.values()):
        raise ModelError(f"hidden is {hidden.dtype}: must be fp32, fp64, bf16 or fp16")
    places = {name: tensor.device for name, tensor in {**given, "targets": targets}.items()}
    if len(set(places.values())) > 1:
        found = ", ".join(f"{name} is on {device}" for name, device in places.items())
        raise DeviceMismatchError(f"{found}: move them to one device")
    _check_options(rule)
    _check_targets(targets, weight.shape[0], rule.ignore_index)


def _check_options(rule: _Rule) -> None:
    if rule.reduction not in REDUCTIONS:
        raise ModelError(
            f"reduction {rule.reduction!r}: must be one of {', '.join(map(repr, REDUCTIONS))}"
        )
    if not 0.0 <= rule.smoothing <= 1.0:
        raise ModelError(f"label_smoothing {rule.smoothing}: must be from 0 to 1")
    if not math.isfinite(rule.z_loss):
        raise ModelError(f"z_loss {rule.z_loss}: must be finite")
    for name, count in zip(("token_chunk", "vocab_chunk"), rule.chunks, strict=True):
        if count is not None and (not isinstance(count, int) or count < 1):
            raise ModelError(f"{name} {count!r}: must be an integer of at least 1, or None")


def _check_targets(targets: torch.Tensor, vocab: int, ignore_index: int) -> None:
    is_wrong = ((targets < 0) | (targets >= vocab)) & (targets != ignore_index)
    text = (
        f"must be from 0 to {vocab - 1}, as weight has {vocab} entries, or ignore_index"
        f" {ignore_index}"
    )
    if targets.device.type != "cpu":
        torch._assert_async(~is_wrong.any(), f"a target {text}")
    elif is_wrong.any():
        place = tuple(is_wrong.nonzero()[0].tolist())
        shape = tuple(targets.shape)
        raise TargetError(
            f"target {int(targets[place])} at index {place} of targets {shape} {text}"
        )


def _result_dtype(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32


class _Products:
    """Products with results in fp32 or fp64, of operands that may have 16 bits.

    CUDA multiplies 16-bit operands into fp32. Elsewhere their result would be rounded to 16 bits,
    so that pieces of the operands are converted first.
    """

    def __init__(self, device: torch.device, dtype: torch.dtype) -> None:
        self.result = _result_dtype(dtype)
        is_short = dtype in (torch.bfloat16, torch.float16)
        self._is_mixed = is_short and device.type == "cuda" and torch.version.cuda is not None
        self.is_converted = is_short and not self._is_mixed
        self._dtype = dtype

    def operand(self, tensor: torch.Tensor, room: torch.Tensor | None = None) -> torch.Tensor:
        """Return a piece of hidden, weight or bias as an operand; in room, if it is converted."""
        rounded = tensor.to(self._dtype)
        if self._is_mixed or rounded.dtype == self.result:
            return rounded
        return rounded.to(self.result) if room is None else room[: len(tensor)].copy_(rounded)

    def factor(self, tile: torch.Tensor) -> torch.Tensor:
        """Return computed numbers as an operand."""
        return tile.to(self._dtype) if self._is_mixed else tile

    def multiply(self, a: torch.Tensor, b: torch.Tensor, out: torch.Tensor) -> None:
        """Compute out = a @ b."""
        if self._is_mixed:
            torch.mm(a, b, out_dtype=self.result, out=out)
        else:
            torch.mm(a, b, out=out)

    def add(self, into: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> None:
        """Compute into += a @ b."""
        if self._is_mixed:
            torch.addmm(into, a, b, out_dtype=self.result, out=into)
        else:
            into.addmm_(a, b)


class _Sum:
    """The sum of a gradient in pieces of rows: views of one tensor if it has the result's dtype.

    Otherwise the pieces are separate tensors, each of which is freed when it has been rounded.

    Attributes:
        pieces: the sums. The weight's have no values before `is_begun`.
        is_begun: whether there is a sum, which is otherwise zero; set by the caller.
    """

    def __init__(self, like: torch.Tensor, rows: int, dtype: torch.dtype, is_zero: bool) -> None:
        make: Callable[..., torch.Tensor] = torch.zeros if is_zero else torch.empty
        self.is_begun = is_zero
        counts = [min(rows, len(like) - at) for at in range(0, len(like), max(rows, 1))]
        self._whole: torch.Tensor | None = None
        self._shape, self._dtype = like.shape, like.dtype
        options = {"dtype": dtype, "device": like.device}
        if like.dtype == dtype:
            self._whole = make(like.shape, **options)
            self.pieces = list(torch.split(self._whole, rows)) if counts else []
        else:
            tail = like.shape[1:]
            self.pieces = [make((count, *tail), **options) for count in counts]

    def result(self, factor: torch.Tensor | None, keeps: bool) -> torch.Tensor:
        """Return the sum times factor in the dtype of its tensor; if not keeps, use up the sum."""
        if not self.is_begun:
            for piece in self.pieces:
                piece.zero_()
            self.is_begun = True
        if self._whole is not None:
            whole, self._whole = self._whole, self._whole if keeps else None
            self.pieces = self.pieces if keeps else []
            if factor is None:
                return whole.clone() if keeps else whole
            return whole * factor if keeps else whole.mul_(factor)
        device = self.pieces[0].device if self.pieces else None
        made = torch.empty(self._shape, dtype=self._dtype, device=device)
        pieces = self.pieces
        if not keeps:
            self.pieces = []
            pieces.reverse()
        at = 0
        for index in range(len(pieces)):
            piece = pieces[index] if keeps else pieces.pop()
            made[at : at + len(piece)] = piece if factor is None else piece * factor
            at += len(piece)
        return made


@dataclasses.dataclass
class _Found:
    """What one pass over the tokens computes."""

    losses: torch.Tensor  # (tokens,), fp64
    gradients: list[_Sum | None]  # of hidden, weight and bias, without the factor of the reduction


class _Pass:
    """One pass over all tokens, for the losses and any of the three gradients."""

    def __init__(
        self,
        hidden: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        rule: _Rule,
        wants: Sequence[bool],
    ) -> None:
        self.products = _Products(hidden.device, rule.dtype)
        self.hidden, self.weight, self.bias = hidden, weight, bias
        self.rule, self.wants = rule, wants
        vocab = weight.shape[0]
        self.tokens_max, width = _chunks(hidden, weight, rule, any(wants), self.products.result)
        self.columns = [(at, min(at + width, vocab)) for at in range(0, vocab, width)]
        self.options: dict[str, Any] = {
            "dtype": self.products.result,
            "device": hidden.device,
        }
        # With gradients, all logits of a piece of tokens; without them, those of one tile.
        room = self.tokens_max * (vocab if any(wants) else width)
        self.room = torch.empty(min(room, hidden.shape[0] * vocab), **self.options)
        shape = (width, weight.shape[1]) if self.products.is_converted else (0,)
        self.part = torch.empty(shape, **self.options)
        self.sums = [
            _Sum(tensor, rows, self.products.result, tensor is not weight)
            if is_wanted and tensor is not None
            else None
            for tensor, rows, is_wanted in zip(
                (hidden, weight, bias), (max(len(hidden), 1), width, vocab), wants, strict=True
            )
        ]

    def run(self, targets: torch.Tensor, factors: torch.Tensor | None = None) -> _Found:
        """Compute the losses, and the gradients of their sum, each times its factor if given."""
        losses = torch.zeros(len(targets), dtype=torch.float64, device=targets.device)
        kind, is_autocast = self.hidden.device.type, _is_autocast(self.hidden.device)
        with torch.autocast(kind, enabled=False) if is_autocast else contextlib.nullcontext():
            for rows in self._pieces(targets):
                self._piece(rows, targets[rows], losses, factors)
        return _Found(losses, self.sums)

    def _pieces(self, targets: torch.Tensor) -> Iterator[Any]:
        """Yield slices of the tokens, or the indices of those that are not ignored.

        On an accelerator their number would have to be waited for.
        """
        if targets.device.type == "cpu":
            counted = (targets != self.rule.ignore_index).nonzero().squeeze(1)
            if len(counted) < len(targets):
                yield from torch.split(counted, self.tokens_max) if len(counted) else ()
                return
        for at in range(0, len(targets), self.tokens_max):
            yield slice(at, min(at + self.tokens_max, len(targets)))

    def _tile(self, begin: int, end: int, count: int) -> torch.Tensor:
        """Return the place of some tokens' logits in the columns from begin to end."""
        at = begin * count if any(self.wants) else 0
        return self.room[at : at + (end - begin) * count].view(count, end - begin)

    def _piece(
        self, rows: Any, targets: torch.Tensor, losses: torch.Tensor, factors: torch.Tensor | None
    ) -> None:
        """Compute the losses and gradients of one piece of tokens."""
        hidden = self.products.operand(self.hidden[rows])
        count, vocab, smoothing = len(targets), self.weight.shape[0], self.rule.smoothing
        of_target, total = torch.zeros(2, count, **self.options)
        tops, sums = torch.empty(2, len(self.columns), count, **self.options)
        for index, (begin, end) in enumerate(self.columns):
            tile = self._tile(begin, end, count)
            part = self.products.operand(self.weight[begin:end], self.part)
            self.products.multiply(hidden, part.T, tile)
            if self.bias is not None:
                tile.add_(self.products.operand(self.bias[begin:end]))
            at, is_here = _places(targets, begin, end)
            of_target = torch.where(is_here, tile.gather(1, at).squeeze(1), of_target)
            if smoothing:
                total += tile.sum(1)
            # A tile of -inf alone must not become NaN.
            top = tile.amax(1).clamp_(min=torch.finfo(tile.dtype).min)
            tile.sub_(top.unsqueeze(1)).exp_()
            tops[index], sums[index] = top, tile.sum(1)
        # These are few: fp64 costs nothing here.
        tops, top = tops.double(), tops.amax(0).double()
        lse = top + (sums * (tops - top).exp_()).sum(0).log_()
        found = (1.0 - smoothing) * (lse - of_target) + self.rule.z_loss * lse.square()
        if smoothing:
            found += smoothing * (lse - total / vocab)
        is_counted = targets != self.rule.ignore_index
        losses[rows] = torch.where(is_counted, found, 0.0)
        if any(self.wants):
            factor = is_counted.to(self.products.result)
            factor = factor if factors is None else factor * factors[rows]
            shares = (tops - lse).exp_().to(factor.dtype)
            self._gradients(rows, targets, hidden, shares, lse.to(factor.dtype), factor)

    def _gradients(
        self,
        rows: Any,
        targets: torch.Tensor,
        hidden: torch.Tensor,
        shares: torch.Tensor,
        lse: torch.Tensor,
        factor: torch.Tensor,
    ) -> None:
        """Add a piece's gradients. Its tiles hold exp(logits - top), shares exp(top - lse)."""
        smoothing, vocab = self.rule.smoothing, self.weight.shape[0]
        of_hidden, of_weight, of_bias = self.sums
        sum_hidden = torch.zeros(hidden.shape, **self.options) if of_hidden else None
        slope = factor * (1.0 + 2.0 * self.rule.z_loss * lse) if self.rule.z_loss else factor
        for index, (begin, end) in enumerate(self.columns):
            tile = self._tile(begin, end, len(targets))
            tile.mul_((shares[index] * slope).unsqueeze(1))
            if smoothing:
                tile.sub_((smoothing / vocab * factor).unsqueeze(1))
            at, is_here = _places(targets, begin, end)
            tile.scatter_add_(1, at, ((smoothing - 1.0) * factor * is_here).unsqueeze(1))
            if of_bias:
                of_bias.pieces[0][begin:end] += tile.sum(0)
            operand = self.products.factor(tile)
            if sum_hidden is not None:
                part = self.products.operand(self.weight[begin:end], self.part)
                self.products.add(sum_hidden, operand, part)
            if of_weight and of_weight.is_begun:
                self.products.add(of_weight.pieces[index], operand.T, hidden)
            elif of_weight:
                self.products.multiply(operand.T, hidden, of_weight.pieces[index])
        if of_hidden and sum_hidden is not None:
            of_hidden.pieces[0][rows] = sum_hidden
        if of_weight:
            of_weight.is_begun = True


def _places(targets: torch.Tensor, begin: int, end: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return each target's column in a tile, (tokens, 1), and whether it is in the tile."""
    is_here = (targets >= begin) & (targets < end)
    return (targets - begin).clamp_(0, end - begin - 1).unsqueeze(1), is_here


def _chunks(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    rule: _Rule,
    has_gradients: bool,
    dtype: torch.dtype,
) -> tuple[int, int]:
    """Return how many tokens and how many entries of the vocabulary are multiplied at a time.

    They depend on shapes, dtypes and the kind of device alone, so that the loss has the same bits
    whatever the memory of a session is.
    """
    tokens, vocab = max(hidden.shape[0], 1), weight.shape[0]
    rows, width = rule.chunks
    if rows is None and has_gradients:
        rows = piece_tokens(tokens, vocab, hidden.nbytes + weight.nbytes, dtype.itemsize)
    elif rows is None:
        rows = math.ceil(tokens / math.ceil(tokens / min(_TOKENS_MAX, tokens)))
    rows = min(rows, tokens)
    if width is not None:
        return rows, min(width, vocab)
    tile = _TILE_COUNT_CPU if hidden.device.type == "cpu" else _TILE_COUNT
    tiles = math.ceil(rows * vocab / tile)
    return rows, math.ceil(vocab / tiles)


def _graph_is_kept() -> bool:
    """Return whether the running backward leaves its graph for another one (retain_graph=True)."""
    kept: bool = torch._C._autograd._get_current_graph_task_keep_graph()
    return kept


class _Loss(torch.autograd.Function):
    """The reduced loss: see [Note: Gradients in forward]."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        targets: torch.Tensor,
        rule: _Rule,
    ) -> torch.Tensor:
        """Compute the loss, and the gradients unless backward needs a factor for each token."""
        wants = ctx.needs_input_grad[:3] if rule.is_recorded else (False, False, False)
        ctx.rule, ctx.count, ctx.found = rule, None, None
        ctx.is_later = rule.reduction == "none" and any(wants)
        if ctx.is_later:
            ctx.save_for_backward(hidden, weight, bias, targets)
            wants = (False, False, False)
        found = _Pass(hidden, weight, bias, rule, wants).run(targets)
        if any(wants):
            # Not saved tensors, whose hooks would offload what backward needs first.
            ctx.found = found.gradients
        loss = found.losses if rule.reduction == "none" else found.losses.sum()
        if rule.reduction == "mean":
            ctx.count = (targets != rule.ignore_index).sum()
            loss = loss / ctx.count
        return loss.to(_result_dtype(rule.dtype))

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        """Multiply the gradients by the incoming one; free what no further backward needs."""
        if torch.is_grad_enabled():
            raise UnsupportedError(
                "the backward of linear_cross_entropy cannot be differentiated, so that it refuses"
                " create_graph=True: use torch.nn.functional.cross_entropy with logits for second"
                " derivatives"
            )
        keeps = _graph_is_kept()
        wants = ctx.needs_input_grad[:3]
        factor: torch.Tensor | None = None
        if ctx.is_later:
            hidden, weight, bias, targets = ctx.saved_tensors
            found = _Pass(hidden, weight, bias, ctx.rule, wants).run(targets, gradient).gradients
            keeps = False
        else:
            if ctx.found is None:
                raise SecondBackwardError(
                    "a second backward through linear_cross_entropy, which has freed its gradients"
                    " after the first: call the first with retain_graph=True"
                )
            found = ctx.found
            ctx.found = found if keeps else None
            factor = gradient if ctx.count is None else gradient / ctx.count.clamp(min=1)
        results: list[torch.Tensor | None] = []
        for place, is_wanted in enumerate(wants):
            total = found[place]
            found = found if keeps else [*found[:place], None, *found[place + 1 :]]
            results.append(total.result(factor, keeps) if total and is_wanted else None)
        return (*results, None, None)
