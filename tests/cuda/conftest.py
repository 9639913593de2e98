"""Tests that need a GPU: they are skipped, with the reason, if torch finds none."""

from __future__ import annotations

import os
import pathlib
from collections.abc import Iterator

import pytest

# Before the first use of cuBLAS: its sums are made in one order then, from workspaces of 8 times
# 4 MiB for each thread that computes.
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
HERE = pathlib.Path(__file__).resolve().parent


def missing() -> str | None:
    """Why there is no GPU to test on, or None."""
    try:
        import torch
    except ImportError as error:
        return f"no torch: {error}"
    if not torch.backends.cuda.is_built():
        return f"torch {torch.__version__} is built without CUDA"
    return None if torch.cuda.is_available() else "torch sees no GPU"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    why = missing()
    for item in items:
        if why and HERE in item.path.parents:
            item.add_marker(pytest.mark.skip(reason=why))


@pytest.fixture
def deterministic() -> Iterator[None]:
    """Sums that torch makes in one order, as bits are compared."""
    import torch

    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(before)
    torch.cuda.synchronize()
