"""One cell of the parity matrix: lohan's run, and its gradients replayed in fp64 and by torch."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import math
import pathlib
import re
import shutil
import struct
import time
from typing import Any

import lohan
import torch
from lohan import _core
from lohan.common._inside import inside
from lohan.errors import BudgetError
from lohan.store import _same
from parity_cells import Cell
from torch import nn

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
LR, BETAS, EPS, WEIGHT_DECAY = 1e-3, (0.9, 0.999), 1e-8, 0.01
HYPER: dict[str, Any] = {"lr": LR, "betas": BETAS, "eps": EPS, "weight_decay": WEIGHT_DECAY}
# Below the gradient norms of these models, so that nearly every step is scaled.
CLIP = {"plain": 0.5, "lora": 0.01}
# More chunks than a full pipeline has slabs. With fewer, no budget could keep a part of the states.
LAYERS = 10
VOCABULARY = 128
# The ratio of two 2-norms of n independent errors deviates by 1/sqrt(n), which is 0.18 for the 32
# elements of the smallest tensor; the logarithm of 2 is nearly four of these.
RATIO_MAX = 2.0
# After fewer steps, the 2-norm of second moments depends on a few elements.
NORM_STEPS = 50


def build(cell: Cell) -> nn.Module:
    """Make a Llama with tied embeddings and grouped queries, with the same values every time."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=LAYERS,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=32,
        vocab_size=VOCABULARY,
        tie_word_embeddings=True,
        use_cache=False,
        bos_token_id=0,
        eos_token_id=0,
    )
    model = LlamaForCausalLM(config).to(DTYPES[cell.dtype])
    if cell.model == "lora":
        from peft import LoraConfig, get_peft_model

        adapters = LoraConfig(r=16, target_modules=["q_proj", "up_proj", "down_proj"])
        # peft would keep adapters of a 16-bit model in fp32: here they have the cell's dtype.
        model = get_peft_model(model, adapters, autocast_adapter_dtype=False)
    return model.train()


def loss_of(model: nn.Module, batch: int) -> torch.Tensor:
    """Return the loss on sequences that count in sevens, from random starts."""
    generator = torch.Generator().manual_seed(batch)
    first = torch.randint(0, VOCABULARY, (2, 1), generator=generator)
    tokens = (first + 7 * torch.arange(12)) % VOCABULARY
    loss: torch.Tensor = model(input_ids=tokens, labels=tokens).loss
    return loss


Values = dict[str, torch.Tensor]
Parts = dict[str, list[torch.Tensor]]  # gradients of a step's backwards, by parameter


class Recorder:
    """Records the gradients that autograd computes, before anything else can change them."""

    def __init__(self, model: nn.Module) -> None:
        self._parts: Parts = {}
        for name, param in model.named_parameters():
            if param.requires_grad:
                param.register_hook(functools.partial(self._keep, name))

    def _keep(self, name: str, gradient: torch.Tensor) -> None:
        self._parts.setdefault(name, []).append(gradient.detach().clone())

    def take(self) -> Parts:
        """Return the gradients recorded since the last call."""
        taken, self._parts = self._parts, {}
        return taken


class Exact:
    """AdamW in fp64, written out, with summed and clipped gradients."""

    def __init__(self, start: Values, clip: float | None) -> None:
        self.clip = clip
        self.values = {name: value.double() for name, value in start.items()}
        self.moments1 = {name: torch.zeros_like(value) for name, value in self.values.items()}
        self.moments2 = {name: torch.zeros_like(value) for name, value in self.values.items()}
        self.steps = 0
        self.clipped_steps = 0

    def step(self, parts: Parts) -> None:
        """Apply the gradients of a step."""
        self.steps += 1
        gradients = {k: torch.stack([g.double() for g in parts[k]]).sum(0) for k in self.values}
        if self.clip is not None:
            norm = math.sqrt(sum(float(g.square().sum()) for g in gradients.values()))
            scale = min(1.0, self.clip / (norm + 1e-6))
            self.clipped_steps += scale < 1
            gradients = {name: gradient * scale for name, gradient in gradients.items()}
        for name, gradient in gradients.items():
            m, v = self.moments1[name], self.moments2[name]
            m += (1 - BETAS[0]) * (gradient - m)
            v += (1 - BETAS[1]) * (gradient.square() - v)
            root = (v / (1 - BETAS[1] ** self.steps)).sqrt() + EPS
            value = self.values[name]
            value *= 1 - LR * WEIGHT_DECAY
            value -= LR * (m / (1 - BETAS[0] ** self.steps)) / root

    def state(self) -> Values:
        """Masters and moments."""
        return states_of(self.values, self.moments1, self.moments2)


class Torchs:
    """torch.optim.AdamW on fp32 masters: p.grad is summed and clipped in fp32."""

    def __init__(self, start: Values, clip: float | None) -> None:
        self.clip = clip
        self.masters = {k: nn.Parameter(v.to(torch.float32, copy=True)) for k, v in start.items()}
        self.optimizer = torch.optim.AdamW(self.masters.values(), **HYPER)

    def step(self, parts: Parts) -> None:
        """Apply the gradients of a step."""
        for name, master in self.masters.items():
            total = parts[name][0].to(torch.float32, copy=True)
            for part in parts[name][1:]:
                total += part.float()
            master.grad = total
        if self.clip is not None:
            torch.nn.utils.clip_grad_norm_(self.masters.values(), self.clip)
        self.optimizer.step()

    def state(self) -> Values:
        """Masters and moments."""
        moments = [
            {name: self.optimizer.state[master][key] for name, master in self.masters.items()}
            for key in ("exp_avg", "exp_avg_sq")
        ]
        return states_of({k: v.detach() for k, v in self.masters.items()}, *moments)


def states_of(values: Values, moments1: Values, moments2: Values) -> Values:
    made = dict(values)
    made |= {f"{name} (m)": value for name, value in moments1.items()}
    return made | {f"{name} (v)": value for name, value in moments2.items()}


def master_of(store: _core.Store, unit: Any, places: Any, param: Any) -> torch.Tensor:
    """Return a trained parameter's fp32 value from the store."""

    def read(extent: int, dtype: torch.dtype) -> torch.Tensor:
        values = torch.empty(param.tensor.shape, dtype=dtype)
        size = dtype.itemsize
        store.read(extent, param.first * size, values.data_ptr(), values.numel() * size)
        return values

    if unit.dtype == torch.float32:
        return read(places.param, torch.float32)
    if unit.dtype == torch.float16:
        return read(places.residual, torch.float32)
    value, residual = read(places.param, unit.dtype), read(places.residual, torch.int16)
    joined = torch.empty(value.shape)
    _core.adam_join(value.data_ptr(), residual.data_ptr(), joined.data_ptr(), joined.numel())
    return joined


def state_of(model: nn.Module) -> Values:
    """Return all masters and moments from the store of a closed session."""
    session = inside(model)
    layout, extents = session.layout, session.extents
    found: list[Values] = [{}, {}, {}]
    with _same.reopened(session.directories, session.config, layout) as store:
        for param in layout.params:
            unit, places = layout.units[param.unit], extents.units[param.unit]
            if not unit.trainable:
                continue
            found[0][param.name] = master_of(store, unit, places, param)
            for index, extent in ((1, places.moment1), (2, places.moment2)):
                values = torch.empty(param.tensor.shape)
                store.read(extent, param.first * 4, values.data_ptr(), values.numel() * 4)
                found[index][param.name] = values
    return states_of(*found)


def least(cell: Cell, folder: pathlib.Path, name: str, **settings: Any) -> int:
    """Return the smallest value of a setting that lohan accepts, which its error states."""
    try:
        model = lohan.wrap(build(cell), store=folder / "refused", **{**settings, name: 1})
    except BudgetError as error:
        found = re.search(r"at least (\d+)", str(error))
        if found is None:
            raise
        return int(found[1])
    model.lohan.close()
    raise AssertionError(f"{name}=1 was not refused")


def settings_of(cell: Cell, folder: pathlib.Path) -> dict[str, Any]:
    """Return the arguments for wrap() except the hyper-parameters."""
    made: dict[str, Any] = {
        "device": cell.device,
        "schedule": cell.schedule,
        "accumulate": cell.accumulate,
        "max_grad_norm": CLIP[cell.model] if cell.clip else None,
    }
    if cell.device == "emu" and cell.tier != "memory":
        made["device_param_bytes"] = least(cell, folder, "device_param_bytes", **made)
    if cell.device == "cpu" and cell.tier == "host":
        whole = lohan.wrap(build(cell), store=folder / "whole", **made)
        budget = inside(whole).budget
        whole.lohan.close()
        made["host_bytes"] = budget["host_bytes_full"] - budget["slab_bytes"]
    if cell.tier == "ssd":
        made["host_bytes"] = least(cell, folder, "host_bytes", **made)
    return made


@dataclasses.dataclass(frozen=True)
class Outcome:
    """The result of a cell.

    Attributes:
        cell: the cell.
        errors: (lohan's, torch's) by tensor: 2-norms of the differences from fp64, divided by the
            2-norm of the distance that fp64 moved the tensor.
        losses: the losses of all backwards.
        digest: a digest of losses, masters and moments.
        schedule: the effective schedule.
        clipped_steps: the number of steps whose gradients were scaled.
        bytes: the bytes moved in the last step, by link.
        kept_chunks: the number of chunks of states that the budget keeps in memory.
        seconds: the run time.
    """

    cell: Cell
    errors: dict[str, tuple[float, float]]
    losses: list[float]
    digest: str
    schedule: str
    clipped_steps: int
    bytes: dict[str, int]
    kept_chunks: int
    seconds: float

    @property
    def worst(self) -> tuple[str, float, float, float]:
        """The tensor with the largest ratio: its name, lohan's error, torch's, their ratio."""

        def ratio(ours: float, theirs: float) -> float:
            if math.isnan(ours) or math.isnan(theirs) or (theirs == 0 and ours > 0):
                return math.inf
            return ours / theirs if theirs else 0.0

        rows = [(name, *both, ratio(*both)) for name, both in self.errors.items()]
        return max(rows, key=lambda row: row[3])

    @property
    def loss(self) -> tuple[float, float]:
        """The mean of the first quarter of the losses, and of the last."""
        count = max(len(self.losses) // 4, 1)
        return sum(self.losses[:count]) / count, sum(self.losses[-count:]) / count

    @property
    def is_near(self) -> bool:
        """Whether every tensor is within the limit."""
        return self.worst[3] <= RATIO_MAX


def run(cell: Cell, steps: int, folder: pathlib.Path) -> Outcome:
    """Train a cell with lohan, and compare it with fp64.

    Args:
        cell: the cell to train.
        steps: the number of optimizer steps; a resumed run is interrupted after half of them.
        folder: a folder on a disk; what is created in it is removed.
    """
    began = time.monotonic()
    here = folder / hashlib.sha256(repr(cell).encode()).hexdigest()[:16]
    here.mkdir(parents=True)
    try:
        return _run(cell, steps, here, began)
    finally:
        shutil.rmtree(here)


def _run(cell: Cell, steps: int, folder: pathlib.Path, began: float) -> Outcome:
    settings = {**HYPER, **settings_of(cell, folder)}
    model = build(cell)
    start = {k: p.detach().clone() for k, p in model.named_parameters() if p.requires_grad}
    clip = settings["max_grad_norm"]
    exact, torchs = Exact(start, clip), Torchs(start, clip)
    recorder = Recorder(model)
    model = lohan.wrap(model, store=folder / "run", **settings)
    losses = []
    for step in range(steps):
        if cell.resume and step == steps // 2:
            model.lohan.close()
            model = build(cell)
            recorder = Recorder(model)
            model = lohan.wrap(model, store=folder / "run", resume=True, **settings)
            assert model.lohan.step == step
        for part in range(cell.accumulate):
            loss = loss_of(model, cell.accumulate * step + part)
            (loss / cell.accumulate).backward()
            losses.append(loss.item())
        model.optimizer.step()
        parts = recorder.take()
        assert all(len(gradients) == cell.accumulate for gradients in parts.values())
        exact.step(parts)
        torchs.step(parts)
    model.lohan.flush()
    moved = dict(model.lohan.stats().bytes)
    schedule = str(inside(model).config.schedule)
    kept = int(inside(model).budget["kept_chunk_count"])
    model.lohan.close()
    ours = state_of(model)
    return Outcome(
        cell,
        errors_of(ours, torchs.state(), exact.state(), start, steps),
        losses,
        digest_of(losses, ours),
        schedule,
        exact.clipped_steps,
        moved,
        kept,
        time.monotonic() - began,
    )


def errors_of(
    ours: Values, torchs: Values, exact: Values, start: Values, steps: int
) -> dict[str, tuple[float, float]]:
    assert ours.keys() == torchs.keys() == exact.keys()
    errors = {}

    def measure(name: str, said: str, scale: torch.Tensor | float) -> None:
        value = exact[name]
        begin = start[name].double() if name in start else 0.0
        moved = float(((value - begin) / scale).norm())
        both = (float(((made[name].double() - value) / scale).norm()) for made in (ours, torchs))
        mine, theirs = (error / moved if moved else error for error in both)
        errors[said] = (mine, theirs)

    for name, value in exact.items():
        is_square = name.endswith("(v)")
        if is_square:
            tiny = torch.finfo(torch.float32).tiny
            measure(name, name.replace("(v)", "(v, relative)"), value.clamp(min=tiny))
        # Squares differ so much that a few dominate the norm, which is too noisy after few steps.
        if not is_square or steps >= NORM_STEPS:
            measure(name, name, 1.0)
    return errors


def digest_of(losses: list[float], state: Values) -> str:
    made = hashlib.sha256(struct.pack(f"<{len(losses)}d", *losses))
    for name in sorted(state):
        made.update(name.encode())
        made.update(state[name].contiguous().view(torch.uint8).numpy().tobytes())
    return made.hexdigest()


def misplaced(outcome: Outcome) -> str:
    """Return a description of data that is not where the cell's tier says; empty if all is.

    The placement is derived from the budget and the bytes that the last step moved.
    """
    cell, moved = outcome.cell, outcome.bytes
    on_ssd = "states on both" if outcome.kept_chunks else "states on SSD"
    found = (
        "parameters on SSD" if moved["param_read"] else "parameters in memory",
        on_ssd if moved["state_read"] else "states in memory",
    )
    held = "states on both" if cell.device == "cpu" else "states in memory"
    expected = {
        "memory": ("parameters in memory", "states in memory"),
        "host": ("parameters in memory", held),
        "ssd": ("parameters on SSD", "states on SSD"),
    }[cell.tier]
    return "" if found == expected else f"{', '.join(found)}, not {', '.join(expected)}"
