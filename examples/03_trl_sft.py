"""TRL's SFTTrainer, unchanged except for two lines, which move the states to SSD.

The prompts and completions are sums of two numbers.

python examples/03_trl_sft.py
"""

import tempfile

import lohan
import torch
from datasets import Dataset
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from trl import SFTConfig, SFTTrainer


def bytes_tokenizer() -> PreTrainedTokenizerFast:
    """Make a tokenizer with one token per byte, and an end token."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: index for index, token in enumerate([*alphabet, "<end>"])}
    made = Tokenizer(models.BPE(vocabulary, []))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=made, eos_token="<end>", pad_token="<end>")


def build(tokenizer: PreTrainedTokenizerFast) -> LlamaForCausalLM:
    """Make a small Llama over bytes."""
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
    return LlamaForCausalLM(config)


def sums() -> Dataset:
    """Make sums of two numbers, each as a question and its answer."""
    rows = [(a, b) for a in range(16) for b in range(16)]
    return Dataset.from_list(
        [{"prompt": f"{a} + {b} = ", "completion": f"{a + b}"} for a, b in rows]
    )


def main() -> None:
    """Train for 30 steps."""
    tokenizer = bytes_tokenizer()
    with tempfile.TemporaryDirectory() as folder:
        args = SFTConfig(
            folder,
            use_cpu=True,
            max_steps=30,
            per_device_train_batch_size=8,
            gradient_accumulation_steps=2,
            learning_rate=3e-3,
            logging_steps=10,
            save_steps=30,
            report_to="none",
            disable_tqdm=True,
        )
        trainer = SFTTrainer(
            build(tokenizer),
            args,
            train_dataset=sums(),
            processing_class=tokenizer,
            callbacks=[lohan.TrainerCallback()],
        )
        trainer.train()
        for entry in trainer.state.log_history[:-1]:
            print(f"step {entry['step']:3d}  loss {entry['loss']:.6f}")


if __name__ == "__main__":
    main()
