"""TRL's DPOTrainer with its states on SSD, and a reference that is read from its files.

Three lines differ from a usual script, in which TRL loads a second copy of the model as the
reference. The preferred answers are sums of two numbers, and the rejected ones are words.

python examples/12_trl_dpo.py
"""

import tempfile

import lohan
import torch
from datasets import Dataset
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
)
from trl import DPOConfig, DPOTrainer


def bytes_tokenizer() -> PreTrainedTokenizerFast:
    """Make a tokenizer with one token per byte, and an end token."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: index for index, token in enumerate([*alphabet, "<end>"])}
    made = Tokenizer(models.BPE(vocabulary, []))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=made, eos_token="<end>", pad_token="<end>")


def make_model(folder: str, tokenizer: PreTrainedTokenizerFast) -> None:
    """Write a small Llama over bytes, in place of a downloaded model."""
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=4,
        num_attention_heads=4,
        max_position_embeddings=64,
        eos_token_id=tokenizer.eos_token_id,
        bos_token_id=None,
    )
    torch.manual_seed(0)
    LlamaForCausalLM(config).save_pretrained(folder)


def preferences() -> Dataset:
    """Make questions, each with a good answer and a poor one."""
    rows = [(a, b) for a in range(16) for b in range(16)]
    return Dataset.from_list(
        [{"prompt": f"{a} + {b} = ", "chosen": f"{a + b}", "rejected": "many"} for a, b in rows]
    )


def main() -> None:
    """Train for 30 steps."""
    tokenizer = bytes_tokenizer()
    with tempfile.TemporaryDirectory() as folder:
        base = f"{folder}/base"
        make_model(base, tokenizer)
        model = AutoModelForCausalLM.from_pretrained(base)
        args = DPOConfig(
            f"{folder}/out",
            use_cpu=True,
            max_steps=30,
            per_device_train_batch_size=8,
            learning_rate=1e-3,
            logging_steps=10,
            save_steps=30,
            report_to="none",
            disable_tqdm=True,
        )
        trainer = DPOTrainer(
            model,
            args=args,
            train_dataset=preferences(),
            processing_class=tokenizer,
            ref_model=lohan.reference(model, weights=base),
            callbacks=[lohan.TrainerCallback()],
        )
        trainer.train()
        for entry in trainer.state.log_history[:-1]:
            print(f"step {entry['step']:3d}  loss {entry['loss']:.6f}")


if __name__ == "__main__":
    main()
