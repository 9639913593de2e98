"""The session of a wrapped model: it owns the engine and the hooks, and checks calls of a step."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from lohan import _core
from lohan.activations._swap import Saving
from lohan.common._stats import StepStats
from lohan.config import POLICIES
from lohan.errors import LohanError, SessionError, StepError
from lohan.layout._block import DTYPE_CODES
from lohan.layout._experts import Apart
from lohan.session import _engine, _gradients, _hooks, _notes
from lohan.session._average import Averages
from lohan.session._commits import Commits
from lohan.session._edits import Edits
from lohan.session._extension import Extensions
from lohan.session._forward import Forwards, refuse_read
from lohan.session._idle import Idle
from lohan.session._method import AdamW
from lohan.session._peers import Alone
from lohan.session._planned import Planned
from lohan.session._registered import Registered
from lohan.session._runs import Loss, Runs
from lohan.session._step import OpenStep
from lohan.session._values import Values
from lohan.store import _scalars
from lohan.torch_glue._accumulate import Accumulation
from lohan.torch_glue._device import Device
from lohan.torch_glue._tensor import hollow, in_backward, nan_array

if TYPE_CHECKING:
    from lohan.activations._activations import Activations
    from lohan.activations._planner import Plan, Planner
    from lohan.config import Config
    from lohan.layout._block import Layout, Param
    from lohan.layout._origins import Origin
    from lohan.session._loop import Loop
    from lohan.session._optim import Optimizer
    from lohan.session._registered import After
    from lohan.store._snapshot import OnChange, PathLike, Snapshot
    from lohan.store._store import Extents
    from lohan.torch_glue._buffers import Buffers


class Session:
    """A wrapped model's connection to its engine, available as `model.lohan`.

    Attributes:
        layout: the model's blocks, units and parameters.
        budget: the division of main memory, in bytes.
        directories: the store's directories.
        device: the device that the model computes on.
        optimizer: the optimizer whose groups provide the hyper-parameters.
    """

    buffers: Buffers | None = None
    closed = False
    resumed_step: int | None = None  # at which the session was resumed; None: its store is new
    speaks = False  # whether the session prints what it has opened and done
    _last_step: int  # of a closed session
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
        peers: Alone | None = None,
        runs: Runs | None = None,
        method: AdamW | None = None,
    ) -> None:
        self._extensions = Extensions()
        self._peers = peers or Alone()
        self._runs = runs or Runs()
        self._method = method or AdamW()
        self.layout = layout
        self.extents = extents
        self.config = config
        self.budget = budget
        self.directories = list(directories)
        self.store = store
        self.device = device or Device()
        self._uuid = str(store.describe()["uuid"])
        self._raised: set[type[LohanError]] = set()  # the classes of the engine's errors so far
        accumulation = Accumulation(config.accumulate, is_on=config.sums_gradients)
        self._workers = config.threads or self.device.workers(config.sharers)
        self._saving = Saving(config, self.device, room)
        self._engine = _engine.make(
            self,
            group_of,
            group_count,
            self._peers.options(config),
            norms=norms,
            sums=accumulation.is_on,
        )
        try:
            self._complete(accumulation)
        except BaseException:
            self._engine.close()
            raise

    def _complete(self, accumulation: Accumulation) -> None:
        """Make what uses the engine."""
        self._bind()
        self._saving.start(self._engine, self.device)
        around = self._saving.stay if self.config.activations in POLICIES else self._saving.saved
        self._loops: list[Loop] = []  # over parameters, the innermost last
        self._forwards = Forwards(self, around)
        _engine.call_back(self._engine, self)
        self._parameters = Values(self, self._engine)
        self._averages, self._registered = Averages(self), Registered(self)
        self._idle = Idle(self.layout, self._engine)
        for extension in (self._averages, self._idle):
            if extension.is_on:
                self._extensions.add(extension)
        self._edits = Edits(self, self._engine)
        self._commits = Commits(self)
        self._hooks = _hooks.Hooks()
        self._open_step = OpenStep(self, self._engine, accumulation)
        self._peers.join(self)
        self._runs.join(self)
        self._method.join(self)

    def __repr__(self) -> str:
        """Return a readable summary."""
        return _notes.summary(self)

    # --- Making -----------------------------------------------------------------------------

    def _bind(self) -> None:
        """Make every parameter hollow and register it with the engine."""
        self._param_index = {id(p.tensor): p.index for p in self.layout.params}
        count = len(self.layout.params)
        self._arrays: dict[torch.dtype, torch.Tensor] = {}
        for param in self.layout.params:
            dtype = param.tensor.dtype
            if dtype not in self._arrays:
                self._arrays[dtype] = nan_array(dtype, count).to(self.device.torch_device)
                if dtype in DTYPE_CODES:
                    self._engine.hollow_array(self._arrays[dtype])
            empty = hollow(self._arrays[dtype], param.index, param.tensor.shape)
            param.tensor.data = empty
            kept = () if param.strides is None else (param.strides, param.order)
            self._engine.bind(param.index, param.tensor, empty, *kept)

    def hook(
        self,
        model: nn.Module,
        activations: Activations,
        planner: Callable[[Session, Activations], Planner],
    ) -> None:
        """Put the hooks on the model; see _hooks.install."""
        self._runs.hook(model)
        _hooks.install(self, self._hooks, model, activations, planner)

    def _gradient_hook(self, index: int) -> Callable[[torch.Tensor], None]:
        """Return the hook that takes a parameter's gradient from autograd."""
        return self._runs.gradient_hook(index, self._peers.gradient_hook(index))

    def _visits(self, units: list[int], scope: _core.Scope) -> Any:
        """Return the hooks (enter and leave) around each forward of a scope's module."""
        return self._runs.visits(units, scope)

    def unhook(self) -> None:
        """Remove every hook, including those that reject a forward after the session is closed."""
        self._hooks.remove()
        for param in self.layout.params:
            _gradients.allow_late_hooks(param.tensor)

    def adopt(self, optimizer: Optimizer) -> None:
        """Set the optimizer whose groups provide the hyper-parameters."""
        self.optimizer = optimizer
        optimizer.attach(self)

    def param_names(self) -> dict[int, str]:
        """Return the name of each parameter, by the id of its tensor."""
        return {id(p.tensor): p.name for p in self.layout.params}

    def _classes(self, index: int, bound: type, hollow: type) -> None:
        """Set a parameter's classes: `bound` while it is in memory, `hollow` while it is not."""
        self._engine.classes(index, bound, hollow)

    # --- Step -------------------------------------------------------------------------------

    @property
    def step(self) -> int:
        """The number of closed steps, including those before a resume."""
        return self._method.step() if not self.closed else self._last_step

    def accumulate(self, functions: Sequence[Loss]) -> list[torch.Tensor]:
        """Run the forwards and backwards of a step's micro-batches; then call optimizer.step().

        With lohan.wrap(order="vertical") each block runs all micro-batches before the next block
        does, so parameters are read once for all of them, and the functions take turns on threads.
        The losses and gradients have the same bits in both orders.

        Args:
            functions: one function for each micro-batch. It calls the model once, and returns the
                loss, a tensor of one element. For the mean of the micro-batches, it divides the
                loss by their number.

        Returns:
            The losses, without graphs.

        Raises:
            ModelError: there are too many functions for the step, or one does not return a loss.
            SecondBackwardError: the step has all of its gradients already.
        """
        self._check_open()
        return self._runs.run(functions)

    @property
    def order(self) -> str:
        """The order of micro-batches: "horizontal" or "vertical"; "auto" until it is chosen."""
        return self._runs.order

    def close(self) -> None:
        """Finish and commit the closed steps, stop the engine and release the store. Idempotent.

        A Ctrl-C before the commit leaves the session open: a further call commits, and so does the
        end of the process. With commit_every="manual", everything since the last commit is lost,
        as in a crash.

        Raises:
            NonFiniteError: the last updates had a gradient that is not finite. A session that has
                raised this error before ends without it, with the store at its last commit.
        """
        self._commits.close()

    def commit(self) -> None:
        """Wait until all closed steps and all edits of parameters are written and committed."""
        self._commits.commit()

    def register(self, name: str, registered: Any, *, after: After = ...) -> None:
        """Include an object's state in every commit, and restore it in a resumed session.

        The state, `registered.state_dict()`, is taken when `model.optimizer.step()` is called, and
        belongs to the commit of that step: it has what the script did before the call, such as the
        position of a sampler, and lacks what it does after it. In a resumed session, register()
        calls `registered.load_state_dict()` with the state of the resumed step.

        Args:
            name: a name that is the same in all sessions.
            registered: an object with state_dict() and load_state_dict(): a sampler, a data loader,
                a scheduler. Its state has numbers, text, tensors, lists and dicts only.
            after: a function that the loop calls after each `step()`, such as `scheduler.step`.
                register() calls it once after it has restored a state. Torch's schedulers need
                after=, which may be None; the groups' hyper-parameters, which their constructors
                change, are restored with them.

        Raises:
            ModelError: the object lacks a method, or a name or `after` is missing or wrong.
            StepError: the session has made a step.
            UnsupportedError: the states are larger than a commit has room for (36 KB), or not
                made of plain values; or another process commits for this one.
        """
        self._registered.add(name, registered, after)

    def snapshot(self, out: PathLike | Sequence[PathLike]) -> Snapshot:
        """Begin to copy the store at the last step to other directories while training continues.

        Commits that are due in the meantime wait for the copy. See `lohan.snapshot`.

        Args:
            out: one or several directories; the copy is striped over them.

        Returns:
            The copy in progress: `wait()` waits for it, and so does close().
        """
        return self._copy_begin(out)

    def keep(
        self, folder: PathLike, *, last: int | None = None, name: str | None = None
    ) -> Snapshot:
        """Begin to copy the store to `folder`/step-N, and keep only the newest copies there.

        Training continues meanwhile, as with snapshot(). If a copy is still in progress, this
        waits for it first. `lohan.wrap(..., store="FOLDER/step-N", resume=True)` continues from a
        copy. Older copies are removed only when the new one is complete.

        Args:
            folder: the folder of all copies; created if it does not exist.
            last: how many copies named step-N to keep, with the new one. None: all.
            name: a name instead of step-N, such as "best"; only a copy of that name replaces it.

        Returns:
            The copy in progress.

        Raises:
            ModelError: last or name is invalid.
            StoreExistsError: what has this name is in use, or no copy of this run.
            StoreError, UnsupportedError: as for `lohan.snapshot`.
        """
        from lohan.store import _kept

        return _kept.keep(self, folder, last=last, name=name)

    def no_sync(self) -> AbstractContextManager[None]:
        """Return a context in which backwards do not complete the step; gradients are summed.

        `wrap` also makes no_sync() a method of the model, as in DistributedDataParallel of torch.

        Raises:
            UnsupportedError: on entering the context, if lohan.wrap() was not given accumulate=.
        """
        return self._open_step.accumulation.no_sync()

    def restore_scalars(self) -> None:
        """Restore hyper-parameters, torch's generators and buffers from the last commit."""
        self._method.restore(self._restore)

    def _restore(self) -> None:
        _scalars.restore(
            self.store.describe()["caller_scalars"],
            self.optimizer,
            self.buffers,
            self.device.torch_device,
        )
        self._idle.restore(self.store)
        said = self.store.describe()
        self._averages.restore(said)
        self._registered.restore(_scalars.parse(said["caller_scalars"])[0])

    @property
    def _trains(self) -> bool:
        """Whether any parameter is trained."""
        return self._method.trains()

    # --- Between steps ----------------------------------------------------------------------

    @property
    def _is_underway(self) -> bool:
        """Whether a forward or backward runs, or step() has to be called after a backward."""
        is_inside = self._forwards.depth > 0 and self._forwards.is_alive()
        return is_inside or self._method.is_underway()

    def _check_whole(self) -> None:
        self._check_open()
        if self._open_step.backward == "running" and not in_backward():
            self._open_step.abort()
        if self._engine.status()["has_gradients"]:
            raise StepError(
                "parameters cannot be read between backward and step(): some already have their"
                " values of the next step. Call model.optimizer.step() first"
            )
        self._forwards.changed_drop()
        self._idle.settle()
        self._method.check_whole()

    def _check_lend(self, index: int) -> None:
        """Prepare to lend a parameter; see _check_whole()."""
        self._runs.reads(self.layout.params[index].unit)
        self._check_whole()

    def _has_moved(self, index: int) -> bool:
        """Return whether the newest value of a parameter is where the model computes."""
        return self._method.has_moved(index)

    def origins(self) -> dict[str, Origin]:
        """Return where the value of each parameter and persistent buffer came from, by its name.

        That is where they were when the model was wrapped; training does not change it. Names of
        tied parameters are in it, too. `str()` of an origin is readable text.
        """
        return dict(self.layout.origins)

    def _reader(self, unit: int) -> Callable[[], bool]:
        """Return the function to call when a parameter of the unit is read as an attribute."""
        read: Callable[[], bool] = self._engine.scope([unit]).read
        return read

    def _resident(self, index: int) -> AbstractContextManager[None]:
        """Return a context in which the parameter has its real data."""
        self._runs.reads(self.layout.params[index].unit)
        self._peers.lends(index)
        self._check_whole()
        refuse_read()
        self._engine.flush(False)  # the caller may write, so wait until all updates are written
        scope = self._engine.scope([self.layout.params[index].unit])
        return _core.Context(scope.enter, scope.leave)

    def _exclusive(
        self, changed: list[int], *, commits: bool = True
    ) -> AbstractContextManager[_core.Store]:
        """Return a context that gives the store, with the engine paused and closed steps written.

        If `changed` names units to be changed in the store, closed steps are also committed, unless
        commits are manual or `commits` is False, and the units' copies in memory are discarded
        afterwards. Other threads wait until the store is returned.
        """
        self._peers.check_exclusive(changed)

        def enter() -> _core.Store:
            self._check_whole()
            is_due = bool(changed) or self._idle.is_on  # settled values, with their step counts
            self._engine.pause(changed, commits and is_due and not self._commits.by_hand)
            return self.store

        return _core.Context(enter, lambda: self._engine.resume(changed))

    def settle(self) -> None:
        """Make the last commit include all closed steps; see Commits.settle."""
        self._commits.settle()

    def reading(self) -> AbstractContextManager[_core.Store]:
        """Return a context that gives the store for reading, also after the session is closed."""
        return self._commits.reading()

    def values(self, params: Sequence[Param] | None = None) -> list[torch.Tensor]:
        """Return parameters' values in main memory; see Commits.values."""
        return self._commits.values(self.layout.params if params is None else params)

    def part(self) -> None:
        """Prepare for the end of the session, with all processes that read its parameters."""
        self._peers.part()

    def keep_names(self) -> None:
        """Let commits, and the end of the session, fail if the store's files were deleted."""
        self._commits.keep_names()

    def flush(self) -> None:
        """Wait until all closed steps are written."""
        self._check_open()
        self._engine.flush(False)

    def stats(self) -> StepStats:
        """Return times and bytes of this session's last finished step; zeros before the first."""
        raw, workers = self._engine.stats(), self._workers
        stats = StepStats.none(workers) if raw is None else StepStats.make(raw, workers)
        return self._peers.stats(stats)

    def plan(self) -> Plan | None:
        """Return the plan for activations of forwards that have the shape of the last one.

        Return None if `activations` is not a policy, or if there is no plan for this shape yet.
        """
        planned = self._extensions.get(Planned)
        return None if planned is None else planned.plan()

    def status(self) -> dict[str, Any]:
        """Return the engine's status: open steps, pinned and held memory, backend, page type."""
        self._check_open()
        return _notes.complete(self._engine.status())

    def note(self, *, loss: float | None = None, tokens: float | None = None) -> None:
        """Add the loss or the number of tokens to the record of a step, for `lohan watch`.

        After a forward, the note is for the step that is in progress; between `step()` and the next
        forward, for the step that was just closed. Of several losses in a step the mean is
        recorded, of several numbers of tokens the sum. Nothing else depends on notes, and if steps
        are not recorded (step_records=False, a temporary store, another rank than 0), they have no
        effect.

        Args:
            loss: the loss, a number. `float(loss)` of a tensor waits for the device.
            tokens: the number of tokens.

        Raises:
            ModelError: an argument is not a number.
            SessionError: the session is closed.
        """
        self._check_open()
        given = _notes.number("loss", loss), _notes.number("tokens", tokens)
        is_next = self._forwards.is_next()
        for extension in self._extensions:
            extension.noted(*given, is_next=is_next)

    def _trace(self) -> list[tuple[int, ...]]:
        """Return timeline events: (kind, unit, lane, step, start_ns, end_ns, bytes)."""
        self._check_open()
        return list(self._engine.trace())

    def save_trace(self, path: str | os.PathLike[str]) -> None:
        """Write the last steps as Chrome trace events, for `lohan trace` and ui.perfetto.dev.

        Raises:
            SessionError: wrap() was not given trace_events=, or the session is closed.
        """
        from lohan.session import _trace

        self.flush()
        _trace.save(path, self)

    def _check_open(self) -> None:
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
        self._engine.check()

    def _copy_begin(
        self,
        out: PathLike | Sequence[PathLike],
        on_change: OnChange | None = None,
        *,
        is_behind_step: bool = False,
    ) -> Snapshot:
        """Begin a copy; see `begin` in store/_snapshot.py, a module that few runs need."""
        from lohan.store import _snapshot

        is_behind_step |= self._peers.copy_begins()
        return _snapshot.begin(self, out, on_change, is_behind_step=is_behind_step)

    def _forked(self) -> None:
        """Make all parameters hollow in a forked child, which does not have their memory."""
        if not self.closed:
            self._engine.scopes_drop()
        for extension in self._extensions:
            extension.release()

    def _release(self) -> None:
        """Release everything that the session owns. Further calls have no effect."""
        self.closed = True
        if self._forwards.depth > 0 and not self._forwards.is_alive():
            self._forwards.drop()
        self._hooks.close()
        self._engine.close()
        self.layout.in_place.close()
        self.store.close()
        self._saving.close()
        for extension in self._extensions:
            extension.release()
