"""Zeroth-order training as the method of a session: two forwards per step and no backward.

[Note: Base and position] The engine treats every parameter as frozen: it reads a unit's base (the
parameters of some earlier step) from the store or from the user's files, and evicts it again. Each
time a unit is pinned, the engine calls the session, which advances the bytes in memory to the
required position ([Note: Positions] in journal/_zeroth.py): from their current position, or from
the base if they were read again. The journal records what each step did. Nothing else has to be
written, and a parameter's values do not depend on the order of blocks, placement or evictions.
"""

from __future__ import annotations

import concurrent.futures
import ctypes
import math
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from lohan import _core
from lohan.common import _meta, _storage_formats
from lohan.errors import LentError, StepError, UnsupportedError
from lohan.journal import _zo_run
from lohan.journal._zeroth import Op, Record
from lohan.journal._zo_run import Run
from lohan.layout._block import Param
from lohan.mezo import _zo_device
from lohan.mezo._zo_peers import mean, step_of_all
from lohan.session._choices import AdamW
from lohan.torch_glue._lockstep import FIRST
from lohan.torch_glue._tensor import SavedTensors, in_backward
from lohan.torch_glue._thread import thread_error

if TYPE_CHECKING:
    from lohan.mezo._zo_optim import ZerothOptimizer
    from lohan.mezo._zo_peers import Sides
    from lohan.mezo._zo_setup import Zeroth
    from lohan.mezo._zo_turns import T, Turns
    from lohan.session._training import Training

# The minimum number of elements per thread: less work (about 100 us) does not justify waking one.
SHARE_ELEMENTS = 1 << 18
# Part of a parameter: the parameter, its unit's address, the first element, the count, the passes.
_Piece = tuple[Param, int, int, int, list[list[Op]]]


class MeZO(AdamW):
    """Training with method="mezo".

    Args:
        zeroth: the settings of the run.
        turns: the turns of both runs of a step.

    Attributes:
        zeroth: see above.
        written_bytes: the bytes of parameters that this session has written.
        read_bytes: the bytes of parameters that were loaded into the computing device's memory.
        longest_lead: the largest number of positions by which a unit was advanced at once.
    """

    edits_at_once = True  # those of buffers, which no backward will commit

    def __init__(self, zeroth: Zeroth, turns: Turns) -> None:
        assert zeroth.journal is not None
        self._turns = turns
        self.zeroth = zeroth
        self.rule = zeroth.rule
        self.journal = zeroth.journal
        self.written_bytes = self.read_bytes = self.longest_lead = 0
        self._is_in_step = False
        self._step_thread = 0
        self._lost: set[int] = set()  # units with invalid bytes in memory, to be read again
        self._rolls_back = False

    def join(self, session: Training) -> None:
        """Serve a session, which has its engine."""
        super().join(session)
        base = int(session.store.describe()["step"])
        self.run = _zo_run.make(self.rule, self.journal.records, base, session.layout.params)
        self._turns.wanted = self.rule.clean(self.step())
        self._workers = max(1, session.workers)  # the number of threads, including the calling one
        self._pool = concurrent.futures.ThreadPoolExecutor(
            max(1, self._workers - 1), "lohan-zeroth"
        )
        self._is_launched = _zo_device.is_launched(session.device)
        if self._is_launched:
            session.engine.zo_load(_zo_device.image())
        moved = [param.index for param in session.layout.params if param.stream is not None]
        session.engine.on_use(self._on_use, moved)
        ablated = session.config.ablate
        if ablated:
            rate = int(session.config.emu_alloc_bytes_per_s or 0)
            session.engine.device_policy("overlap" in ablated, "reuse" in ablated, rate)

    def trains(self) -> bool:
        """Return True; to the engine, all parameters are frozen."""
        return True

    def step(self) -> int:
        """Return the number of steps in the journal."""
        return len(self.journal.records)

    # --- Positions --------------------------------------------------------------------------

    def _on_use(
        self, unit: int, address: int, makes: int, outs: int, is_from_write_back: bool, pins: int
    ) -> bool:
        """Advance a pinned unit to the wanted position; return whether its stored bytes changed."""
        where = self._turns.where.get(unit)
        if where is None:
            return False
        where.address = address
        if where.outs != outs:
            where.outs, where.host = outs, where.left
        begin = where.left
        if where.makes != makes:
            self.read_bytes += self.session.layout.units[unit].nbytes
            begin = where.host if is_from_write_back else self.rule.clean(where.base)
        is_led = begin != self._turns.wanted
        if where.is_kept:
            is_led = where.makes != makes or where.position != self._turns.wanted
        if is_led:
            views = pins - 1 - (unit in self._turns.held)
            if views > 0:
                is_alone = self._turns.lockstep is None
                apart = "" if is_alone else ', or pass MeZO(runs="apart") to lohan.wrap()'
                name = self.session.layout.units[unit].name
                raise LentError(
                    f"the parameters of block {name!r} cannot be changed:"
                    f" {views} tensors are still views of them (kept from a loop over parameters or"
                    f" from a forward); delete them first{apart}"
                )
            self._lost.add(unit)  # an interruption leaves bytes that are at no valid position
            begin = self._shared_bytes(unit, address, begin)
            self.longest_lead = max(self.longest_lead, self._turns.wanted - begin)
            self._lead(unit, address, begin, self._turns.wanted)
        where.makes, where.position = makes, self._turns.wanted
        is_moved = is_led
        if where.is_kept:
            where.kept = self.rule.clean(self.rule.step_of(self._turns.wanted))
            is_moved = where.kept != begin
        if is_led:
            self._lost.discard(unit)  # last, because a Ctrl-C can arrive at any point
        return is_moved

    def _shared_bytes(self, unit: int, address: int, begin: int) -> int:
        """Save or restore the bytes that the first run needs, if several blocks share the unit.

        Returns:
            The current position of the unit's bytes.
        """
        kept = self._turns.kept.get(unit)
        if kept is None or self._turns.lockstep is None:
            return begin
        nbytes, there = self.session.layout.units[unit].nbytes, kept.bytes.data_ptr()
        if begin > self._turns.wanted and kept.position == self._turns.wanted:
            ctypes.memmove(address, there, nbytes)
            return self._turns.wanted
        if self._turns.lockstep.turn != FIRST and kept.position != begin:
            ctypes.memmove(there, address, nbytes)
            kept.position = begin
        return begin

    def _lead(self, unit: int, address: int, begin: int, end: int) -> None:
        if begin > end:
            name = self.session.layout.units[unit].name
            raise StepError(
                f"the parameters of block {name!r} were already advanced"
                " past the position that is wanted, and cannot go back within a step"
            )
        params = self.session.layout.units[unit].params
        if self._is_launched:
            self._launch(params, address, begin, end)
            return
        if self.run.directions is not None:
            for param in params:
                self.run.lead_whole(param, address + param.first, begin, end)
            return
        mine, *others = self._shares(params, address, begin, end)
        futures = [self._pool.submit(_apply, share) for share in others]
        try:
            _apply(mine)
        finally:
            concurrent.futures.wait(futures)
        for future in futures:
            future.result()

    def _launch(self, params: list[Param], address: int, begin: int, end: int) -> None:
        for param in params:
            at = address + param.engine_first
            formats: tuple[int, str, str] = (0, "fp32", "fp32")
            if param.kept is not None:
                dtype = _storage_formats.NAMES[param.tensor.dtype]
                formats = (address + param.first, param.kept, dtype)
            for ops in self._passes(param, begin, end):
                self.session.engine.zo_lead(at, param.count, ops, *formats, param.z_first)

    def _passes(self, param: Param, begin: int, end: int) -> Iterator[list[Op]]:
        if param.kept is None:
            return self.run.passes(param, begin, end)
        return self.run.kept_passes(param, self.rule.step_of(begin), end)

    def _shares(
        self, params: list[Param], address: int, begin: int, end: int
    ) -> list[list[_Piece]]:
        """Divide a unit into about equal shares for the threads; a small unit is one share."""
        total = sum(param.count for param in params)
        share = max(SHARE_ELEMENTS, -(-total // self._workers))
        shares: list[list[_Piece]] = [[]]
        room = share
        for param in params:
            passes = [*self._passes(param, begin, end)]
            first = 0
            while first < param.count:
                if room <= 0:
                    shares.append([])
                    room = share
                # The generator produces 64 elements at a time.
                count = min(-(-room // 64) * 64, param.count - first)
                shares[-1].append((param, address, first, count, passes))
                first += count
                room -= count
        return shares

    # --- A step -----------------------------------------------------------------------------

    def zo_step(self, closure: Callable[[], Any]) -> torch.Tensor:
        """Make one step: compute both losses of each direction, and add a record to the journal.

        Args:
            closure: runs the model and returns the loss, a number or a one-element tensor, or a
                list of the losses of several micro-batches, of which the step uses the mean. It is
                called twice for each direction, and must use the same batch each time.

        Returns:
            The loss on the +eps side, averaged over the directions. With several processes, each
            passes its own micro-batches, and the loss is the mean over those of all processes.

        Raises:
            StepError: the loss or the slope is not finite. The step had no effect.
            PeerStepError: another process failed in this step. The step had no effect.
            PeerLostError: another process died or cannot be reached.
            HyperParameterError: the optimizer's groups are invalid.
        """
        self.session.check_open()
        if self._is_in_step or in_backward() or self.session.forwards.is_alive():
            raise StepError("zo_step() called inside a forward, a backward or another zo_step()")
        for extension in self.session.extensions:
            extension.admit(self.session)
        optimizer: Any = self.session.optimizer
        made: ZerothOptimizer = optimizer
        lr, decay = made.rate()
        self._roll_back()
        step, began = self.step(), time.monotonic()
        gradients, losses = [], []
        with self._step_opened():
            for sides in self._sides(closure, step, lr, decay):
                plus, minus = map(mean, sides)
                gradients.append(_slope(plus, minus, self.rule.eps))
                losses.append(plus)
            self.journal.append(Record(lr, decay, tuple(gradients), tuple(losses)))
        mean_loss = sum(losses) / len(losses)
        for extension in self.session.extensions:
            extension.journaled(self.session, began, mean_loss)
        if "deferred" in self.session.config.ablate:
            self._update_all()
        every = self.zeroth.write_every
        if every is not None and self.step() % every == 0:
            self.write_back()
        return torch.tensor(mean_loss)

    def _step_opened(self) -> AbstractContextManager[None]:
        """Return a context for a step, in evaluation mode: only parameters differ between runs."""
        around = self.session.forwards.around
        model = self._turns.model()
        assert model is not None
        training = [module for module in model.modules() if module.training]
        has_gradients = torch.is_grad_enabled()

        def enter() -> None:
            model.eval()
            self._is_in_step, self._step_thread = True, threading.get_ident()
            self.session.forwards.around = _NOTHING
            torch.set_grad_enabled(False)

        def leave() -> None:
            torch.set_grad_enabled(has_gradients)
            self._is_in_step = False
            self.session.forwards.around = around
            self._turns.wanted = clean = self.rule.clean(self.step())
            # A step that failed leaves some units changed. A complete step leaves none.
            self._lost.update(u for u, where in self._turns.where.items() if where.left > clean)
            for module in training:
                module.training = True

        return _core.Context(enter, leave)

    def _sides(self, closure: Callable[[], Any], step: int, lr: float, decay: float) -> list[Sides]:
        """Compute the losses of each direction, those of all processes included."""

        def mine() -> list[Sides]:
            return [self._both(closure, step, sample) for sample in range(self.rule.samples)]

        if self.zeroth.world is None:
            return mine()
        return step_of_all(self.zeroth.world, step, lr, decay, mine)

    def _both(self, closure: Callable[[], Any], step: int, sample: int) -> Sides:
        def run() -> list[float]:
            return _numbers(closure())

        sides = self.rule.plus(step, sample), self.rule.minus(step, sample)
        if self._turns.is_together:
            plus, minus = self._turns.in_turns([run] * 2, sides)
        else:
            self._turns.wanted = sides[0]
            plus = run()
            self._turns.wanted = sides[1]
            minus = self._turns.probed(run) if self._turns.is_probing else run()
        if len(plus) != len(minus):
            raise StepError(
                f"the closure returned {len(plus)} losses on one side, and {len(minus)} on the"
                " other: both calls must see the same micro-batches. The step had no effect"
            )
        return plus, minus

    def together(self, functions: Sequence[Callable[[], T]]) -> list[T]:
        """Run the model several times without gradients, reading each block once for all runs.

        This is `model.zo_together`. The runs take turns at each block, each on its own thread, so
        the activations of all runs are in memory at once. The functions run one after the other in
        training mode and, unless runs="together" was set, if the model fits in memory or its
        forwards change state.

        Args:
            functions: each calls the model, for example on its own micro-batch.

        Returns:
            The result of each function.

        Raises:
            StepError: it was called inside a forward, a backward or a step.
        """
        self.session.check_open()
        if self._is_in_step or in_backward() or self.session.forwards.is_alive():
            raise StepError("together() called inside a forward, a backward or a step")
        self._roll_back()
        model = self._turns.model()
        assert model is not None
        is_still = not any(module.training for module in model.modules())
        rest, results = [*functions], []
        with torch.no_grad():
            if self._turns.is_probing and is_still and len(rest) > 1:
                results.append(rest.pop(0)())  # the first run may create what later ones use
                results.append(self._turns.probed(rest.pop(0)))
            if self._turns.is_together and is_still and len(rest) > 1:
                return results + self._turns.in_turns(rest, [self._turns.wanted] * len(rest))
            return results + [function() for function in rest]

    def step_of(self, model: nn.Module) -> Callable[[Callable[[], Any]], torch.Tensor]:
        """Return the function that becomes `model.zo_step`."""
        self._turns.model = weakref.ref(model)
        return self.zo_step

    def _update_all(self) -> None:
        """Load every trained unit once more, only to apply its update."""
        for unit in self._turns.where:
            self.session.engine.acquire(unit)
            self.session.engine.release(unit)

    def write_back(self) -> None:
        """Write every trained parameter and commit: the next session starts from these values.

        Does nothing if the parameters are never written (`zeroth.write_every` is None).
        """
        self.session.check_whole()
        if self.zeroth.write_every is None:
            return
        from lohan.mezo._zo_wear import ZerothWear  # which few sessions have

        wear = self.session.extensions.get(ZerothWear)
        for unit, where in self._turns.where.items():
            nbytes, extent = (
                self.session.layout.units[unit].nbytes,
                self.session.extents.units[unit].param,
            )
            self.session.engine.acquire(unit)
            try:
                copy = self._copy_back(unit)
                with self.session.exclusive([]) as store:
                    address = where.address if copy is None else copy.data_ptr()
                    try:  # no commit refers to these bytes yet
                        store.write(extent, 0, address, nbytes)
                        where.base = self.step()
                    except BaseException:  # a Ctrl-C may have arrived between the two lines
                        store.write(extent, 0, address, nbytes)
                        where.base = self.step()
                        raise
            finally:
                self.session.engine.release(unit)
            self.written_bytes += nbytes
            if wear is not None:
                wear.add(nbytes)
        with self.session.exclusive([]) as store:
            self.session.commits.holds.wait_none()
            said = store.describe()
            scalars = said["scalars"]
            if wear is not None:
                scalars = wear.scalars(said, len(self.session.layout.params))
            try:
                store.commit(self.step(), scalars)
            finally:  # a Ctrl-C may arrive right after the commit
                self.run.base = int(store.describe()["step"])

    def _copy_back(self, unit: int) -> torch.Tensor | None:
        """Return a copy of a pinned unit in main memory; None if the unit is there already."""
        if not self._is_launched:
            return None
        here = self.session.layout.units[unit]
        views = [(param, self.session.engine.lend(param.index)) for param in here.params]
        return _zo_device.host_bytes(views, here.nbytes)

    def _roll_back(self) -> None:
        """Undo the changes of a failed step: evict the units, which are then read again."""
        if not self._lost or self._rolls_back:
            return
        if self.session.forwards.depth > 0:
            self.session.forwards.drop()
        self._rolls_back = True
        try:
            with self.session.exclusive(sorted(self._lost)):
                pass
            self._lost.clear()
        finally:
            self._rolls_back = False

    # --- What differs from first-order sessions ----------------------------------------------

    def has_moved(self, index: int) -> bool:
        """Return whether steps have changed a parameter: its newest bytes are where it computes."""
        return self.session.layout.params[index].unit in self._turns.where

    def check_whole(self) -> None:
        """Undo the changes of a failed step."""
        self._roll_back()

    def check_thread(self, what: str) -> None:
        """Raise an error if another thread makes a step, also between the step's forwards."""
        is_mine = self._turns.is_other() or self._step_thread == threading.get_ident()
        if self._is_in_step and not is_mine:
            raise thread_error(self._step_thread, "is inside a step", what)

    def forward_begins(self) -> None:
        """Check the thread, and undo the changes of a failed step."""
        self.session.forwards.refuse_other_thread("the model")
        self._roll_back()

    def is_underway(self) -> bool:
        """Return False: a step has forwards only."""
        return False

    def lends_values(self) -> bool:
        """Return True: the store has the values of an earlier step."""
        return True

    def values_of(self, params: Sequence[Param], stored: list[torch.Tensor]) -> list[torch.Tensor]:
        """Return the values of the last step."""
        pairs = zip(params, stored, strict=True)
        return [self.run.lead(param, value) for param, value in pairs]

    def finish_writes(self) -> None:
        """Complete an interrupted write_back(), because reads already return what it wrote."""
        if any(where.base != self.run.base for where in self._turns.where.values()):
            self.write_back()

    def run_now(self) -> Run:
        """Return a copy of the current run, which later steps do not change."""
        return Run(self.rule, [*self.journal.records], self.run.base)

    def check_edit(self) -> None:
        """Reject an edit of parameters.

        Raises:
            UnsupportedError: always.
        """
        raise UnsupportedError(
            'with method="mezo" only steps change parameters: call lohan.unwrap(model), change'
            " them, and wrap the model with a new store"
        )

    def undo_edit(self, index: int, undo: Callable[[], None]) -> None:
        """Undo an edit in memory: mark the parameter's unit to be read again."""
        self._lost.add(self.session.layout.params[index].unit)

    def commit(self, committed: Callable[[], None]) -> None:
        """Do nothing: a step is durable when zo_step() returns. See write_back()."""

    def restore(self, restored: Callable[[], None]) -> None:
        """Restore the last step's learning rate and weight decay, unless passed to wrap().

        If the run has no step yet, restore the values with which it was created.
        """
        optimizer: Any = self.session.optimizer
        made: ZerothOptimizer = optimizer
        asked = self.zeroth.asked
        records = self.journal.records
        said = _meta.of(self.session.store)["method"]
        lr = records[-1].lr if records else said["lr"]
        decay = records[-1].decay if records else said["weight_decay"]
        made.resume(
            lr if asked["lr"] is None else None,
            decay if asked["weight_decay"] is None else None,
        )

    def commit_rule(self) -> str:
        """Return when steps are durable, for people."""
        return "each step is durable in the journal"

    def durable_step(self) -> int:
        """Return the step that a resumed run would begin after."""
        return self.step()

    def leave(self) -> None:
        """Tell the other processes the reason before their connections end."""
        if self.zeroth.world is not None:
            self.zeroth.world.leave_after(self.session.step)

    def closed(self) -> None:
        """End the threads, and close the journal."""
        self._pool.shutdown()
        self.journal.close()


class _Nothing(SavedTensors):
    """A replacement for SavedTensors inside a step, where no tensors are saved for backward."""

    def __init__(self) -> None:
        pass

    def enter(self) -> None:
        """Do nothing."""

    def leave(self) -> None:
        """Do nothing."""


_NOTHING = _Nothing()


def _apply(pieces: list[_Piece]) -> None:
    for param, address, first, count, passes in pieces:
        width = param.tensor.element_size()
        values = address + param.engine_first + width * first
        if param.kept is None:
            for ops in passes:
                _core.zo_apply(values, values, param.z_first + first, count, ops)
            continue
        kept = address + param.first + _storage_formats.TYPES[param.kept].itemsize * first
        dtype = _storage_formats.NAMES[param.tensor.dtype]
        for ops in passes:
            _core.zo_lead(kept, param.kept, values, dtype, param.z_first + first, count, ops)


def _numbers(losses: Any) -> list[float]:
    """Return what a closure returned as the losses of its micro-batches."""
    if isinstance(losses, list | tuple):
        if not losses:
            raise StepError("the closure returned no loss: it must return one of each micro-batch")
        return [_number(loss) for loss in losses]
    return [_number(losses)]


def _number(loss: Any) -> float:
    value = float(loss)
    if not math.isfinite(value):
        raise StepError(
            f"the loss of a step is {value}, which is not finite: the step had no effect, and the"
            " parameters are unchanged"
        )
    return value


def _slope(plus: float, minus: float, eps: float) -> float:
    """Return the slope. Reject an infinite one: no later step could undo an infinite update."""
    value = (plus - minus) / (2 * eps)
    if not abs(value) <= torch.finfo(torch.float32).max:
        raise StepError(
            f"the losses of a step are {plus} and {minus}, and their slope with eps={eps} is too"
            " large for fp32: the step had no effect, and the parameters are unchanged"
        )
    return value
