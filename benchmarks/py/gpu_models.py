"""gpu.sh models: transformers' Llama with 1.2 billion random parameters, compared with plain torch.

Every case trains the same weights on the same batches. In bf16 and fp32, the first loss must have
the same bits as in plain torch, whatever is loaded and evicted, since the weights of the first
forward are the same. Later losses differ because of the order of AdamW's arithmetic.
"""

from __future__ import annotations

import contextlib
import math
import tempfile
import time
from collections.abc import Iterator, Mapping
from typing import Any

from gpu_llama import Filler
from gpu_part import MIB, Part, Place, Skip, spread, store_folder, timed

# The sizes of Llama-3.2-1B.
LIVE = {
    "vocab_size": 128_256,
    "hidden_size": 2048,
    "intermediate_size": 8192,
    "num_hidden_layers": 16,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "tie_word_embeddings": True,
    "max_position_embeddings": 4096,
}
DRY = {
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "tie_word_embeddings": True,
    "max_position_embeddings": 64,
}
BATCH, TOKENS, STEPS = 4, 2048, 3
DRY_BATCH, DRY_TOKENS = 2, 32
HYPER = {"lr": 1e-5, "weight_decay": 0.01}
NEW_TOKENS = 16
# The tolerance for bf16 (8 bits) after two steps of AdamW with a different order of arithmetic.
LOSS_TOLERANCE = 2e-2


@contextlib.contextmanager
def deterministic(place: Place) -> Iterator[None]:
    """Return a context with deterministic sums in torch."""
    torch = place.torch
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before)


def without_init() -> contextlib.AbstractContextManager[Any]:
    """Return a context in which transformers does not initialise weights, which takes seconds."""
    try:
        from transformers.initialization import no_init_weights
    except ImportError:
        return contextlib.nullcontext()
    made: contextlib.AbstractContextManager[Any] = no_init_weights()
    return made


class Models:
    """The cases."""

    def __init__(self, part: Part) -> None:
        import torch

        self.part, self.place, self.torch = part, part.place, torch
        self.size = (self.place.pick(BATCH, DRY_BATCH), self.place.pick(TOKENS, DRY_TOKENS))
        vocab = self.place.pick(LIVE, DRY)["vocab_size"]
        generator = torch.Generator().manual_seed(1)
        self.batches = [
            torch.randint(0, vocab, self.size, generator=generator).to(self.place.device)
            for _ in range(STEPS)
        ]
        self.expected: dict[Any, list[float]] = {}

    def build(self, dtype: Any) -> Any:
        """Make the model in main memory, with the same weights each time."""
        try:
            from transformers import LlamaConfig, LlamaForCausalLM
        except ImportError as error:
            raise Skip(f"transformers: {error}") from error
        config = LlamaConfig(
            **self.place.pick(LIVE, DRY), use_cache=False, attn_implementation="sdpa"
        )
        before = self.torch.get_default_dtype()
        self.torch.set_default_dtype(dtype)
        try:
            with without_init():
                model = LlamaForCausalLM(config).train()
        finally:
            self.torch.set_default_dtype(before)
        fill = Filler()
        for module in model.modules():
            fill(module)
        return model

    def train(self, model: Any, optimizer: Any, dtype: Any = None) -> dict[str, Any]:
        """Take steps; return their losses, times and memory."""
        self.place.reset_peak()
        losses, seconds = [], []
        for tokens in self.batches:
            self.place.synchronize()
            begin = time.perf_counter()
            with self.torch.autocast(
                self.place.device.type, dtype or self.torch.bfloat16, enabled=dtype is not None
            ):
                loss = model(input_ids=tokens, labels=tokens).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
            self.place.synchronize()
            seconds.append(time.perf_counter() - begin)
        return {"losses": losses, **spread("step", seconds), **self.place.peak_bytes()}

    def plain(self, dtype: Any, autocast: Any = None) -> dict[str, Any]:
        """Train in plain torch, all on the device; other cases are compared with its losses."""
        model = self.build(dtype).to(self.place.device)
        optimizer = self.torch.optim.AdamW(model.parameters(), fused=True, **HYPER)
        with deterministic(self.place):
            found = self.train(model, optimizer, autocast)
        self.expected[dtype, autocast] = found["losses"]
        return found

    @contextlib.contextmanager
    def wrapped(self, model: Any, **settings: Any) -> Iterator[Any]:
        """Return a context with the wrapped model."""
        import lohan

        asked = {"commit_every": "never", "allow_tmpfs": True, **HYPER, **settings}
        with store_folder() as folder:
            model = lohan.wrap(model, store=folder / "store", device=self.place.lohan, **asked)
            try:
                yield model
            finally:
                model.lohan.close()

    def compared(self, dtype: Any, autocast: Any, losses: list[float]) -> dict[str, Any]:
        """Compare with plain torch's losses; fail if the difference is more than rounding."""
        if (dtype, autocast) not in self.expected:
            self.plain(dtype, autocast)
        expected = self.expected[dtype, autocast]
        worst = max(abs(a - b) for a, b in zip(losses, expected, strict=True))
        assert math.isfinite(worst) and worst <= LOSS_TOLERANCE, (losses, expected)
        return {
            "plain_losses": expected,
            "first_loss_has_the_same_bits": losses[0] == expected[0],
            "largest_loss_difference": worst,
        }

    def ours(self, dtype: Any, autocast: Any = None, **settings: Any) -> Mapping[str, Any]:
        """Train with lohan."""
        with self.wrapped(self.build(dtype), **settings) as model, deterministic(self.place):
            found = self.train(model, model.optimizer, autocast)
            model.lohan.flush()
            stats = model.lohan.stats()
            return {
                **found,
                **self.compared(dtype, autocast, found["losses"]),
                "bound_by": stats.bound_by,
                "bytes": dict(stats.bytes),
                "bytes_as_planned": stats.bytes == stats.planned_bytes,
            }

    def lora(self) -> Mapping[str, Any]:
        """Train adapters on a frozen base."""
        try:
            from peft import LoraConfig, get_peft_model
        except ImportError as error:
            raise Skip(f"peft: {error}") from error
        config = LoraConfig(task_type="CAUSAL_LM", target_modules=["q_proj", "v_proj"])
        losses = {}
        for name in ("plain", "lohan"):
            model = get_peft_model(self.build(self.torch.bfloat16), config)
            self.torch.manual_seed(3)
            for key, param in model.named_parameters():
                if "lora_A" in key:
                    with self.torch.no_grad():
                        param.normal_(std=0.02)
            if name == "plain":
                model = model.to(self.place.device)
                trained = [p for p in model.parameters() if p.requires_grad]
                optimizer = self.torch.optim.AdamW(trained, **HYPER)
                losses[name] = self.train(model, optimizer)["losses"]
                continue
            with self.wrapped(model) as model:
                found = self.train(model, model.optimizer)
                losses[name] = found["losses"]
        worst = max(abs(a - b) for a, b in zip(losses["plain"], losses["lohan"], strict=True))
        assert worst <= LOSS_TOLERANCE, losses
        return {**found, "plain_losses": losses["plain"], "largest_loss_difference": worst}

    def trainer(self) -> Mapping[str, Any]:
        """Train with lohan.Trainer, accumulation and clipping."""
        model = self.build(self.torch.float32)
        try:
            import lohan
            from lohan.common._inside import inside
            from transformers import TrainingArguments

            trainer_class = lohan.Trainer
        except ImportError as error:
            raise Skip(f"accelerate: {error}") from error
        rows = [{"input_ids": row.cpu(), "labels": row.cpu()} for row in self.batches[0]] * 8
        with store_folder() as folder, tempfile.TemporaryDirectory() as out:
            args = TrainingArguments(
                out,
                use_cpu=self.place.is_dry,
                max_steps=STEPS,
                per_device_train_batch_size=1,
                gradient_accumulation_steps=4,
                max_grad_norm=1.0,
                learning_rate=1e-5,
                bf16=True,
                logging_steps=1,
                save_strategy="no",
                report_to="none",
                disable_tqdm=True,
            )
            settings = {"device": "emu"} if self.place.is_dry else {}
            callback = lohan.TrainerCallback(
                store=folder / "store", allow_tmpfs=True, commit_every="never", **settings
            )
            trainer = trainer_class(model, args, train_dataset=rows, callbacks=[callback])
            self.place.reset_peak()
            begin = time.perf_counter()
            trainer.train()
            seconds = time.perf_counter() - begin
            log = [entry for entry in trainer.state.log_history if "loss" in entry]
            device = inside(trainer.model).device.name
            trainer.model.lohan.close()
        losses = [entry["loss"] for entry in log]
        assert len(losses) == STEPS and all(map(math.isfinite, losses)), losses
        norms = [entry.get("grad_norm") for entry in log]
        return {
            "losses": losses,
            "grad_norms": norms,
            "train_seconds": seconds,
            "device": device,
            **self.place.peak_bytes(),
        }

    def generate(self) -> Mapping[str, Any]:
        """Greedy generation returns the same tokens as in plain torch."""
        prompt = self.batches[0][:1, :8]
        asked = {
            "max_new_tokens": NEW_TOKENS,
            "do_sample": False,
            "use_cache": True,
            "attention_mask": self.torch.ones_like(prompt),
            "pad_token_id": 0,
            "eos_token_id": None,
        }
        model = self.build(self.torch.bfloat16).to(self.place.device).eval()
        with self.torch.no_grad():
            expected = model.generate(prompt, **asked).tolist()
        del model
        with self.wrapped(self.build(self.torch.bfloat16).eval()) as model:
            with self.torch.no_grad():
                found = model.generate(prompt, **asked).tolist()
                seconds = timed(self.place, lambda: model.generate(prompt, **asked), 1)
        assert found == expected, (found, expected)
        return {"tokens": found[0][8:], "token_ms": 1e3 * seconds[0] / NEW_TOKENS}

    def device_in_the_loop(self) -> Mapping[str, Any]:
        """Measure the cost of reading `model.device` in the loop, as many scripts do."""
        with self.wrapped(self.build(self.torch.bfloat16)) as model:
            seconds = {"with": [], "without": []}
            for name in ("without", "with", "without", "with"):
                tokens = self.batches[0]
                self.place.synchronize()
                begin = time.perf_counter()
                if name == "with":
                    assert model.device.type == self.place.device.type
                model(input_ids=tokens, labels=tokens).loss.backward()
                model.optimizer.step()
                self.place.synchronize()
                seconds[name].append(time.perf_counter() - begin)
        return {f"step_{name}_ms": 1e3 * times[-1] for name, times in seconds.items()}


def run(part: Part) -> None:
    """Run all cases."""
    import torch

    models = Models(part)
    bf16, fp32 = torch.bfloat16, torch.float32
    swap = models.place.pick(2048, 4) * MIB
    small = models.place.pick(64, 1) * MIB
    ssd = models.place.pick(8192, 16) * MIB
    part.run(
        {
            "plain": lambda: models.plain(bf16),
            "bf16": lambda: models.ours(bf16),
            "recompute": lambda: models.ours(bf16, activations="recompute"),
            "swap": lambda: models.ours(bf16, swap_bytes=swap, swap_ssd_bytes=0),
            "swap_small": lambda: models.ours(bf16, swap_bytes=small, swap_ssd_bytes=ssd),
            "auto": lambda: models.ours(bf16, activations="auto"),
            "plain_autocast": lambda: models.plain(fp32, bf16),
            "autocast": lambda: models.ours(fp32, bf16),
            "lora": models.lora,
            "trainer": models.trainer,
            "generate": models.generate,
            "device_in_the_loop": models.device_in_the_loop,
        }
    )
