"""Hugging Face's Trainer with lohan's callback, compared with the same Trainer without it."""

from __future__ import annotations

import pathlib
import re
from collections.abc import Iterator
from typing import Any

import accelerate.state
import lohan
import numpy as np
import pytest
import torch
import trainer_helper as helper
import transformers
from lohan.common import _exit
from lohan.common._inside import inside
from lohan.errors import BudgetError, ModelError, StoreError, UnsupportedError
from lohan.hf import _trainer_args
from lohan.session._training import Training
from transformers import LlamaForCausalLM

pytestmark = pytest.mark.usefixtures("closed")
# AdamW with the same operations in another order: some units in the last place of fp32 per step.
CLOSE = {"rtol": 2e-5, "atol": 2e-6}


def both(folder: pathlib.Path, **given: Any) -> tuple[Any, Any]:
    """Run the same training with and without lohan."""
    trainers = []
    for name, takes in (("with", {}), ("without", None)):
        trainer = helper.make(folder / name, takes, **given)
        trainer.train()
        trainers.append(trainer)
    return trainers[0], trainers[1]


def assert_close(ours: Any, theirs: Any, *names: str, **tolerance: float) -> None:
    for name in ("loss", *names):
        expected = helper.logged(theirs, name)
        assert len(expected) > 1
        np.testing.assert_allclose(
            helper.logged(ours, name), expected, **(tolerance or CLOSE), err_msg=name
        )


ARGUMENTS: dict[str, dict[str, Any]] = {
    "default": {},
    "accumulated": {"gradient_accumulation_steps": 4, "max_steps": 4},
    "a last group that is smaller": {
        "gradient_accumulation_steps": 4,
        "num_train_epochs": 2,
        "max_steps": -1,
    },
    "clipped": {"max_grad_norm": 0.3},
    "not clipped": {"max_grad_norm": 0.0},
    "warm-up, linear": {"warmup_steps": 3, "lr_scheduler_type": "linear"},
    "cosine": {"warmup_steps": 2, "lr_scheduler_type": "cosine"},
    "cosine, to a least rate": {  # this schedule divides min_lr by the optimizer's default rate
        "lr_scheduler_type": "cosine_with_min_lr",
        "lr_scheduler_kwargs": {"min_lr": 1e-3},
    },
    "checkpointed blocks": {"activation_checkpointing": True},
    "by length": {"train_sampling_strategy": "group_by_length"},
    "a worker for the data": {"dataloader_num_workers": 1},
    "smoothed labels": {"label_smoothing_factor": 0.1},
    "not fused": {"optim": "adamw_torch"},
    "other betas": {"adam_beta1": 0.8, "adam_beta2": 0.95, "adam_epsilon": 1e-6},
    "noise": {"neftune_noise_alpha": 5.0},
}


@pytest.mark.parametrize("name", ARGUMENTS)
def test_a_trainer_with_lohan_logs_what_it_logs_without(name: str, store_dir: pathlib.Path) -> None:
    ours, theirs = both(store_dir, **ARGUMENTS[name])
    assert_close(ours, theirs, "grad_norm", "learning_rate")
    state = helper.values(ours.model)
    for key, value in theirs.model.state_dict().items():
        torch.testing.assert_close(state[key], value, rtol=1e-4, atol=2e-5)
    groups = [(g["weight_decay"], len(g["params"])) for g in ours.model.optimizer.param_groups]
    assert groups == [(g["weight_decay"], len(g["params"])) for g in theirs.optimizer.param_groups]


def test_what_data_without_a_length_leave_of_a_step_continues_in_the_next_epoch(
    store_dir: pathlib.Path,
) -> None:
    given = {"per_device_train_batch_size": 1, "gradient_accumulation_steps": 4}
    ours, theirs = both(store_dir, trainer_takes={"train_dataset": helper.Endless()}, **given)
    assert ours.state.epoch > 1, "nothing was left to the next epoch"
    assert_close(ours, theirs, "grad_norm")


def makes(*groups: dict[str, Any], **settings: Any) -> type[transformers.Trainer]:
    """Return a subclass of Trainer that makes its own AdamW, with the parameters in two groups."""

    class Own(transformers.Trainer):  # type: ignore[misc]
        def create_optimizer(self, model: Any = None) -> Any:
            if self.optimizer is None:
                params = list(self.model.parameters())
                parts = (params[:5], params[5:])
                made = [{"params": p, **g} for p, g in zip(parts, groups, strict=True)]
                self.optimizer = torch.optim.AdamW(made or params, **settings)
            return self.optimizer

    return Own


def test_groups_that_a_trainer_makes_itself_keep_their_rates_and_their_names(
    store_dir: pathlib.Path,
) -> None:
    cls = makes({"lr": 1e-3, "name": "first"}, {"betas": (0.5, 0.9), "name": "last"}, lr=1e-2)
    ours, theirs = both(store_dir, cls=cls)
    assert_close(ours, theirs, "grad_norm")
    assert [group["name"] for group in ours.model.optimizer.param_groups] == ["first", "last"]


def test_a_rule_that_a_trainer_makes_itself_is_refused_by_name(store_dir: pathlib.Path) -> None:
    cls = makes({}, {"amsgrad": True})
    with pytest.raises(UnsupportedError, match=r"^amsgrad=True in a parameter group"):
        helper.make(store_dir, {}, cls=cls).train()


def test_a_training_that_begins_reads_no_values_of_parameters(
    store_dir: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shown, begun = [], []
    plain = Training.resident

    def resident(session: Any, index: int) -> Any:
        shown.append(index)
        return plain(session, index)

    class Reads(transformers.TrainerCallback):  # type: ignore[misc]
        def on_train_begin(self, *args: Any, model: Any = None, **kwargs: Any) -> None:
            begun.append(len(shown))
            assert all(bool(param.isfinite().all()) for param in model.parameters())

    monkeypatch.setattr(Training, "resident", resident)
    trainer = helper.make(store_dir, {}, max_steps=1, callbacks=(Reads(),))
    trainer.train()
    count = len(shown)
    trainer.train()
    assert begun == [0, count] and count > 0


def test_dropout_draws_the_same_numbers(store_dir: pathlib.Path) -> None:
    runs = []
    for name, takes in (("with", {}), ("without", None)):
        runs.append(helper.make(store_dir / name, takes, model=helper.gpt2()))
        runs[-1].train()
    assert_close(*runs, "grad_norm")


def least_host_bytes(folder: pathlib.Path, **given: Any) -> int:
    with pytest.raises(BudgetError) as refused:
        helper.make(folder, {"host_bytes": 1}, **given).train()
    found = re.search(r"at least (\d+)", str(refused.value))
    assert found
    return int(found[1])


@pytest.mark.parametrize(
    ("dtype", "accumulate"),
    [(torch.float32, 1), (torch.float32, 4), (torch.bfloat16, 4), (torch.float16, 1)],
    ids=str,
)
def test_where_the_states_are_changes_no_bit_of_a_trainer_s_losses(
    dtype: torch.dtype, accumulate: int, store_dir: pathlib.Path
) -> None:
    given = {"gradient_accumulation_steps": accumulate}
    least = least_host_bytes(store_dir / "refused", model=helper.llama(dtype), **given)
    tiers: list[dict[str, Any]] = [
        {},
        {"host_bytes": least, "store": [store_dir / "a", store_dir / "b"]},
        {"device": "emu", "commit_every": 1},
    ]
    runs = []
    for number, takes in enumerate(tiers):
        trainer = helper.make(store_dir / f"{number}", takes, model=helper.llama(dtype), **given)
        trainer.train()
        runs.append((helper.logged(trainer, "loss"), helper.values(trainer.model)))
    for losses, state in runs[1:]:
        assert losses == runs[0][0]
        assert all(torch.equal(state[key], value) for key, value in runs[0][1].items())
    assert len(set(runs[0][0])) == len(runs[0][0]), "nothing was trained"


def test_without_clipping_updates_may_run_as_gradients_arrive(store_dir: pathlib.Path) -> None:
    logs = {}
    for schedule in ("optimized", "deferred"):
        takes = {"schedule": schedule}
        trainer = helper.make(store_dir / schedule, takes, max_grad_norm=0.0)
        trainer.train()
        assert helper.session_of(trainer).config.schedule == schedule
        logs[schedule] = helper.logged(trainer, "loss")
        assert bool(helper.logged(trainer, "grad_norm")) == (schedule == "deferred")
    assert logs["optimized"] == logs["deferred"]
    with pytest.raises(UnsupportedError, match=r"schedule='optimized'.*max_grad_norm=1\.0"):
        helper.make(store_dir / "refused", {"schedule": "optimized"}).train()
    with pytest.raises(UnsupportedError, match=r"IO\(clip='repeat'\) .*: leave clip= out"):
        helper.make(store_dir / "clip", {"io": lohan.IO(clip="repeat")})


def test_bf16_runs_under_autocast_and_no_cast_of_a_weight_is_kept(store_dir: pathlib.Path) -> None:
    kept: list[int] = []

    class Kept(transformers.TrainerCallback):  # type: ignore[misc]
        def on_pre_optimizer_step(self, *args: Any, model: Any = None, **kwargs: Any) -> None:
            is_cached = torch.is_autocast_cache_enabled()
            kept.append(inside(model).forwards.autocast.is_seen and is_cached)

    given: dict[str, Any] = {"bf16": True, "use_cpu": True}
    ours = helper.make(store_dir / "with", {}, callbacks=(Kept(),), **given)
    ours.train()
    theirs = helper.make(store_dir / "without", None, **given)
    theirs.train()
    assert kept == [True] * 6, "accelerate's autocast is inside the model's call"
    # A bit of a parameter decides how its cast to bf16 is rounded.
    assert_close(ours, theirs, rtol=2e-3)


@pytest.fixture
def scaled() -> Iterator[Any]:
    """Accelerate's way of fp16, which it has for GPUs only, on the CPU."""

    def prepare(trainer: Any, scale: float) -> Any:
        trainer.args.fp16 = True
        trainer.accelerator.state._mixed_precision = "fp16"
        trainer.accelerator.native_amp = True
        trainer.accelerator.scaler = torch.amp.GradScaler("cpu", init_scale=scale)
        return trainer

    yield prepare
    accelerate.state.AcceleratorState._reset_state(True)


@pytest.mark.parametrize("optim", ["adamw_torch_fused", "adamw_torch"])
def test_fp16_scales_the_loss_and_skips_what_overflows(
    optim: str, scaled: Any, store_dir: pathlib.Path
) -> None:
    runs = []
    for name, takes in (("with", {}), ("without", None)):
        trainer = scaled(helper.make(store_dir / name, takes, max_steps=8, optim=optim), 2.0**18)
        trainer.train()
        runs.append(trainer)
        assert trainer.accelerator.scaler.get_scale() < 2.0**18, "nothing overflowed"
    assert_close(*runs, rtol=5e-3)
    # With a fused AdamW, the schedule does not notice a skipped step; with others it does.
    assert helper.logged(runs[0], "learning_rate") == helper.logged(runs[1], "learning_rate")
    assert 0 < helper.session_of(runs[0]).step < 8, "steps that overflowed were made"
    assert runs[0].accelerator.scaler.get_scale() == runs[1].accelerator.scaler.get_scale()


def accuracy(prediction: Any) -> dict[str, float]:
    """Return the accuracy for the next token."""
    guessed = prediction.predictions.argmax(-1)[:, :-1]
    return {"accuracy": float((guessed == prediction.label_ids[:, 1:]).mean())}


class Generates(transformers.TrainerCallback):  # type: ignore[misc]
    """Generates at each evaluation, as a script would that looks at samples."""

    def __init__(self) -> None:
        self.texts: list[list[int]] = []

    def on_evaluate(self, *args: Any, model: Any = None, **kwargs: Any) -> None:
        """Generate eight tokens after three."""
        begun = torch.tensor([[3, 5, 7]])
        texts = model.generate(begun, max_new_tokens=8, do_sample=False, pad_token_id=0)
        self.texts.append(texts[0].tolist())


def test_evaluation_generation_and_the_best_model_are_as_without_lohan(
    store_dir: pathlib.Path,
) -> None:
    runs = []
    for name, takes in (("with", {}), ("without", None)):
        generates = Generates()
        trainer = helper.make(
            store_dir / name,
            takes,
            callbacks=(generates, transformers.EarlyStoppingCallback(2)),
            trainer_takes={
                "train_dataset": helper.Rows(4),  # so few rows that they are memorized
                "eval_dataset": helper.Rows(10),
                "compute_metrics": accuracy,
            },
            max_steps=48,
            learning_rate=1e-2,
            eval_strategy="steps",
            eval_steps=3,
            save_strategy="steps",
            save_steps=3,
            save_total_limit=2,
            load_best_model_at_end=True,
            metric_for_best_model="eval_loss",
            prediction_loss_only=False,
        )
        trainer.train()
        runs.append((trainer, generates))
    (ours, mine), (theirs, yours) = runs
    assert ours.state.global_step == theirs.state.global_step < 48, "it was to stop early"
    assert ours.state.best_global_step == theirs.state.best_global_step < ours.state.global_step
    np.testing.assert_allclose(
        helper.logged(ours, "eval_loss"), helper.logged(theirs, "eval_loss"), rtol=1e-4
    )
    assert len(mine.texts) == len(yours.texts) and mine.texts == yours.texts
    best = LlamaForCausalLM.from_pretrained(ours.state.best_model_checkpoint).state_dict()
    state = helper.values(ours.model)
    assert all(torch.equal(state[key], value) for key, value in best.items())
    for trainer in (ours, theirs):
        predicted = trainer.predict(helper.Rows(4))
        assert set(predicted.metrics) >= {"test_loss", "test_accuracy"}
    ours.save_model(str(store_dir / "saved"))
    saved = LlamaForCausalLM.from_pretrained(store_dir / "saved").state_dict()
    assert all(torch.equal(saved[key], value) for key, value in best.items())


def test_train_again_continues(store_dir: pathlib.Path) -> None:
    runs = []
    for name, takes in (("with", {}), ("without", None)):
        trainer = helper.make(store_dir / name, takes, max_steps=3)
        trainer.train()
        first = helper.logged(trainer, "loss")
        trainer.train()
        runs.append(first + helper.logged(trainer, "loss"))
    assert len(runs[0]) == 6
    np.testing.assert_allclose(runs[0], runs[1], **CLOSE)


def test_an_optimizer_and_scheduler_of_the_user_s_are_taken(store_dir: pathlib.Path) -> None:
    runs = []
    for name, takes in (("with", {}), ("without", None)):
        model = helper.llama()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.0)
        scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
        trainer = helper.make(
            store_dir / name,
            takes,
            model=model,
            trainer_takes={"optimizers": (optimizer, scheduler)},
        )
        trainer.train()
        runs.append(trainer)
    assert_close(*runs, "learning_rate")


def test_the_store_is_committed_at_the_end_where_nothing_is_saved(store_dir: pathlib.Path) -> None:
    trainer = helper.make(store_dir, {})
    trainer.train()
    session = helper.session_of(trainer)
    assert session.directories == [str(store_dir / "out" / "lohan")]
    state = helper.values(trainer.model)
    session.close()
    plain = lohan.unwrap(trainer.model).state_dict()  # the state of the last commit
    assert all(torch.equal(value, state[key]) for key, value in plain.items())


def test_a_model_without_storage_is_trained_by_lohan_s_trainer(store_dir: pathlib.Path) -> None:
    model = helper.llama()
    model.save_pretrained(store_dir / "large")
    plain = helper.make(store_dir / "plain", {}, model=model)
    plain.train()
    with lohan.empty():
        empty = LlamaForCausalLM(model.config)
    takes = {"weights": store_dir / "large"}
    trainer = helper.make(store_dir / "empty", takes, model=empty, cls=lohan.Trainer)
    trainer.train()
    assert helper.logged(trainer, "loss") == helper.logged(plain, "loss")


def test_a_model_wrapped_before_is_taken_with_its_optimizer(store_dir: pathlib.Path) -> None:
    model = lohan.wrap(
        helper.llama(), store=store_dir / "store", accumulate=2, lr=1e-3, weight_decay=0.0
    )
    trainer = helper.make(
        store_dir,
        None,
        model=model,
        trainer_takes={"optimizers": (model.optimizer, None)},
        gradient_accumulation_steps=2,
    )
    trainer.train()
    assert model.lohan.step == 6
    losses = helper.logged(trainer, "loss")
    takes: dict[str, Any] = {}
    given = {"learning_rate": 1e-3, "weight_decay": 0.0, "gradient_accumulation_steps": 2}
    other = helper.make(store_dir / "other", takes, **given)
    other.train()
    assert losses == helper.logged(other, "loss")
    with pytest.raises(UnsupportedError, match=r"schedule='deferred'.*=\(model\.optimizer"):
        helper.make(store_dir / "refused", {}, model=model).train()


REFUSED: dict[str, dict[str, Any]] = {
    "torch_compile=True": {"torch_compile": True},
    "optim='adafactor'": {"optim": "adafactor"},
    "bf16_full_eval=True": {"bf16_full_eval": True, "use_cpu": True},
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_a_trainer_cannot_have_with_lohan_is_refused_by_name(
    name: str, store_dir: pathlib.Path
) -> None:
    with pytest.raises(UnsupportedError, match=re.escape(name)):
        helper.make(store_dir, {}, **REFUSED[name])


def test_processes_that_the_trainer_does_not_know_are_refused_by_name(
    store_dir: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_trainer_args, "process_count", lambda: 2)
    with pytest.raises(UnsupportedError, match=r"^WORLD_SIZE is 2, but .* in 1 process.*torchrun"):
        helper.make(store_dir, {})


@pytest.mark.parametrize("name", ["fsdp", "deepspeed"])
def test_what_accelerate_was_started_with_is_refused_by_name(
    name: str, store_dir: pathlib.Path
) -> None:
    class Started(transformers.Trainer):  # type: ignore[misc]
        def create_accelerator_and_postprocess(self) -> None:
            super().create_accelerator_and_postprocess()
            setattr(self, f"is_{name}_enabled", True)

    with pytest.raises(UnsupportedError, match=rf"^accelerate was started with {name}"):
        helper.make(store_dir, {}, cls=Started)


@pytest.mark.parametrize("name", ["lr", "max_grad_norm", "accumulate", "resume", "optimizer"])
def test_what_training_arguments_say_is_not_the_callback_s(name: str) -> None:
    with pytest.raises(ModelError, match=rf"^{name}= cannot be passed to lohan\.TrainerCallback"):
        lohan.TrainerCallback(**{name: 1})


def test_another_optimizer_is_refused_by_name(store_dir: pathlib.Path) -> None:
    model = helper.llama()
    optimizer = torch.optim.Adamax(model.parameters(), lr=0.1)
    trainer = helper.make(
        store_dir, {}, model=model, trainer_takes={"optimizers": (optimizer, None)}
    )
    with pytest.raises(UnsupportedError, match=r"Adamax, but lohan can only continue from"):
        trainer.train()


def test_an_sgd_that_the_trainer_was_given_trains_as_without_lohan(store_dir: pathlib.Path) -> None:
    values = []
    for name, takes in (("plain", None), ("lohan", {})):
        model = helper.llama()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        more = {"optimizers": (optimizer, None)}
        trainer = helper.make(store_dir / name, takes, model=model, trainer_takes=more)
        trainer.train()
        values.append(helper.logged(trainer, "loss"))
    assert len(values[0]) == 6
    assert values[1] == pytest.approx(values[0], rel=1e-4)


class Uploads(transformers.Trainer):  # type: ignore[misc]
    """A Trainer that uploads to nowhere."""

    def init_hf_repo(self, *args: Any, **kwargs: Any) -> None:
        """Do not access the network."""

    def _push_from_checkpoint(self, checkpoint_folder: str) -> None:
        pass


def test_a_store_that_would_be_uploaded_is_refused(store_dir: pathlib.Path) -> None:
    for place in (None, store_dir / "out" / "here", store_dir / "out"):
        with pytest.raises(UnsupportedError, match=r"push_to_hub=True would upload .*store=\.\.\."):
            helper.make(store_dir, {"store": place}, cls=Uploads, push_to_hub=True)
    for place in (store_dir / "out" / "_not_uploaded", store_dir / "elsewhere"):
        helper.make(store_dir, {"store": place}, cls=Uploads, push_to_hub=True)


def test_a_callback_of_another_trainer_is_refused(store_dir: pathlib.Path) -> None:
    callback = lohan.TrainerCallback(store=store_dir / "store")
    first = helper.make(store_dir / "a", None, callbacks=(callback,), max_steps=1)
    second = helper.make(store_dir / "b", None, callbacks=(callback,), max_steps=1)
    second.train()
    assert helper.session_of(second).step == 1
    with pytest.raises(UnsupportedError, match=r"callbacks=\[lohan\.TrainerCallback"):
        first.train()
    with pytest.raises(UnsupportedError, match=r"has already trained with another Trainer"):
        helper.make(store_dir / "c", None, callbacks=(callback,))


def test_a_callback_that_comes_late_is_refused(store_dir: pathlib.Path) -> None:
    trainer = helper.make(store_dir, None)
    trainer.add_callback(lohan.TrainerCallback())
    with pytest.raises(UnsupportedError, match=r"callbacks=\[lohan\.TrainerCallback"):
        trainer.train()


def test_a_trainer_of_lohan_s_without_the_callback_is_refused(store_dir: pathlib.Path) -> None:
    with pytest.raises(ModelError, match=r"callbacks=\[lohan\.TrainerCallback"):
        helper.make(store_dir, None, cls=lohan.Trainer)


def test_a_store_that_is_there_is_not_overwritten(store_dir: pathlib.Path) -> None:
    helper.make(store_dir, {}, max_steps=1).train()
    _exit._close_all()
    with pytest.raises(StoreError) as refused:
        helper.make(store_dir, {}, max_steps=1).train()
    assert "train(resume_from_checkpoint=True)" in "".join(refused.value.__notes__)


def test_another_model_of_model_init_is_refused_by_name(store_dir: pathlib.Path) -> None:
    class Fresh(transformers.Trainer):  # type: ignore[misc]
        def __init__(self, model: Any, **kwargs: Any) -> None:
            super().__init__(model_init=helper.llama, **kwargs)

    trainer = helper.make(store_dir, {}, cls=Fresh, max_steps=1)
    trainer.train()
    with pytest.raises(UnsupportedError, match=r"model_init="):
        trainer.train()
