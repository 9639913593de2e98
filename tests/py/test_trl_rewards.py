"""TRL's RewardTrainer and GRPOTrainer with lohan's callback, beside the same runs without it."""

from __future__ import annotations

import pathlib
from typing import Any

import lohan
import numpy as np
import pytest
import torch
import trainer_helper as helper
from datasets import Dataset
from peft import LoraConfig
from transformers import AutoModelForCausalLM, LlamaForSequenceClassification
from trl import GRPOConfig, GRPOTrainer, RewardConfig, RewardTrainer
from trl.trainer.utils import add_fused_lm_head

pytestmark = pytest.mark.usefixtures("closed")
EXAMPLE = "12_trl_dpo.py"
BETA = 0.1
# What a step of GRPO logs. Its texts, and so its rewards and lengths, must be the same.
EXACT = ("reward", "reward_std", "completions/mean_length", "completions/clipped_ratio")


def arguments(cls: Any, folder: pathlib.Path, **given: Any) -> Any:
    return cls(
        **{
            "output_dir": str(folder / "out"),
            "use_cpu": True,
            "bf16": False,
            "max_steps": 6,
            "per_device_train_batch_size": 8,
            "learning_rate": 1e-3,
            "lr_scheduler_type": "constant",
            "logging_steps": 1,
            "save_strategy": "no",
            "report_to": "none",
            "disable_tqdm": True,
            "dataloader_pin_memory": False,
            **given,
        }
    )


def rewarded(folder: pathlib.Path, *, with_lohan: bool, **given: Any) -> Any:
    """Train a reward model, and return its Trainer."""
    made = helper.example(EXAMPLE)
    tokenizer = made.bytes_tokenizer()
    made.make_model(str(folder / "base"), tokenizer)
    torch.manual_seed(0)
    model: Any = LlamaForSequenceClassification.from_pretrained(
        str(folder / "base"), num_labels=1, pad_token_id=tokenizer.pad_token_id
    )
    resume = given.pop("resume", None)
    trainer = RewardTrainer(
        model,
        args=arguments(RewardConfig, folder, **given),
        train_dataset=made.preferences(),
        eval_dataset=made.preferences().select(range(16)),
        processing_class=tokenizer,
        callbacks=[lohan.TrainerCallback()] if with_lohan else [],
    )
    trainer.train(resume_from_checkpoint=resume)
    return trainer


def digits(completions: list[str], **others: Any) -> list[float]:
    """Reward each digit of a text, and a little each of its characters."""
    return [sum(c.isdigit() + 0.01 * ord(c) / 128 for c in text) for text in completions]


def policy(folder: pathlib.Path, *, with_lohan: bool, twin: bool = False, **given: Any) -> Any:
    """Train by GRPO, and return the Trainer.

    Args:
        folder: a folder for this run only.
        with_lohan: whether lohan's callback is used.
        twin: whether the reference is lohan's twin, instead of TRL's copy.
        **given: arguments of GRPOConfig, peft_config= and resume=.
    """
    made = helper.example(EXAMPLE)
    tokenizer = made.bytes_tokenizer()
    base = str(folder / "base")
    made.make_model(base, tokenizer)
    model = AutoModelForCausalLM.from_pretrained(base)
    resume, peft_config = given.pop("resume", None), given.pop("peft_config", None)
    reference: Any = lohan.reference(model, weights=base) if twin else None
    trainer = GRPOTrainer(
        model,
        reward_funcs=digits,
        args=arguments(GRPOConfig, folder, num_generations=4, max_completion_length=8, **given),
        train_dataset=Dataset.from_list([{"prompt": f"{a} + "} for a in range(32)]),
        processing_class=tokenizer,
        peft_config=peft_config,
        callbacks=[lohan.TrainerCallback()] if with_lohan else [],
    )
    if twin:
        trainer.beta, trainer.ref_model = BETA, reference
        add_fused_lm_head(reference, temperature=trainer.temperature)
    trainer.train(resume_from_checkpoint=resume)
    return trainer


def check_equal(ours: Any, theirs: Any, *names: str) -> None:
    """Compare what two runs of GRPO logged.

    The tolerance is that of AdamW, and of the gradients' norm, in another order of operations. The
    first loss of a group of texts is zero but for rounding, so it is compared absolutely.
    """
    for name in EXACT:
        found = helper.logged(ours, name)
        assert found == helper.logged(theirs, name), name
    assert len(set(helper.logged(ours, "reward"))) > 2, "the texts do not change"
    for name in ("loss", "entropy", "grad_norm", *names):
        found, expected = helper.logged(ours, name), helper.logged(theirs, name)
        assert len(found) == len(expected) == 6
        assert found[0] == expected[0] or name == "grad_norm", name
        np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-7, err_msg=name)


def test_a_reward_model_has_the_losses_of_plain_trl(store_dir: pathlib.Path) -> None:
    ours = rewarded(store_dir / "ours", with_lohan=True)
    theirs = rewarded(store_dir / "theirs", with_lohan=False)
    losses = helper.logged(ours, "loss")
    assert len(losses) == 6 and losses[-1] < losses[0]
    np.testing.assert_allclose(losses, helper.logged(theirs, "loss"), rtol=1e-5)
    assert helper.logged(ours, "accuracy") == helper.logged(theirs, "accuracy")
    found, expected = ours.evaluate()["eval_loss"], theirs.evaluate()["eval_loss"]
    np.testing.assert_allclose(found, expected, rtol=1e-5)


@pytest.mark.parametrize("beta", [pytest.param(0.0, marks=pytest.mark.slow), BETA])
def test_grpo_generates_and_learns_as_plain_trl(beta: float, store_dir: pathlib.Path) -> None:
    given = {"beta": beta, "num_iterations": 2, "gradient_accumulation_steps": 2}
    ours = policy(store_dir / "ours", with_lohan=True, **given)
    theirs = policy(store_dir / "theirs", with_lohan=False, **given)
    check_equal(ours, theirs, *(["kl"] if beta else []))
    if beta:
        assert helper.logged(ours, "kl")[-1] > 0
        assert "lohan" not in ours.ref_model.__dict__, "TRL's copy is used as it is"


def test_grpo_with_lohan_s_reference_has_the_losses_of_trl_s_copy(
    store_dir: pathlib.Path,
) -> None:
    ours = policy(store_dir / "ours", with_lohan=True, twin=True, num_iterations=2)
    theirs = policy(store_dir / "theirs", with_lohan=False, beta=BETA, num_iterations=2)
    assert ours.ref_model.lohan.step == 0
    check_equal(ours, theirs, "kl")


@pytest.mark.slow
def test_grpo_with_adapters_needs_no_reference(store_dir: pathlib.Path) -> None:
    given = {
        "peft_config": LoraConfig(r=4, target_modules=["q_proj", "v_proj"]),
        "beta": BETA,
        "learning_rate": 1e-2,
    }
    ours = policy(store_dir / "ours", with_lohan=True, **given)
    theirs = policy(store_dir / "theirs", with_lohan=False, **given)
    assert ours.ref_model is None
    check_equal(ours, theirs, "kl")


@pytest.mark.slow
def test_grpo_resumes_from_a_checkpoint_with_the_same_bits(store_dir: pathlib.Path) -> None:
    given = {"num_iterations": 2, "save_strategy": "steps", "save_steps": 4}
    ours = policy(store_dir / "ours", with_lohan=True, **given)
    policy(store_dir / "half", with_lohan=True, **given, max_steps=4).model.lohan.close()
    again = policy(store_dir / "half", with_lohan=True, resume=True, **given)
    for name in ("loss", "reward"):
        assert helper.logged(again, name) == helper.logged(ours, name), name
