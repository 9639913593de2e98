"""Begins and ends the forwards of a session, and rejects forwards at wrong times."""

from __future__ import annotations

import os
import pathlib
import sys
import weakref
from collections.abc import Iterator, Sequence
from types import FrameType
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from lohan.errors import HollowParameterError, SecondBackwardError, UnsupportedError
from lohan.layout._block import DTYPE_CODES
from lohan.torch_glue._batch import BatchCheck
from lohan.torch_glue._cast import Autocast
from lohan.torch_glue._tensor import (
    has_saved_tensor_hooks,
    hooks_are_refused,
    in_backward,
    is_reading_wrapped,
    is_traced,
)
from lohan.torch_glue._thread import ForwardThread

if TYPE_CHECKING:
    from lohan import _core
    from lohan.session._training import Training
    from lohan.torch_glue._tensor import (
        SavedTensors,
    )

_FOLDER = f"{pathlib.Path(__file__).parents[1]}{os.sep}"


# The sessions whose forward runs, or was ended by a Ctrl-C that called no hook. This is a plain set
# of references, because Dynamo would trace the generator of a WeakSet inside a forward.
_running: set[weakref.ref[Forwards]] = set()


class Forwards:
    """The forwards of a session: it has the hooks that torch calls around every one.

    Args:
        session: the session, which has its engine.
        around: saved-tensor hooks that are active during a forward.

    Attributes:
        around: see above; a forward that has begun keeps those that it has entered.
        autocast: follows autocast in forwards.
        depth: the number of calls of the model that are open: 0 outside of a forward.
        root_scopes: the scopes of parameters that no block has.
        thread: the thread of the open forward.
    """

    def __init__(self, session: Training, around: SavedTensors) -> None:
        self._session = session
        self._engine = session.engine
        self._layout = session.layout
        self._runs = session.runs
        self.around = around
        self._batch = BatchCheck(session.device.torch_device)
        self.depth = 0
        self._reference = weakref.ref(self, _running.discard)
        self._begun: tuple[int, bool] | None = None
        self.root_scopes: list[_core.Scope] = []
        self.thread = ForwardThread()
        self.autocast = Autocast(self._engine, session.device.torch_device, DTYPE_CODES)
        self._entered = self.around  # saved-tensor hooks of the running forward
        self._changed: set[int] = set()  # parameters that a forward changed in place

    def is_next(self) -> bool:
        """Return whether a forward of the open step has begun."""
        return self._begun is not None and self._begun[0] == self._session.step

    def root_enter(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        """Begin a forward, as a hook of the model."""
        if not self._runs.joins():
            self._root_begin(module, args, kwargs)
            self._runs.entered()

    def _root_begin(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        if in_backward():
            return
        if self._batch.is_due:
            self._batch.check(module, args, kwargs)
        if self.is_alive():
            self.depth += 1
            return
        self._begin(is_root=True)
        entered = 0
        try:
            for scope in list(self.root_scopes):
                scope.enter()
                entered += 1
        except BaseException:
            for scope in reversed(self.root_scopes[:entered]):
                scope.leave()
            self._end()
            raise

    def root_leave(self, module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        """End a forward, as a hook of the model."""
        if self._runs.parts():
            return
        if self.depth == 0 or in_backward() or self._is_of_other_thread():
            return  # torch also calls this for a forward that was rejected
        if output is None:  # the forward raised an exception, or returned nothing
            self._batch.explain(sys.exc_info()[1], module, args, kwargs)
            _explain_transform(sys.exc_info()[1])
        if self.depth > 1:
            self.depth -= 1
            return
        try:
            if output is not None:
                self._runs.leaves()
        finally:
            for scope in reversed(self.root_scopes):
                scope.leave()
            self._end()
        if output is not None or sys.exc_info()[0] is None:
            self._refuse_changed()

    def block_called(self, begins: bool) -> bool:
        """Handle the begin or end of a block that is called outside the model's own forward.

        Such a call counts as a forward.
        """
        is_part = self._runs.block_joins(begins)
        if is_part is not None:
            return is_part
        if not begins:
            self._end()
            self._refuse_changed()
            return False
        if self.is_alive():
            return False  # alternating runs (torch_glue/_lockstep.py) share one forward
        self._begin(is_root=False)
        return True

    def recompute(self) -> bool:
        """Return whether a parameter is read in a backward, which then recomputes a forward.

        A reentrant checkpoint recomputes without saved-tensor hooks, so the session's hooks are
        entered here. Autograd removes them when the recomputing node is done. If there are others,
        such as the user's, or those that a Ctrl-C in another session's forward left, both are used.
        """
        if not in_backward():
            return False
        if has_saved_tensor_hooks():
            self.around.join(self._engine)
        else:
            self.around.enter()
        return True

    def _begin(self, *, is_root: bool) -> None:
        self._session.method.forward_begins()
        self._session.check_open()
        refuse_transform()
        for reference in tuple(_running):
            other = reference()
            if other is not None and other is not self:
                other.end_interrupted()
        frame = _frame_outside()
        self.thread.claim(frame)
        try:
            self._open(frame, is_root=is_root)
        except BaseException:
            if self.depth == 0:
                self.thread.release()
            raise

    def _open(self, frame: FrameType | None, *, is_root: bool) -> None:
        self._session.peers.forward_opens()
        if self.depth > 0:
            self.drop()
            self.thread.claim(frame)
        open_step = self._session.open_step
        if open_step.backward == "running":
            open_step.abort()  # the last backward failed: discard its step
        elif self._engine.status()["has_gradients"] and not open_step.accumulation.is_open:
            raise SecondBackwardError(
                "a forward after backward and before optimizer.step(): parameters are already being"
                " updated. Call model.optimizer.step() first; lohan.wrap(...,"
                " gradient_accumulation_steps=k) sums"
                " the gradients of k backwards. If no step should use the gradients (in a GAN),"
                ' wrap with schedule="deferred", and call zero_grad() before the forward'
            )
        self._check_hollow()
        self.changed_drop()
        grad = torch.is_grad_enabled()
        if is_root or self._begun != (self._session.step, grad):
            self._engine.begin(grad)
            self._begun = (self._session.step, grad)
        self.autocast.begin()
        self._entered = self.around
        self._entered.enter()
        self.depth = 1
        _running.add(self._reference)
        self._engine.forward(True)
        for extension in self._session.extensions:
            extension.forward_begins(self._session)

    def part_enter(self, module: nn.Module, args: Any) -> None:
        """Detect autocast that is enabled inside the model's call, as accelerate does."""
        if self.autocast.is_seen or self.depth == 0:
            return
        if not in_backward() and not self._is_of_other_thread():
            self.autocast.look()

    def _check_hollow(self) -> None:
        """Raise an error if a hollow parameter was written by code that bypasses its class."""
        if self._session.device.torch_device.type != "cpu":
            return  # the check would wait for the device in every forward
        for dtype, array in self._session.arrays.items():
            if dtype not in DTYPE_CODES or bool(array.isnan().all()):
                continue
            index = int(array.isnan().logical_not().nonzero()[0])
            array.fill_(float("nan"))
            raise HollowParameterError(
                f"parameter {self._layout.params[index].name!r} was written while it was not in"
                " memory, which has no effect: write in a loop over model.named_parameters(), or"
                " with model.load_state_dict()"
            )

    def _end(self) -> None:
        self.depth = 0
        _running.discard(self._reference)
        self.thread.release()
        for extension in self._session.extensions:
            extension.forward_ended()
        self._engine.forward(False)
        self._changed.update(self._engine.changed_take())
        self._entered.leave()
        self.autocast.end()

    def _refuse_changed(self) -> None:
        if self._changed:
            raise UnsupportedError(
                f"parameter {self._layout.params[min(self._changed)].name!r} was changed in place"
                " inside a forward. Such a change is lost when its block leaves memory, or causes a"
                " ChecksumError if the block's last update was still being written. Change"
                " parameters between steps, in a loop over model.named_parameters() or with"
                " model.load_state_dict()"
            )

    def changed_drop(self) -> None:
        """Discard values that a forward changed in place: the store has the valid ones."""
        if not self._changed:
            return
        changed, self._changed = self._changed, set()
        try:
            with self._session.exclusive(sorted({self._layout.params[i].unit for i in changed})):
                pass
        except BaseException:
            self._changed = changed
            raise

    def is_alive(self) -> bool:
        """Return whether a forward is open and its call is on the stack.

        After a Ctrl-C, torch skips the hooks that would close the forward.
        """
        if self.depth == 0:
            return False
        if self._runs.is_other():  # the call that began the forward is on the first run's stack
            return True
        if not self.thread.is_mine():
            return False
        frame: FrameType | None = sys._getframe()
        while frame is not None and frame is not self.thread.frame:
            frame = frame.f_back
        return frame is not None

    def _is_of_other_thread(self) -> bool:
        """Return whether the open forward belongs to another thread."""
        return not self.thread.is_mine() and not self._runs.is_other()

    def refuse_other_thread(self, what: str) -> None:
        """Raise an error if another thread is inside a forward.

        Args:
            what: what the caller is about to do, for the message.

        Raises:
            ThreadError: another thread is inside a forward; the message names both threads.
        """
        self.thread.refuse_others(what)
        self._session.method.check_thread(what)

    def drop(self) -> None:
        """Close a forward that ended without a call of its closing hooks."""
        self._engine.scopes_drop()
        self._end()

    def end_interrupted(self) -> None:
        """Close a forward that a Ctrl-C has ended in this thread: its hooks and its loans."""
        if self.depth > 0 and self.thread.is_mine() and not self.is_alive():
            self.drop()

    def load_in_loop(self, tensor: nn.Parameter) -> bool:
        """Load a hollow parameter that a loop has just yielded ([Note: A loop's turn]).

        Returns:
            Whether it was loaded; False if no loop is at this parameter, or a step is in progress.
        """
        for loop in reversed(tuple(self._session.loops)):
            if loop.is_at(tensor) and not self._session.closed and not self._session.is_underway:
                loop.load()
                return True
        return False

    def make_resident(self, tensors: Sequence[nn.Parameter]) -> bool:
        """Load hollow parameters that are arguments of an operation, if a forward runs.

        Parameters of other sessions are ignored. The parameters stay in memory until the next such
        operation, or until a scope begins or ends.

        Returns:
            Whether the parameters were loaded; False if no forward runs or is being recomputed.
        """
        self._runs.operands(tensors)
        is_alive = self.is_alive()
        if self._session.closed or (not is_alive and not in_backward()):
            return False
        scope = self.scope_of(tensors)
        if not is_alive:
            return bool(scope.read())
        scope.hold()
        return True

    def scope_of(self, tensors: Sequence[torch.Tensor]) -> _core.Scope:
        """Return the scope in which this session's parameters among tensors are in memory."""
        index, params = self._session.param_index, self._layout.params
        indices = [index[id(t)] for t in tensors if id(t) in index]
        return self._engine.scope(sorted({params[each].unit for each in indices}))


def refuse_transform() -> None:
    """Reject tracing, and the transforms of torch.func in which saved tensors cannot be packed.

    Raises:
        UnsupportedError: such a transform is active; the message names alternatives.
    """
    if is_traced():
        raise UnsupportedError(
            "a wrapped model cannot be traced (by make_fx, torch.func.linearize, torch.export or"
            " FakeTensorMode): its parameters are loaded and evicted while it runs. Use"
            " torch.func.jvp, which works, or call lohan.unwrap(model) first"
        )
    if hooks_are_refused():
        raise UnsupportedError(
            "a wrapped model cannot be called inside torch.func.grad, vjp, jacrev or hessian (or"
            " where torch.autograd.graph.disable_saved_tensors_hooks() is in effect): torch"
            " disables the saved-tensor hooks that bring parameters back in backward. Use"
            " torch.autograd.grad or torch.autograd.functional (jacobian, hessian, vjp), which"
            " work, as do torch.func.vmap, jvp and jacfwd; or call lohan.unwrap(model) first"
        )


def _explain_transform(error: BaseException | None) -> None:
    """Add a note to the error of a transform that the model's own forward uses."""
    if isinstance(error, RuntimeError) and str(error).startswith("torch.func.{grad, vjp, jacrev"):
        error.add_note(
            "lohan: the forward of a wrapped model cannot use torch.func.grad, vjp, jacrev or"
            " hessian, because torch disables there the saved-tensor hooks that bring parameters"
            " back in backward. Use torch.func.jacfwd or jvp, or torch.autograd.functional"
            " (jacobian, hessian, vjp with create_graph=True), which work"
        )


def refuse_read() -> None:
    """Reject reads of parameters in transforms of torch.func in which values have no storage.

    Raises:
        UnsupportedError: such a transform is active; the message names alternatives.
    """
    if is_reading_wrapped():
        raise UnsupportedError(
            "parameters of a wrapped model cannot be read inside torch.func.grad or jvp (by"
            " named_parameters() or torch.func.functional_call): use functional_call with a model"
            " that is not wrapped (lohan.unwrap(model), or model.state_dict() loaded into another)"
        )


def _frame_outside() -> FrameType | None:
    """Return the frame that called into lohan, which is on the stack while the module runs."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code.co_filename.startswith(_FOLDER):
        frame = frame.f_back
    return frame


def parts_of(model: nn.Module) -> Iterator[nn.Module]:
    """Yield the modules that a forward may call: children, with a list replaced by its items."""
    for child in model.children():
        if isinstance(child, nn.ModuleList | nn.ModuleDict):
            yield from parts_of(child)
        else:
            yield child
