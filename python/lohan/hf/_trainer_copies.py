"""`lohan.TrainerCopies`: a copy of the store for each checkpoint that a Trainer keeps."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import transformers
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR

from lohan.common._inside import inside
from lohan.errors import ModelError, UnsupportedError
from lohan.store import _kept

if TYPE_CHECKING:
    from lohan.store._snapshot import PathLike


class TrainerCopies(transformers.TrainerCallback):
    """Copy the store when a Trainer saves a checkpoint, for as long as the Trainer keeps that.

    A store is at one step, that of the last checkpoint. With this callback every checkpoint folder
    that `save_total_limit` and `load_best_model_at_end` leave has the store of its step, with its
    moments, in FOLDER/checkpoint-N. To go back to one, pass that to
    `lohan.TrainerCallback(store=...)`, and the checkpoint to `train(resume_from_checkpoint=...)`.
    Training continues while a copy is made; the next checkpoint waits for it.

    Args:
        folder: where the copies are; each takes as much space as the store.

    Raises:
        ModelError: when the first checkpoint is saved: no lohan.TrainerCallback comes before it.
        UnsupportedError: the run has several processes.
        StoreError: as for `lohan.snapshot`, at the next checkpoint.
    """

    def __init__(self, folder: PathLike) -> None:
        self._folder = folder

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Begin the copy of a checkpoint's store, and remove those whose checkpoint is gone."""
        session = inside(kwargs.get("model"))
        if session is None:
            raise ModelError(
                "lohan.TrainerCopies found no store: pass lohan.TrainerCallback before it, as in"
                " callbacks=[lohan.TrainerCallback(store=...), lohan.TrainerCopies(FOLDER)]"
            )
        if session.peers.world is not None:
            raise UnsupportedError(
                "lohan.TrainerCopies is for one process: with several, copy the stores of all with"
                " lohan snapshot when the run has ended"
            )
        name = f"{PREFIX_CHECKPOINT_DIR}-{state.global_step}"
        _kept.copy_to(session, self._folder, name, _gone(args))

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Remove the copies of checkpoints that a Trainer removes when it has the best one."""
        session = inside(kwargs.get("model"))
        if session is not None and not session.closed:
            _kept.remove_old(session, self._folder, _gone(args))


def _gone(args: Any) -> Callable[[Sequence[str]], Sequence[str]]:
    """Return what finds the copies among names whose checkpoint a Trainer has removed."""
    checkpoints = Path(args.output_dir).absolute()

    def gone(names: Sequence[str]) -> Sequence[str]:
        mine = [name for name in names if name.startswith(f"{PREFIX_CHECKPOINT_DIR}-")]
        return [name for name in mine if not (checkpoints / name).is_dir()]

    return gone
