"""lohan.losses: the loss of a head without its logits, compared with torch's and with fp64."""

from __future__ import annotations

import dataclasses
import functools
import gc
import itertools
import math
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from lohan.errors import (
    DeviceMismatchError,
    ModelError,
    SecondBackwardError,
    TargetError,
    UnsupportedError,
)
from lohan.losses import linear_cross_entropy
from patience import HUNG_S
from torch.utils._python_dispatch import TorchDispatchMode

TOKENS, VOCAB, FEATURES = 45, 700, 48
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
WIDE = torch.float64
# None: the default; the others divide neither the tokens nor the vocabulary.
CHUNKS: tuple[dict[str, Any], ...] = ({}, {"token_chunk": 7, "vocab_chunk": 100})


@dataclasses.dataclass
class Head:
    """The arguments of a loss."""

    hidden: torch.Tensor
    weight: torch.Tensor
    bias: torch.Tensor | None
    targets: torch.Tensor

    @classmethod
    def make(cls, dtype: torch.dtype = torch.float32, has_bias: bool = True) -> Head:
        """Return a head with some targets that are ignored."""
        generator = torch.Generator().manual_seed(0)

        def draw(*shape: int) -> torch.Tensor:
            return torch.randn(*shape, generator=generator)

        targets = torch.randint(0, VOCAB, (3, TOKENS // 3), generator=generator)
        targets[1, 3:9] = -100
        return cls(
            draw(3, TOKENS // 3, FEATURES).to(dtype),
            (draw(VOCAB, FEATURES) * 0.3).to(dtype),
            draw(VOCAB).to(dtype) if has_bias else None,
            targets,
        )

    def to(self, dtype: torch.dtype) -> Head:
        """Return a copy whose tensors are leaves of a new graph."""
        made = [
            None if tensor is None else tensor.detach().clone().to(dtype).requires_grad_()
            for tensor in (self.hidden, self.weight, self.bias)
        ]
        assert made[0] is not None and made[1] is not None
        return Head(made[0], made[1], made[2], self.targets)

    def gradients(self) -> list[torch.Tensor | None]:
        """Return the gradients of hidden, weight and bias."""
        return [None if t is None else t.grad for t in (self.hidden, self.weight, self.bias)]


def ours(head: Head, **given: Any) -> torch.Tensor:
    return linear_cross_entropy(head.hidden, head.weight, head.targets, bias=head.bias, **given)


def with_logits(head: Head, z_loss: float = 0.0, **given: Any) -> torch.Tensor:
    """Return the loss by torch, from logits."""
    logits = F.linear(head.hidden, head.weight, head.bias).flatten(0, 1)
    loss = F.cross_entropy(logits, head.targets.flatten(), **given)
    if z_loss:
        is_counted = head.targets.flatten() != -100
        squares = torch.where(is_counted, logits.logsumexp(1).square(), 0.0)
        loss = loss + z_loss * squares.sum() / is_counted.sum()
    return loss.view(head.targets.shape) if given.get("reduction") == "none" else loss


def distance(actual: torch.Tensor, expected: torch.Tensor) -> float:
    """Return the norm of the difference in relation to the norm of what is expected."""
    assert actual.shape == expected.shape
    return float((actual.double() - expected).norm() / expected.norm())


def run(
    loss_of: Callable[..., torch.Tensor], head: Head, **given: Any
) -> tuple[torch.Tensor, list[torch.Tensor | None]]:
    """Return a loss, and the gradients of a sum of its elements with different factors."""
    loss = loss_of(head, **given)
    factors = torch.linspace(0.5, 1.5, loss.numel(), dtype=WIDE).view(loss.shape)
    loss.backward(factors.to(loss.dtype) if loss.dim() else None)
    return loss.detach(), head.gradients()


SMOOTHING = 0.1


def fp32_bounds(head: Head, reduction: str, exact: list[torch.Tensor | None]) -> list[float]:
    """Return bounds of distance() for the loss and the gradients, computed in fp32 in any order.

    With u = 2^-24, each rounding is off by at most u times its result. Errors of different
    roundings are independent, so that their squares add (Higham and Mary, A New Approach to
    Probabilistic Rounding Error Analysis, 2019): a sum of n products is off by u sqrt(n) times the
    root of the sum of their squares. What all entries of a token share (its log-sum-exp: V
    additions, and 8 u for exp and log) adds linearly. Everything is doubled once, as the norms of
    thousands of errors are far less than twice what is expected.

    Args:
        head: the arguments, in fp64.
        reduction: that of the loss, with label_smoothing=SMOOTHING.
        exact: the exact gradients.
    """
    unit, squared = 2.0**-24, torch.Tensor.square
    assert head.bias is not None
    rows, weight, bias = (t.detach() for t in (head.hidden.flatten(0, 1), head.weight, head.bias))
    targets = head.targets.flatten()
    is_counted = (targets != -100).to(WIDE).unsqueeze(1)
    factor = {
        "sum": is_counted,
        "mean": is_counted / is_counted.sum(),
        "none": is_counted * torch.linspace(0.5, 1.5, TOKENS, dtype=WIDE).unsqueeze(1),
    }[reduction]
    logits = F.linear(rows, weight, bias)
    chances = logits.softmax(1)
    is_target = F.one_hot(targets.clamp(min=0), VOCAB)
    terms = squared(factor * (chances + SMOOTHING / VOCAB + is_target))
    logit = unit**2 * (FEATURES + 2) * (squared(rows) @ squared(weight).T + squared(bias))
    shared = logit.amax(1, keepdim=True).sqrt() + (math.sqrt(VOCAB) + 8) * unit
    slope = squared(factor * chances) * (logit + squared(shared)) + 16 * unit**2 * terms
    of_all = squared(factor * shared * (chances @ weight))
    by_hidden = (slope + VOCAB * unit**2 * terms) @ squared(weight) + of_all
    by_weight = (slope + TOKENS * unit**2 * terms).T @ squared(rows)
    by_bias = (slope + TOKENS * unit**2 * terms).sum(0)
    losses = F.cross_entropy(logits, targets, label_smoothing=SMOOTHING)
    found = [2 * float(shared.max() / losses) + unit]
    for total, best in zip((by_hidden, by_weight, by_bias), exact, strict=True):
        assert best is not None
        found.append(2 * float(total.sum().sqrt() / best.norm()))
    return found


def distances_and_bounds(
    dtype: torch.dtype, reduction: str, loss_of: Callable[..., torch.Tensor], head: Head
) -> list[tuple[float, float]]:
    """Return the distances of a loss and its gradients from fp64, each with its bound.

    A gradient x + dx is rounded to the nearest number once, which is off by at most the distance of
    x from its own nearest number and 2 |dx|.
    """
    start = Head.make(dtype)
    exact_head = start.to(WIDE)
    exact, best = run(with_logits, exact_head, reduction=reduction, label_smoothing=SMOOTHING)
    loss, mine = run(loss_of, head, reduction=reduction, label_smoothing=SMOOTHING)
    bounds = fp32_bounds(exact_head, reduction, best)
    found = [(distance(loss, exact), bounds[0])]
    for a, b, bound in zip(mine, best, bounds[1:], strict=True):
        assert a is not None and b is not None and a.isfinite().all()
        found.append((distance(a.to(dtype), b), distance(b.to(dtype), b) + 2 * bound))
    return found


@pytest.mark.parametrize("chunks", CHUNKS, ids=["whole", "pieces"])
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_loss_and_gradients_are_computed_in_fp32_and_rounded_once(
    dtype: torch.dtype, reduction: str, chunks: dict[str, Any]
) -> None:
    head = Head.make(dtype).to(dtype)
    found = distances_and_bounds(dtype, reduction, functools.partial(ours, **chunks), head)
    assert all(distance <= bound for distance, bound in found), found
    assert all(g is not None and g.dtype == dtype for g in head.gradients())
    assert ours(head, reduction=reduction).dtype == torch.float32


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_the_bounds_detect_logits_in_16_bits(dtype: torch.dtype, reduction: str) -> None:
    short = torch.float16 if dtype == torch.float32 else dtype

    def rounded(head: Head, **given: Any) -> torch.Tensor:
        logits = F.linear(head.hidden, head.weight, head.bias).flatten(0, 1)
        logits = logits + (logits.to(short) - logits).detach()
        return F.cross_entropy(logits, head.targets.flatten(), **given).view(
            head.targets.shape if given["reduction"] == "none" else ()
        )

    found = distances_and_bounds(dtype, reduction, rounded, Head.make(dtype).to(WIDE))
    assert all(distance > bound for distance, bound in found[1:]), found


@pytest.mark.parametrize("chunks", CHUNKS, ids=["whole", "pieces"])
@pytest.mark.parametrize(
    "given",
    [
        {},
        {"reduction": "sum"},
        {"reduction": "none"},
        {"label_smoothing": 0.3},
        {"z_loss": 0.05},
        {"z_loss": 0.05, "label_smoothing": 1.0},
        {"ignore_index": 5},
    ],
    ids=str,
)
@pytest.mark.parametrize("has_bias", [True, False])
def test_in_fp64_it_is_the_formula(
    has_bias: bool, given: dict[str, Any], chunks: dict[str, Any]
) -> None:
    head = Head.make(WIDE, has_bias)
    if "ignore_index" in given:
        head.targets = torch.where(head.targets == -100, 5, head.targets)
    loss, gradients = run(ours, head.to(WIDE), **given, **chunks)
    expected, others = run(with_logits, head.to(WIDE), **given)
    assert loss.dtype == WIDE and distance(loss, expected) < 1e-14
    for mine, other in zip(gradients, others, strict=True):
        assert (mine is None) == (other is None)
        assert mine is None or other is None or distance(mine, other) < 1e-13


def test_the_incoming_gradient_is_a_factor_of_all() -> None:
    head = Head.make()
    once, thrice = head.to(torch.float32), head.to(torch.float32)
    ours(once).backward()
    (3.0 * ours(thrice)).backward()
    for a, b in zip(once.gradients(), thrice.gradients(), strict=True):
        assert a is not None and b is not None
        torch.testing.assert_close(b, 3.0 * a, rtol=1e-6, atol=0.0)


def test_fp16_gradients_do_not_underflow_before_a_scaler_s_factor() -> None:
    """Each is below fp16's smallest number until it is multiplied."""
    head, scale = Head.make(torch.float16, False), 2.0**16
    head.hidden, head.targets = head.hidden.repeat(1, 400, 1) * 0.01, head.targets.repeat(1, 400)
    scaled = head.to(torch.float16)
    (ours(scaled) * scale).backward()
    exact = head.to(WIDE)
    (with_logits(exact) * scale).backward()
    assert exact.hidden.grad is not None and scaled.hidden.grad is not None
    assert (exact.hidden.grad / scale).abs().median() < torch.finfo(torch.float16).smallest_normal
    assert distance(scaled.hidden.grad, exact.hidden.grad) < 1e-3


def test_a_frozen_head_and_a_frozen_body_get_no_gradient() -> None:
    for flags in itertools.product([True, False], repeat=3):
        head, full = Head.make().to(torch.float32), Head.make().to(torch.float32)
        assert head.bias is not None
        for tensor, flag in zip((head.hidden, head.weight, head.bias), flags, strict=True):
            tensor.requires_grad_(flag)
        loss = ours(head)
        assert loss.requires_grad == any(flags)
        ours(full).backward()
        if not any(flags):
            continue
        loss.backward()
        for mine, other, flag in zip(head.gradients(), full.gradients(), flags, strict=True):
            assert (mine is not None) == flag
            assert mine is None or (other is not None and torch.equal(mine, other))


def products(loss_of: Callable[[], torch.Tensor]) -> list[torch.Size]:
    """Return the shapes of the results of all products of matrices."""
    shapes: list[torch.Size] = []

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, _: Any, args: Any = (), kwargs: Any = None) -> Any:
            found = func(*args, **(kwargs or {}))
            if func.overloadpacket in (torch.ops.aten.mm, torch.ops.aten.addmm_):
                shapes.append(found.shape)
            return found

    with Watch():
        loss_of()
    return shapes


def test_three_products_with_gradients_and_one_without() -> None:
    head = Head.make().to(torch.float32)
    assert len(products(lambda: ours(head).backward())) == 3
    with torch.no_grad():
        assert len(products(lambda: ours(head))) == 1
    head.weight.requires_grad_(False)
    assert len(products(lambda: ours(head).backward())) == 2


def test_a_backward_frees_what_it_used_unless_the_graph_is_kept() -> None:
    # The tracebacks of tests that failed keep tensors alive.
    earlier = {id(found) for found in gc.get_objects() if isinstance(found, torch.Tensor)}
    head = Head.make().to(torch.float32)
    loss = ours(head)
    loss.backward(retain_graph=True)
    first = [g.clone() for g in head.gradients() if g is not None]
    for tensor in (head.hidden, head.weight, head.bias):
        assert tensor is not None
        tensor.grad = None
    loss.backward()
    for a, b in zip(first, head.gradients(), strict=True):
        assert b is not None and torch.equal(a, b)
    del first, a, b
    held = [t for t in gc.get_objects() if isinstance(t, torch.Tensor)]
    known = earlier | {id(head.weight), id(head.weight.grad)}
    assert not [t for t in held if t.shape == head.weight.shape and id(t) not in known]
    with pytest.raises(SecondBackwardError, match="retain_graph=True"):
        loss.backward()


def test_second_derivatives_are_refused_by_name() -> None:
    for reduction in ("mean", "none"):
        head = Head.make().to(torch.float32)
        loss = ours(head, reduction=reduction).sum()
        with pytest.raises(
            UnsupportedError, match=r"linear_cross_entropy cannot be differentiated"
        ):
            torch.autograd.grad(loss, head.hidden, create_graph=True)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_under_autocast_operands_are_rounded_and_gradients_have_the_dtypes_of_their_tensors(
    dtype: torch.dtype,
) -> None:
    head, rounded = Head.make().to(torch.float32), Head.make().to(torch.float32)
    with torch.autocast("cpu", dtype=dtype):
        loss = ours(head)
    expected = ours(rounded.to(dtype).to(WIDE))
    assert loss.dtype == torch.float32
    assert abs(loss.item() - expected.item()) < 1e-6 * expected.item()
    loss.backward()
    assert all(g is not None and g.dtype == torch.float32 for g in head.gradients())
    mixed = Head.make().to(torch.float32)
    mixed.hidden = mixed.hidden.detach().to(dtype).requires_grad_()
    with torch.autocast("cpu", dtype=dtype):
        again = ours(mixed)
    assert torch.equal(again, loss)
    again.backward()
    assert mixed.hidden.grad is not None and mixed.hidden.grad.dtype == dtype


def test_tokens_that_are_all_ignored_have_no_gradient() -> None:
    head, other = Head.make().to(torch.float32), Head.make().to(torch.float32)
    head.targets = other.targets = torch.full_like(head.targets, -100)
    loss, expected = ours(head), with_logits(other)
    assert math.isnan(loss.item()) and math.isnan(expected.item())
    loss.backward()
    assert all(g is not None and not g.any() for g in head.gradients())
    assert ours(head, reduction="sum").item() == 0.0
    empty = linear_cross_entropy(torch.ones(0, 4), torch.ones(3, 4), torch.ones(0).long())
    assert math.isnan(empty.item())


def test_infinite_logits_are_as_in_torch() -> None:
    """A bias of -inf takes entries out of the vocabulary; a tile may have no others."""
    head = Head.make(WIDE)
    assert head.bias is not None
    head.bias[100:200] = -math.inf
    head.targets = torch.where((head.targets >= 100) & (head.targets < 200), 3, head.targets)
    mine, other = head.to(WIDE), head.to(WIDE)
    ours(mine, token_chunk=7, vocab_chunk=50).backward()
    with_logits(other).backward()
    for a, b in zip(mine.gradients(), other.gradients(), strict=True):
        assert a is not None and b is not None and distance(a, b) < 1e-13
    large = Head.make()
    large.hidden *= 1e4
    mine = large.to(torch.float32)
    assert ours(mine).isfinite() and distance(ours(mine), with_logits(large.to(WIDE))) < 1e-6


H, W, T = torch.ones(2, 5, 4), torch.ones(9, 4), torch.zeros(2, 5, dtype=torch.int64)


@pytest.mark.parametrize(
    ("given", "error", "said"),
    [
        ({"weight": torch.ones(9, 3)}, ModelError, r"\(2, 5, 4\).*\(9, 3\).*number of features"),
        ({"weight": torch.ones(9)}, ModelError, r"\(9,\).*\(vocabulary, features\)"),
        ({"weight": torch.ones(0, 4)}, ModelError, "vocabulary is empty"),
        ({"targets": T[0]}, ModelError, r"\(5,\).*\(2, 5\)"),
        ({"targets": T.int()}, ModelError, "targets are torch.int32 and must be torch.int64"),
        ({"bias": torch.ones(4)}, ModelError, r"bias \(4,\).*\(9,\)"),
        ({"weight": W.half()}, ModelError, "hidden torch.float32, weight torch.float16"),
        ({"bias": torch.ones(9).double()}, ModelError, "bias torch.float64"),
        ({"hidden": H.int(), "weight": W.int()}, ModelError, "torch.int32"),
        ({"targets": T.to("meta")}, DeviceMismatchError, "targets is on meta"),
        ({"targets": T + 9}, TargetError, r"target 9 at index \(0, 0\).*from 0 to 8"),
        ({"targets": T - 1}, TargetError, "target -1 .*ignore_index -100"),
        ({"reduction": "max"}, ModelError, "'max': must be one of 'mean', 'sum', 'none'"),
        ({"label_smoothing": 1.5}, ModelError, "label_smoothing 1.5"),
        ({"z_loss": math.nan}, ModelError, "z_loss nan"),
        ({"token_chunk": 0}, ModelError, "token_chunk 0: must be an integer of at least 1"),
        ({"vocab_chunk": 2.5}, ModelError, "vocab_chunk 2.5"),
    ],
    ids=str,
)
def test_what_does_not_fit_is_refused_with_the_numbers(
    given: dict[str, Any], error: type[Exception], said: str
) -> None:
    tensors = {"hidden": H, "weight": W, "targets": T, **given}
    with pytest.raises(error, match=said):
        linear_cross_entropy(**tensors)


PEAK = """
import pathlib, sys, torch
from lohan.losses import linear_cross_entropy

def peak(tokens, vocab, features):
    status = pathlib.Path("/proc/self/status")
    hidden = torch.randn(tokens, features).requires_grad_()
    weight = (torch.randn(vocab, features) * 0.02).requires_grad_()
    targets = torch.randint(0, vocab, (tokens,))
    own = hidden.nbytes + weight.nbytes
    pathlib.Path("/proc/self/clear_refs").write_text("5")
    field = lambda name: next(
        int(line.split()[1]) << 10 for line in status.read_text().splitlines() if name in line
    )
    before = field("VmRSS")
    linear_cross_entropy(hidden, weight, targets).backward()
    return (own + field("VmHWM") - before - own) / own

torch.set_num_threads(2)
peak(64, 1000, 32)
print(peak(*map(int, sys.argv[1:])))
"""


@pytest.mark.parametrize(
    ("tokens", "vocab", "features"),
    [(1024, 152_064, 256), pytest.param(32_768, 152_064, 256, marks=pytest.mark.slow)],
)
def test_hidden_states_and_the_head_are_most_of_the_memory(
    tokens: int, vocab: int, features: int
) -> None:
    """The gradients take as much as the tensors; everything else at most 0.3 times as much."""
    words = [sys.executable, "-c", PEAK, str(tokens), str(vocab), str(features)]
    done = subprocess.run(words, capture_output=True, text=True, timeout=HUNG_S * 10, check=False)
    assert done.returncode == 0, done.stderr
    assert float(done.stdout) <= 1.3


@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_no_value_is_waited_for_on_an_accelerator(reduction: str) -> None:
    """The meta device has no values: to read one is an error."""
    head = Head.make().to(torch.float32)
    assert head.bias is not None
    hidden, weight, bias = (
        t.detach().to("meta").requires_grad_() for t in (head.hidden, head.weight, head.bias)
    )
    targets = head.targets.to("meta")
    loss = linear_cross_entropy(hidden, weight, targets, bias=bias, reduction=reduction)
    loss.sum().backward()
    for tensor in (hidden, weight, bias):
        assert tensor.grad is not None and tensor.grad.shape == tensor.shape
