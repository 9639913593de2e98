"""What each process of tests/py/test_replicas_*.py does: AdamW on a small model."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import json
import os
import pathlib
import time
from collections.abc import Callable, Sequence
from typing import Any

import lohan
import torch
from kit import WideGradient
from lohan.common._inside import inside
from lohan.common._rules import RULES
from lohan.errors import LohanError
from lohan.layout import _gradient_pieces
from patience import HUNG_S
from torch import nn
from world_worker import WIDTH, Model, rank_and_count

BATCHES = 12  # micro-batches of a step, of all processes together
LATE_S = 1.5
PEER_TIMEOUT_S = 5
SHARE = "TEST_SHARE"  # the environment variable of share= of wrap()
REPLICAS = "TEST_REPLICAS"  # ... and of replicas=
SUMS = "TEST_SUMS"  # ... and of sum_order=
GATHER = "TEST_GATHER"  # ... and of gather=, with an emulated accelerator for half of the model
ON = {SHARE: "on"}
DIVIDED = {REPLICAS: "parameters"}
TREE = {SUMS: "tree"}
# The ways of running several processes, as options of world_helper.run().
WAYS: dict[str, dict[str, Any]] = {
    "replicas": {},
    "divided": {"env": DIVIDED},
    "shared": {"env": ON},
    "machines": {"env": {**ON, **DIVIDED}, "nodes": 2},
}
# The same with partial sums.
TREES: dict[str, dict[str, Any]] = {
    "tree": {"env": TREE},
    "nodes tree": {"env": TREE, "nodes": 2},
    "machines tree": {"env": {**ON, **DIVIDED, **TREE}, "nodes": 2},
}
GATHERED: dict[str, Any] = {"env": {**ON, GATHER: "shards"}}


def build(dtype: torch.dtype = torch.float32, seed: int = 0) -> Model:
    torch.manual_seed(seed)
    return Model(dtype)


def batch(step: int, number: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1000 * step + number)
    x = torch.randn(4, WIDTH, generator=generator)
    return x.to(dtype), torch.sin(3 * x).to(dtype)


def states_digest(model: Any) -> str:
    """Return a hash of every parameter and optimizer state, in whichever stores they are."""
    team = getattr(inside(model).peers, "team", None)
    arrays = {} if team is not None and team.is_mate else _array_digests(model)
    if team is not None or inside(model).layout.part[1] > 1:
        told = inside(model).peers.world.exchange(json.dumps(arrays).encode(), "digests")
        for each in map(json.loads, told):
            assert all(arrays.get(name, value) == value for name, value in each.items())
            arrays |= each
    return hashlib.sha256(json.dumps(arrays, sort_keys=True).encode()).hexdigest()[:16]


def _array_digests(model: Any) -> dict[str, str]:
    found = {}
    with inside(model).exclusive([]) as store:
        for unit, places in enumerate(inside(model).extents.units):
            its = inside(model).layout.units[unit]
            is_stale = RULES[its.rule].has_factors and not its.has_states
            for array, extent in dataclasses.asdict(places).items():
                if extent < 0 or (array == "param" and is_stale):  # factors are where states are
                    continue
                values = torch.empty(store.extents()[extent][0], dtype=torch.uint8)
                store.read(extent, 0, values.data_ptr(), values.numel())
                found[f"{unit} {array}"] = hashlib.sha256(values.numpy().tobytes()).hexdigest()[:16]
    return found


def values_digest(model: Any) -> str:
    """Return a hash of every parameter, as this process reads it."""
    found = hashlib.sha256()
    for values in inside(model).values():
        found.update(values.contiguous().view(torch.uint8).numpy().tobytes())
    return found.hexdigest()[:16]


def wrapped(
    store: Any, dtype: torch.dtype = torch.float32, change: str = "", **settings: Any
) -> Any:
    _, count = rank_and_count()
    settings = {
        "lr": 1e-3,
        "peer_timeout_s": PEER_TIMEOUT_S,
        "accumulate": BATCHES // count,
        **settings,
    }
    settings.setdefault("share", os.environ.get(SHARE, "off"))
    settings.setdefault("replicas", os.environ.get(REPLICAS, "all"))
    settings.setdefault("sum_order", os.environ.get(SUMS))
    if GATHER in os.environ:
        device = {"device": "emu", "device_param_bytes": 300_000}
        settings = {**device, "gather": os.environ[GATHER], **settings}
    if settings.get("resume"):
        settings.pop("lr")
    model = build(dtype)
    if change == "frozen":
        model.layers[1].requires_grad_(False)
        model.begin.bias.requires_grad_(False)
    return lohan.wrap(model, store=store, **settings)


def loss_of(
    model: Any, step: int, number: int, dtype: torch.dtype, change: str = ""
) -> torch.Tensor:
    """Return the loss of a micro-batch."""
    x, y = batch(step, number, dtype)
    if change == "absent" and (number + step) % 4 != 1:
        # Most micro-batches have no gradient of these parameters; in every third step none has.
        return nn.functional.mse_loss(model.layers[0](x), y)
    if change == "absent" and step % 3 == 2:
        return nn.functional.mse_loss(model.layers[1](x), y)
    if change == "order":  # half of the micro-batches produce their gradients in another order
        layers = [*model.layers, model.begin, model.end][:: 1 if number % 2 else -1]
        return sum((nn.functional.mse_loss(layer(x), y) for layer in layers), torch.zeros(()))
    return nn.functional.mse_loss(model(x), y)


def one_step(
    model: Any,
    dtype: torch.dtype = torch.float32,
    change: str = "",
    before_step: Callable[[], None] | None = None,
    between: Callable[[], None] = lambda: None,
    *,
    is_plain: bool = False,
) -> float:
    """Make a step with this process's micro-batches: those with its rank modulo the count.

    In the order of a tree, they are as many that follow one another. With order="vertical",
    accumulate() runs them, unless is_plain says to call backward() for each.
    """
    rank, count = rank_and_count()
    step, total = model.lohan.step, 0.0
    numbers = range(rank, BATCHES, count)
    if inside(model).config.sum_order == "tree":
        numbers = range(rank * len(numbers), (rank + 1) * len(numbers))
    is_plain |= model.lohan.order == "horizontal"
    if not is_plain:
        parts = [
            functools.partial(loss_of, model, step, number, dtype, change) for number in numbers
        ]
        total = sum(map(float, model.lohan.accumulate(parts)))
    for number in numbers if is_plain else ():
        loss = loss_of(model, step, number, dtype, change)
        loss.backward()
        total += float(loss.detach())
        if number == numbers[0]:
            between()
    if before_step is not None:
        before_step()
    # The sum of all gradients, times 1/12 with the same rounding for any number of processes.
    inside(model).open_step.close(unscale=count / BATCHES)
    return total


def train(
    store: str,
    steps: int,
    dtype_name: str = "float32",
    change: str = "",
    piece_bytes: int = 20_000,
    **settings: Any,
) -> tuple[int, str]:
    """Train up to a step, and return the step and a hash of all states."""
    dtype = getattr(torch, dtype_name)
    _gradient_pieces.PIECE_BYTES = piece_bytes
    model = wrapped(store, dtype, change, **settings)
    while model.lohan.step < steps:
        one_step(model, dtype, change)
    result = model.lohan.step, states_digest(model)
    model.lohan.close()
    return result


def train_all(rows: Sequence[tuple[str, int, str, dict[str, Any]]]) -> list[tuple[int, str]]:
    """Train several models one after the other, each in a world of its own."""
    return [train(store, steps, dtype, **settings) for store, steps, dtype, settings in rows]


def traffic(store: str, settings: dict[str, Any]) -> tuple[int, dict[str, int]]:
    """Return the memory for parameters, and the bytes that a step moves over each link."""
    model = wrapped(store, torch.bfloat16, **settings)
    for _ in range(4):
        one_step(model, torch.bfloat16)
    model.lohan.flush()
    stats, region = model.lohan.stats(), inside(model).budget["region_bytes"]
    assert stats.step == 4 and stats.bytes == stats.planned_bytes
    inside(model).part()
    model.lohan.close()
    return region, stats.bytes


def refused(store: str) -> dict[str, str]:
    """Try what processes that share parameters cannot do; return what they say."""
    rank, _ = rank_and_count()
    model = wrapped(store)
    one_step(model)
    calls: dict[str, Callable[[], Any]] = {
        "snapshot": lambda: model.lohan.snapshot(f"{store}-copy"),
    }
    changes: dict[str, Callable[[], Any]] = {
        "loop": lambda: _change_in_loop(model),
        "load": lambda: model.load_state_dict(
            {name: value + 1 for name, value in build().state_dict().items()}
        ),
    }
    said = {}
    for name, call in (calls | changes).items():
        for turn in (0, 1):
            before = values_digest(model)
            inside(model).peers.world.exchange(b"", f"{name}, before")
            if turn == rank and (rank == 1 or name in changes):
                try:
                    call()
                    said[name] = ""
                except LohanError as error:
                    said[name] = f"{type(error).__name__}: {error}"
            inside(model).peers.world.exchange(b"", f"{name}, after")
            assert values_digest(model) == before
    try:
        one_step(model)
    except LohanError as error:
        said["step"] = f"{type(error).__name__}: {error}"
    assert model.state_dict()["end.bias"].shape == (WIDTH,)
    inside(model).part()
    model.lohan.close()
    return said


def frozen_changed(store: str) -> list[str]:
    """Change a frozen parameter in a loop, then train; return what is refused."""
    model = wrapped(store, change="frozen")
    calls: list[Callable[[], Any]] = [
        lambda: _change_in_loop(model, "layers.1.weight"),
        lambda: one_step(model),
    ]
    said = []
    for call in calls:
        try:
            call()
        except LohanError as error:
            said.append(f"{type(error).__name__}: {error}")
        inside(model).peers.world.exchange(b"", "a call has ended")
    inside(model).part()
    model.lohan.close()
    return said


def _change_in_loop(model: Any, only: str = "") -> None:
    for name, param in model.named_parameters():
        if only in ("", name):
            with torch.no_grad():
                param.add_(1)


def unwrapped(store: str) -> str:
    """Train, unwrap the model in all processes, and return a hash of its parameters."""
    model = wrapped(store)
    one_step(model)
    plain = lohan.unwrap(model)
    found = hashlib.sha256()
    for param in plain.parameters():
        found.update(param.detach().numpy().tobytes())
    return found.hexdigest()


def refused_at_wrap(store: str) -> list[str]:
    """Wrap models with what share="on" does not support."""
    said = []
    for settings in ({"store": None}, {"store": store, "method": "mezo", "accumulate": 1}):
        try:
            wrapped(**settings)
        except LohanError as error:
            said.append(f"{type(error).__name__}: {error}")
    return said


def die_with_pins(store: str) -> None:
    """Rank 1 is killed when it has agreed on a step, before it has given back any block."""
    rank, _ = rank_and_count()
    model = wrapped(store)
    one_step(model)
    if rank == 1:
        agree = inside(model).peers._agree
        inside(model).peers._agree = lambda unscale: (agree(unscale), os._exit(9))
    one_step(model)


def slow_train(store: str, steps: int, marker: str, **settings: Any) -> Any:
    """Train; each process leaves a file once its model is wrapped."""
    _gradient_pieces.PIECE_BYTES = 20_000
    model = wrapped(store, **settings)
    pathlib.Path(f"{marker}.{rank_and_count()[0]}").touch()
    while model.lohan.step < steps:
        one_step(model)
    return model.lohan.step, states_digest(model)


def slow_train_for(store: str, steps: int, marker: str, timeout_s: float) -> Any:
    """Train with another time after which a silent process counts as lost."""
    return slow_train(store, steps, marker, peer_timeout_s=timeout_s)


def resume_for(store: str, more: int) -> tuple[int, str]:
    """Resume a run, train some more steps, and return the step and a hash of all states."""
    model = wrapped(store, resume=True)
    steps = model.lohan.step + more
    model.lohan.close()
    return train(store, steps, resume=True)


def interrupt_close(store: str) -> tuple[str, int, bool]:
    """Close with a Ctrl-C at two places before the commit, try another step, and close again.

    Returns:
        The error of that step, the store's step, and whether the other processes were told.
    """
    model = wrapped(store, commit_every=5)
    session, said = inside(model), ""
    for _ in range(2):
        one_step(model)
    for owner, name in ((session.peers.world, "leave_after"), (session.commits, "_finish")):
        setattr(owner, name, _interrupted)
        try:
            session.close()
        except KeyboardInterrupt:
            delattr(owner, name)
    try:
        one_step(model)
    except LohanError as error:
        said = f"{type(error).__name__}: {error}"
    session.close()
    is_told = session.peers.world._is_closed
    again = wrapped(store, resume=True)
    step = again.lohan.step
    again.lohan.close()
    return said, step, is_told


def _interrupted(*args: Any) -> None:
    raise KeyboardInterrupt


def fail_once(store: str, where: str, who: int = 1) -> tuple[list[str], str]:
    """One rank fails once, in or after its first backward or before step(); all continue.

    With "turns" the micro-batches of a step have one backward, in which one of them fails. With
    "fallback" and "plain" the order is vertical, too, but they have backwards of their own, since a
    parameter has a hook, or since the script calls backward().
    """
    rank, _ = rank_and_count()
    _gradient_pieces.PIECE_BYTES = 20_000
    is_vertical = where in ("turns", "fallback", "plain")
    model = wrapped(store, order="vertical" if is_vertical else "horizontal")
    if where == "fallback":
        model.begin.weight.register_hook(torch.clone)
    errors, calls = [], []

    def fail(gradient: Any = None) -> None:
        raise ValueError("this batch is bad")

    def fail_in_turns(module: Any, args: Any, output: torch.Tensor) -> None:
        calls.append(output)
        if len(calls) == 2:
            output.register_hook(fail)  # type: ignore[no-untyped-call]

    def fail_in_second(module: Any, args: Any) -> None:
        calls.append(module)
        if len(calls) == 2:
            fail()

    for attempt in range(5):
        handle = None
        is_bad = attempt == 2 and rank == who
        if is_bad and where == "turns":
            handle = model.layers[1].register_forward_hook(fail_in_turns)
        if is_bad and where == "fallback":
            handle = model.layers[1].register_forward_pre_hook(fail_in_second)
        if is_bad and where == "backward":
            handle = model.layers[1].weight.register_hook(fail)
        try:
            one_step(
                model,
                before_step=fail if is_bad and where == "step" else None,
                between=fail if is_bad and where in ("between", "plain") else lambda: None,
                is_plain=where == "plain",
            )
        except Exception as error:
            errors.append(f"{type(error).__name__}: {error}")
            model.optimizer.zero_grad()
        if handle is not None:
            handle.remove()
    result = errors, states_digest(model)
    assert model.lohan.step == 4
    model.lohan.close()
    return result


def discard(store: str) -> str:
    """Discard the gradients of one micro-batch, and of all, before the steps."""
    rank, _ = rank_and_count()
    model = wrapped(store)
    for count in (1, BATCHES // 2, 0):
        for number in range(count):
            loss_of(model, 9, 2 * number + rank, torch.float32).backward()
        model.optimizer.zero_grad()
        one_step(model)
    result = states_digest(model)
    model.lohan.close()
    return result


def backwards_differ(store: str, who: int, calls: str) -> str:
    """One rank calls this instead of its last backward."""
    rank, count = rank_and_count()
    model = wrapped(store, peer_timeout_s=HUNG_S)
    try:
        for _ in range(3):
            for number in range(rank, BATCHES - count * (rank == who), count):
                loss_of(model, model.lohan.step, number, torch.float32).backward()
            if rank == who and calls != "step":
                getattr(inside(model), calls)()
            model.optimizer.step()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


def alone(store: str, who: int, where: str = "steps") -> tuple[float, str]:
    """One rank alone evaluates between steps or micro-batches.

    Between steps it also differentiates, and reads all parameters.
    """
    rank, _ = rank_and_count()
    model = wrapped(store)
    x, seen = batch(9, 9, torch.float32)[0].requires_grad_(), 0.0

    def evaluate(is_here: bool) -> None:
        nonlocal seen
        if rank == who and is_here:
            with torch.no_grad():
                seen += float(model(x).sum())

    for _ in range(3):
        one_step(model, between=lambda: evaluate(where == "micro-batches"))
        evaluate(where == "steps")
        if rank == who and where == "steps":
            (slope,) = torch.autograd.grad(model(x).sum(), x)
            seen += float(slope.sum())
            seen += sum(float(param.sum()) for _, param in model.named_parameters())
    result = seen, states_digest(model)
    model.lohan.close()
    return result


def one_loads(store: str, are_all: bool) -> str:
    """Rank 1, or every process, loads other values between two steps."""
    rank, _ = rank_and_count()
    model = wrapped(store)
    one_step(model)
    if rank == 1 or are_all:
        values = {name: value + 1 for name, value in model.state_dict().items()}
        model.load_state_dict(values)
    try:
        one_step(model)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return states_digest(model)


def schedules_differ(store: str, name: str) -> str:
    """Rank 1 changes its learning rate or its momentum in the second step."""
    rank, _ = rank_and_count()
    model = wrapped(store, method=lohan.SGD(momentum=0.9) if name == "momentum" else "adamw")
    one_step(model)
    if rank == 1:
        model.optimizer.param_groups[0][name] /= 2
    try:
        one_step(model)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


def differ(cases: Sequence[str], folder: str) -> dict[str, tuple[str, str]]:
    """Wrap with one difference in rank 1 after the other, and return each error."""
    return {case: _differ(case, os.path.join(folder, case)) for case in cases}


def _differ(case: str, store: str) -> tuple[str, str]:
    is_other = rank_and_count()[0] == 1
    settings: dict[str, Any] = {"lr": 1e-3, "store": store, "accumulate": 2}
    model: Any = build(seed=3 if case == "values" and is_other else 0)
    changes: dict[str, dict[str, Any]] = {
        "lr": {"lr": 2e-3},
        "betas": {"betas": (0.9, 0.99)},
        "weight_decay": {"weight_decay": 0.1},
        "accumulate": {"accumulate": 3},
        "max_grad_norm": {"max_grad_norm": 1.0},
        "commit_every": {"commit_every": 4},
        "loss_scaling": {"loss_scaling": True},
        "groups": {"params": [{"params": [*model.begin.parameters()]}]},
    }
    if is_other:
        settings.update(changes.get(case, {}))
    if case == "groups" and is_other:
        rest = [p for name, p in model.named_parameters() if not name.startswith("begin")]
        settings["params"].append({"params": rest, "lr": 1.0})
    if case == "frozen" and is_other:
        model.layers[1].weight.requires_grad_(False)
    if case == "method" and is_other:
        settings |= {"method": "mezo"}
        settings.pop("accumulate")
    if case == "optimizer":
        settings.pop("lr")
        origin = torch.optim.AdamW(model.parameters())
        for _ in range(1 + is_other):
            model(torch.ones(1, WIDTH)).sum().backward()
            origin.step()
        model.load_state_dict(build().state_dict())
        settings["optimizer"] = origin
    try:
        lohan.wrap(model, peer_timeout_s=5, **settings).lohan.close()
    except Exception as error:
        return type(error).__name__, str(error)
    return "", ""


def flip_a_bit(store: str) -> tuple[str, str, str, int]:
    """A bit of a gradient of rank 1 changes on its way in the second step.

    Returns the errors of that step, of optimizer.step() after it, and of another attempt, and the
    step that the session is at.
    """
    rank, _ = rank_and_count()
    model = wrapped(store)
    seal = _gradient_pieces.Draft.seal

    def sealed(self: Any, trailer: Any) -> None:
        seal(self, trailer)
        if model.lohan.step == 1:
            self._buffer[1000] ^= 4

    def said_by(act: Callable[[], object]) -> str:
        try:
            act()
        except Exception as error:
            return f"{type(error).__name__}: {error}"
        return ""

    if rank == 1:
        _gradient_pieces.Draft.seal = sealed  # type: ignore[method-assign]
    one_step(model)
    first = said_by(lambda: one_step(model))
    step = said_by(model.optimizer.step)
    return first, step, said_by(lambda: one_step(model)), model.lohan.step


def other_dtype(store: str) -> str:
    """A parameter's gradient has another dtype than the parameter."""
    model = lohan.wrap(nn.Sequential(WideGradient()), store=store, lr=1e-3)
    try:
        model(torch.ones(1, 8, dtype=torch.bfloat16)).sum().backward()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


def clipped_by_torch(store: str) -> tuple[float, str]:
    """Clip with torch's own function; return the last norm."""
    model = wrapped(store, max_grad_norm=None)
    norm = torch.tensor(0.0)
    rank, count = rank_and_count()
    for step in range(3):
        for number in range(rank, BATCHES, count):
            (loss_of(model, step, number, torch.float32) * count / BATCHES).backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), 0.01)
        model.optimizer.step()
    result = float(norm), states_digest(model)
    model.lohan.close()
    return result


def resume_step(store: str, which: str) -> tuple[int, str] | str:
    """Resume at a given step."""
    try:
        model = wrapped(store, resume=which)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    result = model.lohan.step, states_digest(model)
    model.lohan.close()
    return result


def train_between(store: str, steps: int, folder: str) -> tuple[int, int]:
    """Train between two files, and return the bytes that were sent, and those of the plan."""
    rank, count = rank_and_count()
    model = wrapped(store)
    one_step(model)  # from the second step on, gradients are sent in the order in which they come
    pathlib.Path(folder, f"ready.{rank}").touch()
    wait_for(pathlib.Path(folder, "go"))
    before = inside(model).peers.traffic.sent_bytes
    for _ in range(steps):
        one_step(model)
    sent = inside(model).peers.traffic.sent_bytes - before
    pathlib.Path(folder, f"done.{rank}").touch()
    wait_for(pathlib.Path(folder, "end"))
    planned = (
        inside(model).peers.backward_bytes * BATCHES // count + inside(model).peers.values_bytes
    )
    model.lohan.close()
    return sent, planned * steps


def wait_for(path: pathlib.Path) -> None:
    while not path.exists():
        time.sleep(0.01)


def in_ddp(store: str) -> tuple[str, float]:
    """Put DistributedDataParallel around a wrapped model."""
    model = wrapped(store)
    torch.distributed.init_process_group("gloo")
    said = ""
    try:
        nn.parallel.DistributedDataParallel(model)
    except Exception as error:
        said = f"{type(error).__name__}: {error}"
    loss = one_step(model)
    torch.distributed.destroy_process_group()
    plain: Any = lohan.unwrap(model)
    assert not hasattr(plain, "_ddp_params_and_buffers_to_ignore"), "the plain model is refused"
    return said, loss


def network_stats(store: str) -> tuple[Any, int, str]:
    """Make three steps, before the last of which rank 1 is late; return its stats."""
    rank, count = rank_and_count()
    _gradient_pieces.PIECE_BYTES = 20_000  # pieces of different sizes
    model = wrapped(store)
    for step in range(3):
        late_s = LATE_S if step == 2 and rank == 1 else 0.0
        one_step(model, before_step=functools.partial(time.sleep, late_s))
    model.lohan.flush()
    stats = model.lohan.stats()
    planned = (
        inside(model).peers.backward_bytes * BATCHES // count + inside(model).peers.values_bytes
    )
    model.lohan.close()
    return stats, planned, str(stats)
