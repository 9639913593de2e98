"""Under autocast a weight's cast is kept as a handle, which casts again: never the cast itself."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from lohan.common._inside import inside
from lohan.torch_glue._cast import CastParameter
from rules_helper import Workshop, build, square_loss
from torch import nn

WIDTH = 8


class Gaps(nn.Module):
    """Saves every other element of a tensor that begins with the bytes of a weight's cast."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.linspace(-1, 1, 8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        cast = self.weight.detach().bfloat16()
        gaps = torch.cat([cast, torch.arange(8).bfloat16()])[::2]
        return (gaps * x).sum() + self.weight.sum()


def test_a_saved_tensor_with_gaps_is_no_cast_of_a_weight(workshop: Workshop) -> None:
    grads = []
    for model in (Gaps(), workshop.wrap(Gaps())):
        x = torch.ones(8, requires_grad=True)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = model(x)
        loss.backward()
        grads.append(x.grad)
    assert torch.equal(grads[0], grads[1])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_under_autocast_the_graph_keeps_activations_and_no_weights(
    dtype: torch.dtype, workshop: Workshop
) -> None:
    plain = build()
    shapes = {tuple(p.shape) for p in plain.parameters() if p.dim() == 2}
    shapes |= {(b, a) for a, b in shapes}
    kept: dict[int, torch.Tensor] = {}
    activations: dict[int, torch.Tensor] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        if tuple(tensor.shape) not in shapes and not isinstance(tensor, nn.Parameter):
            activations[tensor.data_ptr()] = tensor
        return tensor

    with torch.autocast("cpu", dtype=dtype):
        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            plain_loss = square_loss(plain, 0)
        model = workshop.wrap(build())
        pack = inside(model).saving.saved.pack

        def count(tensor: torch.Tensor) -> Any:
            packed = pack(tensor)
            if isinstance(packed, torch.Tensor):
                kept[packed.data_ptr()] = packed
            return packed

        inside(model).saving.saved.pack = count
        loss = square_loss(model, 0)
    assert torch.equal(loss, plain_loss)
    assert {tuple(t.shape) for t in kept.values()}.isdisjoint(shapes)
    assert sum(t.nbytes for t in kept.values()) <= sum(t.nbytes for t in activations.values())
    assert model.lohan.status()["handles"] >= 9  # two matrices per block, and the head
    loss.backward()
    assert model.lohan.status()["handles"] == 0


# --- Casts that the history tells --------------------------------------------------------------


def part(weight: torch.Tensor) -> torch.Tensor:
    return weight.bfloat16()[2:6]


def transpose(weight: torch.Tensor) -> torch.Tensor:
    return weight.t().bfloat16().t()


def whole(weight: torch.Tensor) -> torch.Tensor:
    return weight.to(torch.bfloat16)


def reordered(weight: torch.Tensor) -> torch.Tensor:
    """The transpose's cast, with its values in another order in memory than the weight's."""
    return weight.t().to(torch.bfloat16, memory_format=torch.contiguous_format)


def twice(weight: torch.Tensor) -> torch.Tensor:
    return weight.half().to(torch.bfloat16)


def changed(weight: torch.Tensor) -> torch.Tensor:
    cast = weight.bfloat16()
    with torch.no_grad():
        cast.mul_(3)
    return cast


def scaled(weight: torch.Tensor) -> torch.Tensor:
    return weight.bfloat16() * 3


class Casts(nn.Module):
    """Multiplies by a cast of its weight that it makes itself."""

    def __init__(self, cast: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH))
        self.cast = cast

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.linear(x, self.cast(self.weight)).float().square().sum()


def input_gradient(model: nn.Module) -> torch.Tensor:
    x = torch.linspace(-1, 1, 2 * WIDTH).reshape(2, WIDTH).requires_grad_()
    with torch.autocast("cpu", torch.bfloat16):
        loss = model(x)
    loss.backward()
    assert x.grad is not None
    return x.grad


def handles(model: nn.Module) -> int:
    x = torch.ones(2, WIDTH, requires_grad=True)
    with torch.autocast("cpu", torch.bfloat16):
        model(x)  # the graph is dropped with the result, and its handles with the graph
        result = model(x)
    count: int = model.lohan.status()["handles"]
    del result
    return count


@pytest.mark.parametrize("cast", [part, transpose, whole])
def test_a_view_of_a_cast_is_a_handle(
    cast: Callable[[torch.Tensor], torch.Tensor], workshop: Workshop
) -> None:
    expected = input_gradient(Casts(cast))
    assert handles(workshop.wrap(Casts(cast))) == 1
    assert torch.equal(input_gradient(workshop.wrap(Casts(cast))), expected)


@pytest.mark.parametrize("cast", [reordered, twice, changed, scaled])
def test_what_unpack_could_not_make_again_is_kept(
    cast: Callable[[torch.Tensor], torch.Tensor], workshop: Workshop
) -> None:
    expected = input_gradient(Casts(cast))
    assert handles(workshop.wrap(Casts(cast))) == 0
    assert torch.equal(input_gradient(workshop.wrap(Casts(cast))), expected)


class Frozen(Casts):
    """The same with a frozen weight, and a trained number."""

    def __init__(self) -> None:
        super().__init__(whole)
        self.weight.requires_grad_(False)
        self.gain = nn.Parameter(torch.ones(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) * self.gain


def test_the_cast_of_a_frozen_weight_is_a_handle_in_main_memory(workshop: Workshop) -> None:
    expected = input_gradient(Frozen())
    assert handles(workshop.wrap(Frozen())) == 2  # the cast, and the number
    assert torch.equal(input_gradient(workshop.wrap(Frozen())), expected)


# --- Casts that the class of a frozen parameter makes and marks ----------------------------------


def other(tensor: torch.Tensor) -> nn.Parameter:
    """Return a parameter of the class that frozen ones have on an accelerator."""
    made = nn.Parameter(tensor, requires_grad=False)
    made.__class__ = CastParameter
    return made


USES: dict[str, Callable[[torch.Tensor, Any], torch.Tensor]] = {
    "linear": lambda x, w: F.linear(x, w),
    "a keyword": lambda x, w: F.linear(x, weight=w),
    "@": lambda x, w: x @ w,
    "@ from the right": lambda x, w: w @ x.t(),
    "matmul": lambda x, w: torch.matmul(x, w),
    "mm": lambda x, w: x.mm(w),
    "addmm": lambda x, w: torch.addmm(w[0], x, w),
    "conv1d": lambda x, w: F.conv1d(x[None].transpose(1, 2), w[..., None]),
    "conv_transpose1d": lambda x, w: F.conv_transpose1d(x[None].transpose(1, 2), w[..., None]),
    "fp32": lambda x, w: F.layer_norm(x, (WIDTH,), w[0]),
    "no product": lambda x, w: x * w[:2],
    "einsum": lambda x, w: torch.einsum("ij,jk->ik", x, w),
}
# Here an operation of the weight comes before the product, so that the graph keeps the cast.
UNMARKED = {"conv1d", "conv_transpose1d", "fp32", "no product", "einsum"}


@pytest.mark.parametrize("use", USES)
@pytest.mark.parametrize("is_autocast", [True, False])
def test_the_class_of_frozen_parameters_changes_no_bit_and_marks_casts(
    use: str, is_autocast: bool
) -> None:
    torch.manual_seed(0)
    weight = torch.randn(WIDTH, WIDTH)
    results, marks = [], []

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        whole = tensor if tensor._base is None else tensor._base
        marks.append(getattr(whole, "_lohan_cast_of", None))
        return tensor

    for param in (nn.Parameter(weight, requires_grad=False), other(weight)):
        x = torch.linspace(-1, 1, 2 * WIDTH).reshape(2, WIDTH).requires_grad_()
        with (
            torch.autocast("cpu", torch.bfloat16, enabled=is_autocast),
            torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor),
        ):
            result = USES[use](x, param)
        assert type(result) is torch.Tensor
        result.float().square().sum().backward()
        results.append((result.dtype, result.detach(), x.grad))
    assert results[0][0] == results[1][0]
    assert all(torch.equal(a, b) for a, b in zip(results[0][1:], results[1][1:], strict=True))
    assert any(mark is param for mark in marks) is (is_autocast and use not in UNMARKED)


def test_a_parameter_that_requires_a_gradient_gets_it() -> None:
    x = torch.ones(2, WIDTH)
    grads = []
    for param in (nn.Parameter(torch.eye(WIDTH)), other(torch.eye(WIDTH)).requires_grad_()):
        with torch.autocast("cpu", torch.bfloat16):
            F.linear(x, param).sum().backward()
        grads.append(param.grad)
    assert grads[0] is not None and torch.equal(grads[0], grads[1])
