"""Checkpoint folders of a Trainer: [Note: A checkpoint and its store] in _trainer.py."""

from __future__ import annotations

import contextlib
import re
from pathlib import Path
from typing import Any

import torch
from transformers.trainer import OPTIMIZER_NAME, TRAINER_STATE_NAME
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR

from lohan.common import _durable

_STEP = re.compile(rf"^{PREFIX_CHECKPOINT_DIR}-\d+$")

Reference = dict[str, Any]


def reference_of(folder: Path) -> Reference | None:
    """Which step of which store a checkpoint folder belongs to; None: it does not say."""
    path = folder / OPTIMIZER_NAME
    if not path.is_file():
        return None
    try:
        state = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except Exception:  # torch raises whatever its readers of zip files and pickles do
        return None  # cut off, because its process died while it wrote, or damaged
    reference = state.get("lohan") if isinstance(state, dict) else None
    return dict(reference) if reference and isinstance(reference, dict) else None


def checkpoints(folder: Path) -> list[Path]:
    """Checkpoints in a folder, oldest first."""
    found = [path for path in folder.absolute().glob("*-*") if _STEP.search(path.name)]
    return sorted(found, key=lambda path: int(path.name.rpartition("-")[2]))


def is_finished(folder: Path) -> bool:
    """Its last file is there: [Note: A checkpoint and its store]."""
    return (folder / TRAINER_STATE_NAME).is_file()


def sync(folder: Path) -> None:
    """Have a folder's files on the disk before the store says that they count."""
    for path in [*folder.rglob("*"), folder, folder.parent]:
        if path.is_file() or path.is_dir():
            _durable.sync(path)
    # Whoever made the Trainer's output folder has not synced its name, nor its parents' names.
    for path in folder.absolute().parents[1:]:
        with contextlib.suppress(OSError):  # it need not be ours
            _durable.sync(path)
