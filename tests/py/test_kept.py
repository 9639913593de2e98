"""Parameters that zeroth-order training keeps in narrow formats."""

from __future__ import annotations

import pytest
import torch
from lohan import _core

Op = tuple[str, bool, int, int, int, int, float, float, float]

TYPES = {
    "fp32": torch.float32,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
    "fp8": torch.float8_e4m3fn,
}
ROUND = 65535  # the sample of words that rounds take


def op(kind: str, param: int, scale: float = 0.0, *, sample: int = 0, is_same: bool = False) -> Op:
    """As _core takes it."""
    return (kind, is_same, 7, sample, param, 3, scale, 1e-2, 0.0)


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
    update = [op("update", 0, 3.0), op("round", 0, sample=ROUND)]
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
        (("fp64", "fp32"), [], "no format fp64"),
        (("fp8", "fp8"), [], "values of fp8"),
        (("bf16", "fp32"), [op("round", 0), op("draw", 0, is_same=True)], "behind a round"),
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
    with pytest.raises(ValueError, match="no format int8"):
        _core.zo_apply(0, 0, 0, 0, [op("round", 0)], format="int8")
