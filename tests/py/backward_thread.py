"""Run backward on a different thread than forward, as on an accelerator, in every test.

There, autograd runs hooks and unpacks saved tensors on a thread of its own for each device. On the
CPU it does so on the thread that calls backward().
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from typing import Any


def elsewhere(call: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that does a call on a new thread, and waits for it."""

    @functools.wraps(call)
    def run(*args: Any, **kwargs: Any) -> Any:
        if threading.current_thread() is not threading.main_thread():
            return call(*args, **kwargs)
        made: list[Any] = []
        failed: list[BaseException] = []

        def work() -> None:
            try:
                made.append(call(*args, **kwargs))
            except BaseException as error:
                failed.append(error)

        thread = threading.Thread(target=work, name="backward")
        thread.start()
        thread.join()
        if failed:
            raise failed.pop()
        return made[0]

    return run


def install() -> None:
    """Let every backward of this process's main thread run on a thread of its own."""
    import torch

    torch.Tensor.backward = elsewhere(torch.Tensor.backward)  # type: ignore[method-assign]
    torch.autograd.backward = elsewhere(torch.autograd.backward)
