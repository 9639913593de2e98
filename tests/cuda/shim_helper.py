"""csrc/dev without a session: compiles tests/cuda/shim.c, and calls it with ctypes."""

from __future__ import annotations

import ctypes
import pathlib
import sys

import torch

ROOT = pathlib.Path(__file__).resolve().parent.parent.parent
sys.path.insert(0, str(ROOT / "tools"))

import cbuild  # noqa: E402  (its folder has just been named)

MESSAGE_BYTES = 768
FOLDERS = ("base", "dev")


class Shim:
    """A device of csrc/dev; a refusal raises a RuntimeError."""

    def __init__(self, path: pathlib.Path) -> None:
        self.library = ctypes.CDLL(str(path))

    def call(self, name: str, *arguments: object) -> None:
        message = ctypes.create_string_buffer(MESSAGE_BYTES)
        code = getattr(self.library, f"shim_{name}")(*arguments, message)
        if code != 0:
            raise RuntimeError(f"{name}: {message.value.decode()} ({code})")

    def open(self, kind: str, index: int) -> None:
        self.call("open", kind.encode(), index)

    def close(self) -> None:
        self.library.shim_close()

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

    def drain(self) -> int:
        return int(self.library.shim_drain())

    def stream(
        self,
        pairs: tuple[tuple[torch.Tensor, torch.Tensor] | None, ...],
        nbytes: int,
        count: int,
    ) -> list[float]:
        """Return the seconds that each direction took for count copies of nbytes, both at once.

        Args:
            pairs: memory of the host and of the device for copies in and out; None: no copies.
            nbytes: the size of a copy.
            count: the number of copies in each direction.
        """
        both = [[0 if pair is None else pair[side].data_ptr() for pair in pairs] for side in (0, 1)]
        host, device = ((ctypes.c_void_p * 2)(*addresses) for addresses in both)
        took = (ctypes.c_uint64 * 2)()
        self.call("stream", host, device, ctypes.c_uint64(nbytes), ctypes.c_uint32(count), took)
        return [ns / 1e9 for ns in took]


def build(folder: pathlib.Path) -> pathlib.Path:
    """Compile the shim with csrc/dev to a shared object."""
    builder = cbuild.Builder("release")
    sources = [path for name in FOLDERS for path in sorted((ROOT / "csrc" / name).glob("*.c"))]
    objects = builder.compile([*sources, ROOT / "tests" / "cuda" / "shim.c"])
    builder.link(objects, folder / "shim.so", ["-shared"])
    return folder / "shim.so"
