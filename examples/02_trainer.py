"""Hugging Face's Trainer, unchanged except for two lines, which move the states to SSD.

python examples/02_trainer.py
"""

import argparse
import inspect
import tempfile

import lohan
import torch
from torch.utils.data import TensorDataset
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments


def build() -> LlamaForCausalLM:
    """Make a small Llama over bytes."""
    config = LlamaConfig(
        vocab_size=256,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=4,
        num_attention_heads=4,
        max_position_embeddings=128,
        use_cache=False,
    )
    torch.manual_seed(0)
    return LlamaForCausalLM(config)


def texts() -> TensorDataset:
    """Return the source of a Python module, in rows of 128 bytes."""
    source = inspect.getsource(argparse).encode()
    count = len(source) // 128
    return TensorDataset(torch.tensor(list(source[: count * 128])).view(count, 128))


def collate(rows: list[tuple[torch.Tensor]]) -> dict[str, torch.Tensor]:
    """Make a batch, with the bytes themselves as labels."""
    batch = torch.stack([row for (row,) in rows])
    return {"input_ids": batch, "labels": batch}


def main() -> None:
    """Train for 40 steps, with accumulation, clipping, warm-up and checkpoints."""
    with tempfile.TemporaryDirectory() as folder:
        args = TrainingArguments(
            folder,
            use_cpu=True,
            max_steps=40,
            per_device_train_batch_size=4,
            gradient_accumulation_steps=2,
            learning_rate=3e-3,
            weight_decay=0.01,
            max_grad_norm=1.0,
            warmup_steps=5,
            lr_scheduler_type="cosine",
            logging_steps=10,
            save_steps=20,
            report_to="none",
            disable_tqdm=True,
        )
        trainer = Trainer(
            build(),
            args,
            train_dataset=texts(),
            data_collator=collate,
            callbacks=[lohan.TrainerCallback()],
        )
        trainer.train()
        for entry in trainer.state.log_history[:-1]:
            print(f"step {entry['step']:3d}  loss {entry['loss']:.6f}")


if __name__ == "__main__":
    main()
