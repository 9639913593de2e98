"""The direction z of zeroth-order training: torch's reference and the C core give the same bits."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from lohan import _core
from lohan.journal._direction import Stream, normal, philox

Op = tuple[str, bool, int, int, int, int, float, float, float]


def op(
    kind: str,
    stream: Stream,
    scale: float = 0.0,
    *,
    lr: float = 0.0,
    decay: float = 0.0,
    is_same: bool = False,
) -> Op:
    """Return an operation in the form that _core takes."""
    return (
        kind,
        is_same,
        stream.seed,
        stream.sample,
        stream.param,
        stream.step,
        scale,
        lr,
        decay,
    )


def drawn(stream: Stream, first: int, count: int, kernel: str) -> torch.Tensor:
    """Return the numbers that the C core draws."""
    values = torch.empty(count)
    _core.zo_apply(values.data_ptr(), values.data_ptr(), first, count, [op("draw", stream)], kernel)
    return values


def bits(values: torch.Tensor) -> list[int]:
    """Return bits as integers, because zeros have signs."""
    return values.view(torch.int32).tolist()


@pytest.mark.parametrize(
    ("counter", "key", "words"),
    [
        ([0] * 4, (0, 0), [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]),
        (
            [0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344],
            (0xA4093822, 0x299F31D0),
            [0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1],
        ),
        (
            [0xFFFFFFFF] * 4,
            (0xFFFFFFFF, 0xFFFFFFFF),
            [0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD],
        ),
    ],
)
def test_torch_s_philox_gives_the_published_words(
    counter: list[int], key: tuple[int, int], words: list[int]
) -> None:
    assert philox(torch.tensor([counter]), key).tolist() == [words]


@settings(max_examples=25, deadline=None)
@given(
    seed=st.integers(0, 2**64 - 1),
    param=st.integers(0, 2**32 - 1),
    step=st.integers(0, 2**32 - 1),
    sample=st.integers(0, 2**16 - 1),
    first=st.integers(0, 2**50 - 300),
    count=st.integers(0, 300),
)
def test_every_kernel_and_torch_give_the_same_bits(
    seed: int, param: int, step: int, sample: int, first: int, count: int
) -> None:
    stream = Stream(seed, param, step, sample)
    expected = bits(normal(stream, first, count, "cpu"))
    for kernel in _core.zo_kernels():
        assert bits(drawn(stream, first, count, kernel)) == expected


def test_a_million_numbers_are_the_same_and_normal() -> None:
    stream = Stream(7, 1, 2)
    z = normal(stream, 0, 1 << 20, "cpu")
    assert torch.equal(z, drawn(stream, 0, 1 << 20, _core.zo_kernels()[0]))
    wide = z.double()
    assert abs(float(wide.mean())) < 5e-3 and abs(float(wide.var()) - 1) < 7e-3


def test_ops_round_as_torch_does() -> None:
    stream, later = Stream(3, 4, 5), Stream(3, 4, 6)
    values = torch.linspace(-1, 1, 1000)
    expected = values.clone()
    z = normal(stream, 70, 1000, "cpu")
    for scale in (1e-3, -2e-3, 1e-3):
        expected = expected + z * scale
    expected = expected - (z * 12.5 + expected * 0.1) * 1e-2
    expected = expected - (normal(later, 70, 1000, "cpu") * -3.25) * 1e-2
    ops = [
        op("perturb", stream, 1e-3),
        op("perturb", stream, -2e-3, is_same=True),
        op("perturb", stream, 1e-3, is_same=True),
        op("update", stream, 12.5, lr=1e-2, decay=0.1, is_same=True),
        op("update", later, -3.25, lr=1e-2),
    ]
    _core.zo_apply(values.data_ptr(), values.data_ptr(), 70, 1000, ops)
    assert bits(values) == bits(expected)


@pytest.mark.parametrize(
    ("ops", "words"),
    [
        ([op("perturb", Stream(0, 0, 0), is_same=True)], "no z before"),
        ([("walk", False, 0, 0, 0, 0, 0.0, 0.0, 0.0)], "kind is 'walk'"),
        ([("draw", False, 0, 65536, 0, 0, 0.0, 0.0, 0.0)], "sample is 65536: must be 0 to 65535"),
    ],
)
def test_ops_that_mean_nothing_are_refused(ops: list[Op], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        _core.zo_apply(0, 0, 0, 0, ops)


def test_a_range_that_has_no_counters_is_refused() -> None:
    with pytest.raises(ValueError, match=r"2\^50"):
        _core.zo_apply(0, 0, 2**50, 1, [])
    with pytest.raises(ValueError, match=r"2\^50"):
        normal(Stream(0, 0, 0), 2**50, 1, "cpu")
    with pytest.raises(ValueError, match=r"step 4294967296 must be from 0 to 2\^32 - 1"):
        Stream(0, 0, 2**32)
