"""The late device for the tests in this folder; late.py describes it.

Where LOHAN_TEST_LAG is 1, this process gets the device before torch is imported. Where it is gpu,
the tests in ON_A_GPU use the machine's GPU instead (real.py). Otherwise, or if the device is not
available, every test is skipped with the reason.
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

import default_signals  # noqa: E402  (these folders have just been named)
import late  # noqa: E402
import patience  # noqa: E402
import real  # noqa: E402

default_signals.restore()

os.environ.setdefault("OMP_WAIT_POLICY", "passive")
SEED = 1234
# The files whose claims hold on any GPU.
ON_A_GPU = ("test_late_bits.py", "test_late_vertical.py")
_kind = os.environ.get("LOHAN_TEST_LAG", "")
_why = "LOHAN_TEST_LAG is neither 1 nor gpu"
if _kind in ("1", "gpu"):
    try:
        late.load() if _kind == "1" else real.load()
        _why = ""
    except late.Missing as missing:
        _why = f"the device of these tests: {missing}"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if HERE in item.path.parents:
            item.add_marker(pytest.mark.lag)
            why = _why
            if not why and _kind == "gpu" and item.path.name not in ON_A_GPU:
                why = "this claim needs the late device, which executes only what a test allows"
            if why:
                item.add_marker(pytest.mark.skip(reason=why))


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup() -> None:
    patience.skip_if_late()


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    patience.note_failure(report)


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
