"""What building a model in lohan.empty() leaves for its wrap(), and tensors without memory."""

from __future__ import annotations

import threading
from collections.abc import Iterable

import torch

# Of the calling thread: `depth`, the number of empty() contexts that it is in, and `has_copied`,
# whether a buffer was copied from a parameter without storage.
building = threading.local()


def uncopied(buffers: Iterable[tuple[str, torch.Tensor]]) -> str | None:
    """Return the name of a buffer that is still NaN, because files do not have it, or None."""
    if not getattr(building, "has_copied", False):
        return None
    return next((name for name, buffer in buffers if _is_nan(buffer)), None)


def _is_nan(buffer: torch.Tensor) -> bool:
    """Return whether every element is NaN; _copied makes only plain buffers so."""
    is_plain = type(buffer) is torch.Tensor and buffer.layout is torch.strided
    return (
        is_plain
        and buffer.numel() > 0
        and buffer.is_floating_point()
        and bool(buffer.isnan().all())
    )


def no_storage(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor of the same shape without memory, until the session makes it hollow."""
    return torch.empty((), dtype=tensor.dtype).expand(tensor.shape)
