"""Shared by the tests of resumed Trainers and the process that they kill."""

from __future__ import annotations

import pathlib
from collections.abc import Callable
from typing import Any

import transformers
from lohan.session._training import Training

# Checkpoints are at steps 2, 4, ...; dropout and accumulation make generators and data matter.
ARGUMENTS: dict[str, Any] = {
    "max_steps": 9,
    "gradient_accumulation_steps": 2,
    "warmup_steps": 2,
    "lr_scheduler_type": "cosine",
    "save_strategy": "steps",
    "save_steps": 2,
}


class Dies(transformers.TrainerCallback):  # type: ignore[misc]
    """Ends training at a step.

    Args:
        step: the Trainer's step.
        where: "step": after it; "files": all files of its checkpoint except the last are written;
            "commit": all are, and the store has not committed; "saved": it has, and older
            checkpoints are not deleted yet; "done": they are.
        end: called to end the training.
    """

    def __init__(self, step: int, where: str, end: Callable[[], None]) -> None:
        self.step = step
        self.where = where
        self.end = end

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Be there when a checkpoint is saved."""
        saves, commits = state.save_to_json, Training.commit

        def save_to_json(json_path: str) -> None:
            is_there = state.global_step == self.step
            if is_there and self.where == "files":
                self.end()

            def commit(session: Any) -> None:
                if is_there and self.where == "commit":
                    self.end()
                commits(session)

            Training.commit = commit  # type: ignore[method-assign]
            try:
                saves(json_path)
            finally:
                Training.commit = commits  # type: ignore[method-assign]
            if is_there and self.where == "saved":
                self.end()

        state.save_to_json = save_to_json

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """End at this event, which follows the deletion of older checkpoints."""
        if state.global_step == self.step and self.where == "done":
            self.end()

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """End at this event, at which nothing was saved yet."""
        if state.global_step == self.step and self.where == "step":
            self.end()


def checkpoints(folder: pathlib.Path) -> list[pathlib.Path]:
    """The checkpoint folders that there are, oldest first."""
    found = (folder / "out").glob("checkpoint-*")
    return sorted(found, key=lambda path: int(path.name.split("-")[1]))
