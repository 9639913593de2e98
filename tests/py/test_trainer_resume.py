"""A Trainer's checkpoint and lohan's store are of the same step, wherever a process ends."""

from __future__ import annotations

import pathlib
import re
import signal
import subprocess
import sys
from typing import Any

import lohan
import pytest
import torch
import trainer_helper as helper
import transformers
from lohan.common._inside import inside
from lohan.errors import ModelError, StoreError, StoreMismatchError
from patience import HUNG_S
from trainer_resume_helper import ARGUMENTS, Dies, checkpoints

pytestmark = pytest.mark.usefixtures("closed")
WHOLE: dict[str, Any] = {}


class Ended(Exception):
    """A test has ended a training."""


def end() -> None:
    raise Ended


@pytest.fixture
def whole(store_dir: pathlib.Path) -> Any:
    """Return the losses and parameters of a training that was not interrupted."""
    if not WHOLE:
        trainer = helper.make(store_dir / "whole", {}, model=helper.gpt2(), **ARGUMENTS)
        trainer.train()
        WHOLE["losses"] = helper.logged(trainer, "loss")
        WHOLE["state"] = helper.values(trainer.model)
    return WHOLE


def resume(folder: pathlib.Path, checkpoint: Any = True, **given: Any) -> Any:
    """Go on as a new process does: another seed was drawn from, and another model is there."""
    torch.manual_seed(12345)
    arguments = {**ARGUMENTS, **given.pop("arguments", {})}
    trainer = helper.make(folder, given, model=helper.gpt2(), **arguments)
    trainer.train(resume_from_checkpoint=checkpoint)
    return trainer


def assert_is(trainer: Any, whole: Any) -> None:
    assert helper.logged(trainer, "loss") == whole["losses"]
    state = helper.values(trainer.model)
    assert all(torch.equal(state[key], value) for key, value in whole["state"].items())


def train_until(folder: pathlib.Path, step: int, where: str, **arguments: Any) -> None:
    callbacks = (Dies(step, where, end),)
    given = {**ARGUMENTS, **arguments}
    trainer = helper.make(folder, {}, model=helper.gpt2(), callbacks=callbacks, **given)
    with pytest.raises(Ended):
        trainer.train()
    helper.close_all()


def test_a_killed_training_continues_with_the_same_bits(
    whole: Any, store_dir: pathlib.Path
) -> None:
    worker = pathlib.Path(__file__).with_name("trainer_worker.py")
    command = [sys.executable, str(worker), str(store_dir), "7", "step"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=HUNG_S, check=False)
    assert done.returncode == -signal.SIGKILL, done.stderr
    assert [path.name for path in checkpoints(store_dir)][-1] == "checkpoint-6"
    trainer = resume(store_dir)
    assert_is(trainer, whole)


def test_a_scheduler_of_the_optimizer_that_the_trainer_made_still_rules_a_resumed_run(
    whole: Any, store_dir: pathlib.Path
) -> None:
    train_until(store_dir, 4, "done", cls=helper.SchedulesFirst)
    trainer = resume(store_dir, arguments={"cls": helper.SchedulesFirst})
    assert trainer.first is not trainer.model.optimizer
    assert_is(trainer, whole)


@pytest.mark.parametrize("where", ["step", "files", "commit", "saved", "done"])
def test_wherever_it_ends_the_store_fits_one_whole_checkpoint(
    where: str, whole: Any, store_dir: pathlib.Path
) -> None:
    train_until(store_dir, 6, where, save_total_limit=1)
    found = checkpoints(store_dir)
    expected = 6 if where in ("saved", "done") else 4
    matching = next(path for path in found if path.name == f"checkpoint-{expected}")
    if found[-1] != matching:
        with pytest.raises(StoreMismatchError) as refused:
            resume(store_dir, str(found[-1]))
        text = str(refused.value)
        assert f"{found[-1]} belongs to step 6" in text and "is at step 4" in text
        assert f"train(resume_from_checkpoint={str(matching)!r})" in text
        helper.close_all()
    assert_is(resume(store_dir), whole)


def test_a_folder_that_was_never_finished_is_passed_over(
    whole: Any, store_dir: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    train_until(store_dir, 6, "step")
    unfinished = store_dir / "out" / "checkpoint-6"
    unfinished.mkdir()
    (unfinished / "config.json").write_text("{}")
    fitting = str(store_dir / "out" / "checkpoint-4")
    with pytest.raises(StoreMismatchError) as refused:
        resume(store_dir, str(unfinished))
    assert "is incomplete: the process ended" in str(refused.value)
    assert f"Resume from {fitting}: train(resume_from_checkpoint={fitting!r})" in str(refused.value)
    assert_is(resume(store_dir), whole)
    said = capsys.readouterr().err
    assert f"{unfinished}: the process ended" in said and f"resuming from {fitting}" in said


def test_a_last_checkpoint_that_is_no_crash_s_is_not_passed_over(store_dir: pathlib.Path) -> None:
    train_until(store_dir, 3, "step")
    train_until(store_dir / "other", 7, "step")
    newest = checkpoints(store_dir / "other")[-1]
    moved = newest.rename(store_dir / "out" / newest.name)
    with pytest.raises(StoreMismatchError, match=r"checkpoint-6 .* and is a different one"):
        resume(store_dir)
    (moved / "optimizer.pt").unlink()
    with pytest.raises(StoreMismatchError, match=r"checkpoint-6 does not say which step"):
        resume(store_dir)


def test_a_resume_that_failed_is_not_made_up_for_by_the_next_training(
    store_dir: pathlib.Path,
) -> None:
    class NoData(helper.Trainer):  # type: ignore[misc]
        def get_train_dataloader(self) -> Any:
            if not self.state.log_history:
                self.state.log_history = [{}]
                end()
            return super().get_train_dataloader()

    train_until(store_dir, 3, "step")
    trainer = helper.make(store_dir, {}, model=helper.gpt2(), cls=NoData, **ARGUMENTS)
    with pytest.raises(Ended):
        trainer.train(resume_from_checkpoint=True)
    with pytest.raises(StoreError, match=r"resume=True"):
        trainer.train()


def test_an_older_checkpoint_is_refused_with_both_steps_and_the_one_that_fits(
    store_dir: pathlib.Path,
) -> None:
    train_until(store_dir, 7, "step")
    oldest, newest = checkpoints(store_dir)[0], checkpoints(store_dir)[-1]
    with pytest.raises(StoreMismatchError) as refused:
        resume(store_dir, str(oldest))
    assert re.search(r"belongs to step 2 of store.* is at step 6", str(refused.value))
    assert f"resume_from_checkpoint={str(newest)!r}" in str(refused.value)


def test_the_checkpoint_of_another_store_is_refused(store_dir: pathlib.Path) -> None:
    train_until(store_dir / "a", 3, "step")
    train_until(store_dir / "b", 3, "step")
    with pytest.raises(StoreMismatchError, match=r"is a different one, .*pass the store="):
        resume(store_dir / "b", str(checkpoints(store_dir / "a")[0]))


def test_a_checkpoint_continues_with_a_copy_of_its_store(
    whole: Any, store_dir: pathlib.Path
) -> None:
    train_until(store_dir, 7, "step")
    copies = [store_dir / "b", store_dir / "c"]
    lohan.snapshot(store_dir / "out" / "lohan", copies)
    assert_is(resume(store_dir, store=copies), whole)


class Copies(transformers.TrainerCallback):  # type: ignore[misc]
    """It copies the store with a checkpoint, as docs/trainer.md shows."""

    def __init__(self, step: int, out: pathlib.Path) -> None:
        self.step = step
        self.out = out

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Begin the copy."""
        if state.global_step == self.step:
            kwargs["model"].lohan.snapshot(self.out)


def test_a_copy_that_was_made_with_an_older_checkpoint_goes_back_to_it(
    whole: Any, store_dir: pathlib.Path
) -> None:
    copy = store_dir / "copy"
    callbacks = (Copies(2, copy), Dies(7, "step", end))
    trainer = helper.make(store_dir, {}, model=helper.gpt2(), callbacks=callbacks, **ARGUMENTS)
    with pytest.raises(Ended):
        trainer.train()
    helper.close_all()
    oldest = str(checkpoints(store_dir)[0])
    with pytest.raises(StoreMismatchError) as refused:
        resume(store_dir, oldest)
    assert "To go back to step 2, pass a copy that lohan.snapshot() made" in str(refused.value)
    assert f"train(resume_from_checkpoint={oldest!r})" in str(refused.value)
    assert_is(resume(store_dir, oldest, store=copy), whole)


def test_a_checkpoint_without_its_store_is_refused(store_dir: pathlib.Path) -> None:
    train_until(store_dir, 3, "step")
    with pytest.raises(StoreError) as refused:
        resume(store_dir, store=store_dir / "elsewhere")
    assert "the checkpoint's tensors are in the store" in "".join(refused.value.__notes__)


def test_a_checkpoint_of_a_plain_trainer_is_refused(store_dir: pathlib.Path) -> None:
    helper.make(store_dir, None, model=helper.gpt2(), **ARGUMENTS).train()
    with pytest.raises(StoreMismatchError, match=r"does not say which step of which store"):
        resume(store_dir)


def test_a_checkpoint_has_no_tensors_of_the_optimizer_s(store_dir: pathlib.Path) -> None:
    train_until(store_dir, 3, "step")
    (folder,) = checkpoints(store_dir)
    state = torch.load(folder / "optimizer.pt", weights_only=True)
    assert state["state"] == {}
    assert state["lohan"]["step"] == 2
    assert (folder / "optimizer.pt").stat().st_size < 8192


def test_a_learning_rate_of_the_arguments_does_not_rule_a_resumed_run(
    whole: Any, store_dir: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    train_until(store_dir, 7, "step")
    trainer = resume(store_dir, arguments={"learning_rate": 1.0})
    assert_is(trainer, whole)  # the checkpoint has the schedule, as without lohan
    assert "from now on" not in capsys.readouterr().err


def test_the_best_model_at_the_end_leaves_the_last_checkpoint_to_resume_from(
    store_dir: pathlib.Path,
) -> None:
    arguments = {
        **ARGUMENTS,
        "eval_strategy": "steps",
        "eval_steps": 2,
        "load_best_model_at_end": True,
        "metric_for_best_model": "loss",
        # so that the first checkpoint, which has the greatest loss, is the best
        "greater_is_better": True,
        "learning_rate": 1e-2,
        "lr_scheduler_type": "constant",
    }
    takes = {"trainer_takes": {"eval_dataset": helper.Rows(4)}}
    runs = []
    for name, steps in (("whole", 8), ("parts", 4)):
        trainer = helper.make(
            store_dir / name, {}, model=helper.gpt2(), **takes, **{**arguments, "max_steps": steps}
        )
        trainer.train()
        runs.append(trainer)
        helper.close_all()
    assert runs[1].state.best_global_step == 2, "the last one is not to be the best one"
    again = helper.make(
        store_dir / "parts", {}, model=helper.gpt2(), **takes, **{**arguments, "max_steps": 8}
    )
    again.train(resume_from_checkpoint=True)
    assert helper.logged(again, "loss") == helper.logged(runs[0], "loss")


@pytest.mark.parametrize("takes", [{}, {"method": "mezo"}], ids=["adamw", "mezo"])
def test_after_an_interrupt_the_process_is_told_how_to_resume_what_it_has_trained_past(
    takes: dict[str, Any], store_dir: pathlib.Path
) -> None:
    trainer = helper.make(store_dir, takes, callbacks=(Interrupts(3),), **ARGUMENTS)
    with pytest.raises(KeyboardInterrupt):
        trainer.train()
    with pytest.raises(StoreMismatchError, match="this process has trained on since") as caught:
        trainer.train(resume_from_checkpoint=True)
    folder = re.findall(r"resume_from_checkpoint='(.*)'", str(caught.value))[0]
    trainer.model.lohan.close()
    again = helper.make(store_dir, takes, **ARGUMENTS)
    again.train(resume_from_checkpoint=folder)
    plain = helper.make(store_dir / "whole", takes, **ARGUMENTS)
    plain.train()
    assert helper.logged(again, "loss") == helper.logged(plain, "loss")


def test_a_store_that_commits_by_itself_is_not_said_to_resume_an_older_checkpoint(
    store_dir: pathlib.Path,
) -> None:
    takes = {"commit_every": 2}  # close() commits step 3
    trainer = helper.make(store_dir, takes, callbacks=(Interrupts(3),), **ARGUMENTS)
    with pytest.raises(KeyboardInterrupt):
        trainer.train()
    with pytest.raises(StoreMismatchError, match=r"is at step 3, and no checkpoint") as caught:
        trainer.train(resume_from_checkpoint=True)
    assert "trained on since" not in str(caught.value)


class Interrupts(transformers.TrainerCallback):  # type: ignore[misc]
    """Ctrl-C at the end of a step."""

    def __init__(self, step: int) -> None:
        self.step = step

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Interrupt once."""
        if state.global_step == self.step:
            raise KeyboardInterrupt


def test_train_again_from_a_checkpoint_of_this_process(store_dir: pathlib.Path) -> None:
    trainer = helper.make(store_dir, {}, model=helper.gpt2(), **{**ARGUMENTS, "max_steps": 4})
    trainer.train()
    trainer.args.max_steps = 6
    trainer.train(resume_from_checkpoint=True)
    assert helper.session_of(trainer).step == 6
    with pytest.raises(StoreMismatchError, match=r"belongs to step 2.* is at step 6"):
        trainer.train(resume_from_checkpoint=str(checkpoints(store_dir)[0]))


@pytest.mark.parametrize("takes", [{"commit_every": 1}, {"config": lohan.Config(commit_every=1)}])
def test_with_commits_of_its_own_the_store_does_not_wait_for_checkpoints(
    takes: dict[str, Any], store_dir: pathlib.Path
) -> None:
    callbacks = (Dies(5, "step", end),)
    trainer = helper.make(store_dir, takes, model=helper.gpt2(), callbacks=callbacks, **ARGUMENTS)
    with pytest.raises(Ended):
        trainer.train()
    helper.close_all()
    with pytest.raises(StoreMismatchError, match=r"belongs to step 4.* is at step 5"):
        resume(store_dir)


def test_each_checkpoint_that_the_trainer_keeps_has_the_store_of_its_step(
    store_dir: pathlib.Path, whole: Any
) -> None:
    folder, copies = store_dir / "run", store_dir / "copies"
    arguments = {**ARGUMENTS, "save_total_limit": 2}
    callbacks = (lohan.TrainerCopies(copies),)
    trainer = helper.make(folder, {}, model=helper.gpt2(), callbacks=callbacks, **arguments)
    trainer.train()
    inside(trainer.model).commits.snapshot_now.wait()
    trainer.model.lohan.close()
    kept = sorted(path.name for path in checkpoints(folder))
    assert sorted(path.name for path in copies.iterdir()) == kept
    older = kept[0]
    assert older != f"checkpoint-{ARGUMENTS['max_steps']}"
    with pytest.raises(StoreMismatchError, match="To go back to step"):
        resume(folder, str(folder / "out" / older), store=folder / "out" / "lohan")
    again = resume(folder, str(folder / "out" / older), store=copies / older)
    assert_is(again, whole)


def test_no_copy_stays_of_a_checkpoint_that_the_trainer_removes_at_the_end(
    store_dir: pathlib.Path,
) -> None:
    """With the best model at its end, it removes the last checkpoint after that was saved."""
    copies = store_dir / "copies"
    best = {"load_best_model_at_end": True, "greater_is_better": True}  # the first one
    best |= {"metric_for_best_model": "eval_loss", "eval_strategy": "steps", "eval_steps": 2}
    trainer = helper.make(
        store_dir,
        {},
        model=helper.gpt2(),
        callbacks=(lohan.TrainerCopies(copies),),
        trainer_takes={"eval_dataset": helper.Rows()},
        **{**ARGUMENTS, **best, "save_total_limit": 1},
    )
    trainer.train()
    trainer.model.lohan.close()
    kept = [path.name for path in checkpoints(store_dir)]
    assert kept == ["checkpoint-2"] == [path.name for path in copies.iterdir()]


def test_copies_without_lohans_callback_are_an_error(store_dir: pathlib.Path) -> None:
    callbacks = (lohan.TrainerCopies(store_dir / "copies"),)
    arguments = {**ARGUMENTS, "max_steps": 2}
    trainer = helper.make(store_dir, None, model=helper.gpt2(), callbacks=callbacks, **arguments)
    with pytest.raises(ModelError, match=r"pass lohan\.TrainerCallback before it"):
        trainer.train()
