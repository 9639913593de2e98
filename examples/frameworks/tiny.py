"""Make a tiny Llama with random weights, a tokenizer of bytes and a data set, in the folder tiny.

The examples of this folder train it. No model or data set is downloaded.

python examples/frameworks/tiny.py
"""

import json
import pathlib

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

CHAT = "{% for m in messages %}{{ '<s>' + m['role'] + ': ' + m['content'] + '</s>' }}{% endfor %}"


def bytes_tokenizer() -> PreTrainedTokenizerFast:
    """Make a tokenizer with one token per byte, and three special tokens."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: i for i, token in enumerate([*alphabet, "<s>", "</s>", "<pad>"])}
    made = Tokenizer(models.BPE(vocabulary, []))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    special = {"bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>"}
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=made, **special)
    tokenizer.chat_template = CHAT
    return tokenizer


def main() -> None:
    """Write tiny/model, tiny/sums.json and the list of data sets that LLaMA-Factory reads."""
    tokenizer = bytes_tokenizer()
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=512,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    folder = pathlib.Path("tiny")
    LlamaForCausalLM(config).save_pretrained(folder / "model")
    tokenizer.save_pretrained(folder / "model")
    rows = [
        {"instruction": f"Add {a} and {b}.", "input": "", "output": f"The sum is {a + b}."}
        for a in range(8)
        for b in range(8)
    ]
    (folder / "sums.json").write_text(json.dumps(rows))
    (folder / "dataset_info.json").write_text(json.dumps({"sums": {"file_name": "sums.json"}}))


if __name__ == "__main__":
    main()
