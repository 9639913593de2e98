"""Zeroth-order training on a GPU, where lohan's own kernel (cuda/zo.cu) moves the parameters.

The CPU does not touch the GPU's memory. Kernels on the stream that torch computes on move a unit,
so later operations on that stream read the unit at the right position, and no thread waits.
"""

from __future__ import annotations

import pathlib
from collections.abc import Collection
from typing import TYPE_CHECKING

import torch

from lohan import _core
from lohan.common import _storage_formats
from lohan.errors import UnsupportedError

if TYPE_CHECKING:
    from lohan.layout._block import Param
    from lohan.torch_glue._device import Device

# The maximum number of directions in a step if parameters have a stored form: one launch takes at
# most 64 operations, and must have room for all updates of a step.
KEPT_SAMPLES_MAX = 60
# The build creates this file if nvcc is installed.
FATBIN = pathlib.Path(_core.__file__).with_name("lohan.fatbin")


def is_launched(device: Device) -> bool:
    """Return whether kernel launches, and not the CPU, move parameters on this device."""
    return device.name == "cuda"


def check(device: str, rng: str) -> None:
    """Reject settings that are not supported on a GPU.

    Args:
        device: "cpu", "emu" or "cuda".
        rng: the run's generator.

    Raises:
        UnsupportedError: names the setting and what to do instead.
    """
    if device != "cuda":
        return
    if not FATBIN.exists():
        raise UnsupportedError(
            'method="mezo" is not available on a GPU, because this lohan was built without nvcc and'
            " has no GPU kernels: install the CUDA toolkit (LOHAN_NVCC is the path of its nvcc) and"
            ' build lohan from source, or pass device="cpu"'
        )
    if rng == "torch":
        raise UnsupportedError(
            'rng="torch" uses the generator of the CPU, which a GPU does not have: start a new run'
            ' with rng="philox", or pass device="cpu"'
        )


def check_kept(
    device: str, dtypes: Collection[torch.dtype], storage: str | None, what: str
) -> None:
    """Reject a storage format whose numbers the values on a GPU cannot represent.

    The bytes that are written back from a GPU are converted from the values.

    Args:
        device: "cpu", "emu" or "cuda".
        dtypes: the dtypes of the parameters that have a stored form.
        storage: the format; None for the parameters' own.
        what: the parameter's description, for the message.

    Raises:
        UnsupportedError: names the parameter and what to do instead.
    """
    if device != "cuda":
        return
    if not all(_storage_formats.is_copied(dtype, storage) for dtype in dtypes):
        raise UnsupportedError(
            f"{what} on a GPU is not supported: there, 16-bit parameters can only be stored in"
            ' their own format or with storage="fp8": leave storage= out, or pass device="cpu"'
        )


def image() -> bytes:
    """Return the compiled kernels; empty if the build had no nvcc."""
    return FATBIN.read_bytes() if FATBIN.exists() else b""


def host_bytes(views: Collection[tuple[Param, torch.Tensor]], nbytes: int) -> torch.Tensor:
    """Return a unit's stored form in main memory, after the device's stream has finished.

    The stored form is converted from the values, which represent it exactly: see check_kept().

    Args:
        views: each parameter with its values on the device.
        nbytes: the unit's size. The bytes between parameters are zeros.
    """
    copy = torch.zeros(nbytes, dtype=torch.uint8)
    for param, view in views:
        dtype = view.dtype if param.kept is None else _storage_formats.TYPES[param.kept]
        there = copy[param.first : param.first + dtype.itemsize * param.count].view(dtype)
        there.copy_(view.detach().reshape(-1))  # waits for the device
    return copy
