"""The part of a session that decides what is in its store: commits, edits, held commits.

[Note: Edits] An edit is committed when the program uses it: at the first backward after it, by
commit(), or when the session is closed by a program that has not failed since ([Note: Failing
programs] in common/_exit.py). If the program failed, the edit is discarded and the store keeps its
previous contents. With a single slot, an edit replaces the only copy and cannot be discarded.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import sys
import threading
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

from lohan import _core
from lohan.common import _exit, _log
from lohan.common._rules import RULES
from lohan.errors import NonFiniteError, StepError, StoreError
from lohan.store import _checksums, _scalars, _store
from lohan.torch_glue._thread import Lock, held

if TYPE_CHECKING:
    from lohan.layout._block import Param
    from lohan.session._training import Training
    from lohan.store._snapshot import Snapshot


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


class Commits:
    """Decides what the store of a session contains when it is next opened.

    Args:
        session: the session.

    Attributes:
        holds: the holders that delay commits now.
        snapshot_now: the copy that is in progress, if there is one.
        is_ending: whether the process ends or the model was deleted, so that no caller closes it.
    """

    def __init__(self, session: Training) -> None:
        self._session = session
        self.holds = Holds(session.engine)
        self.snapshot_now: Snapshot | None = None
        self.is_ending = False
        self._has_names = False  # whether the store's files must keep their names: see keep_names()
        self._close_lock: Lock = threading.RLock()

    @property
    def _engine(self) -> _core.Engine:
        return self._session.engine

    @property
    def by_hand(self) -> bool:
        """Whether only commit() commits: neither steps, nor edits of parameters, nor close()."""
        return self._session.config.commit_every == "manual"

    def close(self) -> None:
        """See Session.close."""
        if self._engine.is_forked():
            return  # do not take the lock: a thread that fork() did not copy may hold it
        try:
            self._session.method.leave()
        finally:
            self._close_with_peers()
            self._session.method.closed()

    def _close_with_peers(self) -> None:
        session = self._session
        try:
            session.peers.leave()
        except Exception:  # not a Ctrl-C: after one, a further call does all of this
            self._close_own()
            raise
        finally:
            session.peers.leaving_ended()
        self._close_own()
        session.peers.closed()

    def _close_own(self) -> None:
        """Finish, commit and release in this process."""
        session = self._session
        said: list[str] = []
        with held(self._close_lock):
            if not session.closed:
                session.last_step = session.step
                if self.snapshot_now is not None:
                    self.snapshot_now.end()
                self.snapshot_now = None
                try:
                    self._finish_once()
                    said += [each.summary(session) for each in session.extensions]
                    for extension in session.extensions:
                        extension.closing(session)
                except Exception:  # not a Ctrl-C: nothing may be released before the commit
                    session.release()
                    raise
            session.release()  # also in a second call: a Ctrl-C may have interrupted the first one
            for line in filter(None, said):
                _log.inform(line)

    def _finish_once(self) -> None:
        """Finish, without raising again what ended the session if the program has that error."""
        has_raised = NonFiniteError in self._session.raised
        try:
            self._finish()
        except NonFiniteError:
            if not has_raised:
                raise

    def _finish(self) -> None:
        """Discard an open step, and commit the closed ones unless commits are manual."""
        session = self._session
        if session.peers.is_mate:
            return
        with contextlib.suppress(Exception):
            if self._engine.status()["has_gradients"]:
                step = session.open_step
                count = step.accumulation.count if step.backward == "done" else 0
                step.discard()
                if count > 0:
                    self._say_unfinished(count)
        if not (self.by_hand or session.averages.is_swapped):
            session.idle.settle()
            self._engine.flush(True)
            session.edits.end()
            self._end_checksums()
        if self._has_names:
            session.store.check_names()

    def keep_names(self) -> None:
        """Let commits, and the end of the session, fail if the store's files were deleted."""
        self._session.store.check_names()
        self._has_names = True

    def _say_unfinished(self, count: int) -> None:
        if not self.is_ending and sys.exception() is None:
            backwards = "1 backward are" if count == 1 else f"{count} backwards are"
            _log.note(
                f"the gradients of {backwards} dropped, because the session was closed before"
                " model.optimizer.step(): that step is discarded, and the store is at step"
                f" {self._session.last_step}"
            )

    def commit(self) -> None:
        """See Session.commit."""
        session = self._session
        session.check_open()
        if not session.peers.is_mate:
            session.method.commit(self._commit_own)
        session.peers.committed()

    def _commit_own(self) -> None:
        """Commit in the store of this process."""
        session = self._session
        session.averages.refuse_swapped("model.lohan.commit()")
        before = int(session.store.describe()["step"])
        self._engine.flush(True)
        after = int(session.store.describe()["step"])
        if after < session.step:
            raise StepError(
                f"step {session.step} cannot be committed between backward and step(): updates of"
                " the next step are in the same slot. Call model.optimizer.step() first"
            )
        # Otherwise the flush has committed the edits.
        if session.edits.is_pending and after == before:
            with session.exclusive([]) as store:
                self.write(store)
        session.edits.clear()

    def keep_checksums(self) -> None:
        """Write the checksums of first reads, for the commit of the step whose backward begins.

        See [Note: First reads] in store/_checksums.py. With a single slot they are written at the
        session's end, because a step that fails could not be undone.
        """
        session = self._session
        if (
            session.layout.in_place.has_news
            and session.config.commit_every != "never"
            and not self._engine.status()["has_gradients"]
        ):
            with session.exclusive([]) as store:
                _checksums.write(session.layout, session.extents, store)

    def _end_checksums(self) -> None:
        """Commit the checksums of first reads that no step has committed."""
        session = self._session
        if session.layout.in_place.has_news and not session.edits.is_open:
            with session.exclusive([]) as store:
                _checksums.write(session.layout, session.extents, store)
                self.write(store)

    def rule(self) -> str:
        """Return when steps are committed, for people."""
        session = self._session
        if said := session.method.commit_rule():
            return said
        named = {
            "manual": "commits are those of commit() and of a Trainer's checkpoints",
            "never": "nothing is kept if the run crashes",
        }
        every = session.config.commit_every
        if isinstance(every, str) and every in named:
            return named[every]
        for extension in session.extensions:
            if said := extension.commit_rule():
                return said
        steps = session.config.commit_steps
        return "each step is committed" if steps == 1 else f"every {steps} steps are committed"

    def set_every(self, steps: int) -> bool:
        """Set the number of steps between commits, from the next step on; return whether it is set.

        It is not if every step must commit, because its gradients wait on SSD.
        """
        session = self._session
        # Without commit_steps, another process has the store, and commits.
        if session.config.commit_steps > 0 and not self._engine.commit_every(steps):
            return False
        session.config = dataclasses.replace(session.config, commit_every=steps)
        for extension in session.extensions:
            extension.commits_every(steps)
        return True

    def settle(self) -> None:
        """Make the last commit include all closed steps.

        With manual commits, edits made since the last commit stay uncommitted.
        """
        session = self._session
        session.averages.refuse_swapped("lohan.unwrap(model)")
        if self.by_hand and int(session.store.describe()["step"]) == session.step:
            session.flush()
        else:
            self.commit()

    def reading(self) -> contextlib.AbstractContextManager[_core.Store]:
        """Return a context that gives the store for reading, also after the session is closed."""
        session = self._session
        if session.closed:
            from lohan.store import _same

            given = session.directories, session.config, session.layout
            return session.peers.reopened(functools.partial(_same.reopened, *given))
        return session.exclusive([])

    def values(self, params: Sequence[Param]) -> list[torch.Tensor]:
        """Return the value of each of these parameters in main memory, in its dtype and shape.

        The values are the current ones; if the session is closed, those of the last commit.

        Raises:
            StoreError: the session is closed and the store cannot be read, or does not have the
                values of experts that owe updates.
        """
        session = self._session
        if session.peers.is_mate or (not session.closed and session.method.lends_values()):
            return [session.parameters.value(param.index) for param in params]
        opened = session.exclusive([])
        if session.closed:
            from lohan.store import _same

            opened = _same.reopened(session.directories, session.config, session.layout)
        with opened as store:
            owed = _scalars.owed(session.layout, store.describe()) if session.closed else 0
            if owed > 0:
                raise StoreError(
                    f"experts of the last commit owe up to {owed} updates, so it does not have"
                    " their values: lohan.wrap(..., resume=True) and model.lohan.close() make and"
                    " commit them"
                )
            stored = _store.read_params(session.layout, session.extents, store, params)
            return session.method.values_of(params, stored)

    def undo_edit(self, index: int) -> None:
        """Restore a parameter in memory whose new value cannot be written to the store."""
        self._session.method.undo_edit(index, functools.partial(self._undo, index))

    def _undo(self, index: int) -> None:
        session = self._session
        lend, param = session.parameters.lend(index), session.layout.params[index]

        def read() -> torch.Tensor:
            with session.exclusive([]) as store:
                return _store.read_param(session.layout, session.extents, store, param)

        lend.copy_(session.peers.value_before(index, read))

    def drop(self) -> None:
        """End the session without a commit, because what its store has staged is not consistent."""
        session = self._session
        session.last_step = session.step
        session.release()

    def write(self, store: _core.Store) -> None:
        """Commit what was written to the store, and the current buffers, inside exclusive().

        Changed parameters make it a commit of this session: see [Note: Histories] in _history.py.

        This waits for snapshots first, since the preceding flush does not wait for a copy of the
        same step.
        """
        session = self._session
        self.holds.wait_none()
        blob, count = store.describe()["caller_scalars"], len(session.layout.params)
        scalars = _core.scalars_make(self._engine.param_steps(False), blob)
        more: dict[str, Any] = {}
        for extension in session.extensions if session.edits.has_values else ():
            more |= extension.state_of_edit()
        given = scalars, blob, count, session.buffers, more
        store.commit(session.step, _scalars.with_buffers(*given))


@dataclasses.dataclass
class Edit:
    """A change of parameters or buffers that is staged but not yet committed.

    Attributes:
        step: the session's step when the edit was made; the commit of a later step includes it.
        moment: the state of exceptions when the edit was made, to detect later failures.
        is_refused: whether lohan has since raised an error for another part of the same edit.
    """

    step: int
    moment: _exit.Moment
    is_refused: bool = False


class Edits:
    """The edits of a session.

    Args:
        session: the session.
        engine: its engine.

    Attributes:
        is_pending: whether parameters or buffers have uncommitted changes that no step made.
        has_values: whether these are changes of parameters.
    """

    def __init__(self, session: Training, engine: _core.Engine) -> None:
        self._session = session
        self._engine = engine
        self._edit: Edit | None = None  # always None if commits are manual
        self.is_pending = self.has_values = False

    @property
    def is_open(self) -> bool:
        """Whether an edit is staged that a backward, or the end of the session, would commit."""
        return self._edit is not None

    def check(self) -> None:
        """Raise an error if averages are in the parameters' places, or only steps may edit."""
        self._session.averages.refuse_swapped("a change of parameters")
        self._session.method.check_edit()
        self._session.peers.check_edit()

    def made(self, store: _core.Store, *, has_values: bool = True) -> None:
        """Record that parameters were written to the store, in exclusive(). See [Note: Edits].

        Args:
            store: the store.
            has_values: False if only buffers were changed.
        """
        session = self._session
        self.has_values |= has_values
        if session.method.edits_at_once:
            session.commits.write(store)
            return
        self.is_pending = True
        if not session.commits.by_hand:
            if store.describe()["is_single_slot"]:
                session.commits.write(store)
            if self._edit is None or self._edit.step != session.step:
                self._edit = Edit(session.step, _exit.moment())
        session.peers.edited()

    def made_of_buffers(self) -> None:
        """Record that only buffers were changed."""
        self._engine.flush(not self._session.commits.by_hand)
        with self._session.exclusive([]) as store:
            self.made(store, has_values=False)

    def forget_moments(self) -> None:
        """Make all moments and their step counts 0, as before the first step."""
        from lohan.store import _factors, _moments

        self.check()
        layout, places = self._session.layout, self._session.extents.units
        units = {i: u for i, u in enumerate(layout.units) if u.trainable and u.has_states}
        with self._session.exclusive([*units]) as store:
            for index, unit in units.items():
                _moments.clear(unit, places[index], store)
                if RULES[unit.rule].has_factors:
                    _factors.clear(unit, places[index], store)
            self._engine.param_steps(True)
            self._session.averages.begin_again()
            self.made(store)

    def refuse(self) -> None:
        """Record an error for part of an edit, so that closing does not commit the edit."""
        if self._edit is not None:
            self._edit.is_refused = True

    def clear(self) -> None:
        """Record that there is no edit that is not committed."""
        self._edit, self.is_pending, self.has_values = None, False, False

    def commit(self) -> None:
        """Commit an edit that the program is about to use."""
        self._session.averages.refuse_swapped("a backward")
        edit = self._edit
        if edit is None:
            return
        if edit.step == self._session.step:  # otherwise the commit of a step includes it
            with self._session.exclusive([]) as store:
                self._session.commits.write(store)
        self.clear()

    def end(self) -> None:
        """Commit an edit while closing, or discard it if the program has failed since the edit."""
        edit = self._edit
        if edit is None or edit.step != self._session.step:
            return
        if not edit.is_refused and not _exit.has_failed_since(edit.moment):
            self.commit()
            return
        is_kept = self._session.store.describe()["is_single_slot"]
        what = (
            "is in the store anyway: IO(single_slot=True) keeps one copy of each value. Start again"
            " from the weights if the change was not meant to stay"
            if is_kept
            else f"is not in the store, which stays as it was at step {edit.step}. To keep such a"
            " change, call model.lohan.commit() directly after it"
        )
        _log.note(
            "the program failed after parameters were changed (by load_state_dict(), or in"
            " a loop over them) and before a backward used them: the change " + what
        )
