"""What autograd still keeps when the process ends.

[Note: Tasks that a failed backward leaves] A backward that fails stops in the middle: operations
that it has not reached stay in autograd's queue of the thread, with what they saved, until the
thread ends. The main thread ends after the interpreter, and torch 2.15 then takes the GIL to
destroy saved-tensor hooks, which ends the process with SIGSEGV in place of its exit status.
drain() therefore empties the queue while the interpreter lives. autograd discards such a task when
a later backward takes it from the queue, the task with the highest number first. Threads number
operations from 0, so the first operation of a new thread comes after everything else.
"""

from __future__ import annotations

import atexit
import threading

import torch
from torch import autograd

from lohan.torch_glue._tensor import in_backward

_last: list[torch.Tensor] = []  # a leaf, and the result of a new thread's first operation on it


def _make() -> None:
    leaf = torch.zeros((), device="cpu", requires_grad=True)
    _last[:] = leaf, leaf + 0


def prepare() -> None:
    """Call drain() at exit; a process that is ending can no longer start the thread for it."""
    thread = threading.Thread(target=_make, name="lohan-last-task")
    thread.start()
    thread.join()
    atexit.register(drain)


def drain() -> None:
    """Free what failed backwards of the calling thread have left in autograd's queue."""
    if _last and not in_backward():
        leaf, result = _last
        with torch.inference_mode(False):
            autograd.grad(result, leaf, torch.ones(()), retain_graph=True)
