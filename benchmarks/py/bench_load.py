"""Measure how long wrap(weights=) of a large model takes, beside from_pretrained of the same files.

Two models of about 1.3 billion parameters in bf16: one whose tensors only have other names in the
model, and a mixture whose experts the files have one by one, so that the loader merges them. Each
round runs three processes per model in turn (load_once.py), and the disk alone.
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from disk import Disk
from report import Report
from transformers import LlamaConfig, LlamaForCausalLM, MixtralConfig, MixtralForCausalLM

KINDS = ("in_place", "torch", "copied")


def models(layers: int) -> dict[str, Any]:
    """Return what builds each model, by its name."""
    sizes: dict[str, Any] = {
        "hidden_size": 2048,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "vocab_size": 32000,
    }
    dense = LlamaConfig(**sizes, intermediate_size=5632, num_hidden_layers=layers)
    merged = MixtralConfig(
        **sizes, intermediate_size=1408, num_hidden_layers=layers // 2, num_local_experts=8
    )
    return {"dense": (LlamaForCausalLM, dense), "experts": (MixtralForCausalLM, merged)}


def save(cls: Any, config: Any, folder: Path) -> None:
    """Write a model, and beside it the configuration of a small one of its class."""
    torch.manual_seed(0)
    torch.set_default_dtype(torch.bfloat16)
    cls(config).save_pretrained(folder)
    small = {"hidden_size": 32, "num_hidden_layers": 1, "intermediate_size": 32, "vocab_size": 64}
    type(config)(**{**config.to_dict(), **small, "head_dim": 8}).save_pretrained(folder / "small")
    torch.set_default_dtype(torch.float32)


def run(kind: str, folder: Path) -> dict[str, Any]:
    """Return what one contestant printed."""
    store = folder.parent / "store"
    script = Path(__file__).with_name("load_once.py")
    command = [sys.executable, "-W", "ignore", str(script), kind, str(folder), str(store)]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    shutil.rmtree(store, ignore_errors=True)
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def measure(name: str, folder: Path, args: Any, report: Report) -> None:
    """Measure one model, and report it."""
    nbytes = sum(path.stat().st_size for path in folder.glob("*.safetensors"))
    rounds: list[dict[str, Any]] = []
    for index in range(args.rounds):
        order = [KINDS[(index + turn) % len(KINDS)] for turn in range(len(KINDS))]
        rounds.append({kind: run(kind, folder) for kind in order})
        disk = Disk(folder.parent, nbytes)
        rounds[-1]["disk"] = disk.seconds(nbytes, 0)
        rounds[-1]["disk_copy"] = disk.seconds(nbytes, nbytes)
        disk.path.unlink()
    torch_s = [each["torch"]["s"] for each in rounds]
    report.add(
        f"load_{name}_in_place",
        [each["in_place"]["s"] for each in rounds],
        "s",
        peer="from_pretrained, all pages touched",
        peer_values=torch_s,
        read_s=statistics.median(each["disk"] for each in rounds),
        file_bytes=nbytes,
    )
    report.add(
        f"load_{name}_memory",
        [each["in_place"]["peak_bytes"] for each in rounds],
        "bytes",
        peer="from_pretrained, all pages touched",
        peer_values=[each["torch"]["peak_bytes"] for each in rounds],
        file_bytes=nbytes,
    )
    report.add(
        f"load_{name}_copied",
        [each["copied"]["s"] for each in rounds],
        "s",
        peer="the drive: reading the files and writing as many bytes",
        peer_values=[each["disk_copy"] for each in rounds],
        from_pretrained_s=statistics.median(torch_s),
        file_bytes=nbytes,
        peak_bytes=max(each["copied"]["peak_bytes"] for each in rounds),
    )


def main() -> None:
    """Parse the arguments and run the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--layers", type=int, default=24, help="24: about 1.3 billion parameters")
    parser.add_argument("--directory", default=None, help="directory on the disk to measure")
    parser.add_argument("--model", choices=("dense", "experts"), help="measure only this one")
    parser.add_argument("--history", action="store_true")
    args = parser.parse_args()
    report = Report(args.history)
    for name, (cls, config) in models(args.layers).items():
        if args.model not in (None, name):
            continue
        with tempfile.TemporaryDirectory(dir=args.directory, prefix="bench-load-") as place:
            save(cls, config, Path(place) / "files")
            measure(name, Path(place) / "files", args, report)


if __name__ == "__main__":
    main()
