"""A contestant of bench_reference.py: TRL's DPO of GPT-2 124M in fp32.

python benchmarks/py/reference_train.py KIND FOLDER STEPS PAIRS LENGTH HOST_BYTES

KIND is "lohan", "torch" (model, states and reference in memory) or "alone": lohan with reference
log-probabilities that were computed before the training, so that a step has no forward of the
reference. FOLDER has the saved model; the store is made beside it. The last line of the output
is one JSON object. Memory is counted from after the imports on, with activations.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import lohan
import torch
import transformers
from datasets import Dataset
from lohan.common._inside import inside
from peak_memory import PeakMemory
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast
from trl import DPOConfig, DPOTrainer


def bytes_tokenizer() -> PreTrainedTokenizerFast:
    """Make a tokenizer with one token per byte, and an end token."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: index for index, token in enumerate([*alphabet, "<end>"])}
    made = Tokenizer(models.BPE(vocabulary, []))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=made, eos_token="<end>", pad_token="<end>")


def preferences(count: int, length: int) -> Dataset:
    """Make random pairs, each of whose sequences has `length` tokens with its end token."""
    generator = torch.Generator().manual_seed(1)
    half = length // 2

    def text(size: int) -> str:
        return bytes(torch.randint(97, 123, (size,), generator=generator).tolist()).decode()

    names = {"prompt": half, "chosen": length - half - 1, "rejected": length - half - 1}
    return Dataset.from_list(
        [{name: text(size) for name, size in names.items()} for _ in range(count)]
    )


class Clock(transformers.TrainerCallback):
    """The seconds of each step, from its first forward to the end of step()."""

    def __init__(self) -> None:
        self.seconds: list[float] = []
        self.began = 0.0

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Start the clock."""
        self.began = time.perf_counter()

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Stop the clock."""
        self.seconds.append(time.perf_counter() - self.began)


def forward_seconds(model: Any, tokens: torch.Tensor, count: int) -> float:
    """Return the least time of a forward without gradients, as TRL's trainers run it."""
    times = []
    for _ in range(count):
        begin = time.perf_counter()
        with torch.no_grad():
            model(input_ids=tokens, labels=tokens, fused_lm_head=True, use_cache=False)
        times.append(time.perf_counter() - begin)
    return min(times)


def main() -> None:
    """Train, and print what it took."""
    kind, base, *numbers = sys.argv[1:]
    steps, pairs, length, host_bytes = map(int, numbers)
    torch.set_num_threads(len(os.sched_getaffinity(0)))
    tokenizer, dataset = bytes_tokenizer(), preferences(steps * pairs, length)
    peak = PeakMemory(os.getpid())
    peak.restart()
    before = peak.since_bytes
    clock = Clock()
    given: dict[str, Any] = {"callbacks": [clock]}
    if kind != "torch":
        with lohan.empty():
            config = transformers.AutoConfig.from_pretrained(base)
            model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        store = str(Path(base).parent / "store")
        # Gradients that wait for clipping are on SSD only if each step commits; otherwise all of
        # them, 498 MB, are in main memory.
        mine = lohan.TrainerCallback(
            store=store, weights=base, host_bytes=host_bytes, commit_every=1
        )
        given = {
            "ref_model": lohan.reference(model, weights=base),
            "callbacks": [mine, clock],
        }
    else:
        model = AutoModelForCausalLM.from_pretrained(base)
    args = DPOConfig(
        str(Path(base).parent / "out"),
        use_cpu=True,
        bf16=False,
        max_steps=steps,
        per_device_train_batch_size=pairs,
        learning_rate=1e-5,
        logging_steps=1,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        dataloader_pin_memory=False,
        precompute_ref_log_probs=kind == "alone",
    )

    class Dpo(lohan.TrainerMixin, DPOTrainer):  # type: ignore[misc]
        pass

    trainer: Any = (DPOTrainer if kind == "torch" else Dpo)(
        model, args=args, train_dataset=dataset, processing_class=tokenizer, **given
    )
    trainer.train()
    peak.read()
    tokens = torch.randint(97, 123, (2 * pairs, length))
    found = {
        "losses": [entry["loss"] for entry in trainer.state.log_history if "loss" in entry],
        "seconds": clock.seconds,
        "peak_bytes": peak.since_bytes - before,
        "forward_s": forward_seconds(trainer.ref_model, tokens, 3),
    }
    if kind != "torch":
        found["host_bytes"] = inside(model).budget["host_bytes"]
        found["reference_bytes"] = inside(trainer.ref_model).budget["host_bytes"]
    print(json.dumps(found))


if __name__ == "__main__":
    main()
