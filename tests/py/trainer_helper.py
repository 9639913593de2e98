"""A small model, its rows, and a transformers.Trainer, with lohan or without."""

from __future__ import annotations

import contextlib
import importlib.util
import pathlib
from collections.abc import Iterator
from typing import Any

import kit
import lohan
import torch
from lohan.common import _exit
from lohan.common._inside import inside
from lohan.errors import StoreDeletedError
from torch import nn
from torch.utils.data import Dataset, IterableDataset
from transformers import Trainer, TrainingArguments

VOCABULARY = 64
ROWS = 22
TEXT = {"vocab_size": VOCABULARY, "bos_token_id": None, "eos_token_id": None, "use_cache": True}


def close_all() -> None:
    """Do what a process does at its end; a session of an earlier test may have lost its store."""
    for session in list(_exit.sessions):
        with contextlib.suppress(StoreDeletedError):
            session.close()


def example(name: str) -> Any:
    """Return a script of examples/ as a module."""
    path = pathlib.Path(__file__).parents[2] / "examples" / name
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


class Rows(Dataset[dict[str, torch.Tensor]]):
    """Sequences of several lengths; each step's batch identifies the step."""

    def __init__(self, count: int = ROWS) -> None:
        generator = torch.Generator().manual_seed(1)
        self.rows = [
            torch.randint(1, VOCABULARY, (6 + 2 * (i % 4),), generator=generator)
            for i in range(count)
        ]

    def __len__(self) -> int:
        """Return the number of rows."""
        return len(self.rows)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        """Return one row, with its labels."""
        return {"input_ids": self.rows[index], "labels": self.rows[index]}


class Endless(IterableDataset[Any]):
    """Nine rows that do not say how many they are: two windows of four, and one that is left."""

    def __iter__(self) -> Iterator[Any]:
        """Iterate over the rows."""
        rows = Rows(9)
        return (rows[index] for index in range(9))


def collate(rows: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    """Rows of one length, filled up with labels that do not count."""
    length = max(len(row["input_ids"]) for row in rows)

    def fill(name: str, value: int) -> torch.Tensor:
        return torch.stack(
            [nn.functional.pad(r[name], (0, length - len(r[name])), value=value) for r in rows]
        )

    return {"input_ids": fill("input_ids", 0), "labels": fill("labels", -100)}


def llama(dtype: torch.dtype = torch.float32) -> nn.Module:
    """No dropout, weights that are not tied."""
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 2}
    return kit.seeded(lambda: kit.llama(**sizes, **heads, **TEXT), dtype)


def gpt2(dtype: torch.dtype = torch.float32) -> nn.Module:
    """A model with dropout and tied weights."""
    sizes = {"n_embd": 32, "n_layer": 2, "n_head": 2}
    return kit.seeded(lambda: kit.gpt2(dropout=0.1, **sizes, **TEXT), dtype)


class SchedulesFirst(Trainer):  # type: ignore[misc]
    """Makes the scheduler for the optimizer that its own method has made, as ms-swift does."""

    def create_optimizer(self, model: Any = None) -> Any:
        """Keep the optimizer."""
        self.first = super().create_optimizer(model)
        return self.first

    def create_scheduler(self, num_training_steps: int, optimizer: Any = None) -> Any:
        """Ignore the optimizer that the Trainer uses."""
        return super().create_scheduler(num_training_steps, self.first)


def make(
    folder: pathlib.Path,
    lohan_takes: dict[str, Any] | None,
    *,
    model: Any = None,
    cls: type[Trainer] = Trainer,
    trainer_takes: dict[str, Any] | None = None,
    callbacks: tuple[Any, ...] = (),
    **arguments: Any,
) -> Any:
    """Return a Trainer whose store and checkpoints are below folder.

    Args:
        folder: a folder for this Trainer only.
        lohan_takes: the arguments of lohan's callback; None: train without lohan.
        model: the model; None: llama().
        cls: the class of the Trainer.
        trainer_takes: arguments of its constructor.
        callbacks: further callbacks, after lohan's.
        **arguments: arguments of TrainingArguments.
    """
    given = {
        "max_steps": 6,
        "per_device_train_batch_size": 2,
        "learning_rate": 3e-3,
        "weight_decay": 0.1,
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
        "dataloader_pin_memory": False,
        **arguments,
    }
    mine = [] if lohan_takes is None else [lohan.TrainerCallback(**lohan_takes)]
    takes = {
        "model": llama() if model is None else model,
        "args": TrainingArguments(str(folder / "out"), **given),
        "train_dataset": Rows(),
        "data_collator": collate,
        "callbacks": [*mine, *callbacks],
        **(trainer_takes or {}),
    }
    return cls(**takes)


def session_of(trainer: Any) -> Any:
    """Return the session of the trainer's model."""
    return inside(trainer.model)


def logged(trainer: Any, name: str) -> list[float]:
    """Return the values that the Trainer has logged under a name."""
    return [entry[name] for entry in trainer.state.log_history if name in entry]


def values(model: nn.Module) -> dict[str, torch.Tensor]:
    """Return copies of all parameters."""
    return {name: value.clone() for name, value in model.state_dict().items()}
