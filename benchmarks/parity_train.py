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
import parity_rules
import torch
from lohan import _core
from lohan.common._inside import inside
from lohan.common._rules import RULES
from lohan.errors import BudgetError
from lohan.store import _same
from parity_cells import Cell
from parity_rules import METHODS, Parts, Replay, Values
from torch import nn

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
# Below the gradient norms of these models, so that nearly every step is scaled.
CLIP = {"plain": 0.5, "lora": 0.01, "gpt2": 0.5}
# More chunks than a full pipeline has slabs. With fewer, no budget could keep a part of the states.
LAYERS = 10
VOCABULARY = 128
# The ratio of two 2-norms of n independent errors deviates by 1/sqrt(n), which is 0.18 for the 32
# elements of the smallest tensor; the logarithm of 2 is nearly four of these.
RATIO_MAX = 2.0
# After fewer steps, the 2-norm of second moments depends on a few elements.
NORM_STEPS = 50


def build(cell: Cell) -> nn.Module:
    """Make a Llama with tied embeddings and grouped queries, or a GPT-2, always the same one."""
    from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    if cell.model == "gpt2":
        shape = {"n_embd": 32, "n_layer": LAYERS, "n_head": 4, "n_positions": 32}
        dropout = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
        tokens = {"vocab_size": VOCABULARY, "bos_token_id": 0, "eos_token_id": 0}
        made = GPT2Config(**shape, **dropout, **tokens, use_cache=False)
        return GPT2LMHeadModel(made).to(DTYPES[cell.dtype]).train()
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
    values: Values = {}
    moments: dict[str, Values] = {moment: {} for moment in RULES[layout.rule].moments}
    with _same.reopened(session.directories, session.config, layout) as store:
        for param in layout.params:
            unit, places = layout.units[param.unit], extents.units[param.unit]
            if not unit.trainable:
                continue
            values[param.name] = master_of(store, unit, places, param)
            for moment, found in moments.items():
                read = found[param.name] = torch.empty(param.tensor.shape)
                first = param.first * read.itemsize
                store.read(getattr(places, moment), first, read.data_ptr(), read.nbytes)
    return parity_rules.states_of(values, moments)


def trained_of(model: nn.Module) -> list[nn.Parameter]:
    return [param for param in model.parameters() if param.requires_grad]


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
    method = METHODS[cell.method]
    made: dict[str, Any] = {
        "device": cell.device,
        "schedule": cell.schedule,
        "accumulate": cell.accumulate,
        "max_grad_norm": CLIP[cell.model] if cell.clip else None,
    }
    if "method" in method.given:
        made["method"] = method.given["method"]
    if cell.grouped:
        made["params"] = lambda model: parity_rules.groups_of(trained_of(model), method)
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
        undetermined: the share of elements that fp32 does not determine, which are not compared.
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
    undetermined: float
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


def opened(
    cell: Cell, steps: int, settings: dict[str, Any], resume: bool
) -> tuple[nn.Module, Recorder, Any]:
    """Return a wrapped model, what records its gradients, and its scheduler or None."""
    model = build(cell)
    recorder = Recorder(model)
    model = lohan.wrap(model, resume=resume, **settings)
    if not cell.grouped:
        return model, recorder, None
    scheduler = parity_rules.scheduler_of(model.optimizer, steps)
    model.lohan.register("scheduler", scheduler, after=scheduler.step)
    return model, recorder, scheduler


def _run(cell: Cell, steps: int, folder: pathlib.Path, began: float) -> Outcome:
    method = METHODS[cell.method]
    settings = {**method.hyper, **settings_of(cell, folder), "store": folder / "run"}
    start = {k: p.detach() for k, p in build(cell).named_parameters() if p.requires_grad}
    of_replay = method, settings["max_grad_norm"], steps if cell.grouped else None
    exact, torchs = (Replay(start, each, *of_replay) for each in (torch.float64, torch.float32))
    model, recorder, scheduler = opened(cell, steps, settings, False)
    losses = []
    for step in range(steps):
        if cell.resume and step == steps // 2:
            model.lohan.close()
            model, recorder, scheduler = opened(cell, steps, settings, True)
            assert model.lohan.step == step
        for part in range(cell.accumulate):
            loss = loss_of(model, cell.accumulate * step + part)
            (loss / cell.accumulate).backward()
            losses.append(loss.item())
        model.optimizer.step()
        if scheduler is not None:
            scheduler.step()
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
    masks = exact.undetermined()
    return Outcome(
        cell,
        errors_of((ours, torchs.state(), exact.state()), start, steps, masks, method.is_coupled),
        losses,
        digest_of(losses, ours),
        schedule,
        exact.clipped_steps,
        sum(int(mask.sum()) for mask in masks.values()) / sum(v.numel() for v in start.values()),
        moved,
        kept,
        time.monotonic() - began,
    )


def errors_of(
    states: tuple[Values, Values, Values],
    start: Values,
    steps: int,
    masks: Values,
    is_coupled: bool,
) -> dict[str, tuple[float, float]]:
    """Return (lohan's, torch's) error by tensor, as in Outcome.

    Args:
        states: lohan's, torch's and the exact masters and moments.
        start: the values of masters before the first step.
        steps: the number of steps.
        masks: the elements of masters that are not compared.
        is_coupled: whether weight decay is a part of the gradient. Where it cancels the rest, the
            square has no relative accuracy, so that roots are compared.
    """
    ours, torchs, exact = states
    assert ours.keys() == torchs.keys() == exact.keys()
    errors = {}

    def measure(name: str, said: str, scale: torch.Tensor | float = 1.0, power: float = 1) -> None:
        values = [each[name].double() ** power for each in states]
        begin = start[name].double() if name in start else 0.0
        kept = ~masks[name] if name in masks else ...
        moved = float(((values[2] - begin) / scale)[kept].norm())
        made = [float(((each - values[2]) / scale)[kept].norm()) for each in values[:2]]
        mine, theirs = (error / moved if moved else error for error in made)
        errors[said] = (mine, theirs)

    for name, value in exact.items():
        is_square = name.endswith("(v)")
        if is_square and is_coupled:
            measure(name, name.replace("(v)", "(v, root)"), power=0.5)
        elif is_square:
            tiny = torch.finfo(torch.float32).tiny
            measure(name, name.replace("(v)", "(v, relative)"), value.clamp(min=tiny))
        # Squares differ so much that a few dominate the norm, which is too noisy after few steps.
        if not is_square or steps >= NORM_STEPS:
            measure(name, name)
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
