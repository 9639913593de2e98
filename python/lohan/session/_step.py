"""The open step of a session: from the begin of its first backward until it is closed."""

from __future__ import annotations

import math
import weakref
from collections.abc import Iterable
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, Literal

import torch

from lohan import _core
from lohan.common import _log
from lohan.config import SCHEDULES_AT_STEP
from lohan.errors import (
    HyperParameterError,
    SecondBackwardError,
    SessionError,
    StepError,
    UnsupportedError,
    ZeroGradError,
)
from lohan.session import _gradients
from lohan.session._gradients import StepScale
from lohan.store import _scalars
from lohan.torch_glue._tensor import at_backward_end, in_backward

if TYPE_CHECKING:
    from lohan.common._rules import Hyper
    from lohan.session._clipping import Clipping
    from lohan.session._training import Training


class OpenStep:
    """What a session knows of its open step, and how that is closed or discarded.

    Args:
        session: the session.
        engine: its engine.
        accumulation: counts the backwards of the step.

    Attributes:
        backward: the state of the last backward: "none", "running" or "done".
        accumulation: see above.
        gradients: the stand-ins in p.grad.
        scale: the factor of the gradients.
        hypers: the hyper-parameters that updates use, by group; None: no gradient has come.
        clipping: the choices of IO(clip="repeat"); None without it.
    """

    def __init__(self, session: Training, engine: _core.Engine, accumulation: Accumulation) -> None:
        self._session = session
        self._engine = engine
        self._peers = session.peers
        self.accumulation = accumulation
        self.backward = "none"
        self.hypers: list[Hyper] | None = None
        self.clipping: Clipping | None = None
        if session.config.clip == "repeat":
            from lohan.session._clipping import Clipping

            self.clipping = Clipping(session.speaks)
        # The buffers of the last step's commit, which the engine copies from the GPU; see tail.c.
        self._tail: torch.Tensor | None = None
        config = session.config
        self._is_tree = config.tree_leaf_count > 1 and config.process_count == 1
        this, layout = weakref.ref(self), session.layout

        def square_sum() -> float:
            if (step := this()) is None:
                raise SessionError("the session is gone")
            return step._square_sum()

        self.scale = StepScale(
            {p.index: p.name for p in layout.params if layout.units[p.unit].trainable},
            accumulation,
            square_sum if self.is_waiting else None,
            1.0 / session.config.process_count,  # the mean over processes, as torch's DDP takes it
        )
        self.gradients = _gradients.HollowGradients(layout, self.scale)

    @property
    def is_waiting(self) -> bool:
        """Whether updates wait for `step()`."""
        return self._session.config.schedule in SCHEDULES_AT_STEP

    @property
    def needs_norm(self) -> bool:
        """Whether step() needs the norm of all gradients."""
        session = self._session
        return session.config.on_nan == "skip" or session.optimizer.max_grad_norm is not None

    # --- Backward ---------------------------------------------------------------------------

    def backward_begins(self) -> None:
        """Handle the start of a backward, detected at its first saved parameter or gradient."""
        session = self._session
        session.runs.backward_begins()
        for extension in session.extensions:
            extension.admit(session)
        session.forwards.thread.backward_begin()
        session.forwards.changed_drop()
        session.edits.commit()
        session.commits.keep_checksums()
        self.turn(0)
        self.backward = "running"
        for extension in session.extensions:
            extension.backward_begins(session)
        if in_backward():
            at_backward_end(session.forwards.thread.backward_end(self.backward_ended))

    def turn(self, number: int) -> None:
        """Handle that the next gradient is one of this micro-batch of the backward."""
        self._peers.turn(number)
        if self._is_tree and not self.accumulation.is_complete:
            self._engine.sums_leaf(self.accumulation.count + number)

    def backward_ended(self) -> None:
        """Handle the end of a backward."""
        session = self._session
        session.runs.backward_ends()
        is_elsewhere = self._peers.backward_ends()
        self.backward = "done"
        for extension in session.extensions:
            extension.backward_ended(session)
        if self._engine.backward_end() or is_elsewhere:
            self.accumulation.backward_end()
        if is_elsewhere or self._engine.status()["has_gradients"]:
            self.gradients.show()

    def gradient_came(self) -> None:
        """Handle the first gradient of a step: the updates use the current hyper-parameters."""
        _gradients.refuse_graphs()
        if self.clipping is not None:
            self._engine.repeat_wait(self.clipping.begin())
        self._hyper_set(self._session.optimizer.hypers())

    def _hyper_set(self, hypers: list[Hyper]) -> None:
        optimizer = self._session.optimizer
        for index, (group, hyper) in enumerate(zip(optimizer.param_groups, hypers, strict=True)):
            optimizer.rule.of(group).check(hyper)
            self._engine.hyper(index, *hyper, self._session.averages.rest)
        self.hypers = hypers

    # --- step() -----------------------------------------------------------------------------

    def close(self, unscale: float = 1.0) -> None:
        """Close the open step. `model.optimizer.step()` calls this method.

        Args:
            unscale: a factor for the gradients, applied before clipping.
        """
        session = self._session
        session.check_open()
        session.forwards.refuse_other_thread("step()")
        for extension in session.extensions:
            extension.step_begins(session)
        self._peers.close_step(unscale)

    def close_here(self, unscale: float) -> None:
        """Close the open step in this process, once all processes agree on it."""
        session = self._session
        if self.backward == "running" and not in_backward():
            raise StepError(
                "the backward of this step raised an exception: call"
                " model.optimizer.zero_grad() to discard the step, or begin the next forward"
            )
        has_gradients = bool(self._engine.status()["has_gradients"])
        self.gradients.check(has_gradients)
        if not has_gradients:
            self.backward = "none"
            return
        now = session.optimizer.hypers()
        if self.is_waiting:
            self._hyper_set(now)
        elif now != self.hypers:
            raise HyperParameterError(
                f"hyper-parameters changed between backward and step(), from {self.hypers} to"
                f" {now}, but updates already used the former. Change them after step() or before"
                " backward (learning-rate schedulers: after step())"
            )
        if (self.is_waiting or self.clipping is not None) and not self._scale(unscale):
            return
        self.gradients.hide()
        more: dict[str, Any] = {}
        for extension in session.extensions:
            more |= extension.state(session)
        device = session.device.torch_device
        scalars, tail = _scalars.pack(session.optimizer, session.buffers, device, more)
        if tail is not None:
            self._engine.post_tail(tail.data_ptr(), tail.numel())
        for extension in session.extensions:
            extension.before_close(session)
        self._engine.close_step(scalars)
        self._tail = tail  # not before: the engine may have been copying the previous one
        self.backward = "none"
        self.accumulation.reset()
        self.scale.reset()
        self._await_updates()
        if self.clipping is not None:
            self.clipping.closed()
        for extension in session.extensions:
            extension.closed(session)

    def _scale(self, unscale: float) -> bool:
        """Set the factor of the gradients; False: the step was skipped instead."""
        session = self._session
        self._give()
        square_sum = 0.0
        if self.needs_norm:
            square_sum = self._peers.square_sum(self._peers.whole_square_sum)
        if session.config.on_nan == "skip" and not math.isfinite(square_sum):
            self.skip(square_sum)
            return False
        scale = self.scale.factor() * unscale
        if session.optimizer.max_grad_norm is not None:
            scale = session.optimizer.clip_scale(square_sum, scale)
        if self.clipping is not None and self.clipping.must_repeat(scale != 1.0):
            self._engine.repeat()
        self._engine.gradient_scale(scale)
        return True

    def skip(self, square_sum: float) -> None:
        """Discard the open step, because a gradient is not finite."""
        self.discard()
        self._session.optimizer.was_skipped = True
        if self._session.speaks:
            _log.note(
                f"step {self._session.step + 1} is skipped, because the norm of its gradients is"
                f" {math.sqrt(square_sum)}"
            )

    def _await_updates(self) -> None:
        """Wait for the updates of the step that was just closed, if the schedule says so."""
        self._peers.step_closed()
        if self._session.config.schedule == "serial":
            self._engine.await_steps()

    def _give(self) -> None:
        """Pass the summed gradients to the engine; the open step accepts no others after that."""
        if self.accumulation.is_open:
            self._engine.sums_give()
            self.accumulation.is_given = True

    def _square_sum(self) -> float:
        """Return the sum of squares of all gradients; the step accepts no others after that."""
        self._session.check_open()
        is_done = self.backward == "done"
        if is_done:
            self._peers.norm_begins()
        if not is_done or not self._peers.has_gradients():
            raise StepError(
                "there are no gradients to clip or scale: do that after the backward and before"
                " model.optimizer.step()"
            )

        def here() -> float:
            self._give()
            return self._peers.whole_square_sum()

        return self._peers.square_sum(here)

    # --- Without an update --------------------------------------------------------------------

    def zero_grad(self, tensors: Iterable[torch.Tensor]) -> None:
        """Clear p.grad of the given tensors; see Optimizer.zero_grad."""
        self._session.check_open()
        if not in_backward() and (
            self.backward == "running"
            or ((self.is_waiting or self.clipping is not None) and self._peers.has_gradients())
        ):
            self.abort()
        elif self._engine.status()["has_gradients"]:
            raise ZeroGradError(
                "zero_grad() between backward and step(): updates of this step have begun and"
                " cannot be undone. Call zero_grad() after step(), or skip the step before"
                " backward. If a backward leaves gradients that no step should use (a GAN's"
                ' generator, through the discriminator), wrap with schedule="deferred": then no'
                " update begins before step(), and zero_grad() discards the gradients"
            )
        for tensor in tensors:
            tensor.grad = None

    def abort(self) -> None:
        """Forget the open step, in all processes."""
        self._peers.abort_begins()
        if self.backward == "running" and not in_backward():
            self._session.forwards.thread.refuse_backward("the model, step() or zero_grad()")
        self.discard()
        self._peers.abort_ended()

    def discard(self) -> None:
        """Forget the open step in this process."""
        session = self._session
        for extension in session.extensions:
            extension.aborted(session)
        self.gradients.hide()
        self._engine.abort()
        session.layout.in_place.lose()
        self.accumulation.reset()
        self.scale.reset()
        self.backward = "none"
        self.hypers = None


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
