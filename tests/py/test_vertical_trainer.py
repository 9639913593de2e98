"""A Trainer whose micro-batches take turns has the bits of the horizontal order."""

from __future__ import annotations

import pathlib
from collections.abc import Iterator
from typing import Any

import accelerate.state
import pytest
import torch
import trainer_helper as helper
import transformers
from lohan.errors import ModelError, UnsupportedError
from lohan.session._vertical import Vertical

COUNT = 4
STEPS = [4, 4, 3]  # 11 batches of the first epoch


@pytest.fixture(autouse=True)
def quiet(store_dir: pathlib.Path) -> Iterator[None]:
    """Nothing is left open for the next test."""
    yield
    helper.close_all()
    accelerate.state.AcceleratorState._reset_state(True)


@pytest.fixture
def steps_in_turns(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The number of micro-batches of each step that ran in turns."""
    found: list[int] = []
    plain = Vertical._forward

    def forward(session: Any, functions: Any, starts: Any) -> Any:
        found.append(len(functions))
        return plain(session, functions, starts)

    monkeypatch.setattr(Vertical, "_forward", forward)
    return found


class Even(helper.Rows):
    """Sequences of one length, so that each forward draws as many random numbers."""

    def __init__(self, count: int) -> None:
        super().__init__(count)
        self.rows = [row[:6] for row in self.rows]


def make(folder: pathlib.Path, order: str, **given: Any) -> Any:
    given = {"max_steps": 3, "gradient_accumulation_steps": COUNT, **given}
    takes = {"order": order, **given.pop("lohan_takes", {})}
    return helper.make(folder / order, takes, **given)


def deep() -> Any:
    """Make a model with dropout, tied weights and many blocks."""
    config = transformers.GPT2Config(
        vocab_size=helper.VOCABULARY, n_embd=32, n_layer=8, n_head=2, n_positions=32
    )
    torch.manual_seed(0)
    return transformers.GPT2LMHeadModel(config)


def assert_same(these: Any, those: Any) -> None:
    for name in ("loss", "grad_norm", "eval_loss"):
        assert str(helper.logged(these, name)) == str(helper.logged(those, name))  # nan too
    assert len(set(helper.logged(these, "loss"))) > 1, "nothing was trained"
    expected = helper.values(those.model)
    for key, value in helper.values(these.model).items():
        assert torch.equal(value, expected[key]), key
    assert these.state.num_input_tokens_seen == those.state.num_input_tokens_seen


def mean_of_squares(outputs: Any, labels: torch.Tensor, num_items_in_batch: Any = None) -> Any:
    return outputs.logits.square().sum() / num_items_in_batch


CASES: dict[str, dict[str, Any]] = {
    "clipped": {"max_grad_norm": 0.05},
    "two epochs": {"num_train_epochs": 2, "max_steps": -1},
    "smoothed labels": {"label_smoothing_factor": 0.1, "include_num_input_tokens_seen": True},
    "autocast": {"bf16": True, "use_cpu": True},
    "evaluated": {
        "eval_strategy": "steps",
        "eval_steps": 1,
        "trainer_takes": {"eval_dataset": helper.Rows(6)},
    },
    "a loss of the user's": {"trainer_takes": {"compute_loss_func": mean_of_squares}},
    "checkpointed blocks": {"gradient_checkpointing": True},
    "recomputed blocks": {"lohan_takes": {"activations": "recompute"}},
    "no length": {
        "per_device_train_batch_size": 1,
        "trainer_takes": {"train_dataset": helper.Endless()},
    },
}


@pytest.mark.parametrize("name", CASES)
def test_a_trainer_logs_the_same_bits_in_both_orders(
    name: str, store_dir: pathlib.Path, steps_in_turns: list[int]
) -> None:
    trainers = []
    for order in ("horizontal", "vertical"):
        trainers.append(make(store_dir, order, **CASES[name]))
        trainers[-1].train()
    assert_same(trainers[1], trainers[0])
    assert helper.session_of(trainers[1]).order == "vertical"
    others = {"two epochs": [*STEPS, *STEPS], "no length": [COUNT] * 3}
    assert steps_in_turns == others.get(name, STEPS)


def test_dropout_and_auto_have_the_same_bits_too(
    store_dir: pathlib.Path, steps_in_turns: list[int]
) -> None:
    with pytest.raises(Exception, match="at least") as refused:
        make(store_dir / "no", "auto", model=deep(), lohan_takes={"host_bytes": 1}).train()
    least = int(str(refused.value).split("at least ")[1].split()[0])
    trainers = []
    for order in ("horizontal", "vertical", "auto"):
        takes = {"lohan_takes": {"host_bytes": least}, "trainer_takes": {"train_dataset": Even(22)}}
        trainers.append(make(store_dir, order, model=deep(), **takes))
        trainers[-1].train()
    assert_same(trainers[1], trainers[0])
    assert_same(trainers[2], trainers[0])
    assert helper.session_of(trainers[2]).order == "vertical"
    # "vertical" has to repeat its first step; "auto" runs it in the horizontal order.
    assert steps_in_turns == [*STEPS, *STEPS[1:]]


def test_a_scaled_loss_has_the_same_bits(
    store_dir: pathlib.Path, steps_in_turns: list[int]
) -> None:
    trainers = []
    for order in ("horizontal", "vertical"):
        trainer = make(store_dir, order, max_steps=5)
        # Accelerate's way of fp16, which it has for GPUs only, on the CPU.
        trainer.args.fp16 = True
        trainer.accelerator.state._mixed_precision = "fp16"
        trainer.accelerator.native_amp = True
        trainer.accelerator.scaler = torch.amp.GradScaler("cpu", init_scale=2.0**20)
        trainer.train()
        assert trainer.accelerator.scaler.get_scale() < 2.0**20, "nothing overflowed"
        trainers.append(trainer)
    assert_same(trainers[1], trainers[0])
    assert steps_in_turns == [*STEPS, 4, 4]


class Stops(transformers.TrainerCallback):  # type: ignore[misc]
    """Stops after the second step."""

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> Any:
        """Stop, if two steps are done."""
        control.should_training_stop |= state.global_step == 2
        return control


def test_a_run_that_resumes_has_the_same_bits(
    store_dir: pathlib.Path, steps_in_turns: list[int]
) -> None:
    whole = make(store_dir / "whole", "horizontal", max_steps=5)
    whole.train()
    saved = {"save_strategy": "steps", "save_steps": 2, "max_steps": 5}
    first = make(store_dir, "vertical", callbacks=(Stops(),), **saved)
    first.train()
    helper.session_of(first).close()
    again = make(store_dir, "vertical", **saved)
    again.train(resume_from_checkpoint=True)
    expected = helper.values(whole.model)
    found = helper.values(again.model)
    assert all(torch.equal(found[key], value) for key, value in expected.items())
    assert helper.logged(again, "loss") == helper.logged(whole, "loss")
    assert steps_in_turns == [*STEPS, 4, 4]


class Twice(transformers.Trainer):  # type: ignore[misc]
    """Runs two backwards for each batch."""

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        """Run the Trainer's, and one backward more."""
        loss = super().training_step(*args, **kwargs)
        self.accelerator.backward(torch.ones((), requires_grad=True))
        return loss


class Named(transformers.Trainer):  # type: ignore[misc]
    """Passes an argument to backward."""

    def training_step(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        """Compute a loss, and keep its graph."""
        loss = self.compute_loss(model, inputs)
        self.accelerator.backward(loss, retain_graph=True)
        return loss.detach()


class Alone(transformers.Trainer):  # type: ignore[misc]
    """Runs backward without Accelerate."""

    def training_step(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        """Compute a loss, and run its backward."""
        loss = self.compute_loss(model, inputs)
        loss.backward()
        return loss.detach()


@pytest.mark.parametrize(
    ("cls", "said"),
    [
        (Twice, r"training_step of Twice calls accelerator.backward\(\) 2 times"),
        (Named, "training_step of Named passes retain_graph to"),
        (Alone, r"a function of accumulate\(\) ran a backward"),
    ],
)
def test_a_training_step_with_another_backward_is_refused(
    cls: type[transformers.Trainer], said: str, store_dir: pathlib.Path
) -> None:
    trainer = make(store_dir, "vertical", cls=cls)
    with pytest.raises(UnsupportedError, match=said):
        trainer.train()
    assert "backward" not in trainer.accelerator.__dict__


def test_an_epoch_that_a_callback_ends_within_a_step_is_refused(store_dir: pathlib.Path) -> None:
    class Ends(transformers.TrainerCallback):  # type: ignore[misc]
        def on_substep_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> Any:
            control.should_epoch_stop = True
            return control

    trainer = make(store_dir, "vertical", callbacks=(Ends(),), num_train_epochs=3, max_steps=-1)
    with pytest.raises(UnsupportedError, match="an epoch ended 3 micro-batches before the end"):
        trainer.train()


def test_settings_that_have_no_micro_batches_are_refused(store_dir: pathlib.Path) -> None:
    with pytest.raises(ModelError, match="set gradient_accumulation_steps in TrainingArguments"):
        make(store_dir, "vertical", gradient_accumulation_steps=1)
    with pytest.raises(ModelError, match='no meaning with method="mezo"'):
        make(store_dir, "vertical", lohan_takes={"method": "mezo"})
    make(store_dir, "auto", gradient_accumulation_steps=1, max_steps=1).train()
