"""gpu.sh features: micro-batches in turns, 8-bit moments, a packed base, losses without logits.

And two processes on one GPU. Each case compares losses with those of a setting that must not change
a bit, and times both.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import gpu_llama
from gpu_llama import MIDDLE, TINY, Filler, batches, empty, stats_of
from gpu_models import DRY, LIVE, Models, deterministic
from gpu_part import Part, Skip, store_folder

HERE = Path(__file__).resolve().parent
MICRO_BATCHES = 4
STEPS = 4
HYPER = {"lr": 1e-5, "weight_decay": 0.01}
PAIR_SECONDS = 240
Process = subprocess.Popen[str]


class Features:
    """The cases."""

    def __init__(self, part: Part) -> None:
        import torch

        self.part, self.place, self.torch = part, part.place, torch
        self.shape = dataclasses.replace(self.place.pick(MIDDLE, TINY), rows=1)

    def wrapped(self, folder: Path, **settings: Any) -> Any:
        """Make a wrapped model with a quarter of its parameters on the device."""
        import lohan

        nbytes = 2 * self.shape.param_count
        fixed = 4 * self.shape.vocab * self.shape.width
        # With 8-bit moments the smallest block has 65,536 elements.
        few = self.place.pick(max(nbytes // 4, fixed + nbytes // 8), 5 << 17)
        asked = {"device_param_bytes": few, **HYPER, **settings}
        return lohan.wrap(
            empty(self.shape, self.torch.bfloat16),
            store=folder / "store",
            init=Filler(),
            device=self.place.lohan,
            commit_every="never",
            allow_tmpfs=True,
            **asked,
        )

    def trained(self, step: Callable[[Any, int], float], **settings: Any) -> dict[str, Any]:
        """Take steps with a wrapped model."""
        with store_folder() as folder:
            model = self.wrapped(folder, **settings)
            try:
                self.place.reset_peak()
                losses, seconds = [], []
                with deterministic(self.place):
                    for number in range(STEPS):
                        self.place.synchronize()
                        begin = time.perf_counter()
                        losses.append(step(model, number))
                        self.place.synchronize()
                        seconds.append(1e3 * (time.perf_counter() - begin))
                peak = self.place.peak_bytes()
                return {"losses": losses, "step_ms": seconds, **stats_of(model), **peak}
            finally:
                model.lohan.close()

    def turns(self) -> Mapping[str, Any]:
        """Take accumulated steps in both orders."""
        every = batches(self.shape, self.place, MICRO_BATCHES)

        def step(model: Any, number: int) -> float:
            each = [lambda tokens=tokens: model(tokens) / MICRO_BATCHES for tokens in every]
            losses = model.lohan.accumulate(each)
            model.optimizer.step()
            return float(sum(loss.item() for loss in losses))

        found = {}
        for order in ("horizontal", "vertical"):
            found[order] = self.trained(
                step, order=order, accumulate=MICRO_BATCHES, activations="recompute"
            )
        assert found["horizontal"]["losses"] == found["vertical"]["losses"], found
        return found

    def low_precision(self) -> Mapping[str, Any]:
        """Take steps with 8-bit moments; the number of slots must not change a bit."""
        every = batches(self.shape, self.place, STEPS)

        def step(model: Any, number: int) -> float:
            loss = model(every[number])
            loss.backward()
            model.optimizer.step()
            return float(loss.item())

        found = {
            "fp32": self.trained(step),
            "8bit": self.trained(step, states="8bit"),
            "8bit_all_slots": self.trained(step, states="8bit", device_param_bytes=None),
        }
        assert found["8bit"]["losses"] == found["8bit_all_slots"]["losses"], found
        return found

    def packed(self) -> Mapping[str, Any]:
        """Train adapters on a base in NF4; the first loss is that of its decoded values."""
        import lohan
        from lohan.commands._quantize import quantize

        try:
            from peft import LoraConfig, get_peft_model
        except ImportError as error:
            raise Skip(f"peft: {error}") from error
        torch, models = self.torch, Models(self.part)
        config = LoraConfig(task_type="CAUSAL_LM", target_modules=["q_proj", "v_proj"])

        def adapted(model: Any) -> Any:
            torch.manual_seed(3)
            return get_peft_model(model, config).train()

        def adapted_empty() -> Any:
            from transformers import AutoModelForCausalLM, LlamaConfig

            made = LlamaConfig(
                **self.place.pick(LIVE, DRY), use_cache=False, attn_implementation="sdpa"
            )
            with lohan.empty():
                return adapted(AutoModelForCausalLM.from_config(made, dtype=torch.bfloat16))

        with tempfile.TemporaryDirectory() as folder:
            base, nf4 = Path(folder, "base"), Path(folder, "nf4")
            models.build(torch.bfloat16).save_pretrained(base)
            begin = time.perf_counter()
            quantize(base, nf4, to="nf4")
            found: dict[str, Any] = {"quantize_seconds": time.perf_counter() - begin}
            decoded: dict[str, Any] = {}
            least = self.place.pick(1_000_000_000, 1 << 18)
            for name, weights, more in (
                ("nf4", nf4, {}),
                ("nf4_few_slots", nf4, {"device_param_bytes": least}),
                ("bf16", base, {}),
            ):
                with models.wrapped(adapted_empty(), weights=weights, **more) as model:
                    if name == "nf4":
                        decoded = dict(model.state_dict())
                    with deterministic(self.place):
                        found[name] = models.train(model, model.optimizer)
                    found[name].update(stats_of(model))
            plain = adapted(models.build(torch.bfloat16))
            plain.load_state_dict({key: value.cpu() for key, value in decoded.items()})
            plain = plain.to(self.place.device)
            trained = [param for param in plain.parameters() if param.requires_grad]
            optimizer = torch.optim.AdamW(trained, **HYPER)
            with deterministic(self.place):
                found["plain"] = models.train(plain, optimizer)
        assert found["nf4"]["losses"] == found["nf4_few_slots"]["losses"], found
        assert found["nf4"]["losses"][0] == found["plain"]["losses"][0], found
        return found

    def no_logits(self) -> Mapping[str, Any]:
        """Compare the peak of a loss without logits with torch's."""
        import torch
        from lohan.losses import linear_cross_entropy
        from torch.nn import functional

        tokens, width, vocab = self.place.pick((16_384, 2048, 128_256), (64, 16, 96))
        generator = torch.Generator().manual_seed(5)
        hidden = torch.randn(tokens, width, generator=generator).to(
            self.place.device, torch.bfloat16
        )
        head = 0.02 * torch.randn(vocab, width, generator=generator)
        head = head.to(self.place.device, torch.bfloat16).requires_grad_()
        hidden.requires_grad_()
        targets = torch.randint(0, vocab, (tokens,), generator=generator).to(self.place.device)

        def plain() -> Any:
            return functional.cross_entropy((hidden @ head.T).float(), targets)

        found: dict[str, Any] = {}
        for name, call in (
            ("lohan", lambda: linear_cross_entropy(hidden, head, targets)),
            ("torch", plain),
        ):
            call().backward()
            hidden.grad = head.grad = None
            self.place.synchronize()
            self.place.reset_peak()
            begin = time.perf_counter()
            loss = call()
            loss.backward()
            self.place.synchronize()
            found[name] = {
                "loss": loss.item(),
                "ms": 1e3 * (time.perf_counter() - begin),
                **self.place.peak_bytes(),
            }
            hidden.grad = head.grad = None
        assert abs(found["lohan"]["loss"] - found["torch"]["loss"]) < 1e-2, found
        return found

    def pair(self) -> Mapping[str, Any]:
        """Two processes on one GPU have the bits of one that accumulates two micro-batches."""
        runs: dict[str, tuple[int, dict[str, Any]]] = {
            "one": (1, {"accumulate": 2}),
            "replicas": (2, {}),
            "shared": (2, {"share": "on"}),
            "divided": (2, {"replicas": "parameters"}),
        }
        with store_folder() as folder:
            running = {
                name: self._start(folder / name, count, settings)
                for name, (count, settings) in runs.items()
            }
            try:
                found = {name: _said(each) for name, each in running.items()}
            finally:
                for process in itertools.chain(*running.values()):
                    process.kill()
        assert len(set(found.values())) == 1, found
        return found

    def _start(self, folder: Path, count: int, settings: dict[str, Any]) -> list[Process]:
        """Start the processes of a run."""
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        words = [sys.executable, HERE / "gpu_pair.py", folder, json.dumps(settings)]
        running = []
        for rank in range(count):
            launcher = {"RANK": rank, "WORLD_SIZE": count, "LOCAL_RANK": rank}
            launcher |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
            named = {key: str(value) for key, value in launcher.items()} if count > 1 else {}
            running.append(
                subprocess.Popen(
                    list(map(str, words)),
                    env={**os.environ, **named},
                    stdout=subprocess.PIPE,
                    stderr=subprocess.PIPE,
                    text=True,
                )
            )
        return running


def _said(running: list[Process]) -> str:
    """Return the hash that rank 0 printed."""
    said = [process.communicate(timeout=PAIR_SECONDS) for process in running]
    for process, (_, errors) in zip(running, said, strict=True):
        assert process.returncode == 0, errors[-1500:]
    return str(said[0][0].strip().splitlines()[-1])


def run(part: Part) -> None:
    """Run all cases."""
    features = Features(part)
    part.out.write(
        case="shape",
        params=features.shape.param_count,
        forward_flop=gpu_llama.flop(features.shape),
    )
    part.run(
        {
            "turns": features.turns,
            "low_precision": features.low_precision,
            "packed": features.packed,
            "no_logits": features.no_logits,
            "pair": features.pair,
        }
    )
