"""A Trainer in several processes: which checkpoint they resume, and when their stores commit.

[Note: A checkpoint of several processes] Rank 0 writes the folder, except for the states of random
generators, of which each process writes its own. When a process has written its files and synced
them, it says so; rank 0 does that after the folder's last file. Only then do all commit, and rank 0
deletes older folders after it has heard that the commits of all are durable. So while stores may
differ, each has the step of the older folder, because it keeps the step before its newest one, and
both folders are there.

[Note: The folder that all resume] After a crash the newest steps of the stores may differ, and a
process may have no store yet. So each process tells the others which folders it sees and which of
their steps its store has. All choose the newest folder of a step that every store has, and open the
stores at this step. If there is none, a store is out of date: the newest folder of any store's
newest step counts, and wrap() replaces the other stores by copies. With share="on" a process looks
at the store of its machine, which belongs to the process with the lowest rank there.
"""

from __future__ import annotations

import dataclasses
import functools
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR

from lohan.common._meta import copied_from
from lohan.errors import LohanError, StoreMismatchError
from lohan.hf._trainer_folders import checkpoints, fits, is_finished, reference_of, sync
from lohan.replicas import _join, _places
from lohan.store import _snapshot, _store
from lohan.store._stale import stores_of
from lohan.world._world import node

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from lohan.config import Config
    from lohan.hf._trainer_folders import Reference


@dataclasses.dataclass(frozen=True)
class Seen:
    """What a process sees of checkpoint folders and of its store.

    Attributes:
        names: the folders, oldest first.
        finished: the references of complete folders.
        newest: the folders of the newest step of its store.
        opens: the folders of steps that its store can be opened at.
        stores: its store, and those that it was copied from; empty if it has none.
        step: the newest step of its store.
        error: why it cannot tell.
    """

    names: list[str] = dataclasses.field(default_factory=list)
    finished: dict[str, Reference | None] = dataclasses.field(default_factory=dict)
    newest: list[str] = dataclasses.field(default_factory=list)
    opens: list[str] = dataclasses.field(default_factory=list)
    stores: list[str] = dataclasses.field(default_factory=list)
    step: int = 0
    error: str = ""


def choose(told: Sequence[Seen]) -> str | None:
    """Return the folder to resume: see [Note: The folder that all resume]."""
    common = [name for name in told[0].finished if all(name in each.finished for each in told)]
    for name in reversed(common):
        is_there = any(name in each.newest for each in told)
        have = [name in each.opens or (is_there and not each.stores) for each in told]
        if all(have) and any(name in each.opens for each in told):
            return name
    for name in reversed(common):
        if any(name in each.newest for each in told):
            return name
    return None


class Group:
    """The processes of one Trainer, as one of them sees them.

    Attributes:
        is_due: a checkpoint is being saved, and the processes have not agreed on its commit yet.
    """

    def __init__(self, trainer: Any, directories: Sequence[str], config: Config) -> None:
        """Describe this process.

        Args:
            trainer: its Trainer.
            directories: the directories of store=.
            config: the settings of the session.
        """
        self._trainer = trainer
        self._rank = int(trainer.args.process_index)
        self._count = int(trainer.args.world_size)
        self._base = [*directories]
        self._config = config
        self.is_due = False

    # --- Saving ---------------------------------------------------------------------------------

    def save(self, session: Any, plain: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Call the Trainer's _save_checkpoint(), and commit in all processes or in none."""
        trainer = self._trainer
        self.is_due = not (trainer.args.save_only_model or session is None or session.closed)
        result = plain(*args, **kwargs)
        if self.is_due:  # this process does not write the folder's last file
            trial = kwargs.get("trial", args[1] if len(args) > 1 else None)
            name = f"{PREFIX_CHECKPOINT_DIR}-{trainer.state.global_step}"
            sync(Path(trainer._get_output_dir(trial)) / name, f"rng_state_{self._rank}.pth")
            self.commit(session, is_ready=not trainer.args.should_save)
        return result

    def commit(self, session: Any, *, is_ready: bool) -> None:
        """Commit if all processes are ready: [Note: A checkpoint of several processes]."""
        self.is_due = False
        session.peers.commit_together(is_ready=is_ready)

    # --- Resuming -------------------------------------------------------------------------------

    def last(self, session: Any) -> tuple[str | None, list[Path]]:
        """Return the folder to resume, and newer ones, which were being written in a crash.

        Returns:
            None as the folder if the Trainer is to try the last one, which check() then rejects.

        Raises:
            StoreMismatchError: the processes do not see the same folders.
        """
        place = Path(self._trainer.args.output_dir).absolute()
        told = self._gather(checkpoints(place), session)
        name = choose(told)
        if name is not None:
            newer = told[0].names[told[0].names.index(name) + 1 :]
            if all(_is_of_crash(each, told) for each in newer):
                return str(place / name), [place / each for each in newer]
        other = next((rank for rank, each in enumerate(told) if each.names != told[0].names), None)
        if other is not None:
            differing = sorted({*told[0].names} ^ {*told[other].names})
            raise StoreMismatchError(
                f"rank 0 and rank {other} do not see the same checkpoints in {place}"
                f" ({', '.join(differing)}): output_dir must be a folder that all processes share"
            )
        return None, []

    def check(self, folder: Path, session: Any) -> int:
        """Return the step of a checkpoint that all processes can resume.

        Raises:
            StoreMismatchError: a process cannot.
        """
        told = self._gather([folder], session)
        if choose(told) is not None:
            reference = told[0].finished[folder.name]
            assert reference is not None
            return int(reference["step"])
        late = next((rank for rank, each in enumerate(told) if not each.finished), None)
        if late is not None:
            text = f"{folder} is incomplete, or rank {late} does not see it"
        elif any(each.finished[folder.name] is None for each in told):
            text = without_reference(folder)
        else:
            text = _mismatch(folder, told)
        fitting = choose(self._gather(checkpoints(folder.absolute().parent), session))
        if fitting is not None:
            there = str(folder.absolute().parent / fitting)
            text += f". To resume from there: train(resume_from_checkpoint={there!r})"
        raise StoreMismatchError(text)

    def _gather(self, folders: Sequence[Path], session: Any) -> list[Seen]:
        """Return what each process sees, by rank.

        Raises:
            StoreMismatchError: another process cannot tell what it sees.
        """
        failed: LohanError | None = None
        _ = self._directories  # in all processes, also in those that fail below
        try:
            mine = self._look(folders, session)
        except LohanError as error:
            failed, mine = error, Seen(error=str(error))
        told: list[Any] = [None] * self._count
        torch.distributed.all_gather_object(told, mine)
        if failed is not None:
            raise failed
        for rank, each in enumerate(told):
            if each.error:
                raise StoreMismatchError(f"rank {rank} cannot resume: {each.error}")
        return told

    @functools.cached_property
    def _directories(self) -> list[str]:
        """The directories of the store that this process trains. All processes must call this."""
        number = self._rank
        if self._config.share == "on":
            nodes: list[Any] = [None] * self._count
            torch.distributed.all_gather_object(nodes, node())
            number = [*dict.fromkeys(nodes)].index(nodes[self._rank])  # of the machine
        return _places.of_number(number, self._base)

    def _look(self, folders: Sequence[Path], session: Any) -> Seen:
        names = [folder.name for folder in folders]
        finished = {each.name: reference_of(each) for each in folders if is_finished(each)}
        step, copied, uuid = self._store_now(session)
        if uuid is None:
            return Seen(names, finished)
        own = [uuid, *(each for each, _ in copied)]
        newest, opens = [], []
        for name, asked in finished.items():
            if asked is None or not isinstance(asked.get("step"), int):
                continue
            mine = {"store": uuid, "step": asked["step"]}
            pairs = [{"store": each, "step": at} for each, at in copied]
            if not any(fits(asked, each) for each in [mine, *pairs]):
                continue
            if asked["step"] == step:
                newest.append(name)
            if asked["step"] == step or (session is None and self._has(asked["step"])):
                opens.append(name)
        return Seen(names, finished, newest, opens, own, step)

    def _store_now(self, session: Any) -> tuple[int, list[Any], str | None]:
        """Return the step of this process's store, its copied_from, and its UUID if it exists."""
        if session is not None:
            return session.step, copied_from(session.store), session.uuid
        if not _snapshot.is_complete(self._directories):
            return 0, [], None
        store = _store.open_existing(self._directories, self._config, read_only=True)
        try:
            said = store.describe()
            return int(said["step"]), copied_from(store), str(said["uuid"])
        finally:
            store.close()

    def _has(self, step: int) -> bool:
        return 0 <= step < 1 << 63 and _join.has_step(self._directories, self._config, step)


def _is_of_crash(name: str, told: Sequence[Seen]) -> bool:
    """Return whether a folder that cannot be resumed was being written by this run in a crash."""
    known = {store for each in told for store in each.stores}
    found = [each.finished[name] for each in told if name in each.finished]
    return all(asked is not None and not known.isdisjoint(stores_of(asked)) for asked in found)


def _mismatch(folder: Path, told: Sequence[Seen]) -> str:
    asked = told[0].finished[folder.name] or {}
    stores = ", ".join(
        f"{f'at step {each.step}' if each.stores else 'none'} (rank {rank})"
        for rank, each in enumerate(told)
    )
    text = f"{folder} belongs to step {asked.get('step')} of store {asked.get('store')}"
    if not any(each.stores for each in told):
        return (
            f"{text}, but no process has a store: the checkpoint's tensors are in the stores that"
            " were passed to lohan.TrainerCallback when the checkpoint was saved: pass the same"
            " store="
        )
    strange = [r for r, each in enumerate(told) if each.stores and not _knows(each, asked)]
    if strange:
        return (
            f"{text}, but the store of rank {strange[0]} is a different one,"
            f" {told[strange[0]].stores[0]}: pass the store= of that run"
        )
    return f"{text}, but no set of stores has this step; they are: {stores}"


def _knows(seen: Seen, asked: Reference) -> bool:
    return not {*seen.stores}.isdisjoint(stores_of(asked))


def without_reference(folder: Path) -> str:
    """Return the message for a checkpoint that does not refer to a store."""
    return (
        f"{folder} does not say which step of which store has its tensors: it was saved"
        " without lohan, or with save_only_model=True. To continue from its weights, build"
        f" the model with from_pretrained({str(folder)!r}), and call train() with a new"
        " store"
    )
