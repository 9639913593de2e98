"""The part of a session that decides what is in its store: commits, edits, held commits."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import sys
import threading
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, cast

import torch

from lohan import _core
from lohan.common import _log
from lohan.common._lock import Lock, held
from lohan.errors import LohanError, NonFiniteError, StepError, StoreError
from lohan.session._session_base import SessionPart
from lohan.store import _checksums, _scalars, _store

if TYPE_CHECKING:
    from lohan.journal._zo_run import Run
    from lohan.layout._block import Layout
    from lohan.session._registered import After, Registered
    from lohan.session._session import Session
    from lohan.session._step import OpenStep
    from lohan.store._snapshot import PathLike, Snapshot
    from lohan.store._store import Extents
    from lohan.torch_glue._buffers import Buffers


_POLL_S = 0.02


class Holds:
    """The objects that hold back a session's commits: a commit begins only after the last give().

    A holder is any object of the caller. After a Ctrl-C at any point of take() or give(), calling
    give() restores a consistent state; it may be called more often than take().
    """

    def __init__(self, engine: _core.Engine) -> None:
        self._engine = engine
        # Not a Condition, whose methods are in Python: a Ctrl-C in them leaves it locked forever.
        self._lock = threading.Lock()
        self._holders: set[object] = set()

    def take(self, holder: object) -> None:
        """Wait for a running commit, and prevent others until give() is called for all holders."""
        with held(self._lock):
            self._holders.add(holder)
        self._engine.commit_hold()

    def give(self, holder: object) -> None:
        """Allow commits again, if there is no other holder. Any thread may call this."""
        with held(self._lock):
            if self._holders == {holder}:
                self._engine.commit_release()
            self._holders.discard(holder)

    def wait_none(self) -> None:
        """Wait until there are no holders; needed before a commit that the engine does not make."""
        while self._holders:
            time.sleep(_POLL_S)


class Commits(SessionPart):
    """A base class of Session: it decides what the store contains when it is next opened.

    Attributes:
        resumed_step: the step at which the session was resumed; None for a new store.
    """

    layout: Layout
    extents: Extents
    store: _core.Store
    directories: list[str]
    buffers: Buffers | None
    snapshot_now: Snapshot | None = None
    speaks = False  # whether the session prints what it has opened and done
    is_ending = False  # whether the process ends or the model was deleted, so no caller closes it
    _close_lock: Lock
    _open_step: OpenStep
    _last_step: int
    _registered: Registered
    _has_names = False  # whether the store's files must keep their names: see keep_names()
    resumed_step: int | None = None

    @property
    def commits_by_hand(self) -> bool:
        """Whether only commit() commits: neither steps, nor edits of parameters, nor close()."""
        return self.config.commit_every == "manual"

    @property
    def _trains(self) -> bool:
        """Whether any parameter is trained."""
        return self._method.trains()

    def close(self) -> None:
        """Finish and commit the closed steps, stop the engine and release the store. Idempotent.

        A Ctrl-C before the commit leaves the session open: a further call commits, and so does the
        end of the process. With commit_every="manual", everything since the last commit is lost,
        as in a crash.

        Raises:
            NonFiniteError: the last updates had a gradient that is not finite. A session that has
                raised this error before ends without it, with the store at its last commit.
        """
        if self._engine.is_forked():
            return  # do not take the lock: a thread that fork() did not copy may hold it
        try:
            self._method.leave()
        finally:
            self._close_with_peers()
            self._method.closed()

    def _close_with_peers(self) -> None:
        try:
            self._peers.leave()
        except Exception:  # not a Ctrl-C: after one, a further call does all of this
            self._close_own()
            raise
        finally:
            self._peers.leaving_ended()
        self._close_own()
        self._peers.closed()

    def _close_own(self) -> None:
        """Finish, commit and release in this process."""
        said: list[str] = []
        with held(self._close_lock):
            if not self.closed:
                self._last_step = self.step
                if self.snapshot_now is not None:
                    self.snapshot_now.end()
                self.snapshot_now = None
                try:
                    self._finish_once()
                    said += [each.summary(cast("Session", self)) for each in self.extensions]
                    for extension in self.extensions:
                        extension.closing(cast("Session", self))
                except Exception:  # not a Ctrl-C: nothing may be released before the commit
                    self._release()
                    raise
            self._release()  # also in a second call: a Ctrl-C may have interrupted the first one
            for line in filter(None, said):
                _log.inform(line)

    def _finish_once(self) -> None:
        """Finish, without raising again what ended the session if the program has that error."""
        has_raised = NonFiniteError in self._raised
        try:
            self._finish()
        except NonFiniteError:
            if not has_raised:
                raise

    def _finish(self) -> None:
        """Discard an open step, and commit the closed ones unless commits are manual."""
        if self._peers.is_mate:
            return
        with contextlib.suppress(Exception):
            if self._engine.status()["has_gradients"]:
                step = self._open_step
                count = step.accumulation.count if step.backward == "done" else 0
                step.discard()
                if count > 0:
                    self._say_unfinished(count)
        if not self.commits_by_hand:
            self._idle.settle()
            self._engine.flush(True)
            self.edits.end()
            self._end_checksums()
        if self._has_names:
            self.store.check_names()

    def keep_names(self) -> None:
        """Let commits, and the end of the session, fail if the store's files were deleted."""
        self.store.check_names()
        self._has_names = True

    def _say_unfinished(self, count: int) -> None:
        if not self.is_ending and sys.exception() is None:
            backwards = "1 backward are" if count == 1 else f"{count} backwards are"
            _log.note(
                f"the gradients of {backwards} dropped, because the session was closed before"
                " model.optimizer.step(): that step is discarded, and the store is at step"
                f" {self._last_step}"
            )

    def commit(self) -> None:
        """Wait until all closed steps and all edits of parameters are written and committed."""
        self.check_open()
        if not self._peers.is_mate:
            self._method.commit(self._commit_own)
        self._peers.committed()

    def _commit_own(self) -> None:
        """Commit in the store of this process."""
        self.averages.refuse_swapped("model.lohan.commit()")
        before = int(self.store.describe()["step"])
        self._engine.flush(True)
        after = int(self.store.describe()["step"])
        if after < self.step:
            raise StepError(
                f"step {self.step} cannot be committed between backward and step(): updates of the"
                " next step are in the same slot. Call model.optimizer.step() first"
            )
        if self.edits.is_pending and after == before:  # otherwise the flush has committed the edits
            with self.exclusive([]) as store:
                self._commit_buffers(store)
        self.edits.clear()

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

    def _restore_more(self) -> None:
        """Restore idle units, when averages began, and states for register() of the last commit."""
        self._idle.restore(self.store)
        said = self.store.describe()
        self.averages.restore(_scalars.average_of(said))
        self._registered.restore(_scalars.parse(said["caller_scalars"])[0])

    def snapshot(self, out: PathLike | Sequence[PathLike]) -> Snapshot:
        """Begin to copy the store at the last step to other directories while training continues.

        Commits that are due in the meantime wait for the copy. See `lohan.snapshot`.

        Args:
            out: one or several directories; the copy is striped over them.

        Returns:
            The copy in progress: `wait()` waits for it, and so does close().
        """
        return self.copy_begin(out)

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

        return _kept.keep(cast("Session", self), folder, last=last, name=name)

    def _keep_checksums(self) -> None:
        """Write the checksums of first reads, for the commit of the step whose backward begins.

        See [Note: First reads] in store/_checksums.py. With a single slot they are written at the
        session's end, because a step that fails could not be undone.
        """
        if (
            self.layout.in_place.has_news
            and self.config.commit_every != "never"
            and not self._engine.status()["has_gradients"]
        ):
            with self.exclusive([]) as store:
                _checksums.write(self.layout, self.extents, store)

    def _end_checksums(self) -> None:
        """Commit the checksums of first reads that no step has committed."""
        if self.layout.in_place.has_news and not self.edits.is_open:
            with self.exclusive([]) as store:
                _checksums.write(self.layout, self.extents, store)
                self._commit_buffers(store)

    def _commit_rule(self) -> str:
        """Return when steps are committed, for people."""
        if said := self._method.commit_rule():
            return said
        named = {
            "manual": "commits are those of commit() and of a Trainer's checkpoints",
            "never": "nothing is kept if the run crashes",
        }
        every = self.config.commit_every
        if isinstance(every, str) and every in named:
            return named[every]
        for extension in self.extensions:
            if said := extension.commit_rule():
                return said
        steps = self.config.commit_steps
        return "each step is committed" if steps == 1 else f"every {steps} steps are committed"

    def _commit_every(self, steps: int) -> bool:
        """Set the number of steps between commits, from the next step on; return whether it is set.

        It is not if every step must commit, because its gradients wait on SSD.
        """
        # Without commit_steps, another process has the store, and commits.
        if self.config.commit_steps > 0 and not self._engine.commit_every(steps):
            return False
        self.config = dataclasses.replace(self.config, commit_every=steps)
        for extension in self.extensions:
            extension.commits_every(steps)
        return True

    def _durable_step(self) -> int:
        """Return the step that a resumed run would begin after."""
        return self._method.durable_step()

    def settle(self) -> None:
        """Make the last commit include all closed steps.

        With manual commits, edits made since the last commit stay uncommitted.
        """
        self.averages.refuse_swapped("lohan.unwrap(model)")
        if self.commits_by_hand and int(self.store.describe()["step"]) == self.step:
            self.flush()
        else:
            self.commit()

    def reading(self) -> contextlib.AbstractContextManager[_core.Store]:
        """Return a context that gives the store for reading, also after the session is closed."""
        if self.closed:
            given = self.directories, self.config, self.layout
            return self._peers.reopened(functools.partial(_store.reopened, *given))
        return self.exclusive([])

    def values(self) -> list[torch.Tensor]:
        """Return every parameter's value in main memory, in its dtype and shape.

        The values are the current ones; if the session is closed, those of the last commit.

        Raises:
            StoreError: the session is closed and the store cannot be read, or does not have the
                values of experts that owe updates.
        """
        if self._peers.is_mate or (not self.closed and self._method.lends_values()):
            return [self.parameters.value(param.index) for param in self.layout.params]
        opened = self.exclusive([])
        if self.closed:
            opened = _store.reopened(self.directories, self.config, self.layout)
        with opened as store:
            owed = _scalars.owed(self.layout, store.describe()) if self.closed else 0
            if owed > 0:
                raise StoreError(
                    f"experts of the last commit owe up to {owed} updates, so it does not have"
                    " their values: lohan.wrap(..., resume=True) and model.lohan.close() make and"
                    " commit them"
                )
            stored = _store.read_params(self.layout, self.extents, store)
            return self._method.values_of(stored)

    def part(self) -> None:
        """Prepare for the end of the session, with all processes that read its parameters."""
        self._peers.part()

    def _undo_edit(self, index: int) -> None:
        """Restore a parameter in memory whose new value cannot be written to the store."""
        self._method.undo_edit(index, functools.partial(self._undo, index))

    def _undo(self, index: int) -> None:
        lend, param = self.parameters.lend(index), self.layout.params[index]

        def read() -> torch.Tensor:
            with self.exclusive([]) as store:
                return _store.read_param(self.layout, self.extents, store, param)

        lend.copy_(self._peers.value_before(index, read))

    def finish_writes(self) -> None:
        """Ensure that the values in the store are all from one step, for subsequent reads."""
        self._method.finish_writes()

    def run_now(self) -> Run | None:
        """Return the run of zeroth-order training so far; None for other methods."""
        return self._method.run_now()

    @functools.cached_property
    def _raised(self) -> set[type[LohanError]]:
        """The classes of the errors that the engine has raised so far."""
        return set()

    @functools.cached_property
    def holds(self) -> Holds:
        """The holders that currently delay commits."""
        return Holds(self._engine)

    def drop(self) -> None:
        """End the session without a commit, because what its store has staged is not consistent."""
        self._last_step = self.step
        self._release()

    def _check_edit(self) -> None:
        """Raise an error if only steps may change parameters."""
        self._method.check_edit()
        self._peers.check_edit()

    def _on_edit(self) -> None:
        """Handle a change of parameters that was written to the store."""
        self._peers.edited()

    def _commit_buffers(self, store: _core.Store) -> None:
        """Commit what was written to the store, and the current buffers, inside exclusive().

        This waits for snapshots first, since the preceding flush does not wait for a copy of the
        same step.
        """
        self.holds.wait_none()
        blob, count = store.describe()["caller_scalars"], len(self.layout.params)
        scalars = _core.scalars_make(self._engine.param_steps(False), blob)
        store.commit(self.step, _scalars.with_buffers(scalars, blob, count, self.buffers))
