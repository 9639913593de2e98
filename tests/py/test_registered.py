"""Objects that a script registers are in each commit, and a resumed run equals one that was not."""

from __future__ import annotations

import os
import pathlib
import signal
from multiprocessing.connection import Connection
from typing import Any

import crash_worker
import lohan
import numpy as np
import pytest
import torch
from lohan.common._inside import inside
from lohan.errors import ModelError, StepError, StoreMismatchError, UnsupportedError
from torch.optim.lr_scheduler import (
    CosineAnnealingLR,
    ExponentialLR,
    LambdaLR,
    OneCycleLR,
    ReduceLROnPlateau,
    StepLR,
)

STEP_COUNT = 8
END = 5  # the steps before the run ends
EPOCH_STEPS = 3


class Sampler:
    """A position in the data, which moves before each step."""

    def __init__(self) -> None:
        self.order = torch.Generator().manual_seed(5)
        self.drawn = 0

    def draw(self) -> torch.Tensor:
        self.drawn += 1
        return torch.randint(0, crash_worker.VOCABULARY, (2, 9), generator=self.order)

    def state_dict(self) -> dict[str, Any]:
        return {"order": self.order.get_state(), "drawn": self.drawn}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.order.set_state(state["order"])
        self.drawn = state["drawn"]


MAKE: dict[str, Any] = {
    "lambda": lambda o: LambdaLR(o, lambda i: 1 / (1 + i)),
    "exponential": lambda o: ExponentialLR(o, 0.7),
    "cosine": lambda o: CosineAnnealingLR(o, 10),
    "one cycle": lambda o: OneCycleLR(o, 1e-2, total_steps=20),
    "by epoch": lambda o: StepLR(o, 1, 0.5),
}


def run(folder: pathlib.Path, kind: str, begin: int, end: int) -> list[Any]:
    """Train steps begin to end; return the loss and the rate of each."""
    model: Any = lohan.wrap(
        crash_worker.build(), store=folder, lr=1e-2, resume=begin > 0, commit_every=1
    )
    sampler, scheduler = Sampler(), MAKE[kind](model.optimizer)
    each = kind != "by epoch"
    model.lohan.register("scheduler", scheduler, after=scheduler.step if each else None)
    model.lohan.register("sampler", sampler)
    assert (model.lohan.step, sampler.drawn) == (begin, begin)
    had = []
    for step in range(begin, end):
        loss = model(sampler.draw())
        loss.backward()
        had.append((loss.item(), model.optimizer.param_groups[0]["lr"]))
        model.optimizer.step()
        if each or step % EPOCH_STEPS == EPOCH_STEPS - 1:
            scheduler.step()
    model.lohan.close()
    return had


@pytest.mark.parametrize("kind", MAKE)
def test_a_resumed_run_has_the_losses_and_rates_of_one_that_was_not_interrupted(
    kind: str, store_dir: pathlib.Path
) -> None:
    whole = run(store_dir / "whole", kind, 0, STEP_COUNT)
    parts = run(store_dir / "parts", kind, 0, END) + run(store_dir / "parts", kind, END, STEP_COUNT)
    assert parts == whole
    assert len({rate for _, rate in whole}) > 2


@pytest.mark.filterwarnings("error:Detected call")  # of scheduler.step() before optimizer.step()
def test_torch_does_not_warn_of_a_scheduler_that_is_restored_after_one_step(
    store_dir: pathlib.Path,
) -> None:
    run(store_dir, "exponential", 0, 1)
    run(store_dir, "exponential", 1, 2)


def train_until_killed(pipe: Connection, folder: pathlib.Path) -> None:
    run(folder, "exponential", 0, 2)
    model: Any = lohan.wrap(crash_worker.build(), store=folder, resume=True, commit_every=1)
    sampler, scheduler = Sampler(), MAKE["exponential"](model.optimizer)
    model.lohan.register("scheduler", scheduler, after=scheduler.step)
    model.lohan.register("sampler", sampler)
    for _ in range(3):
        model(sampler.draw()).backward()
        model.optimizer.step()
        scheduler.step()
    while inside(model).method.durable_step() < END:
        pass
    pipe.send("committed")
    os.kill(os.getpid(), signal.SIGKILL)


def train_on(pipe: Connection, folder: pathlib.Path, begin: int) -> None:
    pipe.send(run(folder, "exponential", begin, STEP_COUNT))


def test_a_killed_run_continues_with_the_losses_and_rates_of_the_whole_one(
    store_dir: pathlib.Path,
) -> None:
    process, _ = crash_worker.start(train_until_killed, store_dir / "s")
    process.join()
    assert process.exitcode == -signal.SIGKILL
    made = []
    for folder, begin in ((store_dir / "s", END), (store_dir / "whole", 0)):
        process, pipe = crash_worker.start(train_on, folder, begin)
        made.append(pipe.recv())
        process.join()
    assert made[0] == made[1][END:]


class Strange(Sampler):
    """A state with values of a class of its own."""

    def state_dict(self) -> dict[str, Any]:
        return {"self": self}


class Silent:
    """A value that cannot be saved, and whose error has no text."""

    def __reduce__(self) -> Any:
        raise ValueError


class Unsaved(Sampler):
    def state_dict(self) -> dict[str, Any]:
        return {"value": Silent()}


class Large(Sampler):
    def state_dict(self) -> dict[str, Any]:
        return {"seen": list(range(100_000))}


def test_what_cannot_be_restored_exactly_is_refused_by_name(store_dir: pathlib.Path) -> None:
    model: Any = lohan.wrap(crash_worker.build(), store=store_dir / "s", lr=1e-2)
    register = model.lohan.register
    scheduler = MAKE["cosine"](model.optimizer)
    with pytest.raises(ModelError, match=r"after=scheduler\.step"):
        register("scheduler", scheduler)
    with pytest.raises(ModelError, match="object has no state_dict"):
        register("sampler", object())
    with pytest.raises(ModelError, match="do not register it"):
        register("optimizer", model.optimizer)
    with pytest.raises(ModelError, match="do not register a module that has them"):
        register("model", torch.nn.Sequential(model))
    with pytest.raises(UnsupportedError, match=r"'sampler' \(Strange\)"):
        register("sampler", Strange())
    with pytest.raises(UnsupportedError, match=r"lists and dicts alone \(ValueError\)"):
        register("sampler", Unsaved())
    with pytest.raises(UnsupportedError, match=r"room for 49,152: the largest is that of 'large'"):
        register("large", Large())
    sampler = Sampler()
    register("sampler", sampler)
    register("sampler", sampler)  # the same again
    with pytest.raises(ModelError, match="another object has this name"):
        register("sampler", Sampler())
    register("plateau", ReduceLROnPlateau(model.optimizer), after=None)
    crash_worker.train_step(model, 0)
    with pytest.raises(StepError, match="after step 1"):
        register("late", Sampler())
    model.lohan.close()


class Refuses(Sampler):
    """Fails when its state is taken, or loaded."""

    def __init__(self, fails: str) -> None:
        super().__init__()
        self.fails = fails

    def state_dict(self) -> Any:
        return super().state_dict() if self.fails != "take" else {}["take"]

    def load_state_dict(self, state: Any) -> None:
        return super().load_state_dict(state) if self.fails != "load" else {}["load"]


def test_an_object_that_failed_is_not_registered(store_dir: pathlib.Path) -> None:
    for resume, fails in ((False, "take"), (True, "load")):
        model: Any = lohan.wrap(crash_worker.build(), store=store_dir / "s", resume=resume)
        with pytest.raises(KeyError, match=fails):
            model.lohan.register("sampler", Refuses(fails))
        model.lohan.register("sampler", Refuses("never"))
        crash_worker.train_step(model, 0)
        model.lohan.close()


def test_arrays_of_numpy_are_refused_with_the_way_out(store_dir: pathlib.Path) -> None:
    class Arrays(Sampler):
        def state_dict(self) -> Any:
            return {"random": np.random.get_state()}

    model: Any = lohan.wrap(crash_worker.build(), store=store_dir / "s")
    with pytest.raises(
        UnsupportedError, match=r"\(Unsupported global: [^)]*\).* array\.tolist\(\)"
    ):
        model.lohan.register("numpy", Arrays())
    model.lohan.close()


def test_states_that_are_new_or_left_out_are_reported(
    store_dir: pathlib.Path, capfd: pytest.CaptureFixture[str]
) -> None:
    for resume, names in ((False, ("a", "b")), (True, ("a", "c")), (True, ("b",))):
        model: Any = lohan.wrap(crash_worker.build(), store=store_dir / "s", resume=resume)
        for name in names:
            model.lohan.register(name, Sampler())
        crash_worker.train_step(model, 0)
        model.lohan.close()
    said = capfd.readouterr().err
    assert "the store has no state of 'c' at step 1" in said
    assert "had states of 'b', which this run did not register" in said
    assert "the store has no state of 'b' at step 2" in said


def test_a_state_that_another_program_has_changed_is_named(store_dir: pathlib.Path) -> None:
    model: Any = lohan.wrap(crash_worker.build(), store=store_dir / "s", lr=1e-2)
    inside(model).registered.restore({"registered": {"sampler": "AAAA"}})
    with pytest.raises(StoreMismatchError, match=r"'sampler' cannot be read.*another program"):
        model.lohan.register("sampler", Sampler())
    model.lohan.close()
