"""TRL's SFTTrainer with lohan's callback: LoRA by peft_config, resuming, the mixin."""

from __future__ import annotations

import pathlib
from typing import Any

import lohan
import numpy as np
import pytest
import torch
import trainer_helper as helper
from lohan.common._inside import inside
from peft import LoraConfig, PeftModel
from trl import SFTConfig, SFTTrainer

pytestmark = pytest.mark.usefixtures("closed")
EXAMPLE = "03_trl_sft.py"


def train(folder: pathlib.Path, cls: type = SFTTrainer, **given: Any) -> Any:
    """Train adapters with dropout for a few steps, with a checkpoint after the second."""
    made = helper.example(EXAMPLE)
    takes = given.get("takes", {})
    tokenizer = made.bytes_tokenizer()
    args = SFTConfig(
        str(folder),
        use_cpu=True,
        bf16=False,
        max_steps=given.get("steps", 4),
        per_device_train_batch_size=4,
        learning_rate=given.get("rate", 1e-2),
        lr_scheduler_type="constant",
        logging_steps=1,
        save_steps=2,
        report_to="none",
        disable_tqdm=True,
        dataloader_pin_memory=False,
    )
    trainer = cls(
        made.build(tokenizer),
        args,
        train_dataset=made.sums(),
        processing_class=tokenizer,
        peft_config=LoraConfig(r=4, target_modules=["q_proj", "v_proj"], lora_dropout=0.1),
        callbacks=[lohan.TrainerCallback(**takes)] if takes is not None else [],
    )
    trainer.train(resume_from_checkpoint=given.get("resume"))
    return trainer


def losses(trainer: Any) -> list[float]:
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


class Mixed(lohan.TrainerMixin, SFTTrainer):  # type: ignore[misc]
    """The mixin over another library's Trainer."""


def test_adapters_are_trained_saved_and_continued_as_without_lohan(
    store_dir: pathlib.Path,
) -> None:
    ours = train(store_dir / "ours")
    theirs = train(store_dir / "theirs", takes=None)
    np.testing.assert_allclose(losses(ours), losses(theirs), rtol=2e-5)
    ours.save_model(str(store_dir / "adapters"))
    base = helper.example(EXAMPLE).build(helper.example(EXAMPLE).bytes_tokenizer())
    loaded = PeftModel.from_pretrained(base, str(store_dir / "adapters")).eval()
    batch = torch.tensor([[3, 4, 5]])
    ours.model.eval()
    with torch.no_grad():
        assert torch.equal(loaded(batch).logits, ours.model(batch).logits)
    train(store_dir / "half", steps=2)
    helper.close_all()
    assert losses(train(store_dir / "half", resume=True)) == losses(ours)
    assert losses(train(store_dir / "mixed", Mixed)) == losses(ours)


def test_adapters_are_trained_without_backward(store_dir: pathlib.Path) -> None:
    takes = {"method": "mezo", "eps": 1e-3}
    ours = train(store_dir / "ours", takes=takes, rate=1e-3)
    records = inside(ours.model).method.journal.records
    assert [record.losses[0] for record in records] == pytest.approx(losses(ours))
    before = helper.example(EXAMPLE).build(helper.example(EXAMPLE).bytes_tokenizer()).state_dict()
    after = ours.model.state_dict()
    assert len(records) == 4
    bases = {name: value for name, value in after.items() if name.endswith("base_layer.weight")}
    for name, value in bases.items():
        plain = name.removeprefix("base_model.model.").replace(".base_layer", "")
        assert torch.equal(value, before[plain]), "a frozen parameter moved"
    assert any(value.any() for name, value in after.items() if "lora_B" in name)
    train(store_dir / "half", takes=takes, rate=1e-3, steps=2)
    helper.close_all()
    again = train(store_dir / "half", takes=takes, rate=1e-3, resume=True)
    assert losses(again) == losses(ours)
