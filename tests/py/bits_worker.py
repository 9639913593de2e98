"""What each process of test_bits.py does: training one row of its table after the other."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import os
import re
from collections.abc import Callable, Sequence
from typing import Any

import kit
import lohan
import torch
import world_moe
from lohan.common._inside import inside
from lohan.common._rules import RULES as RULES_OF
from lohan.errors import BudgetError
from lohan.layout import _gradient_pieces
from torch import nn
from world_worker import Model, rank_and_count

STEPS = 4
CLIP = 0.001
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
# What a process passes to wrap() in each place.
PLACES: dict[str, dict[str, Any]] = {
    "alone": {},
    "replicas": {},
    "divided": {"replicas": "parameters"},
    "team": {"share": "on"},
    "machines": {"share": "on", "replicas": "parameters"},
    "gather": {"share": "on", "gather": "shards"},
    "groups": {},
    "groups divided": {"replicas": "parameters"},
    "groups team": {"share": "on"},
    "groups machines": {"share": "on", "replicas": "parameters"},
}
ACTIVATIONS: dict[str, dict[str, Any]] = {
    "keep": {},
    "recompute": {"activations": "recompute"},
    "offload": {"activations": {"*": "swap"}, "swap_bytes": 16 << 20, "swap_ssd_bytes": 256 << 20},
    "policy": {"activations": "lohan"},
}
RULES: dict[str, dict[str, Any]] = {
    "adamw": {"lr": 1e-3},
    "adam": {"method": "adam", "lr": 1e-3},
    "lion": {"method": "lion", "lr": 1e-4},
    "sgd": {"method": "sgd", "lr": 0.1},
    "momentum": {"method": lohan.SGD(momentum=0.9), "lr": 0.1},
    "adagrad": {"method": lohan.Adagrad(initial_accumulator_value=0.1), "lr": 1e-2},
    "rmsprop": {"method": lohan.RMSprop(momentum=0.9), "lr": 1e-3},
    "adam_mini": {"method": "adam_mini", "lr": 1e-3},
    "adafactor": {"method": "adafactor", "lr": 1e-2},
    "muon": {"method": lohan.Muon(adjust_lr_fn="match_rms_adamw"), "lr": 1e-3},
}
MOMENT_BYTES = {"fp32": 4, "bf16": 2, "8bit": 1, "4bit": 1}
# Rows and width of a batch: what operations save has the 64 KiB from which on it is offloaded.
SHAPES: dict[str, tuple[int, ...]] = {
    "dense": (256, 128),
    "experts": (512, 64),
    "wide": (64, 1100),
    "twice": (256, 96),
    "gpt2": (16, 32, 64),
    "llama": (16, 32, 64),
}


class Twice(nn.Module):
    """Blocks of two sizes, of which one is used twice."""

    def __init__(self) -> None:
        super().__init__()
        wide = (nn.Sequential(nn.Linear(96, 160), nn.Linear(160, 96)) for _ in range(2))
        self.layers = nn.ModuleList([*(nn.Linear(96, 96) for _ in range(3)), *wide])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in [*self.layers, self.layers[1]]:
            x = x + torch.tanh(layer(x))
        return x


def build(row: dict[str, Any]) -> tuple[Any, world_moe.Part | None]:
    """Return the model of a row, and with groups= the part of the experts in it."""
    torch.manual_seed(0)
    name, dtype = row["model"], DTYPES[row["dtype"]]
    part = None
    if name == "experts" and has_groups(row):
        part = world_moe.part(2, dtype=dtype)
        model: Any = part.model
    elif name == "experts":
        model = world_moe.Mixture(range(world_moe.EXPERTS), dtype=dtype)
    elif name == "dense":
        model = Model(dtype)
    elif name == "wide":  # units of two chunks, of which the second is short
        model = nn.Sequential(*(nn.Linear(1100, 1100) for _ in range(3))).to(dtype)
    elif name == "twice":
        model = Twice().to(dtype)
    else:
        model = kit.build(name, dtype)
    if row["gradients"] == "frozen":
        blocks_of(model, name)[1].requires_grad_(False)
    return model, part


def has_groups(row: dict[str, Any]) -> bool:
    """Return whether a process of a row has a part of the experts only."""
    return str(row["place"]).startswith("groups")


def blocks_of(model: Any, name: str) -> list[Any]:
    """Return the blocks, each of which maps a batch to one of its shape."""
    if name == "wide":
        return [*model]
    if name == "gpt2":
        return [*model.transformer.h]
    return [*(model.model if name == "llama" else model).layers]


def loss_of(model: Any, row: dict[str, Any], batches: int, number: int) -> torch.Tensor:
    """Return the loss of a batch of a step."""
    name, step = row["model"], model.lohan.step
    generator = torch.Generator().manual_seed(1000 * step + number)
    x = torch.randn(SHAPES[name], generator=generator).to(DTYPES[row["dtype"]])
    args: tuple[Any, ...] = ()
    keywords: dict[str, Any] = {}
    turn = step + number
    if name == "llama":
        places = torch.arange(x.shape[1])[None]
        keywords["position_embeddings"] = model.model.rotary_emb(x, places)
    if name == "experts":
        # An expert has tokens of one process in a step if sums of several have several orders.
        # Two processes have one order, except where a backward rounds the sum to 16 bits.
        is_single = batches > 2 or row["dtype"] != "fp32"
        args = (world_moe.allowed_of(step, number, 2, is_single=is_single),)
        turn = step + number // 4  # all processes call the same layers

    def apart(block: Any) -> torch.Tensor:
        y = block(x, *args, **keywords)
        y = y[0] if isinstance(y, tuple) else y
        return nn.functional.mse_loss(y.float(), torch.sin(3 * x.float()))

    def whole() -> torch.Tensor:
        if name in kit.MODELS:
            tokens = torch.randint(0, 256, (16, 32), generator=generator)
            return model(input_ids=tokens, labels=tokens).loss
        if name == "experts":
            return apart(lambda x, allowed: model(x, allowed, has_end=True))
        return apart(model)

    blocks = blocks_of(model, name)
    if row["gradients"] == "order":  # half of the batches have their gradients in another order
        return sum(map(apart, blocks[:: 1 if turn % 2 else -1]), torch.zeros(()))
    if row["gradients"] == "absent" and turn % 4 != 1:
        return apart(blocks[0])
    if row["gradients"] == "absent" and step % 3 == 2:
        return apart(blocks[1])
    return whole()


def settings_of(row: dict[str, Any], part: world_moe.Part | None = None) -> dict[str, Any]:
    """Return the settings of wrap() for a row, except those whose least value must be found."""
    settings: dict[str, Any] = {
        **RULES[row["rule"]],
        "weight_decay": 0.1,
        "peer_timeout_s": 60,
        "accumulate": row["accumulate"],
        "max_grad_norm": CLIP if row["clip"] else None,
        "device": row["device"].partition(" ")[0],
        **PLACES[row["place"]],
        **ACTIVATIONS[row["activations"]],
    }
    if "clip_mode" in row:
        settings["clip"] = row["clip_mode"]
    for name in ("schedule", "order", "states", "commit_every", "io", "threads", "verify"):
        settings[name] = row[name]
    settings["sum_order"] = row["sum_order"]
    if has_groups(row):
        groups = world_moe.groups_of(part) if part else {world_moe.PATTERN: _world_group()}
        settings["groups"] = groups
    return settings


def _world_group() -> Any:
    if not torch.distributed.is_initialized():
        torch.distributed.init_process_group("gloo")
    return torch.distributed.group.WORLD


def _least(row: dict[str, Any], store: str, **settings: Any) -> int:
    """Return the least number of bytes that wrap() accepts, from the error that names it."""
    try:
        lohan.wrap(build(row)[0], store=store, **settings)
    except BudgetError as error:
        found = re.search(r"at least (\d+)", str(error))
        assert found, str(error)
        return int(found[1])
    raise AssertionError(f"{settings} is accepted")


def wrapped(row: dict[str, Any], folder: str) -> Any:
    """Wrap the model of a row."""
    model, part = build(row)
    settings = settings_of(row, part)
    if row["device"] == "emu least":
        settings["device_param_bytes"] = _least(row, folder, **settings, device_param_bytes=1)
    if row["budget"] != "full":
        asked = settings.get("swap_bytes", 0) + 4096
        settings["host_bytes"] = _least(row, folder, **settings, host_bytes=asked)
    if row["budget"] == "middle":  # room for a part of the states
        count = 1 if row["place"] == "alone" else rank_and_count()[1]
        elements = sum(p.numel() for p in model.parameters() if p.requires_grad)
        has_moments = row["rule"] not in ("sgd", "adafactor")
        share = 2 if has_moments else 4  # of what else there is
        settings["host_bytes"] += elements * MOMENT_BYTES[row["states"]] // share // count
    store = [os.path.join(folder, f"disk{index}") for index in range(row["directories"])]
    model = lohan.wrap(model, store=store, **settings)
    if _is_mate(inside(model)):  # the rank that has the store also has the budget
        return model
    budget = inside(model).budget
    if row["budget"] != "full":
        assert budget["host_bytes"] < budget["host_bytes_full"], budget
    else:  # all states stay in memory
        assert budget["kept_chunk_count"] == budget["state_chunk_count"], budget
    assert model.lohan.status()["io"] == row["io"]
    if row["model"] == "wide" and row["budget"] == "least" and row["place"] == "alone":
        units = [unit for unit in inside(model).layout.units if unit.trainable]
        assert budget["chunk_elements"] < max(unit.elements for unit in units)
        assert (budget["slab_count"], budget["kept_chunk_count"]) == (3, 0), budget
    return model


def _is_mate(session: Any) -> bool:
    team = getattr(session.peers, "team", None)
    return team is not None and team.is_mate


def train(row: dict[str, Any], folder: str, batches: int) -> dict[str, Any]:
    """Train in a row's setting; return losses, norms, and hashes of parameters and states."""
    rank, count = rank_and_count()
    if has_groups(row) and "share" in PLACES[row["place"]]:
        os.environ["GROUP_RANK"] = str(rank % 2)  # a machine has processes with the same experts
    _gradient_pieces.PIECE_BYTES = row["piece_bytes"]
    model = wrapped(row, folder)
    session = inside(model)
    found: dict[str, Any] = {}
    moved = dict.fromkeys(("saved", "gathered"), 0)
    for step in range(STEPS):
        numbers = range(rank, batches, count)
        if row["sum_order"] == "tree":  # each process has a range of numbers
            numbers = range(rank * row["accumulate"], (rank + 1) * row["accumulate"])
        calls = [functools.partial(loss_of, model, row, batches, number) for number in numbers]
        for number, loss in zip(numbers, _backwards(row, session, calls), strict=True):
            found[f"loss {step} {number}"] = loss
        session.open_step.close(unscale=1 / row["accumulate"])
        if row["clip"]:
            found[f"norm {step}"] = float(model.optimizer.grad_norm)
        session.flush()
        if session.open_step.clipping is not None:
            session.open_step.clipping.was_clipped = False  # the next step does not wait
        for link, nbytes in session.stats().bytes.items():
            for kind in moved:
                moved[kind] += nbytes if link.startswith(kind) else 0
    norms = [value for name, value in found.items() if name.startswith("norm")]
    assert not norms or max(norms) > CLIP
    assert "clip_mode" not in row or session.stats().clip_repeats > 0
    assert moved["saved"] > 0 or row["activations"] != "offload", moved
    # Where a machine has one process, it gathers nothing.
    assert moved["gathered"] > 0 or row["place"] != "gather" or count == 3, moved
    found |= values(model) | states(model)
    if getattr(session.peers, "team", None) is not None:
        session.part()
    session.close()
    return found


def _backwards(
    row: dict[str, Any], session: Any, calls: Sequence[Callable[[], torch.Tensor]]
) -> list[float]:
    if row["order"] == "vertical":
        return [float(loss) for loss in session.accumulate(calls)]
    losses = []
    for call in calls:
        loss = call()
        loss.backward()
        losses.append(float(loss.detach()))
    return losses


def _hashed(raw: torch.Tensor) -> str:
    return hashlib.sha256(raw.contiguous().view(torch.uint8).numpy().tobytes()).hexdigest()[:16]


def values(model: Any) -> dict[str, str]:
    """Return a hash of every parameter and buffer as this process reads it."""
    return {f"{name} read": _hashed(value) for name, value in model.state_dict().items()}


def states(model: Any) -> dict[str, str]:
    """Return a hash of every parameter, and of its optimizer's states, in this process's store."""
    session = inside(model)
    found: dict[str, str] = {}
    if _is_mate(session):
        return found
    with session.exclusive([]) as store:
        sizes = store.extents()
        for unit, places in zip(session.layout.units, session.extents.units, strict=True):
            arrays = dataclasses.asdict(places)
            widths = {"param": unit.dtype.itemsize, "residual": unit.residual_bytes}
            for array, extent in arrays.items():
                if extent < 0:
                    continue
                raw = torch.empty(sizes[extent][0], dtype=torch.uint8)
                store.read(extent, 0, raw.data_ptr(), raw.numel())
                width = widths.get(array, unit.moment_bytes)
                if array == "scales":  # of all parameters of the unit
                    found[f"{unit.name} {array}"] = _hashed(raw)
                    continue
                for param in unit.params:
                    has_factors = RULES_OF[unit.rule].has_factors and unit.trainable
                    if array == "param" and has_factors and unit.has_states:
                        begin = param.factor_first * width
                        end = begin + 4 * param.factor_count
                        found[f"{param.name} factors"] = _hashed(raw[begin:end])
                    begin, end = param.first * width, (param.first + param.count) * width
                    found[f"{param.name} {array}"] = _hashed(raw[begin:end])
    return found


def train_all(rows: Sequence[tuple[dict[str, Any], str, int]]) -> list[dict[str, Any] | str]:
    """Train rows one after the other; return what train() does, or the errors.

    Of several processes, one that had an error ends: the others would wait for it.
    """
    found: list[dict[str, Any] | str] = []
    for each in rows:
        found.append(_said(functools.partial(train, *each)))
        if isinstance(found[-1], str) and rank_and_count()[1] > 1:
            break
    return [*found, *["not run"] * (len(rows) - len(found))]


def wrap_all(rows: Sequence[tuple[dict[str, Any], str]]) -> list[Any]:
    """Wrap the models of rows one after the other; return the errors, "" for a success."""

    def call(row: dict[str, Any], folder: str) -> str:
        wrapped(row, folder).lohan.close()
        return ""

    return [_said(functools.partial(call, *each)) for each in rows]


def _said(call: Callable[[], Any]) -> Any:
    try:
        return call()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
