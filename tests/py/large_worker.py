"""One process that trains a model larger than its budget, or measures what any process needs.

Run it as `python large_worker.py STORE HOST_BYTES`, as `python large_worker.py baseline`, or as
`python large_worker.py STORE HOST_BYTES SWAP_BYTES` for some steps with more tokens, whose
activations are offloaded if SWAP_BYTES is above 0. It prints a JSON object.
"""

from __future__ import annotations

import json
import pathlib
import sys
import time
from typing import Any

import lohan
import torch
from lohan.common._inside import inside
from transformers import OPTConfig, OPTForCausalLM
from transformers.models.opt.modeling_opt import OPTDecoderLayer

TOKEN_COUNT = 16
SWAP_SSD_BYTES = 8_000_000_000


def config() -> OPTConfig:
    """Return the configuration of a model of OPT-1.3B's shape."""
    return OPTConfig(
        hidden_size=2048,
        num_hidden_layers=24,
        num_attention_heads=32,
        ffn_dim=8192,
        vocab_size=50272,
        word_embed_proj_dim=2048,
        dropout=0.0,
        attention_dropout=0.0,
        use_cache=False,
    )


def peak_bytes() -> int:
    """The most memory this process has had, with huge pages of a pool, which VmHWM leaves out."""
    fields = {}
    for line in pathlib.Path("/proc/self/status").read_text().splitlines():
        name, _, value = line.partition(":")
        fields[name] = value
    return 1024 * sum(int(fields[name].split()[0]) for name in ("VmHWM", "HugetlbPages"))


def run_baseline() -> dict[str, float]:
    """Import the libraries, and run forward and backward of one block in plain torch."""
    block = OPTDecoderLayer(config(), layer_idx=0).to(torch.bfloat16)
    hidden = torch.randn(1, TOKEN_COUNT, 2048).to(torch.bfloat16).requires_grad_()
    output = block(hidden)
    (output[0] if isinstance(output, tuple) else output).float().square().mean().backward()
    return {"peak_bytes": peak_bytes()}


def run_step(store: str, host_bytes: int) -> dict[str, float]:
    """Initialize the model into a store and train it for a step."""
    started = time.monotonic()
    with lohan.empty():
        model = OPTForCausalLM(config()).to(torch.bfloat16)
    model = lohan.wrap(model, store=store, init="model", host_bytes=host_bytes, lr=1e-4)
    wrapped = time.monotonic()
    wrapped_peak_bytes = peak_bytes()
    batch = torch.randint(0, 50272, (1, TOKEN_COUNT))
    loss = model(input_ids=batch, labels=batch).loss
    loss.backward()
    model.optimizer.step()
    model.lohan.flush()
    stats = model.lohan.stats()
    ended = time.monotonic()
    params = sum(unit.elements for unit in inside(model).layout.units)
    model.lohan.close()
    return {
        "loss": loss.item(),
        "params": params,
        "host_bytes": inside(model).budget["host_bytes"],
        "wrap_s": wrapped - started,
        "step_s": ended - wrapped,
        "wrapped_peak_bytes": wrapped_peak_bytes,
        "peak_bytes": peak_bytes(),
        "gradient_bytes_max": stats.gradient_bytes_max,
        "read_bytes": stats.read_bytes,
        "written_bytes": stats.written_bytes,
    }


def run_steps(store: str, host_bytes: int, swap_bytes: int) -> dict[str, Any]:
    """Train on batches of 4 x 512 tokens."""
    swap = {"swap_bytes": swap_bytes, "swap_ssd_bytes": SWAP_SSD_BYTES} if swap_bytes else {}
    with lohan.empty():
        model = OPTForCausalLM(config()).to(torch.bfloat16)
    model = lohan.wrap(model, store=store, init="model", host_bytes=host_bytes, lr=1e-4, **swap)
    losses, swapped, seconds = [], [], []
    for step in range(2):
        started = time.monotonic()
        generator = torch.Generator().manual_seed(step)
        batch = torch.randint(0, 50272, (4, 512), generator=generator)
        loss = model(input_ids=batch, labels=batch).loss
        loss.backward()
        model.optimizer.step()
        model.lohan.flush()
        losses.append(loss.item())
        stats = model.lohan.stats()
        assert stats.bytes == stats.planned_bytes
        swapped.append(stats.bytes["saved_write"])
        seconds.append(time.monotonic() - started)
    model.lohan.close()
    return {
        "losses": losses,
        "swapped_bytes": swapped,
        "step_s": seconds,
        "host_bytes": inside(model).budget["host_bytes"] + swap_bytes,
        "peak_bytes": peak_bytes(),
    }


if __name__ == "__main__":
    torch.set_num_threads(2)
    torch.manual_seed(0)
    answer = (
        run_baseline()
        if sys.argv[1] == "baseline"
        else (run_step, run_steps)[len(sys.argv) == 4](sys.argv[1], *map(int, sys.argv[2:]))
    )
    print(json.dumps(answer))
