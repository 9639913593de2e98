"""What of a session its store keeps, and when: commits, edits of parameters, copies."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import sys
import threading
from typing import TYPE_CHECKING

import torch

from lohan.common import _exit
from lohan.errors import StepError
from lohan.session._session_base import SessionPart
from lohan.store import _scalars, _store

if TYPE_CHECKING:
    from lohan import _core
    from lohan.journal._zo_run import Run
    from lohan.layout._block import Layout
    from lohan.store._store import Extents
    from lohan.torch_glue._buffers import Buffers


_SLICE_S = 0.2


class Holds:
    """Who holds the commits of a session; one that nobody holds has its commits.

    A holder is an object of the caller's. So a Ctrl-C at any point of take() or give() is made up
    for by give(), which may be called more often than take().
    """

    def __init__(self, engine: _core.Engine) -> None:
        self._engine = engine
        self._lock = threading.Condition()
        self._holders: set[object] = set()

    def take(self, holder: object) -> None:
        """Wait for a commit under way, and let none begin until all holders have given up."""
        with self._lock:
            self._holders.add(holder)
        self._engine.commit_hold()

    def give(self, holder: object) -> None:
        """Let commits begin again, if nobody else holds them. Any thread."""
        with self._lock:
            if self._holders == {holder}:
                self._engine.commit_release()
            self._holders.discard(holder)
            self._lock.notify_all()

    def wait_none(self) -> None:
        """Wait until nobody holds them, for a commit that is not the engine's."""
        with self._lock:
            while self._holders:
                self._lock.wait(_SLICE_S)


@dataclasses.dataclass
class Edit:
    """A change of parameters, or of buffers, that is staged and in no commit.

    [Note: Edits] An edit is committed when the program goes on with it: at the first backward after
    it, by commit(), and when the session is closed by a program that has not failed since
    ([Note: Failing programs] in common/_exit.py). One that failed drops it: the store then has what
    it had before. With one slot an edit replaces the only copy and cannot be dropped.

    Attributes:
        step: of the session when it was made. A later step carries it.
        moment: when it was made.
        is_refused: lohan has refused something since that belongs to the same edit.
    """

    step: int
    moment: _exit.Moment
    is_refused: bool = False


class Commits(SessionPart):
    """The part of a session that decides what a store is opened with later, as its base class.

    Attributes:
        has_edits: parameters were changed by other means than steps, and no commit has that yet.
        resumed_step: the step that the session was resumed at; None for a new store.
    """

    layout: Layout
    extents: Extents
    store: _core.Store
    directories: list[str]
    buffers: Buffers | None
    is_ending: bool
    _backward: str
    _last_step: int
    has_edits: bool = False
    resumed_step: int | None = None
    _edit: Edit | None = None  # None, too, where commits are by hand

    def lend(self, index: int) -> torch.Tensor:
        """One parameter's bytes in memory."""
        raise NotImplementedError

    @property
    def commits_by_hand(self) -> bool:
        """Only commit() commits: neither steps, nor edits of parameters, nor close()."""
        return self.config.commit_every == "manual"

    def _finish(self) -> None:
        """Commit what is closed; drop a step that is not."""
        with contextlib.suppress(Exception):
            if self._engine.status()["has_gradients"]:
                self._engine.abort()
                self._say_unfinished()
        if not self.commits_by_hand:
            self._engine.flush(True)
            self._end_edits()

    def _say_unfinished(self) -> None:
        if self._backward == "done" and not self.is_ending and sys.exception() is None:
            print(
                "lohan: the session was closed after a backward and before model.optimizer.step():"
                f" that step is forgotten, and the store is at step {self._last_step}",
                file=sys.stderr,
            )

    def commit(self) -> None:
        """Wait until every closed step, and every edit of parameters, is written and committed."""
        self.check_open()
        before = int(self.store.describe()["step"])
        self._engine.flush(True)
        after = int(self.store.describe()["step"])
        if after < self.step:
            raise StepError(
                f"step {self.step} cannot be committed between backward and step(): updates of the"
                " next one are in the same slot. Call model.optimizer.step() first"
            )
        if self.has_edits and after == before:  # else that commit has them
            with self.exclusive([]) as store:
                self._commit_buffers(store)
        self._edit, self.has_edits = None, False

    def edited(self, store: _core.Store) -> None:
        """Parameters were written to the store, inside exclusive(). See [Note: Edits]."""
        self.has_edits = True
        if self.commits_by_hand:
            return
        if store.describe()["is_single_slot"]:
            self._commit_buffers(store)
        if self._edit is None or self._edit.step != self.step:
            self._edit = Edit(self.step, _exit.moment())

    def edited_buffers(self) -> None:
        """Buffers alone were changed."""
        self._engine.flush(not self.commits_by_hand)
        with self.exclusive([]) as store:
            self.edited(store)

    def refuse_edit(self) -> None:
        """Lohan refuses something that belongs to an edit: a commit of it has to be asked for."""
        if self._edit is not None:
            self._edit.is_refused = True

    def commit_edits(self) -> None:
        """Commit an edit, with which the program goes on."""
        edit = self._edit
        if edit is None:
            return
        if edit.step == self.step:  # else a step carries it
            with self.exclusive([]) as store:
                self._commit_buffers(store)
        self._edit, self.has_edits = None, False

    def _end_edits(self) -> None:
        """Commit an edit, or drop it where the program has failed since: the session is closed."""
        edit = self._edit
        if edit is None or edit.step != self.step:
            return
        if not edit.is_refused and not _exit.has_failed_since(edit.moment):
            self.commit_edits()
            return
        is_kept = self.store.describe()["is_single_slot"]
        what = (
            'is in the store all the same: commit_every="never" keeps one copy of each value. Start'
            " again from the weights if the change was not meant to stay"
            if is_kept
            else f"is not in the store, which stays as it was at step {edit.step}."
            " model.lohan.commit() directly after such a change keeps it"
        )
        print(
            "lohan: the program failed after parameters were changed (by load_state_dict(), or in"
            " a loop over them) and before a backward used them: the change " + what,
            file=sys.stderr,
        )

    def settle(self) -> None:
        """Have closed steps in the last commit. Edits by hand, made since, stay without one."""
        if self.commits_by_hand and int(self.store.describe()["step"]) == self.step:
            self.flush()
        else:
            self.commit()

    def values(self) -> list[torch.Tensor]:
        """Every parameter's, in main memory, in its dtype and shape: of now, or of the last commit.

        Raises:
            StoreError: the session is closed, and the store cannot be read.
        """
        opened = self.exclusive([])
        if self.closed:
            opened = _store.reopened(self.directories, self.config, self.layout)
        with opened as store:
            return _store.read_params(self.layout, self.extents, store)

    def check_edit(self) -> None:
        """Somebody is about to write parameters otherwise than by a step."""

    def undo_edit(self, index: int) -> None:
        """Undo in memory what was written there and cannot go to the store."""
        lend = self.lend(index)
        with self.exclusive([]) as store:
            param = self.layout.params[index]
            lend.copy_(_store.read_param(self.layout, self.extents, store, param))

    def finish_writes(self) -> None:
        """Behind it all that the store is read for is of one step."""

    def run_now(self) -> Run | None:
        """Of zeroth-order training, up to now; None: there is none."""
        return None

    @functools.cached_property
    def holds(self) -> Holds:
        """Who holds commits back."""
        return Holds(self._engine)

    def _commit_buffers(self, store: _core.Store) -> None:
        """Commit what was written to the store, and the buffers of now, inside exclusive().

        The engine's flush before it has not waited for a copy of the very step that is committed.
        """
        self.holds.wait_none()
        said, count = store.describe(), len(self.layout.params)
        blobs = said["scalars"], said["caller_scalars"]
        store.commit(self.step, _scalars.with_buffers(*blobs, count, self.buffers))
