"""Checkpoint folders of a Trainer: [Note: A checkpoint and its store] in _trainer.py."""

from __future__ import annotations

import contextlib
import json
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from transformers.trainer import OPTIMIZER_NAME, TRAINER_STATE_NAME
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR

from lohan.common import _durable
from lohan.store._stale import stores_of

if TYPE_CHECKING:
    from lohan.session._training import Training

_STEP = re.compile(rf"^{PREFIX_CHECKPOINT_DIR}-\d+$")

Reference = dict[str, Any]


def reference_of(folder: Path) -> Reference | None:
    """Return the store and the step that a checkpoint folder belongs to; None if unknown."""
    path = folder / OPTIMIZER_NAME
    if not path.is_file():
        return None
    try:
        state = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except Exception:  # torch.load() lets any exception of its zip and pickle readers through
        return None  # truncated because the process died while writing, or damaged
    reference = state.get("lohan") if isinstance(state, dict) else None
    return dict(reference) if reference and isinstance(reference, dict) else None


def checkpoints(folder: Path) -> list[Path]:
    """Return the checkpoints in a folder, oldest first."""
    found = [path for path in folder.absolute().glob("*-*") if _STEP.search(path.name)]
    return sorted(found, key=lambda path: int(path.name.rpartition("-")[2]))


def is_finished(folder: Path) -> bool:
    """Return whether a checkpoint's last file is whole: [Note: A checkpoint and its store]."""
    try:
        json.loads((folder / TRAINER_STATE_NAME).read_bytes())
    except (OSError, ValueError):  # the process died before it wrote the file, or meanwhile
        return False
    return True


def fits(asked: Reference | None, found: Reference) -> bool:
    """Return whether a checkpoint's reference is of a store's step."""
    if asked is None or asked.get("step") != found["step"]:
        return False
    return found["store"] in stores_of(asked)


def way_back(folder: Path, asked: Reference, found: Reference) -> str:
    """Return how to go back to a checkpoint that is older than the store's step; "" for others."""
    if asked["step"] >= found["step"]:
        return ""
    return (
        f". To go back to step {asked['step']}, pass a copy that lohan.snapshot() made of the store"
        " at that step to lohan.TrainerCallback(store=...), and call"
        f" train(resume_from_checkpoint={str(folder)!r})"
    )


def fitting_beside(folder: Path, found: Reference) -> str | None:
    """Return a complete checkpoint next to `folder` that matches `found`, or None."""
    finished = filter(is_finished, checkpoints(folder.parent))
    matching = [each for each in finished if fits(reference_of(each), found)]
    return str(matching[-1]) if matching else None


def trained_past(folder: Path, step: int, session: Training, is_zeroth: bool) -> str:
    """Return how to resume after an interrupt, while this process has the store open.

    Args:
        folder: the checkpoint that is to be resumed.
        step: its step, which the session has trained past.
        session: the open session.
        is_zeroth: whether its steps can be rolled back to any step since the last commit.

    Returns:
        The end of the error message; "" if no checkpoint can be resumed.
    """
    if not (is_zeroth or session.commits.by_hand):
        return ""  # close() commits the last step
    durable = int(session.store.describe()["step"])
    there: str | None = str(folder)
    if durable != step and not (is_zeroth and durable < step):
        there = fitting_beside(folder, {"store": session.uuid, "step": durable})
    if there is None:
        return ""
    return (
        ", because this process has trained on since. To resume, start a new process, or call"
        " trainer.model.lohan.close() and create a new model, Trainer and lohan.TrainerCallback;"
        f" then call train(resume_from_checkpoint={there!r})"
    )


def sync(folder: Path, pattern: str = "*") -> None:
    """Make a folder's files durable, before the store commits their step."""
    for path in [*folder.rglob(pattern), folder, folder.parent]:
        if path.is_file() or path.is_dir():
            _durable.sync(path)
    # The directory entries of the output folder and its parents have not been synced either.
    for path in folder.absolute().parents[1:]:
        with contextlib.suppress(OSError):  # it may belong to another user
            _durable.sync(path)
