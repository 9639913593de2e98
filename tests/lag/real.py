"""The machine's own GPU in the place of the late device.

With LOHAN_TEST_LAG=gpu, the tests that compare bits run on it. It executes what it is given when it
likes: whatever makes the late device late, or limits it, has no effect here.
"""

from __future__ import annotations

import os
from typing import Any

import late


class Real:
    """The first GPU, with the interface of late.Late that these tests use."""

    is_integrated = False

    def tune(self, *_: Any, **__: Any) -> None:
        """Do nothing: a GPU has an order and delays of its own."""

    def allow(self, count: int) -> None:
        """Do nothing: a GPU executes everything."""

    def limit_registered(self, bytes_max: int) -> None:
        """Do nothing: the limit is the driver's."""

    def drain(self) -> None:
        """Wait until everything that was enqueued is executed."""
        import torch

        torch.cuda.synchronize()

    def trim(self) -> bool:
        """Return torch's free memory to the driver."""
        import torch

        torch.cuda.empty_cache()
        return True


def load() -> Real:
    """Make the GPU the device of these tests, with sums in a fixed order.

    Raises:
        late.Missing: torch sees no GPU.
    """
    # cuBLAS reads this when it is first used.
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    import torch

    if not torch.cuda.is_available():
        raise late.Missing(f"torch {torch.__version__} sees no GPU")
    torch.use_deterministic_algorithms(True, warn_only=True)
    made = Real()
    late.install(made)
    return made
