"""One wrapped model and several threads: a named refusal, and the thread that has it is exact."""

from __future__ import annotations

import pathlib
import threading
import time
from collections.abc import Callable, Iterator

import lohan
import pytest
import torch
from lohan.errors import LohanError, ThreadError
from patience import HUNG_S
from rules_helper import Stack, Workshop, assert_same_state, build, vectors
from torch import nn

THREADS = 4


class Gate(nn.Module):
    """Waits in its forward, or in its backward, until it is opened."""

    def __init__(self) -> None:
        super().__init__()
        self.inside = threading.Event()
        self.opened = threading.Event()
        self.opened.set()
        self.in_backward = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.in_backward:
            if x.requires_grad:
                x.register_hook(self._wait)
        else:
            self._wait(x)
        return x

    def _wait(self, _: torch.Tensor) -> None:
        self.inside.set()
        assert self.opened.wait(HUNG_S)


class Gated(Stack):
    """A stack of blocks with a gate between them."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = Gate()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks[:2]:
            x = block(x)
        x = self.gate(x)
        for block in self.blocks[2:]:
            x = block(x)
        y: torch.Tensor = self.head(x)
        return y


class Other:
    """A call on another thread, which is inside the gate when this object is created."""

    def __init__(self, gate: Gate, call: Callable[[], torch.Tensor]) -> None:
        self.gate = gate
        self.result: list[torch.Tensor] = []
        self.thread = threading.Thread(target=lambda: self.result.append(call()), name="holder")
        gate.inside.clear()
        gate.opened.clear()
        self.thread.start()
        assert gate.inside.wait(HUNG_S)

    def end(self) -> torch.Tensor:
        """Return the result of the call."""
        self.gate.opened.set()
        self.thread.join(HUNG_S)
        assert not self.thread.is_alive()
        (result,) = self.result
        return result


@pytest.fixture
def model(store_dir: pathlib.Path) -> Iterator[Gated]:
    made: Gated = lohan.wrap(build(Gated), store=store_dir / "run", lr=1e-2)
    yield made
    made.gate.opened.set()
    made.lohan.close()


def evaluate(model: nn.Module, step: int) -> torch.Tensor:
    with torch.no_grad():
        y: torch.Tensor = model(vectors(step))
    return y


def train(model: nn.Module, step: int) -> torch.Tensor:
    loss: torch.Tensor = model(vectors(step)).square().mean()
    loss.backward()
    model.optimizer.step()
    model.optimizer.zero_grad()
    return loss.detach()


def trained(workshop: Workshop, steps: int) -> dict[str, torch.Tensor]:
    """Return the parameters after the steps of one thread."""
    return workshop.train(range(steps), Gated)


def test_a_call_while_another_thread_is_in_a_forward_names_that_thread(model: Gated) -> None:
    other = Other(model.gate, lambda: evaluate(model, 0))
    calls: list[Callable[[], object]] = [
        lambda: evaluate(model, 1),
        lambda: model(vectors(1)),
        lambda: model.blocks[0](vectors(1)),
        lambda: model.blocks[3](vectors(1)),
        lambda: model.head(vectors(1)),
        lambda: model.optimizer.step(),
    ]
    for call in calls * 2:
        with pytest.raises(ThreadError, match=r"thread 'holder' is inside a forward.*one thread"):
            call()
    assert torch.equal(other.end(), evaluate(build(Gated), 0))
    assert torch.equal(evaluate(model, 1), evaluate(build(Gated), 1))


def test_a_block_that_a_thread_called_alone_is_refused_to_others(model: Gated) -> None:
    inside, opened = threading.Event(), threading.Event()

    def wait(*_: object) -> None:
        inside.set()
        assert opened.wait(HUNG_S)

    hook = model.blocks[1].norm.register_forward_hook(wait)
    results: list[torch.Tensor] = []
    thread = threading.Thread(
        target=lambda: results.append(model.blocks[1](vectors(0))), name="holder"
    )
    thread.start()
    assert inside.wait(HUNG_S)
    for block in (model.blocks[1], model.blocks[2], model):
        with pytest.raises(ThreadError, match="'holder'"):
            block(vectors(0))
    opened.set()
    thread.join(HUNG_S)
    hook.remove()
    plain = build(Gated)
    assert torch.equal(results[0], plain.blocks[1](vectors(0)))
    assert torch.equal(model.blocks[1](vectors(1)), plain.blocks[1](vectors(1)))


def test_a_refusal_costs_the_training_thread_nothing(model: Gated, workshop: Workshop) -> None:
    for step in range(4):
        other = Other(model.gate, lambda step=step: train(model, step))
        with pytest.raises(ThreadError):
            evaluate(model, 9)
        with pytest.raises(ThreadError):
            model.blocks[0](vectors(9))
        other.end()
    assert_same_state(dict(model.state_dict()), trained(workshop, 4))


def test_a_call_while_another_thread_is_in_a_backward_names_that_thread(
    model: Gated, workshop: Workshop
) -> None:
    model.gate.in_backward = True
    for step in range(3):
        other = Other(model.gate, lambda step=step: train(model, step))
        for call in (lambda: evaluate(model, 9), lambda: model.optimizer.zero_grad()):
            with pytest.raises(ThreadError, match=r"thread 'holder' runs a backward"):
                call()
        other.end()
    model.gate.in_backward = False
    assert_same_state(dict(model.state_dict()), trained(workshop, 3))


def test_a_backward_of_another_model_on_the_thread_of_a_failed_one_refuses_nothing(
    model: Gated, store_dir: pathlib.Path, workshop: Workshop
) -> None:
    def die(_: torch.Tensor) -> None:
        raise ValueError("planned")

    def fail_and_train_the_other() -> torch.Tensor:
        hook = model.blocks[0].up._parameters["weight"].register_hook(die)
        with pytest.raises(ValueError, match="planned"):
            model(vectors(0)).square().mean().backward()
        hook.remove()
        return train(unrelated, 0)

    unrelated: Gated = lohan.wrap(build(Gated), store=store_dir / "unrelated", lr=1e-2)
    unrelated.gate.in_backward = True
    other = Other(unrelated.gate, fail_and_train_the_other)
    try:
        model.optimizer.zero_grad()
        for step in range(2):
            train(model, step)
        with pytest.raises(ThreadError, match=r"thread 'holder' runs a backward"):
            evaluate(unrelated, 9)
    finally:
        other.end()
    assert_same_state(dict(model.state_dict()), trained(workshop, 2))
    assert_same_state(dict(unrelated.state_dict()), trained(workshop, 1))
    unrelated.lohan.close()


def test_a_backward_while_another_thread_is_in_a_forward_is_refused(
    model: Gated, workshop: Workshop
) -> None:
    train(model, 0)
    loss = model(vectors(1)).square().mean()
    other = Other(model.gate, lambda: evaluate(model, 9))
    with pytest.raises(ThreadError, match="'holder'"):
        loss.backward()
    want = build(Gated)
    want.load_state_dict(trained(workshop, 1))
    assert torch.equal(other.end(), evaluate(want, 9))
    del loss
    for step in range(1, 3):
        train(model, step)
    assert_same_state(dict(model.state_dict()), trained(workshop, 3))


def test_a_backward_may_run_on_another_thread_than_its_forward(
    model: Gated, workshop: Workshop
) -> None:
    for step in range(3):
        loss = model(vectors(step)).square().mean()
        thread = threading.Thread(target=loss.backward)
        thread.start()
        thread.join()
        model.optimizer.step()
    assert_same_state(dict(model.state_dict()), trained(workshop, 3))


def test_a_thread_that_died_inside_a_forward_holds_nothing(
    model: Gated, workshop: Workshop
) -> None:
    def die() -> None:
        with pytest.raises(ZeroDivisionError):
            model.head(model.blocks[0](vectors(0)))

    hook = model.head.register_forward_pre_hook(lambda *_: 1 // 0)
    thread = threading.Thread(target=die)
    thread.start()
    thread.join()
    hook.remove()
    for step in range(2):
        train(model, step)
    assert_same_state(dict(model.state_dict()), trained(workshop, 2))


@pytest.mark.parametrize("grad", [False, True])
def test_many_threads_at_once_get_exact_results_or_named_refusals(
    grad: bool, workshop: Workshop
) -> None:
    plain = build(Stack)
    want = plain(vectors(0)).detach()
    model = workshop.wrap(build(Stack), host_bytes="minimal")
    right, refused, wrong = [0], [0], list[object]()

    def call() -> None:
        for _ in range(60):
            try:
                with torch.set_grad_enabled(grad):
                    y = model(vectors(0)).detach()
            except ThreadError:
                refused[0] += 1
            except BaseException as error:
                wrong.append(error)
            else:
                if torch.equal(y, want):
                    right[0] += 1
                else:
                    wrong.append(y)

    threads = [threading.Thread(target=call) for _ in range(THREADS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong and right[0] > 0 and right[0] + refused[0] == 60 * THREADS
    assert torch.equal(model(vectors(0)).detach(), want)
    train(model, 0)
    assert_same_state(dict(model.state_dict()), workshop.train(range(1)))


class Slow(nn.Parameter):
    """A parameter at which threads take turns while its values come or go."""

    def __setattr__(self, name: str, value: object) -> None:
        if name == "data":
            time.sleep(1e-4)
        super().__setattr__(name, value)


@pytest.mark.parametrize("device", [None, "emu"])
def test_threads_that_read_parameters_at_once_get_exact_values_or_named_refusals(
    device: str | None, workshop: Workshop
) -> None:
    plain = build(Stack)
    for module in plain.modules():
        for name, param in module._parameters.items():
            if param is not None:
                module._parameters[name] = Slow(param.detach())
    model = workshop.wrap(plain, device=device)
    train(model, 0)
    want = {name: value.clone() for name, value in model.state_dict().items()}
    # append() is atomic
    right, refused, wrong = list[str](), list[LohanError](), list[object]()

    def read(is_whole: bool) -> None:
        for _ in range(15):
            try:
                if is_whole:
                    found = dict(model.state_dict())
                else:
                    found = {n: p.detach().clone() for n, p in model.named_parameters()}
                model.lohan.flush()
            except LohanError as error:
                refused.append(error)
            except BaseException as error:
                wrong.append(error)
            else:
                for name, value in want.items():
                    (right if torch.equal(found[name], value) else wrong).append(name)

    threads = [threading.Thread(target=read, args=(i % 2 == 0,)) for i in range(THREADS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong and right
    assert len(right) // len(want) + len(refused) == 15 * THREADS
    assert_same_state(dict(model.state_dict()), want)
    train(model, 1)
    assert_same_state(dict(model.state_dict()), workshop.train(range(2), Stack))


def test_zeroth_order_training_refuses_another_thread_by_name(store_dir: pathlib.Path) -> None:
    model: Gated = lohan.wrap(build(Gated), store=store_dir / "run", method="mezo", lr=1e-3)

    def step() -> torch.Tensor:
        loss: torch.Tensor = model.zo_step(lambda: model(vectors(0)).square().mean())
        return loss

    other = Other(model.gate, step)
    for call in (lambda: evaluate(model, 1), step):
        with pytest.raises(LohanError, match=r"holder|inside a"):
            call()
    assert other.end().isfinite()
    assert model.lohan.step == 1
    step()
    model.lohan.close()
    again: Gated = lohan.wrap(
        build(Gated), store=store_dir / "run", method="mezo", lr=1e-3, resume=True
    )
    assert again.lohan.step == 2
    again.lohan.close()
