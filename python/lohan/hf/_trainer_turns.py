"""A Trainer's accumulated steps with order="vertical".

[Note: A Trainer's micro-batches] A Trainer collects the batches of a step with get_batch_samples(),
and then calls training_step() for each of them, which computes a loss and runs its backward. With
order="vertical" the first of these calls makes the whole step: the Trainer's own training_step()
runs for every batch, each as a function of session.accumulate(), where it takes turns with the
others, and Accelerate's backward() only records the loss, scaled as Accelerate scales it. One
backward of all losses follows. The other calls of training_step() return the losses that are
already known. Callbacks, clipping, the scaler and the optimizer's step run as before.
"""

from __future__ import annotations

import copy
import functools
import threading
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from lohan.errors import ModelError, UnsupportedError

if TYPE_CHECKING:
    import torch

    from lohan.config import Config
    from lohan.session._training import Training

# The methods of a Trainer that are replaced.
REPLACED = ("get_batch_samples", "training_step")


def check(args: Any, config: Config, *, is_zeroth: bool) -> bool:
    """Return whether a Trainer's micro-batches may have to take turns.

    Raises:
        ModelError: order="vertical" and other settings contradict each other.
    """
    if config.order == "horizontal":
        return False
    is_asked = config.order == "vertical"
    if is_asked and is_zeroth:
        raise ModelError('order="vertical" has no meaning with method="mezo": leave order= out')
    if is_asked and args.gradient_accumulation_steps == 1:
        raise ModelError(
            'order="vertical" needs several micro-batches in a step: set'
            " gradient_accumulation_steps in TrainingArguments, or leave order= out"
        )
    return not is_zeroth and args.gradient_accumulation_steps > 1


class Turns:
    """The replacements for a Trainer's methods: [Note: A Trainer's micro-batches]."""

    def __init__(self, trainer: Any, session: Callable[[], Training | None]) -> None:
        """Replace the methods.

        Args:
            trainer: the Trainer.
            session: returns the session of its model, or None if the model is not wrapped.
        """
        self._trainer = trainer
        self._session = session
        self._batches: list[Any] = []  # of a step that has not begun
        self._losses: list[torch.Tensor] = []  # those of the step's other batches
        self._local = threading.local()  # the losses that backward() gets in this thread
        for name in REPLACED:
            ours = getattr(self, f"_{name}")
            setattr(trainer, name, functools.partial(ours, getattr(trainer, name)))

    def begin(self) -> None:
        """Begin a training."""
        self._batches, self._losses = [], []

    def _get_batch_samples(self, plain: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if self._losses:
            raise UnsupportedError(
                f"an epoch ended {len(self._losses)} micro-batches before the end of a step"
                " (should_epoch_stop of a callback?), but with order='vertical' all micro-batches"
                " of the step have run: end the epoch in on_step_end, or leave order= out"
            )
        result = plain(*args, **kwargs)
        self._batches = list(result[0])
        return result

    def _training_step(
        self, plain: Callable[..., Any], model: Any, inputs: Any, *args: Any, **kwargs: Any
    ) -> torch.Tensor:
        if self._losses:
            return self._losses.pop(0)
        batches, self._batches = self._batches, []
        session = self._session()
        is_mine = session is not None and session.order != "horizontal"
        if not is_mine or len(batches) < 2 or inputs is not batches[0]:
            result: torch.Tensor = plain(model, inputs, *args, **kwargs)
            return result
        assert session is not None

        def step(batch: Any) -> torch.Tensor:
            # It may be called a second time, and compute_loss may remove labels from its inputs.
            loss: torch.Tensor = plain(model, copy.copy(batch), *args, **kwargs)
            return loss

        self._losses = self._make(session, step, batches)
        return self._losses.pop(0)

    def _make(
        self, session: Training, step: Callable[[Any], torch.Tensor], batches: Sequence[Any]
    ) -> list[torch.Tensor]:
        """Run all micro-batches of a step; return what training_step() returned for each."""
        losses: dict[int, torch.Tensor] = {}

        def function(number: int) -> torch.Tensor:
            scaled: list[torch.Tensor] = []
            self._local.scaled = scaled
            losses[number] = step(batches[number])
            if len(scaled) != 1:
                raise UnsupportedError(
                    f"training_step of {type(self._trainer).__name__} calls accelerator.backward()"
                    f" {len(scaled)} times: with order='vertical' it must call it exactly once,"
                    " and loss.backward() never. Move what it does into compute_loss, or leave"
                    " order= out"
                )
            return scaled[0]

        attributes = self._trainer.accelerator.__dict__
        before = attributes.get("backward")
        attributes["backward"] = self._backward
        try:
            session.accumulate([functools.partial(function, n) for n in range(len(batches))])
        finally:
            del attributes["backward"]
            if before is not None:
                attributes["backward"] = before
        return [losses[number] for number in range(len(batches))]

    def _backward(self, loss: torch.Tensor, **kwargs: Any) -> None:
        """Record a loss, scaled as accelerator.backward() scales it."""
        if kwargs:
            raise UnsupportedError(
                f"training_step of {type(self._trainer).__name__} passes {', '.join(kwargs)} to"
                " accelerator.backward(), which is not supported with order='vertical': leave"
                " order= out"
            )
        accelerator = self._trainer.accelerator
        loss = loss / accelerator.gradient_accumulation_steps
        if accelerator.scaler is not None:
            loss = accelerator.scaler.scale(loss)
        self._local.scaled.append(loss)
