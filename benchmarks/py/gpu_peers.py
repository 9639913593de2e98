"""gpu.sh peers: training steps of other libraries that keep states off the GPU.

The model, batches and optimizer are those of `gpu.sh overlap`. A library that is not installed is
reported as skipped.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping
from typing import Any

from gpu_llama import MIDDLE, TINY, Filler, batches, build, empty, stats_of
from gpu_part import Part, Skip, store_folder

HYPER = {"lr": 1e-4, "weight_decay": 0.01}
WARMUP, STEPS = 2, 5


class Peers:
    """The contestants."""

    def __init__(self, part: Part) -> None:
        import torch

        self.part, self.place, self.torch = part, part.place, torch
        self.shape = self.place.pick(MIDDLE, TINY)
        self.steps = self.place.pick(STEPS, 1)
        self.batches = batches(self.shape, self.place, WARMUP + self.steps)

    def measure(
        self, step: Callable[[Any], Any], flush: Callable[[], Any] = lambda: None
    ) -> dict[str, Any]:
        """Measure steps after a warm-up, without waiting for losses."""
        losses = [step(tokens) for tokens in self.batches[:WARMUP]]
        flush()
        self.place.synchronize()
        self.place.reset_peak()
        begin = time.perf_counter()
        losses += [step(tokens) for tokens in self.batches[WARMUP:]]
        flush()
        self.place.synchronize()
        seconds = (time.perf_counter() - begin) / self.steps
        tokens = self.shape.rows * self.shape.tokens
        return {
            "step_ms": 1e3 * seconds,
            "tokens_per_s": tokens / seconds,
            "losses": [loss.item() for loss in losses],
            **self.place.peak_bytes(),
        }

    def lohan(self) -> Mapping[str, Any]:
        """Train with lohan, with half of the parameters on the device at a time."""
        import lohan

        with store_folder() as folder:
            model = lohan.wrap(
                empty(self.shape, self.torch.bfloat16),
                store=folder / "store",
                init=Filler(),
                device=self.place.lohan,
                device_param_bytes=self.shape.param_count,
                commit_every="never",
                allow_tmpfs=True,
                **HYPER,
            )
            try:

                def step(tokens: Any) -> Any:
                    loss = model(tokens)
                    loss.backward()
                    model.optimizer.step()
                    return loss.detach()

                return {**self.measure(step, model.lohan.flush), **stats_of(model)}
            finally:
                model.lohan.close()

    def torch_on_the_cpu(self) -> Mapping[str, Any]:
        """Train in torch with bf16 parameters on the device, and a fused AdamW on the CPU."""
        torch = self.torch
        model = build(self.shape, torch.bfloat16).to(self.place.device)
        params = list(model.parameters())
        masters = [p.detach().to("cpu", torch.float32).requires_grad_() for p in params]
        optimizer = torch.optim.AdamW(masters, fused=True, **HYPER)

        def step(tokens: Any) -> Any:
            loss = model(tokens)
            loss.backward()
            for param, master in zip(params, masters, strict=True):
                assert param.grad is not None
                master.grad = param.grad.to("cpu", torch.float32)
                param.grad = None
            optimizer.step()
            with torch.no_grad():
                for param, master in zip(params, masters, strict=True):
                    param.copy_(master)
            return loss.detach()

        return self.measure(step)

    def torchao(self) -> Mapping[str, Any]:
        """Use torchao's CPUOffloadOptimizer: parameters on the device, states in main memory."""
        try:
            from torchao.optim import CPUOffloadOptimizer
        except ImportError as error:
            raise Skip(f"torchao: {error}") from error
        if self.place.is_dry:
            raise Skip("torchao's CPUOffloadOptimizer takes parameters on a GPU only")
        model = build(self.shape, self.torch.bfloat16).to(self.place.device)
        optimizer = CPUOffloadOptimizer(
            model.parameters(), self.torch.optim.AdamW, fused=True, **HYPER
        )

        def step(tokens: Any) -> Any:
            loss = model(tokens)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            return loss.detach()

        return self.measure(step)

    def deepspeed(self, stage: int) -> Mapping[str, Any]:
        """Train with ZeRO and the optimizer on the CPU; in stage 3 also the parameters."""
        try:
            import deepspeed
        except ImportError as error:
            raise Skip(f"deepspeed: {error}") from error
        if self.place.is_dry:
            raise Skip("deepspeed has no dry run")
        defaults = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29555", "RANK": "0"}
        for name, value in {**defaults, "WORLD_SIZE": "1", "LOCAL_RANK": "0"}.items():
            os.environ.setdefault(name, value)
        offload = {"device": "cpu", "pin_memory": True}
        zero: dict[str, Any] = {"stage": stage, "offload_optimizer": offload}
        if stage == 3:
            zero["offload_param"] = offload
        config = {
            "train_micro_batch_size_per_gpu": self.shape.rows,
            "bf16": {"enabled": True},
            "gradient_clipping": 0.0,
            "steps_per_print": 1 << 30,
            "zero_optimization": zero,
            "optimizer": {"type": "AdamW", "params": HYPER},
        }
        model = build(self.shape, self.torch.bfloat16)
        engine, *_ = deepspeed.initialize(
            model=model, model_parameters=model.parameters(), config=config
        )

        def step(tokens: Any) -> Any:
            loss = engine(tokens)
            engine.backward(loss)
            engine.step()
            return loss.detach()

        return self.measure(step)


def run(part: Part) -> None:
    """Run all cases; `gpu.sh overlap` has torch with everything on the device."""
    peers = Peers(part)
    part.run(
        {
            "lohan": peers.lohan,
            "torch_adamw_on_cpu": peers.torch_on_the_cpu,
            "torchao": peers.torchao,
            "deepspeed_zero2": lambda: peers.deepspeed(2),
            "deepspeed_zero3": lambda: peers.deepspeed(3),
        }
    )
