"""Zeroth-order training by Hugging Face's Trainer is a loop of zo_step over the same batches."""

from __future__ import annotations

import contextlib
import pathlib
from collections.abc import Callable, Iterator
from typing import Any

import accelerate.state
import lohan
import pytest
import torch
import trainer_helper as helper
import transformers
from lohan.common import _exit
from lohan.errors import ModelError, StepError, StoreMismatchError, UnsupportedError
from trainer_resume_helper import Dies, checkpoints

pytestmark = pytest.mark.usefixtures("closed")
EPS = 1e-3
LR = 1e-4
TAKES: dict[str, Any] = {"method": "mezo", "eps": EPS}
STEPS = 6


class Seen(transformers.Trainer):  # type: ignore[misc]
    """Records the batches of training, and the learning rates of its steps."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.batches: list[Any] = []

    def training_step(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        """Record a batch."""
        self.batches.append(dict(inputs))
        return super().training_step(model, inputs, *args, **kwargs)


def train(folder: pathlib.Path, *, resume: Any = None, **given: Any) -> Any:
    """Train with lohan's callback; return the Trainer."""
    takes = {**TAKES, **given.pop("takes", {})}
    given = {"cls": Seen, "learning_rate": LR, "max_steps": STEPS, "weight_decay": 0.0, **given}
    trainer = helper.make(folder, takes, **given)
    trainer.train(resume_from_checkpoint=resume)
    return trainer


Parts = Callable[[Any, list[Any]], float]


def mean_of_tokens(model: Any, group: list[Any]) -> float:
    """Return the mean loss over all tokens of a step's batches, as transformers computes it."""
    count = sum(int((batch["labels"][:, 1:] != -100).sum()) for batch in group)
    return sum(float(model(**batch, num_items_in_batch=count).loss) for batch in group)


def loop(
    folder: pathlib.Path,
    trainer: Any,
    *,
    loss: Parts = mean_of_tokens,
    together: int = 1,
    model: Any = None,
    **wrap: Any,
) -> tuple[list[float], Any]:
    """Repeat the steps of a trainer by hand: the same batches in order, with its learning rates."""
    model = lohan.wrap(
        helper.llama() if model is None else model,
        store=folder / "loop",
        **{**TAKES, "lr": LR, "seed": trainer.args.seed, **wrap},
    )
    losses = []
    rates = helper.logged(trainer, "learning_rate")
    for step, first in enumerate(range(0, len(trainer.batches), together)):
        group = trainer.batches[first : first + together]
        for each in model.optimizer.param_groups:
            each["lr"] = rates[step]
        losses.append(float(model.zo_step(lambda g=group: loss(model, g))))
    return losses, helper.values(model)


def assert_is(trainer: Any, expected: tuple[list[float], Any]) -> None:
    losses, state = expected
    assert helper.logged(trainer, "loss") == losses
    mine = helper.values(trainer.model)
    assert all(torch.equal(mine[key], value) for key, value in state.items())


# --- The same bits --------------------------------------------------------------------------------

ARGUMENTS: dict[str, dict[str, Any]] = {
    "constant": {"lr_scheduler_type": "constant"},
    "warm-up, cosine": {"warmup_steps": 2, "lr_scheduler_type": "cosine"},
    "default": {},
    "checkpointed blocks": {"activation_checkpointing": True},
}


@pytest.mark.parametrize("name", ARGUMENTS)
def test_a_trainer_s_steps_are_those_of_a_loop(name: str, store_dir: pathlib.Path) -> None:
    trainer = train(store_dir, **ARGUMENTS[name])
    assert helper.session_of(trainer).step == STEPS == len(trainer.batches)
    assert_is(trainer, loop(store_dir, trainer))
    rates = helper.logged(trainer, "learning_rate")
    assert (len(set(rates)) == 1) == (name == "constant")
    assert [record.lr for record in helper.session_of(trainer).method.journal.records] == rates
    assert helper.logged(trainer, "grad_norm") == []


def test_several_directions_decay_and_a_seed_are_the_loop_s(store_dir: pathlib.Path) -> None:
    trainer = train(store_dir, takes={"num_samples": 2, "seed": 11}, weight_decay=0.1, max_steps=3)
    model = helper.llama()
    decaying = [p for p in model.parameters() if p.dim() > 1]
    norms = [p for p in model.parameters() if p.dim() <= 1]
    groups = [{"params": decaying, "weight_decay": 0.1}, {"params": norms, "weight_decay": 0.0}]
    more = {"params": groups, "num_samples": 2, "seed": 11, "weight_decay": 0.1}
    assert_is(trainer, loop(store_dir, trainer, model=model, **more))


def test_a_budget_that_holds_a_part_changes_no_bit(store_dir: pathlib.Path) -> None:
    takes = {"host_bytes": 8_000_000, "runs": "together"}
    trainer = train(store_dir, takes=takes, max_steps=3)
    assert helper.session_of(trainer).runs.is_together
    assert_is(trainer, loop(store_dir, trainer))


def test_accumulated_batches_are_one_step_whose_loss_is_that_of_all(
    store_dir: pathlib.Path,
) -> None:
    # An epoch has 11 batches: groups of four, four and three.
    given = {"gradient_accumulation_steps": 4, "num_train_epochs": 1, "max_steps": -1}
    trainer = train(store_dir, **given)
    assert len(trainer.batches) == 11
    assert helper.session_of(trainer).step == trainer.state.global_step == 3
    assert_is(trainer, loop(store_dir, trainer, together=4))


class Means(Seen):
    """Its loss is a batch's mean, which the Trainer divides itself."""

    loss_is_scaled_for_ga = False

    def compute_loss(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        """Return the loss without the count of all tokens."""
        return model(**inputs).loss


def mean_of_means(model: Any, group: list[Any]) -> float:
    return sum(float(model(**batch).loss) / len(group) for batch in group)


@pytest.mark.parametrize("together", [1, 3])
def test_a_loss_of_one_s_own_that_is_not_scaled_is_the_mean_over_batches(
    together: int, store_dir: pathlib.Path
) -> None:
    trainer = train(store_dir, cls=Means, gradient_accumulation_steps=together, max_steps=3)
    assert_is(trainer, loop(store_dir, trainer, loss=mean_of_means, together=together))


def test_what_data_without_a_length_leave_of_a_step_continues_in_the_next_epoch(
    store_dir: pathlib.Path,
) -> None:
    trainer = train(
        store_dir,
        per_device_train_batch_size=1,
        gradient_accumulation_steps=4,
        trainer_takes={"train_dataset": helper.Endless()},
    )
    assert trainer.state.epoch > 1, "nothing was left to the next epoch"
    session = helper.session_of(trainer)
    assert session.step == STEPS == trainer.state.global_step
    logged = helper.logged(trainer, "loss")
    assert [record.losses[0] for record in session.method.journal.records] == pytest.approx(logged)


def smoothed(trainer: Any) -> Parts:
    def loss(model: Any, group: list[Any]) -> float:
        (batch,) = group
        count = (batch["labels"][:, 1:] != -100).sum()
        inputs = {name: value for name, value in batch.items() if name != "labels"}
        outputs = model(**inputs)
        made = trainer.label_smoother(
            outputs, batch["labels"], shift_labels=True, num_items_in_batch=count
        )
        return float(made)

    return loss


def test_smoothed_labels_are_those_of_the_trainer_in_both_runs(store_dir: pathlib.Path) -> None:
    trainer = train(store_dir, label_smoothing_factor=0.1, max_steps=3)
    assert_is(trainer, loop(store_dir, trainer, loss=smoothed(trainer)))


class Rewards(Seen):
    """Its loss is a number that has no gradient."""

    def compute_loss(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        """Of Python."""
        return reward(model, inputs)


def reward(model: Any, batch: Any) -> float:
    return -(float(model(input_ids=batch["input_ids"]).logits.numpy().std()) ** 2)


def test_a_loss_that_cannot_be_differentiated_is_trained(store_dir: pathlib.Path) -> None:
    trainer = train(store_dir, cls=Rewards, max_steps=3)
    expected = loop(store_dir, trainer, loss=lambda model, group: reward(model, group[0]))
    assert_is(trainer, expected)


def test_bf16_is_autocast_in_both_runs(store_dir: pathlib.Path) -> None:
    trainer = train(store_dir, bf16=True, use_cpu=True, max_steps=3)

    def cast(model: Any, group: list[Any]) -> float:
        with torch.autocast("cpu", torch.bfloat16):
            return mean_of_tokens(model, group)

    assert_is(trainer, loop(store_dir, trainer, loss=cast))


@pytest.fixture
def unscaled() -> Iterator[Callable[[Any], Any]]:
    """Accelerate's way of fp16, which it has for GPUs only, on the CPU."""

    def prepare(trainer: Any) -> Any:
        trainer.args.fp16 = True
        trainer.accelerator.state._mixed_precision = "fp16"
        trainer.accelerator.native_amp = True
        trainer.accelerator.scaler = torch.amp.GradScaler("cpu")
        return trainer

    yield prepare
    accelerate.state.AcceleratorState._reset_state(True)


def test_fp16_is_autocast_and_no_loss_is_scaled(
    unscaled: Callable[[Any], Any], store_dir: pathlib.Path
) -> None:
    trainer = unscaled(helper.make(store_dir, dict(TAKES), max_steps=3, learning_rate=LR))
    trainer.train()
    assert helper.session_of(trainer).step == 3
    assert all(0 < loss < 6 for loss in helper.logged(trainer, "loss"))


# --- The rest of a training -----------------------------------------------------------------------


class Looks(transformers.TrainerCallback):  # type: ignore[misc]
    """Copies the parameters at each evaluation, and generates tokens."""

    def __init__(self) -> None:
        self.seen: list[Any] = []
        self.texts: list[Any] = []

    def on_evaluate(self, *args: Any, model: Any = None, **kwargs: Any) -> None:
        """Generate five tokens after three."""
        self.seen.append(helper.values(model))
        begun = torch.tensor([[3, 5, 7]])
        self.texts.append(
            model.generate(begun, max_new_tokens=5, do_sample=False, pad_token_id=0).tolist()
        )


def test_evaluation_in_mid_training_sees_the_parameters_of_its_step_and_changes_no_bit(
    store_dir: pathlib.Path,
) -> None:
    looks = Looks()
    takes = {"train_dataset": helper.Rows(), "eval_dataset": helper.Rows(5)}
    trainer = train(
        store_dir,
        callbacks=(looks,),
        trainer_takes=takes,
        eval_strategy="steps",
        eval_steps=3,
    )
    assert_is(trainer, loop(store_dir, trainer))
    plain = helper.make(store_dir / "plain", None, trainer_takes=takes)
    told = []
    for state, text in zip(looks.seen, looks.texts, strict=True):
        plain.model.load_state_dict(state)
        told.append(plain.evaluate()["eval_loss"])
        begun = torch.tensor([[3, 5, 7]])
        asked = {"max_new_tokens": 5, "do_sample": False, "pad_token_id": 0}
        assert plain.model.generate(begun, **asked).tolist() == text
    assert len(told) == 2 and told[0] != told[1]
    assert helper.logged(trainer, "eval_loss") == told
    assert trainer.evaluate()["eval_loss"] == told[1]
    trainer.save_model(str(store_dir / "saved"))
    saved = transformers.LlamaForCausalLM.from_pretrained(store_dir / "saved").state_dict()
    assert all(torch.equal(saved[key], value) for key, value in looks.seen[1].items())


def test_a_second_train_continues_and_step_is_a_loop_s_again(store_dir: pathlib.Path) -> None:
    trainer = train(store_dir, max_steps=2)
    trainer.train()
    assert helper.session_of(trainer).step == 4
    optimizer = trainer.model.optimizer
    with pytest.raises(StepError, match="no gradients"):
        optimizer.step()
    optimizer.step(lambda: mean_of_tokens(trainer.model, trainer.batches[:1]))
    assert helper.session_of(trainer).step == 5


def test_a_model_without_storage_is_trained_by_lohan_s_trainer(store_dir: pathlib.Path) -> None:
    class Own(lohan.TrainerMixin, Seen):  # type: ignore[misc]
        pass

    model = helper.llama()
    model.save_pretrained(store_dir / "large")
    with lohan.empty():
        empty = transformers.LlamaForCausalLM(model.config)
    takes = {"weights": store_dir / "large"}
    trainer = train(store_dir, model=empty, takes=takes, cls=Own, max_steps=3)
    assert_is(trainer, loop(store_dir, trainer))


# --- Checkpoints ----------------------------------------------------------------------------------

SAVED: dict[str, Any] = {
    "max_steps": 7,
    "gradient_accumulation_steps": 2,
    "warmup_steps": 2,
    "lr_scheduler_type": "cosine",
    "save_strategy": "steps",
    "save_steps": 2,
}


class EndedError(Exception):
    """A test has ended a training."""


def end() -> None:
    raise EndedError


def train_until(folder: pathlib.Path, step: int, where: str, **given: Any) -> None:
    with contextlib.suppress(EndedError):
        given |= {"model": helper.gpt2(), "callbacks": (Dies(step, where, end),), **SAVED}
        train(folder, **given)
        pytest.fail("it was to end")
    helper.close_all()


def resumed(folder: pathlib.Path, resume: Any = True, **given: Any) -> Any:
    """Resume as a new process does: with another state of the generator and another model."""
    torch.manual_seed(12345)
    return train(folder, resume=resume, model=helper.gpt2(), **{**SAVED, **given})


def assert_continues(trainer: Any, folder: pathlib.Path, **given: Any) -> None:
    whole = train(folder / "whole", model=helper.gpt2(), **SAVED, **given)
    losses = helper.logged(whole, "loss")
    assert helper.logged(trainer, "learning_rate") == helper.logged(whole, "learning_rate")
    assert_is(trainer, (losses, helper.values(whole.model)))


@pytest.mark.parametrize("where", ["saved", "done"])
def test_a_checkpoint_continues_with_the_same_bits(where: str, store_dir: pathlib.Path) -> None:
    train_until(store_dir, 4, where)
    folder = checkpoints(store_dir)[-1]
    state = torch.load(folder / "optimizer.pt", weights_only=True)
    assert state["state"] == {} and state["lohan"]["step"] == 4
    trainer = resumed(store_dir)
    assert len(trainer.batches) == 5, "two, the one that ends an epoch, two"
    assert_continues(trainer, store_dir)


class SeenFirst(Seen, helper.SchedulesFirst):
    """Its scheduler is made for the optimizer that its own method has made."""


@pytest.mark.parametrize("is_resumed", [False, True])
def test_a_scheduler_of_the_optimizer_that_the_trainer_made_sets_the_learning_rates(
    is_resumed: bool, store_dir: pathlib.Path
) -> None:
    if is_resumed:
        train_until(store_dir, 4, "done", cls=SeenFirst)
    trainer = resumed(store_dir, is_resumed, cls=SeenFirst)
    assert_continues(trainer, store_dir)


@pytest.mark.parametrize("storage", ["bf16", "fp8"])
def test_parameters_in_fewer_bits_are_those_of_a_loop_and_continue(
    storage: str, store_dir: pathlib.Path
) -> None:
    trainer = train(store_dir / "one", takes={"storage": storage})
    assert_is(trainer, loop(store_dir, trainer, storage=storage))
    helper.close_all()
    train_until(store_dir, 4, "done", takes={"storage": storage})
    trainer = resumed(store_dir, takes={"storage": storage})
    assert_continues(trainer, store_dir, takes={"storage": storage})


def test_a_checkpoint_continues_with_a_copy_of_its_store(store_dir: pathlib.Path) -> None:
    train_until(store_dir, 4, "done")
    lohan.snapshot(store_dir / "out" / "lohan", store_dir / "copy")
    trainer = resumed(store_dir, takes={"store": store_dir / "copy"})
    assert_continues(trainer, store_dir)


def test_a_run_that_ended_between_checkpoints_makes_the_steps_again(
    store_dir: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    train_until(store_dir, 5, "step")
    journal = store_dir / "out" / "lohan" / "journal.lohan"
    before = journal.read_bytes()
    trainer = resumed(store_dir)
    assert "the store is at step 5" in capsys.readouterr().err
    assert journal.with_suffix(".before").read_bytes() == before
    assert_continues(trainer, store_dir)


def test_an_older_checkpoint_is_continued_too(store_dir: pathlib.Path) -> None:
    train_until(store_dir, 4, "done")
    oldest, _ = checkpoints(store_dir)
    assert_continues(resumed(store_dir, str(oldest)), store_dir)


def test_a_checkpoint_that_parameters_were_written_behind_is_refused_with_a_way_out(
    store_dir: pathlib.Path,
) -> None:
    takes = {"write_every": 1}
    with contextlib.suppress(EndedError):
        train(
            store_dir, takes=takes, model=helper.gpt2(), callbacks=(Dies(5, "step", end),), **SAVED
        )
    helper.close_all()
    newest = checkpoints(store_dir)[-1]
    for asked in (True, str(newest)):
        with pytest.raises(StoreMismatchError) as refused:
            resumed(store_dir, asked, takes=takes)
        text = str(refused.value)
        assert f"{newest} belongs to step 4" in text and "is at step 5" in text
        assert "lohan.export(" in text and 'method="mezo", resume=True' in text
    lohan.export(store_dir / "out" / "lohan", store_dir / "exported", dtype="float32")
    assert (store_dir / "exported" / "model.safetensors").is_file()


@pytest.mark.parametrize("written", [None, b"", b'{"epoch": 0.5, "log_his'])
def test_a_folder_that_was_never_finished_is_passed_over_or_refused(
    store_dir: pathlib.Path, written: bytes | None
) -> None:
    train_until(store_dir, 4, "files")
    if written is not None:  # the process died in the write of the last file
        (checkpoints(store_dir)[-1] / "trainer_state.json").write_bytes(written)
    with pytest.raises(StoreMismatchError, match=r"is incomplete.*is at step 4"):
        resumed(store_dir, str(checkpoints(store_dir)[-1]))
    assert_continues(resumed(store_dir), store_dir)


def test_a_store_of_the_other_method_is_refused(store_dir: pathlib.Path) -> None:
    train_until(store_dir, 4, "done")
    other = {"learning_rate": LR, "model": helper.gpt2(), **SAVED}
    with pytest.raises(StoreMismatchError, match='method="mezo", not method="adamw"'):
        helper.make(store_dir, {}, **other).train(resume_from_checkpoint=True)


# --- Refusals, and what is said -------------------------------------------------------------------


def test_what_has_no_meaning_without_backward_is_said_where_somebody_has_set_it(
    store_dir: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    ours = train(store_dir / "a", max_steps=2)
    assert "no meaning" not in capsys.readouterr().err
    other = train(store_dir / "b", max_steps=2, max_grad_norm=0.3, adam_beta1=0.8)
    said = capsys.readouterr().err
    assert "max_grad_norm=0.3 has no meaning" in said and "adam_beta1=0.8 has no meaning" in said
    assert helper.logged(ours, "loss") == helper.logged(other, "loss")
    train(store_dir / "c", max_steps=2, max_grad_norm=0.0)
    assert "no meaning" not in capsys.readouterr().err


def test_what_cannot_be_had_is_refused_by_name_before_anything_is_made(
    store_dir: pathlib.Path,
) -> None:
    best = {
        "load_best_model_at_end": True,
        "eval_strategy": "steps",
        "save_strategy": "steps",
        "save_steps": 500,
        "trainer_takes": {"eval_dataset": helper.Rows(2)},
    }
    model = helper.llama()
    own = torch.optim.AdamW(model.parameters())
    for given, match in (
        (best, "^load_best_model_at_end=True: .*best_model_checkpoint"),
        ({"optim": "sgd"}, "^optim='sgd'"),
        ({"model": model, "trainer_takes": {"optimizers": (own, None)}}, "^optimizers="),
    ):
        with pytest.raises(UnsupportedError, match=match):
            train(store_dir, **given)
    for takes, name in (
        ({"method": "tiger"}, "tiger"),
        ({"lr": 1e-3}, "lr="),
        ({"method": "adamw"}, "eps="),
        ({"method": "adamw", "eps": 1e-8}, "eps="),
    ):
        with pytest.raises(ModelError, match=name):
            train(store_dir, takes=takes)
    with pytest.raises(ModelError, match="seed= is only valid with"):
        lohan.TrainerCallback(seed=1)
    assert not (store_dir / "out" / "lohan").exists()


class Twice(transformers.Trainer):  # type: ignore[misc]
    """Computes two losses in a step."""

    def training_step(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        """Return the sum of two losses of a batch."""
        first = self.compute_loss(model, inputs)
        return first + self.compute_loss(model, inputs)


class Otherwise(transformers.Trainer):  # type: ignore[misc]
    """A loss that compute_loss does not know."""

    def training_step(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        """Return a loss without calling backward or reporting it."""
        with torch.no_grad():
            return model(**inputs).loss


@pytest.mark.parametrize("cls", [Twice, Otherwise])
def test_a_training_step_that_is_not_one_compute_loss_is_refused(
    cls: type[Any], store_dir: pathlib.Path
) -> None:
    with pytest.raises(UnsupportedError, match=f"training_step of {cls.__name__} calls"):
        train(store_dir, cls=cls)


class Penalty(transformers.Trainer):  # type: ignore[misc]
    """Also runs the backward of its own loss."""

    def training_step(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        """Run a second backward after the Trainer's own."""
        loss = super().training_step(model, inputs, *args, **kwargs)
        self.accelerator.backward(torch.ones(1, requires_grad=True).sum())
        return loss


def test_backward_through_another_loss_is_refused(store_dir: pathlib.Path) -> None:
    with pytest.raises(StepError, match="not compute_loss's"):
        train(store_dir, cls=Penalty)


def test_a_loss_that_is_no_number_ends_training_before_its_step(store_dir: pathlib.Path) -> None:
    class Fails(Seen):
        def compute_loss(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
            loss = model(**inputs).loss
            return loss * float("nan") if len(self.batches) == 3 else loss

    with pytest.raises(StepError, match="loss of a step is nan"):
        train(store_dir, cls=Fails)
    (session,) = (session for session in _exit.sessions if not session.closed)
    assert session.step == 2
