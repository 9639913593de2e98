"""One process of bench_diffusion.py: a diffusion transformer of SD3's shape, in bf16.

It answers "train N" with the seconds that N steps and the flush of the last one took, and with the
losses; "stats" with what lohan moved in the last step. The kinds are:

* lohan: all parameters are trained on an emulated accelerator, with all states on SSD.
* computation: forward and backward in memory, without an optimizer.
* adafactor: the same with transformers' Adafactor, with everything in memory.
* prepare: no contestant; at "bits" it trains a small model in several budgets and answers with the
  results, and at "write" it writes the random weights, which the others read.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import re
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import diffusers
import lohan
import served
import torch
from diffusers import SD3Transformer2DModel
from lohan import _core
from lohan.errors import BudgetError
from torch import nn

HYPER = {"lr": 1e-5, "weight_decay": 0.01}
HEAD_SIZE = 64
CHANNELS = 16
# SD3's widths of the prompts' embeddings: those of the tokens, and the pooled one.
TEXT_WIDTH, POOLED_WIDTH = 4096, 2048
BATCH_COUNT = 2  # batches that are repeated, so that the loss falls if they are really learned
SMALL = {"layers": 4, "width": 256, "latent": 16, "text": 8, "batch": 2}
SMALL_STEPS = 4
SMALL_DEVICE_BYTES = 16_000_000
FRACTIONS = (0.0, 0.5, 1.0)  # of the way from the least budget to one that holds everything
Step = Callable[[int], float]


def config_of(args: argparse.Namespace) -> dict[str, Any]:
    """Return the configuration of a model: SD3-medium's, except for layers and width."""
    return {
        "sample_size": 2 * args.latent,
        "patch_size": 2,
        "in_channels": CHANNELS,
        "out_channels": CHANNELS,
        "num_layers": args.layers,
        "attention_head_dim": HEAD_SIZE,
        "num_attention_heads": args.width // HEAD_SIZE,
        "joint_attention_dim": TEXT_WIDTH,
        "caption_projection_dim": args.width,
        "pooled_projection_dim": POOLED_WIDTH,
        "pos_embed_max_size": args.latent,
    }


def write(folder: Path, args: argparse.Namespace) -> None:
    """Write random weights in bf16, as diffusers does."""
    torch.manual_seed(0)
    torch.set_default_dtype(torch.bfloat16)
    try:
        SD3Transformer2DModel(**config_of(args)).to(torch.bfloat16).save_pretrained(folder)
    finally:
        torch.set_default_dtype(torch.float32)


def prepared(model: Any) -> Any:
    """Return the model as all contestants train it: activations of blocks are recomputed."""
    model.enable_gradient_checkpointing()
    return model.train()


def loss_of(model: nn.Module, args: argparse.Namespace, step: int) -> torch.Tensor:
    """Return the flow-matching loss of a step: the error of the predicted velocity."""
    cache = torch.Generator().manual_seed(step % BATCH_COUNT)
    shape = (args.batch, CHANNELS, args.latent, args.latent)
    latents = torch.randn(shape, generator=cache)
    text = torch.randn(args.batch, args.text, TEXT_WIDTH, generator=cache)
    pooled = torch.randn(args.batch, POOLED_WIDTH, generator=cache)
    own = torch.Generator().manual_seed(100 + step)
    noise = torch.randn(shape, generator=own)
    times = torch.sigmoid(torch.randn(args.batch, generator=own))
    part = times.view(-1, 1, 1, 1)
    found = model(
        hidden_states=((1 - part) * latents + part * noise).to(torch.bfloat16),
        timestep=1000 * times,
        encoder_hidden_states=text.to(torch.bfloat16),
        pooled_projections=pooled.to(torch.bfloat16),
    ).sample
    return nn.functional.mse_loss(found.float(), noise - latents)


def plain(folder: Path) -> Any:
    """Return the model in memory, which is torch's own and not a mapping of the file."""
    model = SD3Transformer2DModel.from_pretrained(folder, torch_dtype=torch.bfloat16)
    for param in model.parameters():
        param.data = param.data.clone()
    return prepared(model)


def wrapped(folder: Path, store: Path, host_bytes: int, device_bytes: int, **settings: Any) -> Any:
    """Return the model with its parameters and states on SSD, which is never all in memory."""
    with lohan.empty():
        model = SD3Transformer2DModel.from_config(SD3Transformer2DModel.load_config(folder))
    return lohan.wrap(
        prepared(model.to(torch.bfloat16)),
        weights=folder,
        store=store,
        host_bytes=host_bytes,
        device="emu",
        device_param_bytes=device_bytes,
        **settings,
        **HYPER,
    )


def memory_step(model: Any, optimizer: Any, args: argparse.Namespace) -> Step:
    """Return a step in memory; without an optimizer, the gradients are dropped."""

    def step(index: int) -> float:
        loss = loss_of(model, args, index)
        loss.backward()
        if optimizer is not None:
            optimizer.step()
        for param in model.parameters():
            param.grad = None
        return loss.item()

    return step


def lohan_step(model: Any, args: argparse.Namespace) -> Step:
    """Return a training step of a wrapped model."""

    def step(index: int) -> float:
        loss = loss_of(model, args, index)
        loss.backward()
        model.optimizer.step()
        return loss.item()

    return step


def adafactor_of(model: Any) -> Any:
    """Return Adafactor with a fixed rate and no momentum, whose states are the fewest."""
    from transformers import Adafactor

    return Adafactor(
        model.parameters(),
        lr=HYPER["lr"],
        weight_decay=HYPER["weight_decay"],
        scale_parameter=False,
        relative_step=False,
        warmup_init=False,
    )


def contestant(args: argparse.Namespace) -> tuple[Any, Step]:
    """Return the model of a contestant and its step."""
    if args.kind == "lohan":
        model = wrapped(
            args.weights,
            args.store,
            args.host_bytes,
            args.device_bytes,
            threads=max(1, len(os.sched_getaffinity(0)) - torch.get_num_threads()),
            schedule=args.schedule,
            commit_every=int(args.commit_every) if args.commit_every.isdigit() else "never",
            emu_bytes_per_s=(args.link_rate, args.link_rate),
        )
        return model, lohan_step(model, args)
    if args.kind == "computation":
        _core.heap_keep()  # as wrap() does: torch's memory stays with the process
    model = plain(args.weights)
    optimizer = adafactor_of(model) if args.kind == "adafactor" else None
    return model, memory_step(model, optimizer, args)


def stats_of(model: Any) -> dict[str, Any]:
    """Return what lohan moved in the last step, and how busy each resource was."""
    last = model.lohan.stats()
    return {
        "bound_by": last.bound_by,
        "busy": {name: round(share, 3) for name, share in last.busy.items()},
        "read_bytes": last.read_bytes,
        "written_bytes": last.written_bytes,
    }


def digest(model: nn.Module) -> str:
    """Return a checksum of the bits of all parameters."""
    found = hashlib.sha256()
    for name, param in sorted(model.state_dict().items()):
        found.update(name.encode() + param.contiguous().view(torch.uint8).numpy().tobytes())
    return found.hexdigest()


def least_bytes(folder: Path) -> int:
    """Return the least budget of the small model, which the error for less names."""
    try:
        wrapped(folder, folder.parent / "least", _core.BLOCK_BYTES, SMALL_DEVICE_BYTES)
    except BudgetError as error:
        found = re.search(r"at least (\d+)", str(error))
        assert found is not None, error
        return int(found[1])
    raise AssertionError(f"{_core.BLOCK_BYTES} bytes were enough")


def bits(folder: Path) -> dict[str, Any]:
    """Train a small model in several budgets.

    Args:
        folder: where its weights and stores are written.

    Returns:
        For each budget, in bytes: the losses, a checksum of the final parameters, and the bytes
        that a step read from SSD.
    """
    args = argparse.Namespace(**SMALL)
    write(folder / "small", args)
    least = least_bytes(folder / "small")
    whole = least + 14 * sum(p.numel() for p in plain(folder / "small").parameters())
    found = {}
    for fraction in FRACTIONS:
        budget = int(least + fraction * (whole - least))
        store = folder / f"bits-{budget}"
        model = wrapped(folder / "small", store, budget, SMALL_DEVICE_BYTES)
        step = lohan_step(model, args)
        losses = [step(index) for index in range(SMALL_STEPS)]
        model.lohan.flush()
        read = model.lohan.stats().read_bytes
        found[str(budget)] = {"losses": losses, "digest": digest(model), "read_bytes": read}
        model.lohan.close()
    return found


def prepare(request: str, args: argparse.Namespace) -> dict[str, Any]:
    """Answer a request of the kind "prepare"."""
    if request == "bits":
        with tempfile.TemporaryDirectory(dir=args.weights.parent) as name:
            return bits(Path(name))
    write(args.weights, args)
    return {}


def arguments() -> argparse.Namespace:
    """Parse the arguments, which bench_diffusion.py passes on."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("kind", choices=["prepare", "lohan", "computation", "adafactor"])
    parser.add_argument("--weights", type=Path, required=True)
    parser.add_argument("--store", type=Path)
    for name in ("layers", "width", "latent", "text", "batch", "host-bytes", "device-bytes"):
        parser.add_argument(f"--{name}", type=int, required=True)
    parser.add_argument("--link-rate", type=int, required=True)
    parser.add_argument("--schedule", required=True)
    parser.add_argument("--commit-every", required=True)
    parser.add_argument("--compute-threads", type=int, required=True)
    return parser.parse_args()


def main() -> None:
    """Run one process of the benchmark."""
    pipe = served.answers()
    args = arguments()
    diffusers.logging.set_verbosity_error()  # it warns of any cast to bf16
    torch.set_num_threads(args.compute_threads)
    if args.kind == "prepare":
        served.answer_all(pipe, {}, lambda request: prepare(request, args))
        return
    model, step = contestant(args)
    params = sum(param.numel() for param in model.parameters())
    done = 0

    def answer(request: str) -> dict[str, Any]:
        nonlocal done
        if request == "stats":
            return stats_of(model)
        count = int(request.removeprefix("train "))
        begin = time.perf_counter()
        losses = [step(index) for index in range(done, done + count)]
        if args.kind == "lohan":
            model.lohan.flush()
        done += count
        return {"seconds": time.perf_counter() - begin, "losses": losses}

    served.answer_all(pipe, {"params": params}, answer)
    if args.kind == "lohan":
        model.lohan.close()


if __name__ == "__main__":
    main()
