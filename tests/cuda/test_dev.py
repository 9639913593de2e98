"""The CUDA backend and torch share a context: memory, streams and fences of one are the other's."""

from __future__ import annotations

import pathlib
import sys
from collections.abc import Iterator

import pytest
import torch

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent))
from shim_helper import Shim, build

ELEMENT_COUNT = 4 << 20


@pytest.fixture
def shim(tmp_path: pathlib.Path) -> Iterator[Shim]:
    library = Shim(build(tmp_path))
    try:
        library.open("cuda", 0)
        yield library
    finally:
        library.close()


def test_torch_sees_registered_memory_as_pinned(shim: Shim) -> None:
    tensor = torch.zeros(ELEMENT_COUNT)
    assert not tensor.is_pinned()
    shim.register(tensor)
    try:
        assert tensor.is_pinned()
        with pytest.raises(RuntimeError, match=r"cuMemHostRegister of 16777216 bytes.*CUDA_ERROR"):
            shim.register(tensor)
    finally:
        shim.unregister(tensor)
    assert not tensor.is_pinned()


@pytest.mark.parametrize("is_default", [True, False])
def test_copies_are_ordered_with_what_torch_computes(shim: Shim, is_default: bool) -> None:
    stream = torch.cuda.current_stream() if is_default else torch.cuda.Stream()
    source, result = torch.empty(ELEMENT_COUNT), torch.empty(ELEMENT_COUNT)
    for tensor in (source, result):
        shim.register(tensor)
    try:
        with torch.cuda.stream(stream):
            slot, computed = torch.zeros((2, ELEMENT_COUNT), device="cuda")
            busy = torch.ones(4096, 4096, device="cuda")
            for round_index in range(10):
                source.uniform_()
                shim.copy("in", source, slot, stream)
                # Work that does not wait for the fence finds the result of the previous round.
                for _ in range(4):
                    busy = (busy @ busy).clamp_(max=1)
                torch.mul(slot, 2 + round_index, out=computed)
                shim.copy("out", result, computed, stream)
                assert shim.drain() == 0
                assert torch.equal(result, source * (2 + round_index))
    finally:
        torch.cuda.synchronize()
        for tensor in (source, result):
            shim.unregister(tensor)
