"""What of a session its store keeps, and when: commits, edits of parameters, copies."""

from __future__ import annotations

import functools
from collections.abc import Sequence

import torch

from lohan import _core, _scalars, _snapshot, _store, _weights
from lohan._block import Layout
from lohan._buffers import Buffers
from lohan._part import SessionPart
from lohan._snapshot import Holds, PathLike, Snapshot
from lohan._store import Extents
from lohan._zo_run import Run
from lohan.errors import StepError


class Commits(SessionPart):
    """The part of a session that decides what a store is opened with later, as its base class.

    Attributes:
        has_edits: parameters were changed by other means than steps, and no commit has that yet.
    """

    layout: Layout
    extents: Extents
    store: _core.Store
    directories: list[str]
    buffers: Buffers | None
    has_edits: bool = False

    def lend(self, index: int) -> torch.Tensor:
        """One parameter's bytes in memory."""
        raise NotImplementedError

    @property
    def commits_by_hand(self) -> bool:
        """Only commit() commits: neither steps, nor edits of parameters, nor close()."""
        return self.config.commit_every == "manual"

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
        self.has_edits = False

    def edited(self, store: _core.Store) -> None:
        """Parameters were written to the store, inside exclusive(): commit them, or note it."""
        if self.commits_by_hand:
            self.has_edits = True
        else:
            self._commit_buffers(store)

    def edited_buffers(self) -> None:
        """Buffers alone were changed: commit them, or note it."""
        self._engine.flush(not self.commits_by_hand)
        with self.exclusive([]) as store:
            self.edited(store)

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
            return _weights.read(self.layout, self.extents, store)

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

    def snapshot(self, out: PathLike | Sequence[PathLike]) -> Snapshot:
        """Begin to copy the store, as of the last step, to other directories; training goes on.

        Commits that are due meanwhile come behind the copy. See `lohan.snapshot`.

        Args:
            out: a directory, or several; the copy is striped over them.

        Returns:
            The copy under way: `wait()` waits for it, and so does close().
        """
        return _snapshot.begin(self, out)  # type: ignore[arg-type]

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
