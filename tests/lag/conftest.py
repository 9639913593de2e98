"""The late device for the tests in this folder; late.py describes it.

Where LOHAN_TEST_LAG is 1, this process gets the device before torch is imported. Otherwise, or if
the device cannot be built, every test is skipped with the reason.
"""

from __future__ import annotations

import gc
import os
import pathlib
import sys
from collections.abc import Iterator

import pytest

HERE = pathlib.Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent / "py")]

import late  # noqa: E402  (these folders have just been named)
import patience  # noqa: E402

os.environ.setdefault("OMP_WAIT_POLICY", "passive")
SEED = 1234
_why = "LOHAN_TEST_LAG is not 1"
if os.environ.get("LOHAN_TEST_LAG") == "1":
    try:
        late.load()
        _why = ""
    except late.Missing as missing:
        _why = f"the late device: {missing}"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if HERE in item.path.parents:
            item.add_marker(pytest.mark.lag)
            if _why:
                item.add_marker(pytest.mark.skip(reason=_why))


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup() -> None:
    patience.skip_if_late()


@pytest.fixture
def device() -> Iterator[late.Late]:
    """The device, as it is after `late.load()`; nothing of a test's is left on it."""
    import torch

    found = late.device()
    torch.set_num_threads(1)
    torch.manual_seed(SEED)
    found.tune()
    found.allow(-1)
    found.limit_registered(0)
    found.is_integrated = False
    yield found
    found.allow(-1)
    found.limit_registered(0)
    found.is_integrated = False
    found.drain()
    gc.collect()
    found.trim()
