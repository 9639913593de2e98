"""One process of a system of bench_world.py: GPT-2 124M in bf16, trained on two nodes.

lohan_wide has another model, whose computation takes next to no time, and gloo has none: it sends
and receives as many bytes as lohan_wide, and does nothing with them.

It answers each line of stdin, a number of steps, with what these took, the losses of all steps and
the sockets that the process has open.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import json
import os
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from transformers import GPT2Config, GPT2LMHeadModel

HYPER: dict[str, Any] = {"lr": 1e-4, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.01}
LENGTH = 128
LORA_RANK = 16
WIDE, WIDE_LAYERS = 4096, 6  # of 403 MB of gradients, and little computation
PIECE_BYTES, PIECES_AT_ONCE = 4 << 20, 8  # as in lohan
SYSTEMS = ("lohan", "lohan_wide", "gloo", "ddp", "fsdp2", "fsdp2_best", "deepspeed")
Step = Callable[[torch.Tensor], torch.Tensor]


TOLD: dict[str, Any] = {}  # what else an answer has


def own_bytes() -> int:
    """Return the memory of this process; what several share counts as a part of each."""
    ctypes.CDLL(None).malloc_trim(0)
    with open("/proc/self/smaps_rollup", encoding="ascii") as file:
        lines = dict(line.split()[:2] for line in file.read().splitlines()[1:])
    return int(lines["Pss:"]) << 10


def open_sockets() -> int:
    """Return the number of sockets that this process has open."""
    count = 0
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):  # the one of listdir itself
            count += os.readlink(f"/proc/self/fd/{name}").startswith("socket:")
    return count


def build(is_lora: bool) -> Any:
    torch.manual_seed(0)
    config = GPT2Config(resid_pdrop=0, embd_pdrop=0, attn_pdrop=0, use_cache=False)
    model: Any = GPT2LMHeadModel(config).to(torch.bfloat16)
    if is_lora:
        from peft import LoraConfig, get_peft_model

        lora = LoraConfig(
            r=LORA_RANK, target_modules=["c_attn", "c_proj"], fan_in_fan_out=True, bias="none"
        )
        model = get_peft_model(model, lora).to(torch.bfloat16)
    return model.train()


def _emulated(args: argparse.Namespace) -> dict[str, Any]:
    """Return the settings of an emulated accelerator; 0 bytes a second: no limit."""
    return {
        "device": "emu",
        "device_param_bytes": args.device_param_bytes,
        "emu_bytes_per_s": (args.link_rate, 0),
        "gather": args.gather,
    }


def lohan_step(args: argparse.Namespace) -> Step:
    """Everything is in main memory, as for the others; the store gets a commit at the end."""
    import lohan

    plain = build(args.lora)
    if args.memory:
        plain(input_ids=torch.zeros((1, args.length), dtype=torch.int64))
    # Each process has a plain model until wrap() takes its memory, which is not torch's own.
    weights = sum(param.nbytes for param in plain.parameters())
    before = own_bytes() - weights if args.memory else 0
    model = lohan.wrap(
        plain,
        store=args.store,
        commit_every="manual",
        threads=1,
        share=args.share,
        accumulate=args.accumulate,
        **({"heap": "system", "schedule": "serial"} if args.memory else {}),
        **({"replicas": args.replicas, "host_bytes": args.host_bytes} if args.host_bytes else {}),
        **(_emulated(args) if args.device_param_bytes else {}),
        **HYPER,
    )

    def step(batch: torch.Tensor) -> torch.Tensor:
        for _ in range(args.accumulate):
            loss = model(input_ids=batch, labels=batch).loss
            loss.backward()
        model.optimizer.step()
        if args.device_param_bytes:
            model.lohan.flush()
        if args.memory or args.host_bytes or args.device_param_bytes:
            stats = model.lohan.stats()
            TOLD["ssd_bytes"] = stats.read_bytes + stats.written_bytes
            TOLD["bytes"], TOLD["planned_bytes"] = stats.bytes, stats.planned_bytes
            TOLD["replans"] = stats.replans
        if args.memory:
            TOLD["memory_bytes"] = own_bytes() - before
        return loss.detach()

    return step


def torch_step(args: argparse.Namespace) -> Step:
    dist.init_process_group("gloo")
    model = build(args.lora)
    if args.system == "ddp":
        model = torch.nn.parallel.DistributedDataParallel(model)
    else:
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard

        options: dict[str, Any] = {"mesh": init_device_mesh("cpu", (dist.get_world_size(),))}
        if args.system == "fsdp2_best":
            options["reshard_after_forward"] = False
        inner = model.base_model.model if args.lora else model
        for block in inner.transformer.h:
            fully_shard(block, **options)
        fully_shard(model, **options)
    trained = [param for param in model.parameters() if param.requires_grad]
    fused = {"fused": True} if args.system == "ddp" else {"foreach": True}
    optimizer = torch.optim.AdamW(trained, **fused, **HYPER)

    def step(batch: torch.Tensor) -> torch.Tensor:
        loss: torch.Tensor = model(input_ids=batch, labels=batch).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return step


def deepspeed_step(args: argparse.Namespace) -> Step:
    import deepspeed

    dist.init_process_group("gloo")
    model = build(args.lora)
    config = {
        "train_micro_batch_size_per_gpu": args.batch,
        "gradient_accumulation_steps": 1,
        "gradient_clipping": 0.0,
        "bf16": {"enabled": True},
        "zero_allow_untested_optimizer": True,
        "steps_per_print": 10**9,
        "zero_optimization": {
            "stage": 3,
            "stage3_param_persistence_threshold": 0,
            "overlap_comm": True,
        },
        "optimizer": {"type": "AdamW", "params": {**HYPER, "torch_adam": True}},
    }
    trained = [param for param in model.parameters() if param.requires_grad]
    engine, *_ = deepspeed.initialize(model=model, model_parameters=trained, config=config)

    def step(batch: torch.Tensor) -> torch.Tensor:
        loss: torch.Tensor = engine(input_ids=batch, labels=batch).loss
        engine.backward(loss)
        engine.step()
        return loss.detach()

    return step


def wide_step(args: argparse.Namespace) -> Step:
    """Exchange the gradients of matrices in fp32, each of which is multiplied by one vector."""
    import lohan

    torch.manual_seed(0)
    layers = [torch.nn.Linear(WIDE, WIDE, bias=False) for _ in range(WIDE_LAYERS)]
    model = lohan.wrap(
        torch.nn.Sequential(*layers), store=args.store, commit_every="manual", threads=1, **HYPER
    )
    x = torch.ones(1, WIDE)

    def step(_: torch.Tensor) -> torch.Tensor:
        loss: torch.Tensor = model(x).square().mean()
        loss.backward()
        model.optimizer.step()
        model.lohan.flush()
        return loss.detach()

    return step


def gloo_step(_: argparse.Namespace) -> Step:
    """Exchange as many bytes as wide_step does."""
    dist.init_process_group("gloo")
    other = 1 - dist.get_rank()
    pieces = WIDE_LAYERS * WIDE * WIDE * 4 // PIECE_BYTES
    out, into = (
        [torch.zeros(PIECE_BYTES, dtype=torch.uint8) for _ in range(PIECES_AT_ONCE)]
        for _ in range(2)
    )

    def step(_: torch.Tensor) -> torch.Tensor:
        for _ in range(0, pieces, PIECES_AT_ONCE):
            works = [dist.irecv(each, other) for each in into]
            works += [dist.isend(each, other) for each in out]
            for work in works:
                work.wait()  # type: ignore[union-attr]
        return torch.zeros(())

    return step


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("system", choices=SYSTEMS)
    parser.add_argument("--lora", action="store_true")
    parser.add_argument("--store", default=None)
    parser.add_argument("--batch", type=int, default=2, help="sequences of one process")
    parser.add_argument("--length", type=int, default=LENGTH, help="tokens of a sequence")
    parser.add_argument("--share", default="off", choices=("off", "on"))
    parser.add_argument("--accumulate", type=int, default=1, help="backwards of a step (lohan)")
    parser.add_argument("--replicas", default="all", choices=("all", "parameters"))
    parser.add_argument("--host-bytes", type=int, default=0, help="lohan: states are on SSD")
    parser.add_argument("--device-param-bytes", type=int, default=0, help="lohan: emulated device")
    parser.add_argument("--link-rate", type=int, default=0, help="bytes a second to that device")
    parser.add_argument("--gather", default="host", choices=("host", "shards"))
    parser.add_argument("--memory", action="store_true", help="measure lohan's memory")
    args = parser.parse_args()
    torch.set_num_threads(1)
    # Libraries print; only answers belong in this program's output.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    made = {
        "lohan": lohan_step,
        "lohan_wide": wide_step,
        "gloo": gloo_step,
        "deepspeed": deepspeed_step,
    }
    step = made.get(args.system, torch_step)(args)
    generator = torch.Generator().manual_seed(1 + int(os.environ.get("RANK", "0")))
    for line in sys.stdin:
        shape = (args.batch, args.length)
        batches = [torch.randint(0, 50257, shape, generator=generator) for _ in range(int(line))]
        begin, cpu = time.perf_counter(), time.process_time()
        losses = [float(step(batch)) for batch in batches]
        answer = {
            "seconds": (time.perf_counter() - begin) / len(batches),
            "cpu_seconds": (time.process_time() - cpu) / len(batches),
            "losses": losses,
            "sockets": open_sockets(),
            **TOLD,
        }
        print(json.dumps(answer), file=answers, flush=True)
    os._exit(0)  # gloo's groups wait for each other otherwise


if __name__ == "__main__":
    main()
