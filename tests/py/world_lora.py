"""What each process of test_together.py's runs does: LoRA on a base that is read in place."""

from __future__ import annotations

import hashlib
import re
from typing import Any

import lohan
import torch
from lohan.common._inside import inside
from lohan.errors import BudgetError
from lora_helper import lora
from quantize_helper import CONFIG
from transformers import AutoModelForCausalLM, LlamaConfig
from world_worker import rank_and_count

MICRO_BATCHES = 4  # of a step, of all processes together


def build() -> Any:
    """Make the model with adapters, and a base without storage."""
    with lohan.empty():
        made = AutoModelForCausalLM.from_config(LlamaConfig(**CONFIG), dtype=torch.bfloat16)
    return lora(made)


def tokens(step: int, number: int) -> torch.Tensor:
    """Return a micro-batch."""
    generator = torch.Generator().manual_seed(100 * step + number)
    return torch.randint(0, CONFIG["vocab_size"], (1, 16), generator=generator)


def digest(model: Any) -> str:
    """Return a hash of the values of all adapters."""
    found = hashlib.sha256()
    for name, param in model.named_parameters():
        if "lora" in name:
            found.update(param.detach().float().numpy().tobytes())
    return found.hexdigest()[:16]


def train(
    store: str, base: str, steps: int, share: str, spare_bytes: int | None = None, **more: Any
) -> tuple[str, int]:
    """Train, and return a hash of the adapters and the number of units that stay packed.

    "{rank}" in base is replaced by the rank. With spare_bytes, host_bytes is as much above the
    least, and the base stays packed in memory.
    """
    rank, count = rank_and_count()
    accumulate = MICRO_BATCHES // count
    settings: dict[str, Any] = {"accumulate": accumulate, "share": share, "lr": 1e-2, **more}
    weights = base.format(rank=rank)
    if spare_bytes is not None:
        settings["frozen"] = "packed"
        try:
            lohan.wrap(build(), store=store, weights=weights, host_bytes=1, **settings)
        except BudgetError as error:
            found = re.search(r"at least (\d+)", str(error))
            assert found
            settings["host_bytes"] = int(found[1]) + spare_bytes
    model = lohan.wrap(build(), store=store, weights=weights, **settings)
    packed = sum(bool(unit.packs) for unit in inside(model).layout.units)
    for step in range(steps):
        for number in range(rank, MICRO_BATCHES, count):
            batch = tokens(step, number)
            model(input_ids=batch, labels=batch).loss.backward()
        inside(model).open_step.close(unscale=count / MICRO_BATCHES)
    result = digest(model), packed
    model.lohan.close()
    return result
