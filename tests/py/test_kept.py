"""Parameters that zeroth-order training stores in narrow formats."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from lohan import _core
from lohan.common._storage_formats import ROUND_SAMPLE, TYPES, rounded
from lohan.journal._direction import Stream, normal, words

Op = tuple[str, bool, int, int, int, int, float, float, float]

NARROW = ["bf16", "fp16", "fp8"]


def op(kind: str, param: int, scale: float = 0.0, *, sample: int = 0, is_same: bool = False) -> Op:
    """Return an operation in the form that _core takes."""
    return (kind, is_same, 7, sample, param, 3, scale, 1e-2, 0.0)


def numbers(bits: list[int]) -> torch.Tensor:
    """Return fp32 numbers with these bits."""
    return torch.tensor(bits, dtype=torch.int64).to(torch.int32).view(torch.float32)


def bits(values: torch.Tensor) -> list[int]:
    """Return bits as integers, because zeros have signs."""
    return values.view(torch.int32).tolist()


@settings(max_examples=100, deadline=None)
@given(
    storage=st.sampled_from(["fp32", *NARROW]),
    param=st.integers(0, 2**32 - 1),
    first=st.integers(0, 2**50 - 300),
    # Random bits, and bits near the limits of the formats.
    values=st.lists(
        st.one_of(
            st.integers(0, 2**32 - 1),
            st.floats(-(2.0**-5), 2.0**-5, width=32).map(
                lambda v: bits(torch.tensor(v).view(1))[0]
            ),
            st.sampled_from([0, 1, 0x7F800000, 0x7F800001, 0x7F7FFFFF, 0x43E00001, 0x477FE001]),
        ),
        max_size=300,
    ),
)
def test_every_kernel_rounds_to_the_bits_of_torch_s_reference(
    storage: str, param: int, first: int, values: list[int]
) -> None:
    count = len(values)
    stream = Stream(7, param, 3, ROUND_SAMPLE)
    expected = rounded(numbers(values), words(stream, first, count, "cpu"), storage)
    ops = [op("round", param, sample=ROUND_SAMPLE)]
    for kernel in _core.zo_kernels():
        found = numbers(values)
        place = (found.data_ptr(), found.data_ptr(), first, count)
        _core.zo_apply(*place, ops, kernel, format=storage)
        assert bits(found) == bits(expected)


def test_words_are_those_of_their_elements() -> None:
    stream = Stream(1, 2, 3)
    whole = words(stream, 0, 1000, "cpu")
    assert whole.min() >= 0 and whole.max() < 1 << 32
    assert len(set(whole.tolist())) == 1000
    assert torch.equal(words(stream, 77, 500, "cpu"), whole[77:577])


@pytest.mark.parametrize("storage", NARROW)
def test_rounding_at_random_keeps_the_mean_and_the_numbers_of_the_format(storage: str) -> None:
    count = 1 << 16
    stream = Stream(5, 6, 7, ROUND_SAMPLE)
    random = words(stream, 0, count, "cpu")
    for value in (0.3, -0.001, 3e-6, 100.1, 1e-9):
        single = torch.full((count,), value)
        led = rounded(single, random, storage)
        found = sorted(set(led.tolist()))
        assert len(found) <= 2
        assert torch.equal(led.to(TYPES[storage]).float(), led)
        step = found[-1] - found[0]
        mean = float(led.double().mean())
        # The bound is 5 standard deviations; the share of words that round a number up may be as
        # small as 1 in 2^16 without any of these words doing so.
        spread = max(step, 2.0**-9) if storage == "fp8" else max(step, 2.0**-24)
        assert abs(mean - float(single[0].double())) < 5 * spread / 2 / math.sqrt(count)
    exact = torch.randn(count).to(TYPES[storage]).float()
    assert torch.equal(rounded(exact, random, storage), exact)


def test_a_step_of_what_is_kept_is_torch_s_arithmetic() -> None:
    first, count = 130, 3000
    for storage in NARROW:
        state = (torch.randn(count) * 0.05).to(TYPES[storage])
        values = torch.empty(count, dtype=torch.float16)
        wide = state.float()
        wide = wide - (normal(Stream(7, 4, 3), first, count, "cpu") * 0.5) * 1e-2
        wide = rounded(wide, words(Stream(7, 4, 3, ROUND_SAMPLE), first, count, "cpu"), storage)
        moved = wide + normal(Stream(7, 5, 3), first, count, "cpu") * 1e-3
        ops = [op("update", 4, 0.5), op("round", 4, sample=ROUND_SAMPLE), op("perturb", 5, 1e-3)]
        place = (state.data_ptr(), storage, values.data_ptr(), "fp16", first, count)
        _core.zo_lead(*place, ops)
        assert torch.equal(state.float(), wide)
        assert torch.equal(values, moved.half())


@pytest.mark.parametrize("state_format", TYPES)
@pytest.mark.parametrize("value_format", ["fp32", "bf16", "fp16"])
def test_what_is_led_is_what_ops_and_torch_s_types_give(
    state_format: str, value_format: str
) -> None:
    first, count = 70, 5000
    begin = (torch.randn(count, generator=torch.Generator().manual_seed(1)) * 0.03).to(
        TYPES[state_format]
    )
    state = begin.clone()
    values = torch.empty(count, dtype=TYPES[value_format])
    update = [op("update", 0, 3.0), op("round", 0, sample=ROUND_SAMPLE)]
    perturb = [op("perturb", 1, 1e-3), op("perturb", 1, -2e-3, is_same=True)]
    _core.zo_lead(
        state.data_ptr(),
        state_format,
        values.data_ptr(),
        value_format,
        first,
        count,
        update + perturb,
    )
    wide = begin.float().clone()
    place = (wide.data_ptr(), wide.data_ptr(), first, count)
    _core.zo_apply(*place, update, format=state_format)
    assert torch.equal(state.float(), wide)
    assert torch.equal(wide.to(TYPES[state_format]).float(), wide)
    assert not torch.equal(begin.float(), wide)
    _core.zo_apply(*place, perturb)
    assert torch.equal(values, wide.to(TYPES[value_format]))


@pytest.mark.parametrize(
    ("formats", "ops", "words"),
    [
        (("fp64", "fp32"), [], "state_format is 'fp64': must be one of"),
        (("fp8", "fp8"), [], "value_format is 'fp8': must be one of fp32, bf16, fp16"),
        (("bf16", "fp32"), [op("round", 0), op("draw", 0, is_same=True)], "after a round"),
        (("bf16", "fp32"), [op("draw", 0), op("round", 0, is_same=True)], "a round has no z"),
    ],
)
def test_what_cannot_be_led_is_refused(formats: tuple[str, str], ops: list[Op], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        _core.zo_lead(0, formats[0], 0, formats[1], 0, 0, ops)


def test_a_range_that_has_no_counters_is_not_led() -> None:
    with pytest.raises(ValueError, match=r"2\^50"):
        _core.zo_lead(0, "bf16", 0, "fp32", 2**50, 1, [])


def test_a_round_in_fp32_needs_a_format() -> None:
    with pytest.raises(ValueError, match="a round needs a format"):
        _core.zo_apply(0, 0, 0, 0, [op("round", 0)])
    with pytest.raises(ValueError, match="format is 'int8'"):
        _core.zo_apply(0, 0, 0, 0, [op("round", 0)], format="int8")
