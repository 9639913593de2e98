"""Programs that change parameters and then end, for test_rules_ends.py: EDIT END STORE [STEP]."""

from __future__ import annotations

import atexit
import contextlib
import gc
import os
import signal
import sys
import threading
from typing import Any

import lohan
import torch
from conftest import TORCH_THREAD_COUNT
from lohan.errors import StoreMismatchError
from rules_helper import Stack, build, train_step
from torch import nn


def load(model: nn.Module) -> None:
    """Load other weights on purpose: a plain dict does not record its origin."""
    model.load_state_dict({name: value * 2 for name, value in model.state_dict().items()})


def loop(model: nn.Module) -> None:
    """Edit in a loop over parameters."""
    for param in model.parameters():
        param.data.mul_(2)


def half(model: nn.Module) -> None:
    """Fail half-way through a loop, which leaves the changes made so far."""
    for number, param in enumerate(model.parameters()):
        if number == 3:
            raise ValueError("planned, in the loop")
        param.data.mul_(2)


EDITS = {"load": load, "loop": loop, "half": half}


def uncaught(model: nn.Module, edit: Any) -> None:
    """End with an exception that is not caught."""
    edit(model)
    raise ValueError("planned")


def evaluated(model: nn.Module, edit: Any) -> None:
    """An evaluation is not yet training."""
    edit(model)
    with torch.no_grad():
        model(torch.ones(1, 32))
    raise ValueError("planned")


def interrupted(model: nn.Module, edit: Any) -> None:
    """End with Ctrl-C."""
    edit(model)
    signal.raise_signal(signal.SIGINT)


def terminated(model: nn.Module, edit: Any) -> None:
    """End with SIGTERM."""
    edit(model)
    signal.raise_signal(signal.SIGTERM)


def edited_after_sigterm(model: nn.Module, edit: Any) -> None:
    """Restore the best weights when SIGTERM has ended the training loop."""
    with contextlib.suppress(SystemExit):
        signal.raise_signal(signal.SIGTERM)
    edit(model)


def exit_status(model: nn.Module, edit: Any) -> None:
    """An error is handled by an exit with a status."""
    edit(model)
    try:
        raise ValueError("planned")
    except ValueError as error:
        sys.exit(f"failed: {error}")


def exit_caught(model: nn.Module, edit: Any) -> None:
    """A part of the program exits with a status, and its caller continues."""
    edit(model)
    with contextlib.suppress(SystemExit):
        sys.exit("planned, and caught")
    try:
        sys.exit(3)
    except SystemExit as error:
        assert error.code == 3


def exit_kept(model: nn.Module, edit: Any) -> None:
    """The same, but the exception stays referenced until the end."""
    edit(model)
    try:
        sys.exit(3)
    except SystemExit as error:
        model.error = error


def exit_raised_again(model: nn.Module, edit: Any) -> None:
    """An exit that is handled first, and then reaches the top of the program."""
    edit(model)
    try:
        sys.exit(3)
    except SystemExit as error:
        assert error.code == 3
        model.error = error
        raise


def exit_in_thread(model: nn.Module, edit: Any) -> None:
    """The thread that edits exits with a status; the main thread ends as usual."""
    thread = threading.Thread(target=exit_status, args=(model, edit))
    thread.start()
    thread.join()


def exit_caught_in_thread(model: nn.Module, edit: Any) -> None:
    """The thread that edits catches its exit."""
    thread = threading.Thread(target=exit_caught, args=(model, edit))
    thread.start()
    thread.join()


def exit_in_other_thread(model: nn.Module, edit: Any) -> None:
    """Another thread exits with a status, which ends only that thread."""
    edit(model)
    thread = threading.Thread(target=sys.exit, args=(3,))
    thread.start()
    thread.join()


def exit_zero(model: nn.Module, edit: Any) -> None:
    """An exit that is meant."""
    edit(model)
    sys.exit(0)


def end(model: nn.Module, edit: Any) -> None:
    """Reach the end of the script."""
    edit(model)


def collected(model: nn.Module, edit: Any) -> None:
    """The model is dropped, and the program continues."""
    edit(model)


def closed(model: nn.Module, edit: Any) -> None:
    """Close explicitly."""
    edit(model)
    model.lohan.close()


def closed_finally(model: nn.Module, edit: Any) -> None:
    """Close while an exception propagates."""
    try:
        edit(model)
        raise ValueError("planned")
    finally:
        model.lohan.close()


def closed_by_with(model: nn.Module, edit: Any) -> None:
    """The same with contextlib.closing."""
    with contextlib.closing(model.lohan):
        edit(model)
        raise ValueError("planned")


def closed_by_atexit(model: nn.Module, edit: Any) -> None:
    """A close that the script has registered itself, which runs before lohan's."""
    atexit.register(model.lohan.close)
    edit(model)
    raise ValueError("planned")


def edited_in_handler(model: nn.Module, edit: Any) -> None:
    """Some scripts end with an exception on purpose, and edit and close where they handle it."""
    try:
        next(iter(()))
    except StopIteration:
        edit(model)
        model.lohan.close()


def caught(model: nn.Module, edit: Any) -> None:
    """A handled exception does not count as a failure of the program."""
    edit(model)
    try:
        raise ValueError("planned")
    except ValueError:
        pass


def committed(model: nn.Module, edit: Any) -> None:
    """Call commit(), which is explicit."""
    edit(model)
    model.lohan.commit()
    raise ValueError("planned")


def trained(model: nn.Module, edit: Any) -> None:
    """A backward has begun, so the program has used the edit."""
    edit(model)
    (model(torch.ones(1, 32)).sum()).backward()
    raise ValueError("planned")


def at_prompt(model: nn.Module, edit: Any) -> None:
    """Run a notebook, in which an exception only ends a cell."""
    sys.ps1 = "In : "
    edit(model)
    sys.last_value = ValueError("planned, in a cell")


def in_thread(model: nn.Module, edit: Any) -> None:
    """The editing thread dies of an exception; the main thread ends as usual."""
    thread = threading.Thread(target=uncaught, args=(model, edit))
    thread.start()
    thread.join()


def other_thread(model: nn.Module, edit: Any) -> None:
    """Another thread dies of an exception."""
    edit(model)
    thread = threading.Thread(target=lambda: [].pop())
    thread.start()
    thread.join()


def killed(model: nn.Module, edit: Any) -> None:
    """End the process without running anything at its end."""
    edit(model)
    os._exit(3)


def refused_and_dropped(model: nn.Module, edit: Any) -> None:
    """Load an optimizer state that is refused; the script prints this and ends without an error."""
    edit(model)
    try:
        model.optimizer.load_state_dict(
            torch.optim.AdamW([nn.Parameter(torch.ones(1))]).state_dict()
        )
    except StoreMismatchError as error:
        print("told", error)


def refused_and_trained(model: nn.Module, edit: Any) -> None:
    """The same, and the script continues to train."""
    refused_and_dropped(model, edit)
    train_step(model, 3)


ENDS = {
    f.__name__: f
    for f in (
        uncaught, evaluated, interrupted, terminated, exit_status, exit_zero, end, collected,
        closed, closed_finally, closed_by_with, closed_by_atexit, edited_in_handler, caught,
        committed, trained, at_prompt, in_thread, other_thread, killed, refused_and_dropped,
        refused_and_trained, exit_caught, exit_kept, exit_raised_again, exit_in_thread,
        exit_caught_in_thread, exit_in_other_thread, edited_after_sigterm,
    )
}  # fmt: skip


def main() -> None:
    """Resume from a store and change its parameters."""
    torch.set_num_threads(TORCH_THREAD_COUNT)
    edit, how, store, *settings = sys.argv[1:]
    model = lohan.wrap(
        build(Stack), store=store, resume=True, **dict(pair.split("=") for pair in settings)
    )
    ENDS[how](model, EDITS[edit])
    if how == "collected":
        del model
        gc.collect()
        os._exit(0)


if __name__ == "__main__":
    main()
