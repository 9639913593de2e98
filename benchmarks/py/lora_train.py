"""A contestant of bench_lora.py --base nf4: LoRA by lohan or by bitsandbytes.

python benchmarks/py/lora_train.py lohan|bitsandbytes BASE BATCH LENGTH [STORE HOST_BYTES]

It answers "train N" with the seconds of N steps and their losses, and "stats" with its counters.
Memory is counted from after the imports on.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import peft
import served
import torch
import transformers

RATE = 1e-3


def resident_bytes() -> int:
    """Return the main memory of this process."""
    words = Path("/proc/self/statm").read_text(encoding="ascii").split()
    return int(words[1]) * os.sysconf("SC_PAGE_SIZE")


def adapted(model: Any) -> Any:
    """Add adapters, with the same values for any base."""
    torch.manual_seed(1)
    config = peft.LoraConfig(r=16, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
    return peft.get_peft_model(model, config).train()


def with_lohan(
    base: str, store: str, host_bytes: int
) -> tuple[Any, Any, Callable[[], dict[str, Any]]]:
    """Return a model that reads its base from SSD, its optimizer, and its counters."""
    import lohan

    config = transformers.AutoConfig.from_pretrained(base)
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    with lohan.empty():
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model = lohan.wrap(
        adapted(model), weights=base, store=store, host_bytes=host_bytes, lr=RATE, weight_decay=0.01
    )

    def stats() -> dict[str, Any]:
        model.lohan.flush()
        last = model.lohan.stats()
        return {
            "read_bytes": last.bytes["param_read"],
            "planned_read_bytes": last.planned_bytes["param_read"],
            "bound_by": last.bound_by,
        }

    return model, model.optimizer, stats


def with_bitsandbytes(base: str) -> tuple[Any, Any, Callable[[], dict[str, Any]]]:
    """Return a model whose base is in memory in NF4, its optimizer, and no counters."""
    model = transformers.AutoModelForCausalLM.from_pretrained(
        base, dtype=torch.bfloat16, device_map="cpu"
    )
    kinds = {type(module).__name__ for module in model.modules()}
    if "Linear4bit" not in kinds:
        raise SystemExit("from_pretrained made no Linear4bit: bitsandbytes is not in use")
    model = adapted(model)
    trained = [param for param in model.parameters() if param.requires_grad]
    return model, torch.optim.AdamW(trained, lr=RATE, weight_decay=0.01), dict


def main() -> None:
    pipe = served.answers()
    kind, base, batch, length, *rest = sys.argv[1:]
    if kind == "lohan":
        import lohan  # noqa: F401  (an import, as bitsandbytes is)
    else:
        import bitsandbytes  # noqa: F401
    torch.set_num_threads(len(os.sched_getaffinity(0)))
    before = resident_bytes()
    if kind == "lohan":
        model, optimizer, stats = with_lohan(base, rest[0], int(rest[1]))
    else:
        model, optimizer, stats = with_bitsandbytes(base)
    shape = int(batch), int(length)
    tokens = torch.randint(
        0, model.config.vocab_size, shape, generator=torch.Generator().manual_seed(2)
    )

    def answer(request: str) -> dict[str, Any]:
        if request == "stats":
            return stats()
        losses = []
        begin = time.perf_counter()
        for _ in range(int(request.removeprefix("train "))):
            loss = model(input_ids=tokens, labels=tokens).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        return {"seconds": time.perf_counter() - begin, "losses": losses}

    served.answer_all(pipe, {"imports_bytes": before}, answer)
    if kind == "lohan":
        model.lohan.close()


if __name__ == "__main__":
    main()
