"""Trains with lohan's callback until it kills itself: the process that test_trainer_resume.py ends.

python trainer_worker.py FOLDER STEP WHERE
"""

from __future__ import annotations

import os
import pathlib
import signal
import sys

import torch
import trainer_helper as helper
from conftest import TORCH_THREAD_COUNT
from trainer_resume_helper import ARGUMENTS, Dies


def main() -> None:
    """Kill this process at a step and a place, as kill -9 does."""
    torch.set_num_threads(TORCH_THREAD_COUNT)
    folder, step, where = pathlib.Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3]

    def kill() -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    trainer = helper.make(
        folder, {}, model=helper.gpt2(), callbacks=(Dies(step, where, kill),), **ARGUMENTS
    )
    trainer.train()


if __name__ == "__main__":
    main()
