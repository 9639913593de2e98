"""The implementation of a session: it owns the engine and the hooks, and validates calls."""

from __future__ import annotations

import dataclasses
import os
import weakref
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from lohan import _core
from lohan.activations._swap import Saving
from lohan.common._stats import StepStats
from lohan.config import POLICIES, SCHEDULES
from lohan.errors import LohanError, SessionError, StepError, engine_raiser
from lohan.layout._block import DTYPE_CODES
from lohan.layout._experts import Apart
from lohan.session import _gradients, _hooks, _notes
from lohan.session._average import Averages
from lohan.session._choices import AdamW, Alone, Loss, Runs
from lohan.session._commits import Commits, Edits
from lohan.session._extension import Extensions
from lohan.session._forward import Forwards, refuse_read
from lohan.session._hooks import Planned
from lohan.session._idle import Idle
from lohan.session._registered import Registered
from lohan.session._step import Accumulation, OpenStep
from lohan.session._values import Values
from lohan.store import _scalars
from lohan.store._store import param_tuples, unit_tuples
from lohan.torch_glue._device import Device
from lohan.torch_glue._tensor import hollow, in_backward, nan_array

if TYPE_CHECKING:
    from lohan.activations._activations import Activations
    from lohan.activations._planner import Plan, Planner
    from lohan.config import Config
    from lohan.layout._block import Layout, Param
    from lohan.session._loop import Loop
    from lohan.session._optim import Optimizer
    from lohan.store._snapshot import OnChange, PathLike, Snapshot
    from lohan.store._store import Extents
    from lohan.torch_glue._buffers import Buffers


class Training:
    """What trains a wrapped model; other modules call it the session. See [Note: Sessions].

    Attributes:
        layout: the model's blocks, units and parameters.
        budget: the division of main memory, in bytes.
        directories: the store's directories.
        device: the device that the model computes on.
        optimizer: the optimizer whose groups provide the hyper-parameters.
    """

    optimizer: Optimizer
    buffers: Buffers | None = None
    closed = False
    resumed_step: int | None = None  # at which the session was resumed; None: its store is new
    speaks = False  # whether the session prints what it has opened and done
    last_step: int  # of a closed session
    apart = Apart()  # experts that are blocks of their own: none

    def __init__(
        self,
        layout: Layout,
        extents: Extents,
        store: _core.Store,
        config: Config,
        budget: dict[str, int],
        directories: Sequence[str],
        group_of: dict[int, int],
        group_count: int,
        norms: bool = False,
        device: Device | None = None,
        room: _core.Store | None = None,
        apart: _core.Store | None = None,
        peers: Alone | None = None,
        runs: Runs | None = None,
        method: AdamW | None = None,
    ) -> None:
        self.extensions = Extensions()
        self.peers = peers or Alone()
        self.runs = runs or Runs()
        self.method = method or AdamW()
        self.layout = layout
        self.extents = extents
        self.config = config
        self.budget = budget
        self.directories = list(directories)
        self.store = store
        self.device = device or Device()
        self.uuid = str(store.describe()["uuid"])
        self.raised: set[type[LohanError]] = set()  # the classes of the engine's errors so far
        accumulation = Accumulation(config.accumulate, is_on=config.sums_gradients)
        self.workers = config.threads or self.device.workers(config.sharers)
        self.saving = Saving(config, self.device, room)
        self._apart = apart
        self.engine = _make_engine(
            self,
            group_of,
            group_count,
            self.peers.options(config),
            norms=norms,
            apart=apart,
            sums=accumulation.is_on,
        )
        try:
            self._complete(accumulation)
        except BaseException:
            self.engine.close()
            raise

    def _complete(self, accumulation: Accumulation) -> None:
        """Make what uses the engine."""
        self._bind()
        self.saving.start(self.engine, self.device)
        around = self.saving.stay if self.config.activations in POLICIES else self.saving.saved
        self.loops: list[Loop] = []  # over parameters, the innermost last
        self.forwards = Forwards(self, around)
        _call_back(self.engine, self)
        self.parameters = Values(self, self.engine)
        self.averages, self.registered = Averages(self), Registered(self)
        self.idle = Idle(self.layout, self.engine)
        for extension in (self.averages, self.idle):
            if extension.is_on:
                self.extensions.add(extension)
        self.edits = Edits(self, self.engine)
        self.commits = Commits(self)
        self.hooks = _hooks.Hooks()
        self.open_step = OpenStep(self, self.engine, accumulation)
        self.peers.join(self)
        self.runs.join(self)
        self.method.join(self)

    def __repr__(self) -> str:
        """Return a readable summary."""
        return _notes.summary(self)

    # --- Making -----------------------------------------------------------------------------

    def _bind(self) -> None:
        """Make every parameter hollow and register it with the engine."""
        self.param_index = {id(p.tensor): p.index for p in self.layout.params}
        count = len(self.layout.params)
        self.arrays: dict[torch.dtype, torch.Tensor] = {}
        for param in self.layout.params:
            dtype = param.tensor.dtype
            if dtype not in self.arrays:
                self.arrays[dtype] = nan_array(dtype, count).to(self.device.torch_device)
                if dtype in DTYPE_CODES:
                    self.engine.hollow_array(self.arrays[dtype])
            empty = hollow(self.arrays[dtype], param.index, param.tensor.shape)
            param.tensor.data = empty
            kept = () if param.strides is None else (param.strides, param.order)
            self.engine.bind(param.index, param.tensor, empty, *kept)

    def hook(
        self,
        model: nn.Module,
        activations: Activations,
        planner: Callable[[Training, Activations], Planner],
    ) -> None:
        """Put the hooks on the model; see _hooks.install."""
        self.runs.hook(model)
        _hooks.install(self, self.hooks, model, activations, planner)

    def unhook(self) -> None:
        """Remove every hook, including those that reject a forward after the session is closed."""
        self.hooks.remove()
        for param in self.layout.params:
            _gradients.allow_late_hooks(param.tensor)

    def param_names(self) -> dict[int, str]:
        """Return the name of each parameter, by the id of its tensor."""
        return {id(p.tensor): p.name for p in self.layout.params}

    # --- Step -------------------------------------------------------------------------------

    @property
    def step(self) -> int:
        """The number of closed steps, including those before a resume."""
        return self.method.step() if not self.closed else self.last_step

    def accumulate(self, functions: Sequence[Loss]) -> list[torch.Tensor]:
        """See Session.accumulate."""
        self.check_open()
        return self.runs.run(functions)

    @property
    def order(self) -> str:
        """The order of micro-batches: "horizontal" or "vertical"; "auto" until it is chosen."""
        return self.runs.order

    def close(self) -> None:
        """See Session.close."""
        self.commits.close()

    def commit(self) -> None:
        """Wait until all closed steps and all edits of parameters are written and committed."""
        self.commits.commit()

    def restore_scalars(self) -> None:
        """Restore hyper-parameters, torch's generators and buffers from the last commit."""
        self.method.restore(self._restore)

    def _restore(self) -> None:
        _scalars.restore(
            self.store.describe()["caller_scalars"],
            self.optimizer,
            self.buffers,
            self.device.torch_device,
        )
        self.idle.restore(self.store)
        said = self.store.describe()
        self.averages.restore(said)
        self.registered.restore(_scalars.parse(said["caller_scalars"])[0])

    @property
    def trains(self) -> bool:
        """Whether any parameter is trained."""
        return self.method.trains()

    # --- Between steps ----------------------------------------------------------------------

    @property
    def is_underway(self) -> bool:
        """Whether a forward or backward runs, or step() has to be called after a backward."""
        is_inside = self.forwards.depth > 0 and self.forwards.is_alive()
        return is_inside or self.method.is_underway()

    def check_whole(self) -> None:
        self.check_open()
        if self.open_step.backward == "running" and not in_backward():
            self.open_step.abort()
        if self.engine.status()["has_gradients"]:
            raise StepError(
                "parameters cannot be read between backward and step(): some already have their"
                " values of the next step. Call model.optimizer.step() first"
            )
        self.forwards.changed_drop()
        self.idle.settle()
        self.method.check_whole()

    def check_lend(self, index: int) -> None:
        """Prepare to lend a parameter; see check_whole()."""
        self.runs.reads(self.layout.params[index].unit)
        self.check_whole()

    def has_moved(self, index: int) -> bool:
        """Return whether the newest value of a parameter is where the model computes."""
        return self.method.has_moved(index)

    def reader(self, unit: int) -> Callable[[], bool]:
        """Return the function to call when a parameter of the unit is read as an attribute."""
        read: Callable[[], bool] = self.engine.scope([unit]).read
        return read

    def resident(self, index: int) -> AbstractContextManager[None]:
        """Return a context in which the parameter has its real data."""
        self.runs.reads(self.layout.params[index].unit)
        self.peers.lends(index)
        self.check_whole()
        refuse_read()
        self.engine.flush(False)  # the caller may write, so wait until all updates are written
        scope = self.engine.scope([self.layout.params[index].unit])
        return _core.Context(scope.enter, scope.leave)

    def exclusive(
        self, changed: list[int], *, commits: bool = True
    ) -> AbstractContextManager[_core.Store]:
        """Return a context that gives the store, with the engine paused and closed steps written.

        If `changed` names units to be changed in the store, closed steps are also committed, unless
        commits are manual or `commits` is False, and the units' copies in memory are discarded
        afterwards. Other threads wait until the store is returned.
        """
        self.peers.check_exclusive(changed)

        def enter() -> _core.Store:
            self.check_whole()
            is_due = bool(changed) or self.idle.is_on  # settled values, with their step counts
            self.engine.pause(changed, commits and is_due and not self.commits.by_hand)
            return self.store

        return _core.Context(enter, lambda: self.engine.resume(changed))

    def values(self, params: Sequence[Param] | None = None) -> list[torch.Tensor]:
        """Return parameters' values in main memory; see Commits.values."""
        return self.commits.values(self.layout.params if params is None else params)

    def part(self) -> None:
        """Prepare for the end of the session, with all processes that read its parameters."""
        self.peers.part()

    def flush(self) -> None:
        """Wait until all closed steps are written."""
        self.check_open()
        self.engine.flush(False)

    def stats(self) -> StepStats:
        """Return times and bytes of this session's last finished step; zeros before the first."""
        raw, workers = self.engine.stats(), self.workers
        stats = StepStats.none(workers) if raw is None else StepStats.make(raw, workers)
        if (clipping := self.open_step.clipping) is not None:
            stats = dataclasses.replace(
                stats, clip_repeats=clipping.repeats, clip_waits=clipping.wait_count
            )
        return self.peers.stats(stats)

    def plan(self) -> Plan | None:
        """See Session.plan."""
        planned = self.extensions.get(Planned)
        return None if planned is None else planned.plan()

    def status(self) -> dict[str, Any]:
        """Return the engine's status: open steps, pinned and held memory, backend, page type."""
        self.check_open()
        return _notes.complete(self.engine.status()) | {"budget": {**self.budget}}

    def note(self, *, loss: float | None = None, tokens: float | None = None) -> None:
        """See Session.note."""
        self.check_open()
        given = _notes.number("loss", loss), _notes.number("tokens", tokens)
        is_next = self.forwards.is_next()
        for extension in self.extensions:
            extension.noted(*given, is_next=is_next)

    def trace(self) -> list[tuple[int, ...]]:
        """Return timeline events: (kind, unit, lane, step, start_ns, end_ns, bytes)."""
        self.check_open()
        return list(self.engine.trace())

    def check_open(self) -> None:
        """Raise an error if the session is closed, belongs to a parent process, or has failed.

        Raises:
            SessionError: the session is closed or belongs to a parent process.
            LohanError: the first error of the engine.
        """
        if self.closed:
            raise SessionError(
                "the session is closed: lohan.unwrap(model) reads the last commit into memory;"
                " lohan.wrap(..., resume=True) resumes training"
            )
        self.engine.check()

    def copy_begin(
        self,
        out: PathLike | Sequence[PathLike],
        on_change: OnChange | None = None,
        *,
        is_behind_step: bool = False,
    ) -> Snapshot:
        """Begin a copy; see `begin` in store/_snapshot.py, a module that few runs need."""
        from lohan.store import _snapshot

        is_behind_step |= self.peers.copy_begins()
        return _snapshot.begin(self, out, on_change, is_behind_step=is_behind_step)

    def forked(self) -> None:
        """Make all parameters hollow in a forked child, which does not have their memory."""
        if not self.closed:
            self.engine.scopes_drop()
        for extension in self.extensions:
            extension.release()

    def release(self) -> None:
        """Release everything that the session owns. Further calls have no effect."""
        self.closed = True
        if self.forwards.depth > 0 and not self.forwards.is_alive():
            self.forwards.drop()
        self.hooks.close()
        self.engine.close()
        self.layout.in_place.close()
        self.store.close()
        self.saving.close()
        if self._apart is not None:
            self._apart.close()
        for extension in self.extensions:
            extension.release()


def _make_engine(
    session: Training,
    group_of: dict[int, int],
    group_count: int,
    team: tuple[int, int, int, int],
    *,
    norms: bool,
    apart: _core.Store | None,
    sums: bool,
) -> _core.Engine:
    """Create the engine of a session that has its layout, store, settings and device.

    Args:
        session: the session.
        group_of: the parameter group of each trained parameter, by the parameter's index.
        group_count: the number of parameter groups.
        team: the engine's part in a team of processes that share parameters.
        norms: whether the norm of a step's gradients will be needed.
        apart: SSD space for gradients of a step that may be repeated.
        sums: whether the engine sums the gradients of several backwards.
    """
    config, layout, device = session.config, session.layout, session.device
    return _core.Engine(
        store=session.store,
        units=unit_tuples(layout, session.extents),
        params=param_tuples(layout, group_of),
        group_count=group_count,
        budget=session.budget,
        raiser=engine_raiser(
            [u.name for u in layout.units], [p.name for p in layout.params], session.raised
        ),
        types=(_core.Handle, _core.Scope),
        io=config.io,
        directory=os.fsencode(session.directories[0]),
        threads=session.workers,
        nice=device.workers_nice if config.nice is None else config.nice,
        io_depth=config.io_depth,
        transfer_bytes=config.transfer_bytes,
        commit_every=config.commit_steps,
        schedule=SCHEDULES.index(config.schedule),
        verify=config.verify,
        trace_count=min(config.trace_events, _core.TRACE_COUNT_MAX),
        accept_nan=config.on_nan == "accept",
        norms=norms,
        repeats=config.clip == "repeat",
        apart=apart,
        sums=sums,
        # Several processes add in the order of a tree as they exchange gradients.
        sum_leaves=config.tree_leaf_count if sums and config.process_count == 1 else 0,
        device=device.options(layout.buffer_bytes),
        saved=session.saving.options,
        in_place=layout.in_place.engine_options(layout),
        team=team,
    )


def _call_back(engine: _core.Engine, session: Training) -> None:
    """Let the engine call the session; a strong reference would form a cycle through C."""
    this = weakref.ref(session)
    engine.callbacks(
        lambda: _alive(this).open_step.backward_begins(),
        lambda: _alive(this).open_step.gradient_came(),
        lambda begins: _alive(this).forwards.block_called(begins),
        lambda: _alive(this).forwards.recompute(),
    )


def _alive(reference: weakref.ref[Training]) -> Training:
    """Return the session that a reference is to.

    Raises:
        SessionError: it no longer exists.
    """
    if (session := reference()) is None:
        raise SessionError("the session is gone")
    return session
