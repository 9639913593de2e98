"""The CUDA backend and torch share a context: memory, streams and fences of one are the other's."""

from __future__ import annotations

import ctypes
import pathlib
import sys
from collections.abc import Iterator

import pytest
import torch

ROOT = pathlib.Path(__file__).resolve().parent.parent.parent
sys.path.insert(0, str(ROOT / "tools"))

import cbuild  # noqa: E402  (its folder has just been named)

MESSAGE_BYTES = 768
ELEMENT_COUNT = 4 << 20


class Shim:
    """tests/cuda/shim.c; a refusal is a RuntimeError."""

    def __init__(self, path: pathlib.Path) -> None:
        self.library = ctypes.CDLL(str(path))

    def call(self, name: str, *arguments: object) -> None:
        message = ctypes.create_string_buffer(MESSAGE_BYTES)
        code = getattr(self.library, f"shim_{name}")(*arguments, message)
        if code != 0:
            raise RuntimeError(f"{name}: {message.value.decode()} ({code})")

    def register(self, tensor: torch.Tensor) -> None:
        self.call("register", ctypes.c_void_p(tensor.data_ptr()), ctypes.c_uint64(tensor.nbytes))

    def unregister(self, tensor: torch.Tensor) -> None:
        self.library.shim_unregister(ctypes.c_void_p(tensor.data_ptr()))

    def copy(
        self, name: str, host: torch.Tensor, device: torch.Tensor, stream: torch.cuda.Stream
    ) -> None:
        addresses = [ctypes.c_void_p(tensor.data_ptr()) for tensor in (host, device)]
        handle = ctypes.c_void_p(stream.cuda_stream)
        self.call(name, *addresses, ctypes.c_uint64(host.nbytes), handle)


def build(folder: pathlib.Path) -> pathlib.Path:
    """The shim with the core, as a shared object."""
    builder = cbuild.Builder("release")
    core = builder.archive(builder.compile(cbuild.core_sources(with_binding=False)), "core")
    objects = builder.compile([ROOT / "tests" / "cuda" / "shim.c"])
    builder.link([*objects, core], folder / "shim.so", ["-shared"])
    return folder / "shim.so"


@pytest.fixture
def shim(tmp_path: pathlib.Path) -> Iterator[Shim]:
    library = Shim(build(tmp_path))
    try:
        library.call("open", 0)
        yield library
    finally:
        library.library.shim_close()


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
                # What does not wait for it finds the result of the round before.
                for _ in range(4):
                    busy = (busy @ busy).clamp_(max=1)
                torch.mul(slot, 2 + round_index, out=computed)
                shim.copy("out", result, computed, stream)
                assert shim.library.shim_drain() == 0
                assert torch.equal(result, source * (2 + round_index))
    finally:
        torch.cuda.synchronize()
        for tensor in (source, result):
            shim.unregister(tensor)
