"""What each process of tests/py/test_world_*.py does: zeroth-order training of a small model."""

from __future__ import annotations

import functools
import hashlib
import os
import pathlib
import signal
import threading
import time
from collections.abc import Sequence
from typing import Any

import experts_helper
import lohan
import safetensors.torch
import torch
from lohan.common._inside import inside
from torch import nn

BATCHES = 12  # micro-batches of a step, of all processes together
WIDTH = 128


class Model(nn.Module):
    """A tied weight, a buffer, and blocks of different sizes."""

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.begin = nn.Linear(WIDTH, WIDTH, dtype=dtype)
        self.layers = nn.ModuleList([nn.Linear(WIDTH, WIDTH, dtype=dtype) for _ in range(3)])
        self.end = nn.Linear(WIDTH, WIDTH, dtype=dtype)
        self.end.weight = self.begin.weight
        self.register_buffer("scale", torch.full((1,), 0.5, dtype=dtype))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.begin(x)
        for layer in self.layers:
            x = x + torch.tanh(layer(x))
        return self.end(x) * self.scale


def rank_and_count() -> tuple[int, int]:
    return int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))


def build(dtype: torch.dtype = torch.float32, seed: int = 0) -> Model:
    torch.manual_seed(seed)
    return Model(dtype)


def data(step: int, dtype: torch.dtype = torch.float32) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1000 + step)
    x = torch.randn(BATCHES, 4, WIDTH, generator=generator)
    return x.to(dtype), torch.sin(3 * x).to(dtype)


def losses(model: Any, step: int, dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    """Return the losses of this process's micro-batches: those with its rank modulo the count."""
    rank, count = rank_and_count()
    if not isinstance(model, Model):
        numbers = range(BATCHES * step + rank, BATCHES * (step + 1), count)
        return [experts_helper.loss_of(model, number) for number in numbers]
    x, y = data(step, dtype)
    return [nn.functional.mse_loss(model(x[i]), y[i]) for i in range(rank, BATCHES, count)]


def digest(model: Any) -> str:
    """Return a hash of all parameters."""
    parts = [
        value.contiguous().view(torch.uint8).numpy().tobytes() for value in inside(model).values()
    ]
    return hashlib.sha256(b"".join(parts)).hexdigest()[:16]


def wrapped(store: Any, dtype: torch.dtype = torch.float32, **settings: Any) -> Any:
    settings = {"lr": 1e-3, "eps": 1e-3, "seed": 5, "peer_timeout_s": 5, **settings}
    if settings.get("resume"):
        for name in ("lr", "eps", "seed"):
            settings.pop(name)
    model: Any = build(dtype)
    if settings.get("experts") == "apart":
        model = experts_helper.qwen().to(dtype)
    return lohan.wrap(model, store=store, method="mezo", **settings)


def train(
    store: str, steps: int, dtype_name: str = "float32", pause_s: float = 0.0, **settings: Any
) -> tuple[int, str, list[float]]:
    """Train up to a step, and return the step, a hash of the parameters, and the losses."""
    dtype = getattr(torch, dtype_name)
    model = wrapped(store, dtype, **settings)
    seen = []
    while model.lohan.step < steps:
        step = model.lohan.step
        seen.append(float(model.zo_step(functools.partial(losses, model, step, dtype))))
        time.sleep(pause_s)
    result = model.lohan.step, digest(model), seen
    model.lohan.close()
    return result


def train_all(rows: Sequence[tuple[str, int, str, dict[str, Any]]]) -> list[tuple[int, str, Any]]:
    """Train several models one after the other, each in a world of its own."""
    return [train(store, steps, dtype, **settings) for store, steps, dtype, settings in rows]


def slow_train(store: str, steps: int, marker: str, **settings: Any) -> Any:
    """Train; each process leaves a file once its model is wrapped."""
    dtype = torch.float32
    model = wrapped(store, dtype, **settings)
    pathlib.Path(f"{marker}.{rank_and_count()[0]}").touch()
    while model.lohan.step < steps:
        step = model.lohan.step
        model.zo_step(functools.partial(losses, model, step))
        time.sleep(0.002)
    return model.lohan.step, digest(model)


def slow_train_for(store: str, steps: int, marker: str, timeout_s: float) -> Any:
    """Train with another time after which a silent process counts as lost."""
    return slow_train(store, steps, marker, peer_timeout_s=timeout_s)


def resume_for(store: str, more: int) -> tuple[int, str]:
    """Resume a run, train some more steps, and return the step and a hash of the parameters."""
    model = wrapped(store, resume=True)
    end = model.lohan.step + more
    while model.lohan.step < end:
        step = model.lohan.step
        model.zo_step(functools.partial(losses, model, step))
    result = model.lohan.step, digest(model)
    model.lohan.close()
    return result


def fail_once(store: str) -> tuple[list[str], str]:
    """Rank 1 raises in one step, and has a loss that is not finite in another; then all go on."""
    rank, _ = rank_and_count()
    model = wrapped(store)
    raised = []
    for attempt in range(6):
        step = model.lohan.step

        def closure(attempt: int = attempt, step: int = step) -> Any:
            if attempt == 2 and rank == 1:
                raise ValueError("this batch is bad")
            found = losses(model, step)
            return [each * float("nan") for each in found] if attempt == 4 and rank == 1 else found

        try:
            model.zo_step(closure)
        except Exception as error:
            raised.append(f"{type(error).__name__}: {error}")
    result = raised, digest(model)
    model.lohan.close()
    return result


def alone(store: str, out: str) -> tuple[str, float]:
    """Rank 0 alone evaluates, saves, exports and reads its parameters between the steps."""
    rank, _ = rank_and_count()
    model = wrapped(store)
    value = 0.0
    for step in range(4):
        model.zo_step(functools.partial(losses, model, step))
        if rank == 0 and step == 1:
            with torch.no_grad():
                value = float(model(data(0)[0][0]).sum())
            lohan.export(model, out)
            assert len(model.state_dict()) > 0
    result = digest(model), value
    model.lohan.close()
    return result


def wait_for_rank_0(store: str, marker: str, pause_s: float) -> int:
    """Rank 0 takes long for its second step; the others leave a file and wait for it."""
    rank, _ = rank_and_count()
    model = wrapped(store)
    model.zo_step(functools.partial(losses, model, 0))

    def closure() -> list[torch.Tensor]:
        found = losses(model, 1)
        pathlib.Path(f"{marker}.{rank}").touch()
        if rank == 0:
            time.sleep(pause_s)
        return found

    for _ in range(2):
        model.zo_step(closure)
    return int(model.lohan.step)


def leave_early(store: str) -> int:
    """Rank 1 makes two steps fewer than the others."""
    rank, _ = rank_and_count()
    model = wrapped(store)
    for step in range(2 if rank == 1 else 4):
        model.zo_step(functools.partial(losses, model, step))
    step = model.lohan.step
    model.lohan.close()
    return int(step)


def die_in_program(store: str) -> int:
    """Rank 1's program raises an error between two steps."""
    rank, _ = rank_and_count()
    model = wrapped(store)
    for step in range(4):
        if rank == 1 and step == 2:
            raise OSError("the data set is gone")
        model.zo_step(functools.partial(losses, model, step))
    return int(model.lohan.step)


def differ(cases: Sequence[str], folder: str) -> dict[str, tuple[str, str, float]]:
    """Wrap with one difference in rank 1 after the other; return each error, and its seconds."""
    return {case: _differ(case, os.path.join(folder, case)) for case in cases}


def _differ(case: str, store: str) -> tuple[str, str, float]:
    rank, _ = rank_and_count()
    is_other = rank == 1
    settings: dict[str, Any] = {"lr": 1e-3, "eps": 1e-3, "seed": 5, "store": store}
    model: Any = build(seed=3 if case == "values" and is_other else 0)
    changes = {
        "lr": {"lr": 2e-3},
        "eps": {"eps": 1e-4},
        "seed": {"seed": 6},
        "seed_given": {"seed": None},
        "num_samples": {"num_samples": 2},
        "rng": {"rng": "torch"},
        "weight_decay": {"weight_decay": 0.1},
        "directories": {"store": [store, store + "-b"]},
        "no_store": {"store": None},
        "storage": {"storage": "bf16"},
        "resume": {"resume": True},
        "invalid": {"num_samples": -1},
        "init_given": {"init": "model"},
    }
    if is_other:
        settings.update(changes.get(case, {}))
    if case == "frozen" and is_other:
        model.layers[1].weight.requires_grad_(False)
    if case == "shape" and is_other:
        model.layers[1] = nn.Linear(WIDTH, WIDTH, bias=False)
    if case == "dtype" and is_other:
        model.layers[1].to(torch.bfloat16)
    if case == "name" and is_other:
        model = nn.ModuleDict({"inner": model})
    if case == "buffer" and is_other:
        model.scale.fill_(0.25)
    began = time.monotonic()
    try:
        lohan.wrap(model, method="mezo", peer_timeout_s=5, **settings)
    except Exception as error:
        return type(error).__name__, str(error), time.monotonic() - began
    return "", "", time.monotonic() - began


def schedules_differ(store: str) -> tuple[str, str]:
    """Rank 1 changes its learning rate in the second step."""
    rank, _ = rank_and_count()
    model = wrapped(store)
    model.zo_step(lambda: losses(model, 0))
    if rank == 1:
        model.optimizer.param_groups[0]["lr"] = 5e-4
    try:
        model.zo_step(lambda: losses(model, 1))
    except Exception as error:
        return type(error).__name__, str(error)
    return "", ""


def interrupt_soon(seconds: float) -> None:
    """Send this process SIGINT, as Ctrl-C does."""
    threading.Timer(seconds, lambda: os.kill(os.getpid(), signal.SIGINT)).start()


def interrupted_in_exchange(store: str, marker: str) -> str:
    """Rank 1 is interrupted while it waits for rank 0, and lives on until rank 0 has the error."""
    rank, _ = rank_and_count()
    model = wrapped(store)

    def closure() -> Any:
        if rank == 0:
            time.sleep(3)
        return losses(model, 0)

    if rank == 1:
        interrupt_soon(1)
    said = ""
    try:
        for _ in range(3):
            model.zo_step(closure)
    except (Exception, KeyboardInterrupt) as error:
        said = f"{type(error).__name__}: {error}"
    if rank == 0:
        pathlib.Path(marker).touch()
    while not pathlib.Path(marker).exists():
        time.sleep(0.05)
    return said


def die_in_third_step(store: str) -> None:
    """Start or resume a run; rank 1 is killed in the third step."""
    rank, _ = rank_and_count()
    model = wrapped(store, resume=os.path.exists(store))
    for attempt in range(4):

        def closure(attempt: int = attempt) -> Any:
            if attempt == 2 and rank == 1:
                os.kill(os.getpid(), signal.SIGKILL)
            return losses(model, 0)

        model.zo_step(closure)


def interrupted_alone() -> None:
    """Rank 0 is interrupted while it waits for rank 1, which never calls wrap()."""
    if rank_and_count()[0] == 0:
        interrupt_soon(1)
        lohan.wrap(build(), method="mezo")


def fail_beside_a_dead_process(store: str) -> None:
    """Rank 0 fails in a step while rank 1 is gone."""
    rank, _ = rank_and_count()
    model = wrapped(store)
    model.zo_step(functools.partial(losses, model, 0))
    if rank == 1:
        raise OSError("the data set is gone")

    def closure() -> Any:
        raise ValueError("this batch is bad")

    model.zo_step(closure)


def close_without_threads(store: str) -> int:
    """Rank 1 closes its session when no thread can be started, as at the end of a program."""
    rank, _ = rank_and_count()
    model = wrapped(store)
    model.zo_step(functools.partial(losses, model, 0))
    if rank == 1:

        def start(self: threading.Thread) -> None:
            raise RuntimeError("can't create new thread at interpreter shutdown")

        threading.Thread.start = start  # type: ignore[method-assign]
        model.lohan.close()
        return 1
    model.zo_step(functools.partial(losses, model, 1))
    return 2


def filled(how: str, folder: str) -> tuple[str, str]:
    """Wrap a model that rank 1 fills differently; return the error."""
    rank, _ = rank_and_count()
    store = os.path.join(folder, how)
    weights = os.path.join(folder, f"{how}-{rank}.safetensors")
    model: Any = build(seed=rank)
    settings: dict[str, Any] = {"weights": weights}
    if how != "init":
        tensors = [*model.named_parameters(), *model.named_buffers()]
        safetensors.torch.save_file({name: value.detach() for name, value in tensors}, weights)
    with lohan.empty():
        model = Model()
    if how == "frozen":
        for name, param in model.named_parameters():
            param.requires_grad_(name.startswith("layers.2"))
    if how == "init":
        settings = {"init": lambda module: torch.nn.init.constant_(module.weight, 1.0 + rank)}
        model = nn.Sequential(nn.Linear(8, 8, bias=False, device="meta"))
    try:
        lohan.wrap(model, method="mezo", store=store, peer_timeout_s=5, **settings)
    except Exception as error:
        return type(error).__name__, str(error)
    return "", ""


def killed_while_filling(store: str) -> str:
    """Rank 1 is killed before the first of its weights is written."""
    from lohan.store import _weights

    if rank_and_count()[0] == 1:
        _weights._Filling._write = lambda *_, **__: os.kill(os.getpid(), signal.SIGKILL)
    model = wrapped(store)
    model.zo_step(functools.partial(losses, model, 0))
    return ""
