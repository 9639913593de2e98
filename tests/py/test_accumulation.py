"""Gradients of several backwards in one step: they are torch's sums for every placement."""

from __future__ import annotations

import contextlib
import functools
from typing import Any

import lohan
import pytest
import torch
from lohan.common._inside import inside
from lohan.errors import (
    BudgetError,
    ModelError,
    OffloadedGradientError,
    SecondBackwardError,
    UnsupportedError,
)
from quick_helper import half_quick
from rules_helper import WIDTH, Workshop, assert_same_state, build, square_loss, vectors
from torch import nn

STEP_COUNT = 3
COUNT = 4
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


class Chain(nn.Module):
    """Parameters of which some batches use only a part, and one tied pair."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.layers[3].weight = self.layers[0].weight

    def forward(self, x: torch.Tensor, skipped: int) -> torch.Tensor:
        for index, layer in enumerate(self.layers):
            if index != skipped:
                x = torch.tanh(layer(x))
        return x.square().mean()


def summed(model: nn.Module, step: int, dtype: torch.dtype) -> None:
    """Run COUNT backwards; the first leaves layer 1 out, the second layer 2."""
    for part in range(COUNT):
        model(vectors(10 * step + part).to(dtype), part + 1).backward()


def test_fp32_sums_are_torchs_bit_for_bit(workshop: Workshop) -> None:
    plain = build(Chain)
    model = workshop.wrap(build(Chain), accumulate=COUNT, host_bytes="minimal", lr=1e-2)
    optimizer = torch.optim.AdamW(plain.parameters(), lr=1e-2, weight_decay=0.01)
    for step in range(STEP_COUNT):
        for each in (plain, model):
            summed(each, step, torch.float32)
        optimizer.step()
        optimizer.zero_grad()
        model.optimizer.step()
        # AdamW's arithmetic is in another order in torch: values are equal where sums are.
        for name, value in plain.state_dict().items():
            torch.testing.assert_close(model.state_dict()[name], value, rtol=1e-5, atol=1e-6)
        plain.load_state_dict(model.state_dict())


class Probe(nn.Module):
    """Its gradient is its input: sums can be read off the step of an AdamW without memory."""

    def __init__(self, count: int = 5000) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(count))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (self.weight * x).sum()


PROBE = {"lr": 1.0, "betas": (0.0, 0.0), "eps": 1e30, "weight_decay": 0.0}


def probe(workshop: Workshop, inputs: list[torch.Tensor]) -> torch.Tensor:
    """Return what lohan makes of the sum of gradients: -sum / eps in the fp32 master."""
    model = workshop.wrap(Probe(), accumulate=len(inputs), **PROBE)
    for x in inputs:
        model(x).backward()
    model.optimizer.step()
    weight: torch.Tensor = model.state_dict()["weight"]
    return weight


def test_the_sum_of_fp32_gradients_has_the_bits_of_p_grad(workshop: Workshop) -> None:
    inputs = [torch.randn(5000) * 10.0 ** (index - 2) for index in range(COUNT)]
    plain = Probe()
    for x in inputs:
        plain(x).backward()
    one = workshop.wrap(Probe(), **PROBE)
    one(plain.weight.grad).backward()
    one.optimizer.step()
    assert torch.equal(probe(workshop, inputs), one.state_dict()["weight"])
    assert not torch.equal(probe(workshop, inputs[::-1]), one.state_dict()["weight"])


class Sums(nn.Module):
    """Its gradients are sums over the batch's rows, whatever its parameters are."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.stack([layer(x).sum() for layer in self.layers]).sum()


@pytest.mark.parametrize(
    ("dtype", "host_bytes", "device"), half_quick(DTYPES, ["minimal", None], ["cpu", "emu"])
)
def test_several_small_batches_are_one_large_batch_wherever_their_sums_are(
    dtype: str, host_bytes: str | None, device: str, workshop: Workshop
) -> None:
    """Bit for bit: of whole numbers below 256 no sum is rounded, in any dtype or order."""
    states = []
    for count in (1, COUNT):
        model = workshop.wrap(
            Sums().to(DTYPES[dtype]),
            accumulate=count,
            host_bytes=host_bytes,
            device=device,
            max_grad_norm=100.0,
        )
        for step in range(STEP_COUNT):
            generator = torch.Generator().manual_seed(step)
            rows = torch.randint(-8, 9, (2 * COUNT, WIDTH), generator=generator)
            for part in rows.to(DTYPES[dtype]).chunk(count):
                model(part).backward()
            model.optimizer.step()
        assert model.optimizer.grad_norm > 100
        states.append(dict(model.state_dict()))
    assert_same_state(states[1], states[0])


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_a_sum_of_16_bit_gradients_is_as_exact_as_fp32_and_torchs_is_not(
    dtype: str, workshop: Workshop
) -> None:
    """Compared with fp64; lohan's sum is read from a parameter, which rounds it once.

    The sum of 16 gradients in fp32 rounds 15 times, each time a value of at most the sum of their
    magnitudes; the step rounds a value below 1 fewer than 16 times, and its slope is at most 1.
    """
    inputs = [torch.randn(5000).to(DTYPES[dtype]) for _ in range(16)]
    exact = sum(x.double() for x in inputs)
    plain = Probe().to(DTYPES[dtype])
    for x in inputs:
        plain(x).backward()
    model = workshop.wrap(Probe().to(DTYPES[dtype]), accumulate=16, **PROBE | {"eps": 1.0})
    for x in inputs:
        model(x).backward()
    model.optimizer.step()
    # With v = g * g the step is -g / (|g| + 1): its inverse is g.
    moved = -model.state_dict()["weight"].double()
    expected = exact / (exact.abs() + 1)
    torchs = plain.weight.grad.double() / (plain.weight.grad.double().abs() + 1)
    magnitudes = sum(x.double().abs() for x in inputs)
    bound = torch.finfo(torch.float32).eps / 2 * (15 * magnitudes + 16)
    # the parameter's own rounding: half a unit in the last place
    bound += torch.finfo(DTYPES[dtype]).eps / 2 * (expected.abs() + bound)
    bound += torch.finfo(DTYPES[dtype]).smallest_normal * torch.finfo(DTYPES[dtype]).eps
    assert ((moved - expected).abs() <= bound).all()
    assert ((torchs - expected).abs() > bound).any()


def test_the_norm_of_a_sum_of_bf16_gradients_is_not_rounded(workshop: Workshop) -> None:
    exact: dict[str, torch.Tensor] = {}
    single = build(Chain).bfloat16()
    for part in range(COUNT):
        single.zero_grad()
        single(vectors(part).bfloat16(), part + 1).backward()
        for name, param in single.named_parameters():
            if param.grad is not None:
                exact[name] = exact.get(name, 0) + param.grad.double()
    norm = float(sum(value.square().sum() for value in exact.values())) ** 0.5
    model = workshop.wrap(build(Chain).bfloat16(), accumulate=COUNT, max_grad_norm=1e9)
    summed(model, 0, torch.bfloat16)
    model.optimizer.step()
    assert model.optimizer.grad_norm == pytest.approx(norm, rel=1e-6)


def test_parameters_do_not_change_between_the_backwards(workshop: Workshop) -> None:
    model = workshop.wrap(build(), accumulate=3, host_bytes="minimal")
    first = square_loss(model, 0)
    for _ in range(3):
        loss = square_loss(model, 0)
        assert torch.equal(loss, first)
        loss.backward()
    with torch.no_grad():
        assert torch.equal(square_loss(model, 0), first)
    model.optimizer.step()
    assert not torch.equal(square_loss(model, 0), first)


def test_forwards_before_their_backwards_are_summed_too(workshop: Workshop) -> None:
    states = []
    for is_ahead in (True, False):
        model = workshop.wrap(build(), accumulate=2)
        for step in range(2):
            batches = (2 * step, 2 * step + 1)
            losses = [square_loss(model, i) for i in batches] if is_ahead else []
            for index, batch in enumerate(batches):
                (losses[index] if is_ahead else square_loss(model, batch)).backward()
            model.optimizer.step()
        states.append(dict(model.state_dict()))
    assert_same_state(states[0], states[1])


def test_a_step_before_all_backwards_takes_what_is_there(workshop: Workshop) -> None:
    early = workshop.wrap(build(), accumulate=3)
    single = workshop.wrap(build())
    for step in range(2):
        for model in (early, single):
            square_loss(model, step).backward()
            model.optimizer.step()
    assert_same_state(early.state_dict(), single.state_dict())


def test_one_backward_more_than_a_step_has_is_refused(workshop: Workshop) -> None:
    model = workshop.wrap(build(), accumulate=2)
    for _ in range(2):
        square_loss(model, 0).backward()
    loss = square_loss(model, 0)
    with pytest.raises(SecondBackwardError, match=r"backward 3 .* has 2"):
        loss.backward()
    model.optimizer.zero_grad()
    single = workshop.wrap(build(), accumulate=2)
    for each in (model, single):
        for part in range(2):
            square_loss(each, part).backward()
        each.optimizer.step()
    assert_same_state(model.state_dict(), single.state_dict())


def test_no_sync_keeps_a_step_open(workshop: Workshop) -> None:
    counted = workshop.wrap(build(), accumulate=3)
    manual = workshop.wrap(build(), accumulate="manual")
    for step in range(2):
        for part in range(3):
            square_loss(counted, 3 * step + part).backward()
            with manual.no_sync() if part < 2 else contextlib.nullcontext():
                square_loss(manual, 3 * step + part).backward()
        loss = square_loss(manual, 0)
        if step == 1:
            with pytest.raises(SecondBackwardError, match=r"outside model\.no_sync\(\)"):
                loss.backward()
            manual.optimizer.zero_grad()
            break
        manual.optimizer.step()
        counted.optimizer.step()
        assert_same_state(manual.state_dict(), counted.state_dict())


def test_accumulate_keeps_a_step_open_between_its_functions(workshop: Workshop) -> None:
    counted = workshop.wrap(build(), accumulate=3)
    manual = workshop.wrap(build(), accumulate="manual")
    for model in (counted, manual):
        model.lohan.accumulate([functools.partial(square_loss, model, part) for part in range(3)])
    with pytest.raises(SecondBackwardError, match=r"outside model\.no_sync\(\)"):
        manual.lohan.accumulate([lambda: square_loss(manual, 0)])
    for model in (counted, manual):
        model.optimizer.step()
    assert_same_state(manual.state_dict(), counted.state_dict())


def test_no_sync_without_memory_for_sums_is_refused(workshop: Workshop) -> None:
    model = workshop.wrap(build(), accumulate=1)
    with (
        pytest.raises(UnsupportedError, match="gradient_accumulation_steps='manual'"),
        model.no_sync(),
    ):
        pass
    assert inside(model).budget["gradient_waiting_bytes"] == 0
    lohan.unwrap(workshop.made.pop())
    assert not hasattr(model, "no_sync")


@pytest.mark.parametrize("how", ["zero_grad", "exception"])
def test_a_forgotten_step_leaves_no_sums(how: str, workshop: Workshop) -> None:
    class Interrupted(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
            raise KeyboardInterrupt

    model = workshop.wrap(build(), accumulate=3, host_bytes="minimal")
    single = workshop.wrap(build(), accumulate=3)
    for step in range(2):
        square_loss(model, 50).backward()
        square_loss(model, 51).backward()
        if how == "zero_grad":
            model.optimizer.zero_grad()
        else:
            x = model.blocks[0](vectors(0))
            x = model.blocks[1](Interrupted.apply(x))
            with pytest.raises(KeyboardInterrupt):
                x.sum().backward()
        for each in (model, single):
            for part in range(3):
                square_loss(each, 3 * step + part).backward()
            each.optimizer.step()
        assert_same_state(model.state_dict(), single.state_dict())


def test_p_grad_that_is_edited_between_two_backwards_is_refused(workshop: Workshop) -> None:
    model = workshop.wrap(build(), accumulate=2)
    square_loss(model, 0).backward()
    model.head._parameters["weight"].grad = None
    with pytest.raises(OffloadedGradientError, match=r"head\.weight.* between two backwards"):
        square_loss(model, 0).backward()
    model.optimizer.zero_grad()
    for _ in range(2):
        square_loss(model, 0).backward()
    model.optimizer.step()


def test_gradients_of_inputs_alone_are_no_backward_of_the_step(workshop: Workshop) -> None:
    model = workshop.wrap(build(), accumulate=2)
    for _ in range(2):
        x = vectors(0).requires_grad_()
        torch.autograd.grad(model(x).sum(), x)
        square_loss(model, 0).backward()
    model.optimizer.step()


def test_sums_have_their_place_in_the_budget(workshop: Workshop) -> None:
    model = build().bfloat16()
    elements = sum(p.numel() for p in model.parameters())
    least = workshop.least(model, accumulate=2)
    with pytest.raises(BudgetError, match=f"at least {least}"):
        workshop.wrap(model, accumulate=2, host_bytes=least - 1)
    wrapped = workshop.wrap(model, accumulate=2, host_bytes=least)
    budget = inside(wrapped).budget
    assert budget["gradient_bytes"] >= budget["gradient_waiting_bytes"] >= 4 * elements
    assert wrapped.lohan.status()["arena_bytes"] <= least


def test_a_step_of_several_backwards_moves_the_bytes_that_were_planned(
    workshop: Workshop,
) -> None:
    model = workshop.wrap(build(), accumulate=3, host_bytes="minimal")
    for step in range(5):
        for part in range(3):
            square_loss(model, 3 * step + part).backward()
        model.optimizer.step()
        model.lohan.flush()
        stats = model.lohan.stats()
        assert stats.step == step + 1 and stats.bytes == stats.planned_bytes
        assert stats.bytes["param_read"] > 0


def test_what_is_no_number_of_backwards_is_refused(workshop: Workshop) -> None:
    for bad in (0, -1, 1.5, "auto", True, None):
        with pytest.raises(ModelError, match="gradient_accumulation_steps"):
            workshop.wrap(build(), accumulate=bad)
