"""What each process of tests/py/test_replicas_trainer*.py does: a small model with a Trainer."""

from __future__ import annotations

import hashlib
import os
import pathlib
import signal
import sys
import time
from typing import Any

import lohan
import torch
import torch.nn.functional as F
import trainer_helper as helper
import transformers
import world_helper
from lohan.common._inside import inside
from lohan.losses import linear_cross_entropy
from lohan.replicas._replica import Replica
from lohan.session._commits import Commits
from torch import nn
from world_adamw import REPLICAS, SHARE
from world_worker import rank_and_count

world_helper.preload("transformers.trainer", "accelerate")

# Checkpoints are at steps 2, 4, 6; dropout and accumulation make generators and data matter.
RESUMED: dict[str, Any] = {
    "max_steps": 7,
    "gradient_accumulation_steps": 2,
    "warmup_steps": 2,
    "lr_scheduler_type": "cosine",
    "save_strategy": "steps",
    "save_steps": 2,
    "save_total_limit": 1,
}


def start(folder: str, takes: dict[str, Any] | None, **given: Any) -> Any:
    """Return this process's Trainer."""
    os.environ["LOCAL_RANK"] = os.environ["RANK"]  # as torchrun does on one machine
    os.environ["OMP_NUM_THREADS"] = "1"
    for key, name in (("share", SHARE), ("replicas", REPLICAS)):
        if takes is not None and name in os.environ:
            takes = {key: os.environ[name], **takes}
    return helper.make(pathlib.Path(folder), takes, use_cpu=True, **given)


def digest(model: nn.Module) -> str:
    """Return a hash of all parameters."""
    found = hashlib.sha256()
    for value in helper.values(model).values():
        found.update(value.contiguous().view(torch.uint8).numpy().tobytes())
    return found.hexdigest()[:16]


def logs_of(trainer: Any) -> dict[str, list[float]]:
    return {key: helper.logged(trainer, key) for key in ("loss", "grad_norm", "learning_rate")}


def compare(folder: str, rows: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """Run the same trainings with lohan and without, which is with DistributedDataParallel."""
    found = {}
    for name, given in rows.items():
        for kind, takes in (("lohan", {}), ("ddp", None)):
            trainer = start(f"{folder}/{name}/{kind}", takes, **given)
            trainer.train()
            assert isinstance(trainer.model_wrapped, nn.parallel.DistributedDataParallel) == (
                kind == "ddp"
            )
            found[name, kind] = logs_of(trainer), helper.values(trainer.model)
            if kind == "lohan":
                trainer.model.lohan.close()
    return found


def recipe_of_losses() -> Any:
    """Return the Trainer of docs/losses.md, whose loss needs no logits."""
    page = pathlib.Path(__file__).parents[2] / "docs" / "losses.md"
    text = page.read_text(encoding="utf-8")
    begin = text.index("class Trainer(lohan.Trainer):")
    names = {"lohan": lohan, "F": F, "linear_cross_entropy": linear_cross_entropy}
    exec(text[begin : text.index("trainer = Trainer(", begin)], names)
    return names["Trainer"]


def compare_losses(folder: str, rows: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """Train and evaluate with the Trainer's own loss, and with that of docs/losses.md."""
    found = {}
    takes = {"train_dataset": helper.Rows(16), "eval_dataset": helper.Rows(6)}
    for name, given in rows.items():
        for kind, cls in (("logits", helper.Trainer), ("recipe", recipe_of_losses())):
            given = {"max_steps": 3, "trainer_takes": takes, **given}
            trainer = start(f"{folder}/{name}/{kind}", {}, cls=cls, **given)
            trainer.train()
            found[name, kind] = logs_of(trainer), trainer.evaluate()["eval_loss"]
            trainer.model.lohan.close()
    return found


def train_resumable(folder: str, steps: int) -> tuple[list[float], str]:
    """Make an undisturbed training of the model that others resume."""
    torch.manual_seed(3)
    given = {**RESUMED, "max_steps": steps}
    trainer = start(folder, {}, model=helper.gpt2(), **given)
    trainer.train()
    return helper.logged(trainer, "loss"), digest(trainer.model)


def train_rows(folder: str, rows: dict[str, dict[str, Any]]) -> dict[str, tuple[list[float], str]]:
    """Run several trainings with lohan."""
    found = {}
    for name, row in rows.items():
        given = dict(row)
        takes = {"order": order} if (order := given.pop("order", "")) else {}
        trainer = start(f"{folder}/{name}", takes, **given)
        trainer.train()
        assert trainer.model_wrapped is trainer.model
        found[name] = helper.logged(trainer, "loss"), digest(trainer.model)
        trainer.model.lohan.close()
    return found


def accuracy(prediction: Any) -> dict[str, float]:
    guessed = prediction.predictions.argmax(-1)[:, :-1]
    return {"accuracy": float((guessed == prediction.label_ids[:, 1:]).mean())}


BEST: dict[str, Any] = {
    "load_best_model_at_end": True,
    "metric_for_best_model": "eval_loss",
    "greater_is_better": True,  # so that the first one is the best
}


def evaluate(folder: str, best: dict[str, Any]) -> dict[str, Any]:
    """Evaluate, predict, save, and load the best model if asked, with lohan and without."""
    found = {}
    for kind, takes in (("lohan", {}), ("ddp", None)):
        trainer = start(
            f"{folder}/{kind}",
            takes,
            trainer_takes={
                "train_dataset": helper.Rows(4),
                "eval_dataset": helper.Rows(10),
                "compute_metrics": accuracy,
            },
            max_steps=8,
            learning_rate=1e-2,
            eval_strategy="steps",
            eval_steps=2,
            save_strategy="steps",
            save_steps=2,
            save_total_limit=2,
            **best,
        )
        trainer.train()
        predicted = trainer.predict(helper.Rows(6)).metrics
        alone = digest(trainer.model) if rank_and_count()[0] == 0 else ""
        trainer.save_model(f"{folder}/{kind}/saved")
        again = trainer.evaluate()["eval_loss"]
        found[kind] = {
            "eval_loss": helper.logged(trainer, "eval_loss"),
            "best": trainer.state.best_global_step,
            "predicted": [predicted["test_loss"], predicted["test_accuracy"]],
            "again": again,
            "values": helper.values(trainer.model),
            "alone": alone,
        }
        if kind == "lohan":
            trainer.model.lohan.close()
    return found


class Begins(transformers.TrainerCallback):  # type: ignore[misc]
    """Takes down at which step a training begins, and the parameters."""

    def __init__(self) -> None:
        self.step = -1
        self.digest = ""

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Take down the step."""
        self.step = state.global_step
        self.digest = digest(kwargs["model"])


def resume(
    folder: str, checkpoint: Any = True, **given: Any
) -> tuple[int, str, list[float], str] | str:
    """Resume with another seed; return the step, the parameters there, the losses, the end."""
    torch.manual_seed(12345)
    begins = Begins()
    arguments = {**RESUMED, **given}
    takes = {"store": arguments.pop("store")} if "store" in arguments else {}
    trainer = start(folder, takes, model=helper.gpt2(), callbacks=(begins,), **arguments)
    try:
        trainer.train(resume_from_checkpoint=checkpoint)
    except lohan.errors.LohanError as error:
        notes = "".join(getattr(error, "__notes__", []))
        return f"{type(error).__name__}: {error}{notes}"
    return begins.step, begins.digest, helper.logged(trainer, "loss"), digest(trainer.model)


def resume_to(
    folder: str, steps: int, checkpoint: Any = True
) -> tuple[int, str, list[float], str] | str:
    return resume(folder, checkpoint, max_steps=steps)


class _Kills(transformers.TrainerCallback):  # type: ignore[misc]
    """Kills all processes when one of them reaches a place in a checkpoint.

    Args:
        folder: where each process leaves its number.
        rank: the rank that kills.
        place: "begin": before anything is saved; "json": before the folder's last file is written;
            "ready": before the rank says that its files are written; "committed": the rank has
            committed, and no other; "agreed": all have; "saved": older folders are deleted.
        step: the step of the checkpoint.
    """

    def __init__(self, folder: str, rank: int, place: str, step: int) -> None:
        self.folder = pathlib.Path(folder)
        self.is_me = rank_and_count()[0] == rank
        self.place = place
        self.step = step
        mine = self.folder / f"pid.{rank_and_count()[0]}"
        mine.write_text(str(os.getpid()))

    def reach(self, place: str) -> None:
        if place != self.place or not self.is_me:
            return
        for path in self.folder.glob("pid.*"):
            if int(path.read_text()) != os.getpid():
                os.kill(int(path.read_text()), signal.SIGKILL)
        os.kill(os.getpid(), signal.SIGKILL)

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Be there when a checkpoint is saved."""
        saves, commits = state.save_to_json, Commits._commit_own
        together = Replica.commit_together

        def save_to_json(json_path: str) -> None:
            if state.global_step == self.step:
                self.reach("json")
            saves(json_path)

        def commit(own: Any) -> None:
            is_it = own._session.step == self.step
            if is_it and self.place == "committed" and not self.is_me:
                time.sleep(60)  # until it is killed
            if is_it and self.place in ("agreed", "saved") and not self.is_me:
                time.sleep(1)  # the other one must wait
            commits(own)
            if is_it:
                self.reach("committed")

        def commit_together(peers: Any, **given: Any) -> bool:
            if peers.session.step == self.step:
                self.reach("ready")
            result = together(peers, **given)
            if peers.session.step == self.step:
                self.reach("agreed")
            return result

        state.save_to_json = save_to_json
        Commits._commit_own = commit  # type: ignore[method-assign]
        Replica.commit_together = commit_together  # type: ignore[method-assign]

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Reach the place before anything is saved."""
        if state.global_step == self.step:
            self.reach("begin")

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Reach the place after older folders were deleted."""
        if state.global_step == self.step:
            self.reach("saved")


def killed(folder: str, rank: int, place: str, step: int) -> None:
    """Train until all processes are killed."""
    torch.manual_seed(3)
    pathlib.Path(folder).mkdir(exist_ok=True)
    kills = _Kills(folder, rank, place, step)
    trainer = start(folder, {}, model=helper.gpt2(), callbacks=(kills,), **RESUMED)
    trainer.train()


def endless(folder: str, steps: int) -> tuple[list[float], str]:
    """Train or resume with a checkpoint at every step."""
    given = {**RESUMED, "max_steps": steps, "save_steps": 1}
    trainer = start(folder, {}, model=helper.gpt2(), **given)
    trainer.train(resume_from_checkpoint=_resumes(folder))
    return helper.logged(trainer, "loss"), digest(trainer.model)


def _resumes(folder: str) -> bool:
    found = pathlib.Path(folder, "out").glob("checkpoint-*/trainer_state.json")
    return any(True for _ in found)


class _NoOptimizer(helper.Trainer):  # type: ignore[misc]
    """A Trainer whose checkpoints do not have the optimizer's file."""

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        pass


def without_reference(folder: str) -> tuple[int, int]:
    """Save checkpoints that do not refer to a store; return its step and its committed step."""
    trainer = start(folder, {}, cls=_NoOptimizer, **RESUMED)
    trainer.train()
    trainer.save_state()
    session = inside(trainer.model)
    return session.step, session.store.describe()["step"]


def refused(folder: str) -> dict[str, str]:
    """Make Trainers with what several processes cannot do."""
    found = {}
    for name, takes, given in (
        ("jit", {}, {"enable_jit_checkpoint": True}),
        ("mezo", {"method": "mezo"}, {}),
        (
            "best",
            {"share": "on"},
            {
                "load_best_model_at_end": True,
                "eval_strategy": "steps",
                "save_strategy": "steps",
                "trainer_takes": {"eval_dataset": helper.Rows(4)},
            },
        ),
        ("world_size", {}, {}),
    ):
        if name == "world_size":
            os.environ["WORLD_SIZE"] = "3"
        try:
            start(f"{folder}/{name}", takes, **given)
        except lohan.errors.LohanError as error:
            found[name] = f"{type(error).__name__}: {error}"
    return found


def main() -> None:
    """Train as a script does that a launcher starts; print the losses of rank 0."""
    trainer = helper.make(pathlib.Path(sys.argv[1]), {}, use_cpu=True)
    trainer.train()
    if trainer.is_world_process_zero():
        print("losses", helper.logged(trainer, "loss"))


if __name__ == "__main__":
    main()
