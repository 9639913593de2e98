"""What each process of tests/py/test_groups_*.py does: a mixture of experts, divided among them."""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import functools
import hashlib
import io
import os
import re
import signal
from collections.abc import Callable, Sequence
from typing import Any

import lohan
import safetensors.torch
import torch
from lohan.common._inside import inside
from lohan.errors import LohanError
from lohan.layout import _gradient_pieces
from lohan.store import _export
from patience import HUNG_S
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from world_worker import rank_and_count

WIDTH = 64
EXPERTS = 4
LAYERS = 2
TOKENS = 12
PEER_TIMEOUT_S = 10
STEPS_OF_FAIL = 4
PATTERN = "layers.*.experts.*"


class AllToAll(torch.autograd.Function):
    """Rows to other processes, and theirs to this one; in backward, the way back."""

    @staticmethod
    def forward(
        ctx: Any, rows: torch.Tensor, out: list[int], into: list[int], group: Any
    ) -> torch.Tensor:
        ctx.route = (into, out, group)
        return _sent(rows, out, into, group)

    @staticmethod
    def backward(ctx: Any, rows: torch.Tensor) -> Any:  # type: ignore[override]
        return _sent(rows, *ctx.route), None, None, None


def _sent(rows: torch.Tensor, out: list[int], into: list[int], group: Any) -> torch.Tensor:
    if group is None:
        return rows.clone()
    made = rows.new_empty(sum(into), *rows.shape[1:])
    torch.distributed.all_to_all_single(made, rows.contiguous(), into, out, group=group)
    return made


class Layer(nn.Module):
    """A router and experts, of which this process has some.

    Each expert is called once for the tokens of each process that sends it some, so that its
    matrices have the same shapes as in one process that runs the batches one after the other.
    """

    def __init__(self, mine: Sequence[int], group: Any, is_local: bool) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.router = nn.Linear(WIDTH, EXPERTS)
        every = [
            nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.GELU(), nn.Linear(2 * WIDTH, WIDTH))
            for _ in range(EXPERTS)
        ]
        names = range(len(mine)) if is_local else mine
        self.experts = nn.ModuleDict({str(n): every[e] for n, e in zip(names, mine, strict=True)})
        self.group = group
        self.uses_all = False  # whether each expert has a gradient, also without tokens

    def forward(self, x: torch.Tensor, allowed: torch.Tensor) -> torch.Tensor:
        y = self.norm(x)
        weights = self.router(y).masked_fill(~allowed, -torch.inf).softmax(-1)
        weight, chosen = weights.max(-1)
        made = x + weight[:, None] * self.apply_experts(y, chosen)
        for expert in self.experts.values() if self.uses_all else ():
            made = made + 0 * expert(y)
        return made

    def apply_experts(self, y: torch.Tensor, chosen: torch.Tensor) -> torch.Tensor:
        here = list(self.experts.values())
        sources = EXPERTS // len(here)
        order = chosen.argsort(stable=True)
        counts = torch.bincount(chosen, minlength=EXPERTS).view(sources, len(here))
        got = _sent(counts, [1] * sources, [1] * sources, self.group)
        out, into = counts.sum(1).tolist(), got.sum(1).tolist()
        rows = AllToAll.apply(y[order], out, into, self.group)
        parts = list(rows.split(got.flatten().tolist()))
        for number, part in enumerate(parts):
            if len(part) > 0:  # without tokens an expert has no gradient
                parts[number] = here[number % len(here)](part)
        back = AllToAll.apply(torch.cat(parts), into, out, self.group)
        return back[order.argsort()]


class Mixture(nn.Module):
    """A model of layers with experts."""

    def __init__(
        self,
        mine: Sequence[int],
        group: Any = None,
        is_local: bool = False,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.begin = nn.Linear(WIDTH, WIDTH)
        self.layers = nn.ModuleList(Layer(mine, group, is_local) for _ in range(LAYERS))
        self.end = nn.Linear(WIDTH, WIDTH)
        self.to(dtype)

    def forward(self, x: torch.Tensor, allowed: torch.Tensor, has_end: bool) -> torch.Tensor:
        x = self.begin(x)
        for layer in self.layers:
            x = layer(x, allowed)
        return self.end(x) if has_end else x


@dataclasses.dataclass
class Part:
    """The part of the experts that this process has.

    Attributes:
        mesh: the processes, by the copy of the experts ("dp") and the part of them ("ep").
        experts: the numbers of this process's experts.
        model: the model with these experts.
        is_local: whether experts are numbered within the process.
    """

    mesh: DeviceMesh | None
    experts: list[int]
    model: Any
    is_local: bool


def part(parts: int, is_local: bool = False, dtype: torch.dtype = torch.float32) -> Part:
    """Divide the experts into as many parts, and the processes into as many copies as are left."""
    _, count = rank_and_count()
    if count == 1:
        every = range(EXPERTS)
        return Part(None, [*every], Mixture(every, dtype=dtype), is_local=False)
    if not torch.distributed.is_initialized():
        limit = datetime.timedelta(seconds=HUNG_S / 2)  # of an all-to-all without a killed process
        torch.distributed.init_process_group("gloo", timeout=limit)
    mesh = init_device_mesh("cpu", (count // parts, parts), mesh_dim_names=("dp", "ep"))
    size = EXPERTS // parts
    first = size * mesh["ep"].get_local_rank()
    mine = [*range(first, first + size)]
    return Part(mesh, mine, Mixture(mine, mesh["ep"].get_group(), is_local, dtype), is_local)


def groups_of(mine: Part) -> Any:
    return None if mine.mesh is None else {PATTERN: mine.mesh["dp"]}


def wrapped(mine: Part, store: Any, batches: int, **settings: Any) -> Any:
    _, count = rank_and_count()
    settings = {
        "lr": 1e-2,
        "peer_timeout_s": PEER_TIMEOUT_S,
        "accumulate": batches // count,
        "groups": groups_of(mine),
        **settings,
    }
    if settings.get("resume"):
        settings.pop("lr")
    return lohan.wrap(mine.model, store=store, **settings)


def allowed_of(step: int, number: int, parts: int, *, is_single: bool) -> torch.Tensor:
    """Return which experts a batch may be routed to.

    In step 2 no batch uses the last expert. With is_single, an expert has the tokens of
    one of the processes that could send it some.
    """
    allowed = torch.ones(EXPERTS, dtype=torch.bool)
    if is_single:
        allowed = (torch.arange(EXPERTS) + step) % parts == number % parts
        if step % 2 and number < parts:  # the experts' first copies are not all used
            allowed[:2] = False
    if step % 6 == 2:
        allowed[-1] = False
    return allowed


def loss_of(
    model: Any, step: int, number: int, parts: int, *, is_single: bool, skips: bool = False
) -> torch.Tensor:
    """Return the loss of a batch; with skips, half of the batches do not use the last layer."""
    dtype = model.begin.weight.dtype
    generator = torch.Generator().manual_seed(1000 * step + number)
    x = torch.randn(TOKENS, WIDTH, generator=generator)
    allowed = allowed_of(step, number, parts, is_single=is_single)
    y = model(x.to(dtype), allowed, has_end=not skips or number % 2 == 1)
    return nn.functional.mse_loss(y, torch.sin(3 * x).to(dtype))


def one_step(model: Any, batches: int, parts: int, *, is_single: bool, skips: bool = False) -> None:
    """Make a step with this process's batches, and the mean over all of them."""
    rank, count = rank_and_count()
    step = model.lohan.step
    for number in range(rank, batches, count):
        loss = loss_of(model, step, number, parts, is_single=is_single, skips=skips)
        (loss * count / batches).backward()
    model.optimizer.step()


def skipped_step(model: Any, mine: Part, batches: int, parts: int, *, is_single: bool) -> None:
    """Make a step that all processes skip: a gradient of one expert is not finite."""
    handles = []
    if EXPERTS - 1 in mine.experts:
        expert = [*model.layers[0].experts.values()][-1]
        handles = [each.register_hook(lambda g: g * float("nan")) for each in expert.parameters()]
    one_step(model, batches, parts, is_single=is_single)
    for handle in handles:
        handle.remove()
    assert model.optimizer.was_skipped


def states(mine: Part, model: Any) -> dict[str, str]:
    """Return a hash of each parameter and of its optimizer states, by the expert's number."""
    found = {}
    layout = inside(model).layout
    with inside(model).exclusive([]) as store:
        for unit, places in zip(layout.units, inside(model).extents.units, strict=True):
            for array, extent in dataclasses.asdict(places).items():
                if extent < 0:
                    continue
                values = torch.empty(store.extents()[extent][0], dtype=torch.uint8)
                store.read(extent, 0, values.data_ptr(), values.numel())
                widths = {"param": unit.dtype.itemsize, "residual": unit.residual_bytes}
                width = widths.get(array, 4)
                for param in unit.params:
                    raw = values[param.first * width : (param.first + param.count) * width]
                    digest = hashlib.sha256(raw.numpy().tobytes()).hexdigest()[:16]
                    found[f"{_named(mine, param.name)} {array}"] = digest
    return found


def _named(mine: Part, name: str) -> str:
    words = name.split(".")
    if mine.is_local and "experts" in words:
        at = words.index("experts") + 1
        words[at] = str(mine.experts[int(words[at])])
    return ".".join(words)


def train(
    store: str,
    steps: int,
    batches: int,
    parts: int,
    is_single: bool,
    is_local: bool = False,
    dtype: str = "float32",
    piece_bytes: int = 20_000,
    skips: bool = False,
    has_files: bool = False,
    blocks: str = "",
    spoils: bool = False,
    uses_all: bool = False,
    **settings: Any,
) -> tuple[int, float | None, dict[str, str]]:
    """Train up to a step, and return the step, the last norm, and hashes of the states.

    Args:
        store: the store.
        steps: the number of steps.
        batches: the batches of a step, of all processes together.
        parts: the number of parts of the experts.
        is_single: see allowed_of().
        is_local: whether experts are numbered within the process.
        dtype: the dtype of the model.
        piece_bytes: the size of pieces.
        skips: see loss_of().
        has_files: whether the values come from files.
        blocks: "experts" or "layers", each of which is a block, or "" for the usual ones.
        spoils: whether the second step is skipped once.
        uses_all: whether every expert has a gradient in each step.
        settings: settings of wrap().
    """
    _gradient_pieces.PIECE_BYTES = piece_bytes
    mine = part(parts, is_local, getattr(torch, dtype))
    if has_files:
        settings["weights"] = f"{store}-{rank_and_count()[0]}.safetensors"
        safetensors.torch.save_file(mine.model.state_dict(), settings["weights"])
    layers = mine.model.layers
    for layer in layers:
        layer.uses_all = uses_all
    if blocks == "experts":
        settings["blocks"] = [each for layer in layers for each in layer.experts.values()]
    if blocks == "layers":
        settings["blocks"] = [*layers]
    model = wrapped(mine, store, batches, **settings)
    while model.lohan.step < steps:
        if spoils and model.lohan.step == 1:
            skipped_step(model, mine, batches, parts, is_single=is_single)
            spoils = False
        one_step(model, batches, parts, is_single=is_single, skips=skips)
    result = model.lohan.step, model.optimizer.grad_norm, states(mine, model)
    model.lohan.close()
    return result


def train_all(rows: Sequence[tuple[str, tuple[int, int, int, bool], dict[str, Any]]]) -> list[Any]:
    """Train several models one after the other; see train()."""
    found = []
    for store, args, settings in rows:
        if rank_and_count()[1] == 1:  # this process has all experts
            settings = {name: value for name, value in settings.items() if name != "is_local"}
        found.append(train(store, *args, **settings))
    return found


def die(store: str, steps: int, where: str) -> None:
    """Train until rank 1 is killed in a step, in its forward or after all have agreed on it."""
    rank, _ = rank_and_count()
    mine = part(2)
    model = wrapped(mine, store, 2)

    agree = inside(model).peers._agree

    def end(*args: Any) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    while True:
        if rank == 1 and model.lohan.step == steps:
            if where == "forward":
                model.layers[1].register_forward_pre_hook(end)
            else:
                inside(model).peers._agree = lambda unscale: (agree(unscale), end())
        one_step(model, 2, 2, is_single=False)


def said(call: Callable[[], Any]) -> str:
    """Return the class and the message of the error that a call raises."""
    try:
        call()
    except LohanError as error:
        return f"{type(error).__name__}: {error}"
    return ""


def resume(store: str, parts: int, *groups: Any) -> str:
    """Return the error of a resume."""
    mine = part(parts)
    given = dict.fromkeys(["groups"], *groups) if groups else {}
    return said(lambda: wrapped(mine, store, rank_and_count()[1], resume=True, **given))


def traffic(store: str) -> tuple[int, int, dict[str, int], dict[str, int]]:
    """Return the bytes that a step sent, those of the plan, and the bytes of parameters by kind."""
    _gradient_pieces.PIECE_BYTES = 20_000
    mine, batches = part(2), rank_and_count()[1]
    model = wrapped(mine, store, batches, blocks=[*mine.model.layers])
    for _ in range(2):  # in the first one the final order of the gradients is not known
        one_step(model, batches, 2, is_single=False)
    model.lohan.flush()
    sent, planned = model.lohan.stats().traffic.sent_bytes, inside(model).peers.backward_bytes
    layout = inside(model).layout
    for unit in layout.units:  # no unit has parameters that other processes have, too, and others
        assert len({layout.ranks_of.get(param.index) for param in unit.params}) == 1
    sizes = {"experts": 0, "others": 0}
    for param in layout.params:
        sizes["experts" if "experts" in param.name else "others"] += 4 * param.count
    by_kind = {"experts": 0, "others": 0}
    routes = inside(model).peers.exchange._routes
    for piece, to in zip(routes.pieces, routes.to, strict=True):
        names = {layout.params[each.param].name for each in piece.parts}
        (kind,) = {"experts" if "experts" in name else "others" for name in names}
        by_kind[kind] += piece.nbytes * len(to)
    model.lohan.close()
    return sent, planned, sizes, by_kind


def refused(store: str) -> dict[str, str]:
    """Wrap with what processes with groups cannot have; return what the errors say."""
    mine = part(2)
    mesh = mine.mesh
    assert mesh is not None
    other = torch.distributed.new_group([1])
    only = torch.distributed.new_group([0])
    frozen = Mixture([0])
    for name, param in frozen.named_parameters():
        param.requires_grad_("experts" in name)
    shared = Mixture([0])
    shared.end = shared.layers[0].experts["0"][2]
    twice = Mixture([0])
    twice.layers[1].experts = twice.layers[0].experts
    wrong: dict[str, dict[str, Any]] = {
        "share": {"share": "on"},
        "mezo": {"method": "mezo", "accumulate": 1},
        "mesh": {"groups": {PATTERN: mesh}},
        "kind": {"groups": {PATTERN: [0]}},
        "dict": {"groups": mesh["dp"]},
        "unused": {"groups": {"layers.*.expert.*": mesh["dp"]}},
        "outside": {"groups": {PATTERN: only if rank_and_count()[0] == 1 else other}},
        "untrained": {"model": frozen},
        "tied": {"model": shared},
        "twice": {
            "model": twice,
            "groups": {"layers.0.experts": mesh["dp"], "layers.1.experts": mesh["ep"]},
        },
    }
    found = {}
    for case, settings in wrong.items():
        settings = dict(settings)
        changed = dataclasses.replace(mine, model=settings.pop("model", Mixture(mine.experts)))
        call = functools.partial(wrapped, changed, f"{store}-{case}", 2, **settings)
        found[case] = said(call)
    return found


def differ(store: str) -> dict[str, str]:
    """Wrap with a difference between the processes of a 2 x 2 mesh; return what errors say."""
    rank, _ = rank_and_count()
    found = {}
    mine = part(2)
    assert mine.mesh is not None
    pairs = [torch.distributed.new_group(ranks) for ranks in ([0, 1], [2, 3])]
    for case in ("none", "group", "values", "shape", "name", "others"):
        model = Mixture(mine.experts, mine.mesh["ep"].get_group())
        groups = groups_of(mine)
        expert = next(iter(model.layers[1].experts.values()))
        if case == "none" and rank == 3:
            groups = None
        if case == "group" and rank in (0, 1):
            groups = {PATTERN: pairs[0]}
        if case == "values" and rank == 3:
            expert[0].weight.data[0, 0] = 7
        if case == "shape" and rank == 3:
            expert[0] = nn.Linear(WIDTH, 3 * WIDTH)
        if case == "name" and rank == 3:
            model.layers[1].experts["9"] = model.layers[1].experts.pop("3")
        if case == "others" and rank == 3:
            model.end.bias.data[0] = 7
        changed = dataclasses.replace(mine, model=model)
        call = functools.partial(wrapped, changed, f"{store}-{case}", 4, groups=groups)
        found[case] = said(call)
    return found


def exported(store: str) -> list[str]:
    """Return what exports and a resharding say, and the experts of a state dict."""
    mine = part(2)
    model = wrapped(mine, store, 2)
    one_step(model, 2, 2, is_single=False)
    found = [
        said(lambda: lohan.export(model, f"{store}-out")),
        said(lambda: _export.save_pretrained(model, inside(model), {}, f"{store}-out")),
    ]
    names = sorted({name.split(".")[3] for name in model.state_dict() if "experts" in name})
    model.lohan.close()
    torch.distributed.barrier()
    found.append(said(lambda: lohan.export(store, f"{store}-out")))
    found.append(said(lambda: lohan.reshard(store, f"{store}-out", parts=1)))
    return [*found, ",".join(names)]


def fail_once(store: str) -> tuple[list[str], dict[str, str]]:
    """Rank 1 fails at the end of a backward, after its last all-to-all; all continue."""
    rank, batches = rank_and_count()
    mine = part(2)
    model = wrapped(mine, store, batches)
    errors = []
    for attempt in range(STEPS_OF_FAIL + 1):
        handle = None
        if attempt == 2 and rank == 1:
            handle = model.begin.weight.register_hook(_fail)
        try:
            one_step(model, batches, 2, is_single=batches > 2)
        except Exception as error:
            errors.append(f"{type(error).__name__}: {error}")
            model.optimizer.zero_grad()
        if handle is not None:
            handle.remove()
    result = errors, states(mine, model)
    model.lohan.close()
    return result


def clipped_by_torch(store: str) -> tuple[float, dict[str, str]]:
    """Clip with torch's own function; return the last norm, and hashes of the states."""
    rank, count = rank_and_count()
    mine = part(2)
    model = wrapped(mine, store, 2)
    norm = torch.tensor(0.0)
    for step in range(3):
        for number in range(rank, 2, count):
            (loss_of(model, step, number, 2, is_single=False) * count / 2).backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), 0.05)
        model.optimizer.step()
    result = float(norm), states(mine, model)
    model.lohan.close()
    return result


def script(text: str) -> str:
    """Run a script, and return what it prints."""
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        exec(compile(text, "script", "exec"), {})
    return out.getvalue()


class Crossed(nn.Module):
    """Two kinds of modules, each of which two of four processes have, but not the same two."""

    def __init__(self, rows: Sequence[int], columns: Sequence[int]) -> None:
        super().__init__()
        torch.manual_seed(0)
        every = [nn.Linear(WIDTH, WIDTH) for _ in range(5)]
        self.a = nn.ModuleDict({str(row): every[row] for row in rows})
        self.b = nn.ModuleDict({str(column): every[2 + column] for column in columns})
        self.end = every[4]

    def forward(self, x: torch.Tensor, number: int) -> torch.Tensor:
        y = torch.tanh(self.a[str(number // 2)](x))
        return self.end(y + torch.tanh(self.b[str(number % 2)](y)))


def _fail(gradient: Any) -> None:
    raise ValueError("this batch is bad")


def crossed(store: str, fails: bool) -> tuple[float, dict[str, str], list[str]]:
    """Train with four batches, each of which has other modules.

    Args:
        store: the store.
        fails: whether the second step fails once in rank 1, in a module that few processes have.

    Returns:
        The norm, the states, and the errors.
    """
    rank, count = rank_and_count()
    _gradient_pieces.PIECE_BYTES = 3000
    settings: dict[str, Any] = {"lr": 1e-2, "max_grad_norm": 0.05, "accumulate": 4 // count}
    model: Any = Crossed(range(2), range(2))
    if count > 1:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("row", "column"))
        # A row of the mesh has the processes of all columns, which have the same modules of a.
        settings["groups"] = {"a.*": mesh["column"], "b.*": mesh["row"].get_group()}
        model = Crossed([rank // 2], [rank % 2])
    model = lohan.wrap(model, store=store, peer_timeout_s=PEER_TIMEOUT_S, **settings)
    errors: list[str] = []
    while (step := model.lohan.step) < 3:
        handle = None
        if fails and step == 1 and rank == 1 and not errors:
            handle = next(iter(model.a.values())).weight.register_hook(_fail)
        try:
            for number in range(rank, 4, count):
                generator = torch.Generator().manual_seed(1000 * step + number)
                x = torch.randn(TOKENS, WIDTH, generator=generator)
                loss = nn.functional.mse_loss(model(x, number), torch.sin(3 * x))
                (loss * count / 4).backward()
            model.optimizer.step()
        except (ValueError, LohanError) as error:
            errors.append(f"{type(error).__name__}: {error}")
            model.optimizer.zero_grad()
        if handle is not None:
            handle.remove()
    found = states(Part(None, [], model, is_local=False), model)
    result = model.optimizer.grad_norm, found, errors
    model.lohan.close()
    return result


def edit(store: str) -> dict[str, str]:
    """Change all parameters in a loop, of which the processes have different numbers."""
    rank, _ = rank_and_count()
    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("all", "own"))
    model: Any = Crossed([[0, 1], [1]][rank], [0])
    groups = {"a.*": mesh["own"]}
    model = lohan.wrap(model, store=store, lr=1e-2, peer_timeout_s=PEER_TIMEOUT_S, groups=groups)
    for _ in range(2):
        for param in model.parameters():
            with torch.no_grad():
                param.add_(0.01)
        model(torch.ones(2, WIDTH), 2 * rank).sum().backward()
        model.optimizer.step()
    found = states(Part(None, [], model, is_local=False), model)
    model.lohan.close()
    return found


def least_bytes(store: str) -> tuple[int, int, int]:
    """Return the least memory with groups and without, and the bytes that groups add."""
    mine = part(2)
    errors = (
        said(lambda: wrapped(mine, store, 2, host_bytes=1)),
        said(lambda: wrapped(mine, store, 2, host_bytes=1, groups=None)),
    )
    needed = [int(re.findall(r"at least (\d+)", error)[0]) for error in errors]
    sent = sum(p.nbytes for name, p in mine.model.named_parameters() if "experts" not in name)
    return needed[0], needed[1], sent
