"""Zeroth-order training on a GPU: parameters are moved there by a kernel of ours (cuda/zo.cu).

The CPU touches no byte of the GPU's memory. A unit is led by launches on the stream that torch
computes on, so whatever reads it behind that reads it where it is to be, and nobody waits.
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

# Directions of a step, where parameters are kept in a format of their own: a launch takes 64
# operations, which are one step's updates at least.
KEPT_SAMPLES_MAX = 60
# Made by the build where nvcc is.
FATBIN = pathlib.Path(_core.__file__).with_name("lohan.fatbin")


def is_launched(device: Device) -> bool:
    """Parameters are led by launches, not by the CPU."""
    return device.name == "cuda"


def check(device: str, rng: str, without: Collection[str]) -> None:
    """Refuse what no GPU does.

    Args:
        device: "cpu", "emu" or "cuda".
        rng: of the run.
        without: parts of the schedule to leave out.

    Raises:
        UnsupportedError: says what, and the way out.
    """
    if device != "cuda":
        return
    if not FATBIN.exists():
        raise UnsupportedError(
            'method="mezo" on a GPU: this lohan was built without its kernels, because there was no'
            " nvcc: install the CUDA toolkit (LOHAN_NVCC names its nvcc) and build lohan from"
            ' source, or pass device="cpu"'
        )
    if rng == "torch":
        raise UnsupportedError(
            'rng="torch" draws on the CPU, whose generator a GPU does not have: rng="philox" (of a'
            ' new run), or device="cpu"'
        )
    if "reuse" in without:
        raise UnsupportedError(
            'without=("reuse",) is of the emulated device: leave it out, or pass device="emu"'
        )


def check_kept(
    device: str, dtypes: Collection[torch.dtype], storage: str | None, what: str
) -> None:
    """Refuse a format that a GPU's values are no copy of: what is written comes from them.

    Args:
        device: "cpu", "emu" or "cuda".
        dtypes: of the parameters that are kept in a format of their own.
        storage: the format; None: theirs.
        what: says which it is of.

    Raises:
        UnsupportedError: says what, and the way out.
    """
    if device != "cuda":
        return
    if not all(_storage_formats.is_copied(dtype, storage) for dtype in dtypes):
        raise UnsupportedError(
            f"{what} on a GPU: 16-bit parameters are kept in their own format there, or in"
            ' storage="fp8": leave storage= out, or pass device="cpu"'
        )


def image() -> bytes:
    """The kernels."""
    return FATBIN.read_bytes() if FATBIN.exists() else b""


def host_bytes(views: Collection[tuple[Param, torch.Tensor]], nbytes: int) -> torch.Tensor:
    """A copy of what is kept of a unit in main memory, behind all that its stream holds.

    Args:
        views: each parameter, and its values on the device, which what is kept is as wide as.
        nbytes: of the unit; what is between parameters is zeros.
    """
    copy = torch.zeros(nbytes, dtype=torch.uint8)
    for param, view in views:
        dtype = view.dtype if param.kept is None else _storage_formats.TYPES[param.kept]
        there = copy[param.first : param.first + dtype.itemsize * param.count].view(dtype)
        there.copy_(view.detach().reshape(-1))  # waits for the device
    return copy
