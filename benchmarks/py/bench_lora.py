"""Measure LoRA on a base of OPT-1.3B's shape that is read in place.

A step reads the base's 2.6 GB twice, in forward and in backward, with a budget that cannot hold it.
It can be no faster than the larger of two times, which are measured in turn with it in every round:
computing (peft's model in memory, with torch's AdamW) and reading (as many bytes of the same files,
O_DIRECT, with nothing else running).

With --base nf4 the base has a Llama's shape and is quantized (lora_nf4.py), and its peers are the
base in bf16 and, with --bitsandbytes-python, peft with bitsandbytes, which has all of the base in
memory.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import json
import mmap
import os
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lohan
import lora_nf4
import torch
from lohan.common._inside import inside
from peak_memory import PeakMemory
from peft import LoraConfig, get_peft_model
from report import Report
from safetensors.torch import save_file
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    OPTConfig,
    OPTForCausalLM,
)

SHAPE = {"hidden_size": 2048, "ffn_dim": 8192, "num_hidden_layers": 24, "num_attention_heads": 32}
# The same number of parameters in more and smaller blocks, of which 300 MB hold more than one.
DEEP_SHAPE = {
    "hidden_size": 1536,
    "intermediate_size": 4096,
    "num_hidden_layers": 44,
    "num_attention_heads": 24,
    "num_key_value_heads": 24,
    "vocab_size": 30_000,
    "tie_word_embeddings": False,
}
PIECE_BYTES = 4 << 20
READERS = 8


def empty_deep_model() -> Any:
    """Make the base of --base nf4 without storage, in bf16."""
    with lohan.empty():
        return LlamaForCausalLM(LlamaConfig(**DEEP_SHAPE)).to(torch.bfloat16)


def empty_model() -> Any:
    """Make the base without storage, in bf16."""
    with lohan.empty():
        return OPTForCausalLM(OPTConfig(**SHAPE, dropout=0.0)).to(torch.bfloat16)


def write_base(folder: Path, model: Any) -> None:
    """Write random weights as a Hugging Face folder, with a shard per layer."""
    torch.manual_seed(0)
    model.config.save_pretrained(folder)
    shards: dict[str, list[tuple[str, torch.Size]]] = {}
    for name, param in model.named_parameters():
        numbers = [part for part in name.split(".") if part.isdigit()]
        shards.setdefault(numbers[0] if numbers else "rest", []).append((name, param.shape))
    weight_map = {}
    for shard, params in shards.items():
        values = {name: _value(name, shape) for name, shape in params}
        path = folder / f"model-{shard}.safetensors"
        save_file(values, path, {"format": "pt"})
        with path.open("rb") as file:
            os.fsync(file.fileno())
        weight_map.update(dict.fromkeys(values, path.name))
    index = folder / "model.safetensors.index.json"
    index.write_text(json.dumps({"metadata": {}, "weight_map": weight_map}), encoding="utf-8")


def _value(name: str, shape: torch.Size) -> torch.Tensor:
    if len(shape) > 1:
        return torch.randn(shape).mul_(0.02).to(torch.bfloat16)
    is_scale = "norm" in name and name.endswith("weight")
    return torch.full(shape, 1.0 if is_scale else 0.0, dtype=torch.bfloat16)


def adapted(model: Any) -> Any:
    """Add adapters, with the same values for any base."""
    torch.manual_seed(1)
    config = LoraConfig(r=16, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
    return get_peft_model(model, config).train()


def read_seconds(paths: list[Path], nbytes: int) -> float:
    """Return how long the disk takes to read nbytes from the files, repeatedly if necessary.

    Args:
        paths: the files of the base.
        nbytes: the bytes that a step reads.
    """
    pieces = []
    while nbytes > 0:
        for path in paths:
            size = min(path.stat().st_size // PIECE_BYTES * PIECE_BYTES, nbytes)
            pieces += [(path, at) for at in range(0, size, PIECE_BYTES)]
            nbytes -= size
    fds = {path: os.open(path, os.O_RDONLY | os.O_DIRECT) for path in paths}
    buffers = [mmap.mmap(-1, PIECE_BYTES) for _ in range(READERS)]

    def reader(index: int) -> None:
        for path, at in pieces[index::READERS]:
            os.preadv(fds[path], [buffers[index]], at)

    begin = time.perf_counter()
    with concurrent.futures.ThreadPoolExecutor(READERS) as pool:
        list(pool.map(reader, range(READERS)))
    seconds = time.perf_counter() - begin
    for fd in fds.values():
        os.close(fd)
    return seconds


def step_of(model: Any, optimizer: Any, tokens: torch.Tensor) -> Callable[[], float]:
    """Return a function that takes a step and returns its seconds."""

    def step() -> float:
        begin = time.perf_counter()
        model(input_ids=tokens, labels=tokens).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return time.perf_counter() - begin

    return step


def written_bytes() -> int:
    """Return the bytes that this process has written to disks."""
    lines = Path("/proc/self/io").read_text(encoding="ascii").splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("write_bytes"))


def main() -> None:
    """Parse the arguments and run the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--base", choices=["bf16", "nf4"], default="bf16")
    parser.add_argument("--bitsandbytes-python", help="interpreter with bitsandbytes and peft")
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--length", type=int, default=128)
    parser.add_argument("--host-bytes", type=int, help="[default: 1 GB; with nf4 300 MB]")
    parser.add_argument("--directory", default=None, help="directory on the disk to measure")
    parser.add_argument("--history", action="store_true")
    args = parser.parse_args()
    torch.set_num_threads(len(os.sched_getaffinity(0)))
    report = Report(args.history)
    args.host_bytes = args.host_bytes or (300_000_000 if args.base == "nf4" else 1_000_000_000)
    with tempfile.TemporaryDirectory(dir=args.directory, prefix="bench-lora-") as name:
        base = Path(name) / "base"
        base.mkdir()
        write_base(base, empty_deep_model() if args.base == "nf4" else empty_model())
        if args.base == "nf4":
            lora_nf4.measure(Path(name), base, args, report)
        else:
            measure(Path(name), base, args, report)


def measure(folder: Path, base: Path, args: Any, report: Report) -> None:
    """Run the benchmark on a base in bf16, with everything else in the folder."""
    tokens = torch.randint(0, 50272, (args.batch, args.length))
    peak = PeakMemory(os.getpid())
    peak.restart()
    before = peak.since_bytes
    begin = time.perf_counter()
    model = lohan.wrap(
        adapted(empty_model()), weights=base, store=folder / "store", host_bytes=args.host_bytes
    )
    load_seconds = time.perf_counter() - begin
    peak.read()
    load_bytes = peak.since_bytes - before
    ours = step_of(model, model.optimizer, tokens)
    ours()
    ours()
    model.lohan.flush()
    begin_bytes = written_bytes()
    ours()
    model.lohan.flush()
    written = written_bytes() - begin_bytes
    stats = model.lohan.stats()
    peer_model = adapted(AutoModelForCausalLM.from_pretrained(base, dtype=torch.bfloat16))
    trained = [p for p in peer_model.parameters() if p.requires_grad]
    theirs = step_of(peer_model, torch.optim.AdamW(trained, lr=1e-3), tokens)
    theirs()
    rounds: list[tuple[float, float, float]] = []
    paths = sorted(base.glob("*.safetensors"))
    read_bytes = stats.bytes["param_read"]
    for index in range(args.rounds):
        turns: list[Callable[[], float]] = [ours, theirs, lambda: read_seconds(paths, read_bytes)]
        order = [(index + i) % 3 for i in range(3)]
        times = {place: turns[place]() for place in order}
        model.lohan.flush()
        rounds.append((times[0], times[1], times[2]))
    units = inside(model).layout.units
    trainable = sum(12 * unit.elements for unit in units if unit.trainable)
    states = stats.bytes["param_write"] + stats.bytes["state_write"]
    report.add(
        "lora_step",
        [ours for ours, _, _ in rounds],
        "s",
        peer="peft's model in memory",
        peer_values=[peer for _, peer, _ in rounds],
        bound="larger of computing and reading",
        bound_values=[max(peer, disk) for _, peer, disk in rounds],
        read_s=[round(disk, 3) for _, _, disk in rounds],
        tokens=tokens.numel(),
        host_bytes=args.host_bytes,
        frozen_bytes=sum(unit.nbytes for unit in units if unit.runs),
        read_bytes=read_bytes,
        planned_read_bytes=stats.planned_bytes["param_read"],
        frozen_written_bytes=states - trainable,
        process_written_bytes=written,
        step_written_bytes=stats.written_bytes,
        load_s=load_seconds,
        load_peak_bytes=load_bytes,
        bound_by=stats.bound_by,
    )
    model.lohan.close()


if __name__ == "__main__":
    main()
