"""A contestant of bench_accumulate.py: steps of several micro-batches, states on a limited drive.

    python benchmarks/py/accumulate_train.py SYSTEM FOLDER [--lora] [--count 8] [--host-bytes N]

SYSTEM is "vertical" or "horizontal" (lohan's orders) or "zero3" (DeepSpeed's ZeRO-3 on NVMe, in
DeepSpeed's interpreter). It answers "K" with the seconds of a step of K micro-batches and the flush
of its writes, the losses, and what lohan has read. ZeRO-3 always takes --count micro-batches.
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Callable, Sequence
from typing import Any

import served
import torch
from transformers import OPTConfig, OPTForCausalLM

# Small embeddings, so that nearly all parameters are in blocks, as in models of many billions.
SHAPE = {
    "vocab_size": 8192,
    "hidden_size": 1024,
    "word_embed_proj_dim": 1024,
    "ffn_dim": 4096,
    "num_attention_heads": 16,
    "max_position_embeddings": 128,
    "dropout": 0.0,
}
HYPER: dict[str, Any] = {"lr": 1e-4, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.01}
LORA_RANK = 16
ZERO3 = "zero3 nvme, 8 MiB x 32, pipelined, page-locked"
# A function that takes a step of micro-batches, and one that waits for the writes of the last step.
Step = tuple[Callable[[Sequence[torch.Tensor]], list[float]], Callable[[], None]]
TOLD: dict[str, Any] = {}  # what else an answer has


def build(args: argparse.Namespace) -> Any:
    """Make the model in bf16, with adapters if they are to be trained."""
    torch.manual_seed(0)
    model: Any = OPTForCausalLM(OPTConfig(**SHAPE, num_hidden_layers=args.layers))
    model = model.to(torch.bfloat16)
    if args.lora:
        from peft import LoraConfig, get_peft_model

        torch.manual_seed(1)
        lora = LoraConfig(r=LORA_RANK, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
        model = get_peft_model(model, lora).to(torch.bfloat16)
    return model.train()


def lohan_step(args: argparse.Namespace) -> Step:
    """Wrap with one of lohan's orders, and otherwise default settings."""
    import lohan

    model = lohan.wrap(
        build(args),
        store=args.folder,
        host_bytes=args.host_bytes,
        accumulate=args.count,
        order=args.system,
        **HYPER,
    )
    session: Any = model.lohan

    def step(batches: Sequence[torch.Tensor]) -> list[float]:
        def loss_of(batch: torch.Tensor) -> torch.Tensor:
            loss: torch.Tensor = model(input_ids=batch, labels=batch).loss / len(batches)
            return loss

        losses = session.accumulate([lambda batch=batch: loss_of(batch) for batch in batches])
        model.optimizer.step()
        return [float(loss) * len(batches) for loss in losses]

    def finish() -> None:
        session.flush()
        stats = session.stats()
        TOLD.update(
            read_bytes=stats.read_bytes,
            block_input_bytes=stats.bytes["saved_read"],
            param_read_bytes=stats.bytes["param_read"],
            written_bytes=stats.written_bytes,
            bound_by=stats.bound_by,
            stats=str(stats),
        )

    return step, finish


def zero3_step(args: argparse.Namespace) -> Step:
    """Train with DeepSpeed's ZeRO-3: parameters, gradients and optimizer on NVMe."""
    import deepspeed_train

    os.environ["DS_PIN_MEMORY_BACKEND"] = "native"  # torch's locks nothing without a GPU
    import deepspeed

    model = build(args)
    config = deepspeed_train.config_of(ZERO3, args.folder)
    config["train_micro_batch_size_per_gpu"] = 1
    config["gradient_accumulation_steps"] = args.count
    trained = [param for param in model.parameters() if param.requires_grad]
    engine, *_ = deepspeed.initialize(model=model, model_parameters=trained, config=config)

    def step(batches: Sequence[torch.Tensor]) -> list[float]:
        losses = []
        for batch in batches:
            loss = engine(input_ids=batch, labels=batch).loss
            engine.backward(loss)
            engine.step()
            losses.append(float(loss.detach()))
        return losses

    return step, lambda: None


def main() -> None:
    """Serve steps until the pipe is closed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("system", choices=("vertical", "horizontal", "zero3"))
    parser.add_argument("folder")
    parser.add_argument("--lora", action="store_true")
    parser.add_argument("--count", type=int, default=8, help="micro-batches of a step")
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--length", type=int, default=16, help="tokens of a micro-batch")
    parser.add_argument("--host-bytes", type=int, default=None)
    args = parser.parse_args()
    pipe = served.answers()
    torch.set_num_threads(len(os.sched_getaffinity(0)))
    step, finish = (zero3_step if args.system == "zero3" else lohan_step)(args)
    generator = torch.Generator().manual_seed(1)

    def answer(request: str) -> dict[str, Any]:
        count, steps = map(int, request.split())
        shape = (count, 1, args.length)
        vocabulary = SHAPE["vocab_size"]
        drawn = [torch.randint(0, vocabulary, shape, generator=generator) for _ in range(steps)]
        begin = time.perf_counter()
        losses = [loss for each in drawn for loss in step([*each])]
        finish()
        seconds = (time.perf_counter() - begin) / steps
        return {"seconds": seconds, "losses": losses, **TOLD}

    served.answer_all(pipe, {"system": args.system}, answer)


if __name__ == "__main__":
    main()
