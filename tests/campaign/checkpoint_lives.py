"""Lives of a transformers.Trainer, whose checkpoint folders fit the store or are passed over."""

from __future__ import annotations

import os
import pathlib
import shutil
from collections.abc import Callable
from typing import Any

import lives
import torch
import trainer_helper
import transformers
from lives import OK, WRONG, Board
from lohan.errors import LohanError
from trainer_resume_helper import ARGUMENTS, checkpoints


class Marks(transformers.TrainerCallback):  # type: ignore[misc]
    """Tells a board which steps are begun, and which are saved."""

    def __init__(self, board: Board) -> None:
        self.board = board

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """A checkpoint of it may be there from now on."""
        self.board.enter("step")
        self.board.most = state.global_step + 1

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """It is saved, and the store has committed."""
        self.board.made = 1
        self.board.least = state.global_step


class Checkpoints(lives.World):
    """GPT-2 with dropout, saved after every second one of nine steps."""

    name = "trainer"
    life_count = 1
    is_killed = False

    def __init__(self) -> None:
        super().__init__()
        self.digest = ""

    def _train(self, folder: pathlib.Path, board: Board, checkpoint: bool | None) -> str:
        torch.set_num_threads(1)
        trainer = trainer_helper.make(
            folder,
            {"io": "threads", "threads": 2},
            model=trainer_helper.gpt2(),
            callbacks=(Marks(board),),
            **ARGUMENTS,
        )
        trainer.train(resume_from_checkpoint=checkpoint)
        digest = lives.crash_worker.digest(trainer.model)
        trainer.model.lohan.close()
        return digest

    def prepare(self, folder: pathlib.Path) -> None:
        """Train without any interruption."""
        read, write = os.pipe()

        def work() -> int:
            os.write(write, self._train(folder / "reference", Board(), None).encode())
            return OK

        pid = lives.fork(work)
        os.close(write)
        with os.fdopen(read) as said:
            self.digest = said.read()
        if lives.join(pid) != OK or not self.digest:
            raise RuntimeError("the reference run of the Trainer failed")
        shutil.rmtree(folder / "reference")

    def life(
        self, folder: pathlib.Path, board: Board, seed: int, resume: bool, arm: Callable[[], None]
    ) -> int:
        """Train to the end, or until killed."""
        board.enter("resume" if resume else "create")
        arm()
        digest = self._train(folder, board, True if resume else None)
        return OK if digest == self.digest else WRONG

    def check(self, folder: pathlib.Path, board: Board, was_there: bool) -> int:
        """Resume from the newest checkpoint that fits, and end at the bits."""
        if not checkpoints(folder):
            board.found = -1
            return OK if board.least == 0 else WRONG
        try:
            digest = self._train(folder, Board(), True)
        except (LohanError, ValueError) as error:
            if board.least > 0:
                raise
            print(f"refused: {error}")
            board.found = -1
            return OK
        board.found = lives.STEP_MAX  # training is complete
        return OK if digest == self.digest else WRONG
