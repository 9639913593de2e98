"""A Trainer of a mixture whose experts are blocks of their own has the bits of whole layers."""

from __future__ import annotations

import functools
import pathlib
from typing import Any

import experts_helper
import pytest
import torch
import trainer_helper as helper
import transformers

SETTINGS: dict[str, dict[str, Any]] = {
    "plain": {},
    "clipped": {"max_grad_norm": 0.05},
    "accumulated": {"gradient_accumulation_steps": 2},
}


def mixture() -> Any:
    torch.manual_seed(5)
    return experts_helper.qwen(8, vocab_size=helper.VOCABULARY)


class Ends(transformers.TrainerCallback):  # type: ignore[misc]
    """Ends the training after step 4, as a user would."""

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """End it."""
        control.should_training_stop = state.global_step == 4


def trained(
    folder: pathlib.Path, takes: dict[str, Any], *, resumes: bool = False, **arguments: Any
) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Return the losses and the parameters of a Trainer with lohan."""
    trainer = helper.make(folder, takes, model=mixture(), **arguments)
    trainer.train(resume_from_checkpoint=resumes)
    found = helper.logged(trainer, "loss"), helper.values(trainer.model)
    helper.close_all()
    return found


@functools.cache
def together(name: str, folder: pathlib.Path) -> tuple[list[float], dict[str, torch.Tensor]]:
    return trained(folder / name, {"store": folder / name / "s"}, **SETTINGS[name])


@pytest.mark.parametrize("name", SETTINGS)
def test_a_trainer_has_the_same_bits_with_experts_apart(
    name: str, tmp_path: pathlib.Path, store_dir: pathlib.Path
) -> None:
    losses, values = together(name, tmp_path)
    takes = {"store": store_dir / "s", "experts": "apart"}
    found = trained(tmp_path / "apart", takes, **SETTINGS[name])
    assert found[0] == losses
    assert found[1].keys() == values.keys()
    assert all(torch.equal(found[1][key], value) for key, value in values.items())


@pytest.mark.parametrize("idle", ["exact", "skip"])
def test_a_trainer_with_experts_apart_is_resumed(
    idle: str, tmp_path: pathlib.Path, store_dir: pathlib.Path
) -> None:
    apart = {"experts": "apart", "idle": idle}
    saving: dict[str, Any] = {"save_strategy": "steps", "save_steps": 2}
    whole = trained(tmp_path / "whole", {"store": store_dir / "whole", **apart}, **saving)
    takes = {"store": store_dir / "s", **apart}
    first = trained(tmp_path / "s", takes, callbacks=(Ends(),), **saving)
    assert first[0] == whole[0][:4]
    again = trained(tmp_path / "s", takes, resumes=True, **saving)
    assert again[0] == whole[0]
    assert all(torch.equal(again[1][key], value) for key, value in whole[1].items())


def test_a_trainer_continues_with_an_optimizer_that_was_passed(
    tmp_path: pathlib.Path, store_dir: pathlib.Path
) -> None:
    found = []
    for experts in ("together", "apart"):
        made = mixture()
        optimizer = torch.optim.AdamW(made.parameters(), lr=1e-2)
        tokens = torch.arange(4).view(1, 4)
        made(input_ids=tokens, labels=tokens).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        takes = {"store": store_dir / experts, "experts": experts}
        folder, more = tmp_path / experts, {"optimizers": (optimizer, None)}
        trainer = helper.make(folder, takes, model=made, trainer_takes=more)
        trainer.train()
        found.append((helper.logged(trainer, "loss"), helper.values(trainer.model)))
        helper.close_all()
    assert found[0][0] == found[1][0]
    assert all(torch.equal(found[1][1][key], value) for key, value in found[0][1].items())
