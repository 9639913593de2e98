"""What processes of test_replicas_commits.py do."""

from __future__ import annotations

import contextlib
from typing import Any

from lohan.errors import LohanError
from world_adamw import one_step, wrapped
from world_worker import rank_and_count


def stop_between_commits(store: str) -> int:
    """Rank 1 fails after all have agreed on step 3, which the others close and commit.

    Returns:
        The last step that this process has closed, which close() commits.
    """
    rank, _ = rank_and_count()
    model = wrapped(store, commit_every=3)
    for _ in range(2):
        one_step(model)
    if rank == 1:
        agree = model.lohan._agree

        def fail(unscale: float) -> Any:
            agree(unscale)
            raise ArithmeticError

        model.lohan._agree = fail
    with contextlib.suppress(ArithmeticError):
        one_step(model)
    step: int = model.lohan.step
    with contextlib.suppress(LohanError):
        model.lohan.close()
    return step
