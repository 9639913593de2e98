"""Gradient accumulation: which backwards belong to a step."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Literal

from lohan import _core
from lohan.errors import SecondBackwardError, UnsupportedError

Accumulate = int | Literal["manual"]


class Accumulation:
    """A counter of the current step's backwards, which decides when the step is complete.

    Attributes:
        is_on: whether gradients are summed.
        count: the number of the open step's backwards that produced gradients.
        is_complete: whether the step has all of its backwards.
        is_given: whether the engine has received the sums, so that no backward can be added.
    """

    def __init__(self, accumulate: Accumulate, *, is_on: bool) -> None:
        self._accumulate = accumulate
        self.is_on = is_on
        self._is_no_sync = False  # whether a no_sync() context is entered
        self.reset()

    def reset(self) -> None:
        """Begin the next step."""
        self.count = 0
        self.is_complete = False
        self.is_given = False

    @property
    def is_open(self) -> bool:
        """Whether the step has not updated any parameters yet, so that a forward may follow."""
        return self.is_on and not self.is_given

    def backward_end(self) -> None:
        """Count a backward that produced gradients."""
        self.count += 1
        if self._accumulate == "manual":
            self.is_complete = not self._is_no_sync
        else:
            self.is_complete = self.count >= self._accumulate

    def check_may_add(self) -> None:
        """Reject a backward that cannot belong to the current step.

        Raises:
            SecondBackwardError: says what to do instead.
        """
        if not self.is_on:
            raise SecondBackwardError(
                "a second backward before optimizer.step(): the optimizer already has the gradients"
                " of the first. lohan.wrap(..., gradient_accumulation_steps=k) sums the"
                " gradients of k backwards"
            )
        if self.is_given:
            raise SecondBackwardError(
                "a backward after the gradients of this step were clipped or unscaled: call"
                " model.optimizer.step() first, and clip after the last backward"
            )
        if self.is_complete and self._accumulate == "manual":
            raise SecondBackwardError(
                "a backward outside model.no_sync() has completed this step: call"
                " model.optimizer.step() first, or run the earlier backwards in model.no_sync()"
            )
        if self.is_complete:
            raise SecondBackwardError(
                f"backward {self.count + 1} before optimizer.step(), but a step has"
                f" {self._accumulate} (gradient_accumulation_steps={self._accumulate}): call"
                " model.optimizer.step()"
                " first, or pass a larger gradient_accumulation_steps= to lohan.wrap()"
            )

    def no_sync(self) -> AbstractContextManager[None]:
        """Implement Session.no_sync()."""
        if self._accumulate == 1:
            raise UnsupportedError(
                "model.no_sync() needs memory for sums of gradients, which lohan.wrap() allocates:"
                " wrap with gradient_accumulation_steps='manual', or with the number of"
                " backwards per step"
            )
        before: bool | None = None  # None: not entered

        def enter() -> None:
            nonlocal before
            before = self._is_no_sync
            self._is_no_sync = True

        def leave() -> None:
            nonlocal before
            if before is not None:
                self._is_no_sync, before = before, None

        return _core.Context(enter, leave)
