"""Micro-batches that take turns at the blocks: the bits of the horizontal order, read once."""

from __future__ import annotations

import functools
import pathlib
import signal
import threading
from collections.abc import Callable
from typing import Any
from unittest.mock import Mock

import kit as helper
import lohan
import pytest
import torch
from lohan import _core
from lohan.common._inside import inside
from lohan.errors import DeviceMemoryError, ModelError, SecondBackwardError, UnsupportedError
from lohan.session import _order
from lohan.torch_glue import _random_starts
from rules_helper import WIDTH, Workshop, assert_same_state, build, vectors
from torch import nn
from torch.utils.checkpoint import checkpoint

STEP_COUNT = 3
COUNT = 4
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
KEPT: dict[str, dict[str, Any]] = {
    "keep": {},
    "recompute": {"activations": "recompute"},
    "swap": {"activations": {"*": "swap"}, "swap_bytes": 16 << 20, "swap_ssd_bytes": 64 << 20},
    "policy": {"activations": "lohan"},
}


def losses_of(model: nn.Module, step: int, count: int = COUNT) -> list[Callable[[], torch.Tensor]]:
    def loss_of(part: int) -> torch.Tensor:
        return helper.language_loss(model, COUNT * step + part) / count

    return [lambda part=part: loss_of(part) for part in range(count)]


@pytest.mark.parametrize("kept", ["keep", "recompute", "policy"])
def test_all_micro_batches_read_what_one_reads(kept: str, store_dir: pathlib.Path) -> None:
    model = helper.build("gpt2", torch.bfloat16)
    least = helper.host_bytes_min(model, store_dir, accumulate=8)
    fixed = {"host_bytes": least, **KEPT[kept]}
    read = {}
    for count, order in ((8, "horizontal"), (8, "vertical"), (2, "vertical")):
        place = {"store": store_dir / f"{count}{order}", "accumulate": count, "order": order}
        model = lohan.wrap(helper.build("gpt2", torch.bfloat16), **place, **fixed)
        session: Any = model.lohan
        found = []
        for step in range(2 * STEP_COUNT):
            session.accumulate(losses_of(model, step, count))
            model.optimizer.step()
            session.flush()
            found.append(session.stats().bytes["param_read"])
        session.close()
        # On a busy machine a step may be planned again, and then reads more.
        read[count, order] = min(found)
    assert read[8, "vertical"] == read[2, "vertical"]
    assert read[8, "horizontal"] > 4 * read[8, "vertical"]


class Noisy(nn.Module):
    """Blocks with dropout, a parameter and a bias of the model's own, and one tied weight."""

    def __init__(self, is_predictable: bool = True) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(WIDTH))
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.layers[3].weight = self.layers[0].weight
        self.is_predictable = is_predictable

    def forward(self, x: torch.Tensor, skipped: int = -1) -> torch.Tensor:
        x = x * self.scale
        for index, layer in enumerate(self.layers):
            if index != skipped:
                x = x + nn.functional.dropout(torch.tanh(layer(x)), 0.3)
        if not self.is_predictable:
            x = x + torch.randn(1)  # a normal number leaves another one in the generator
        return (x * self.scale).square().mean()


def run(model: nn.Module, skip: bool = False) -> list[float]:
    """Train a Noisy model for some steps, and close it; return the losses."""
    torch.manual_seed(3)
    session: Any = model.lohan
    losses: list[float] = []
    for step in range(STEP_COUNT):
        functions = [
            functools.partial(model, vectors(10 * step + part), part if skip else -1)
            for part in range(COUNT)
        ]
        losses += [float(loss) for loss in session.accumulate(functions)]
        model.optimizer.step()
    return losses


@pytest.mark.parametrize("skip", [False, True])
@pytest.mark.parametrize("is_predictable", [True, False])
def test_random_numbers_are_those_of_the_horizontal_order(
    is_predictable: bool,
    skip: bool,
    workshop: Workshop,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    results = []
    for order in ("horizontal", "vertical"):
        model = workshop.wrap(
            build(lambda: Noisy(is_predictable)), accumulate=COUNT, order=order, lr=1e-2
        )
        learn = Mock(wraps=getattr(inside(model).runs, "_learn", None))
        monkeypatch.setattr(inside(model).runs, "_learn", learn, raising=False)
        losses = run(model, skip)
        results.append((losses, dict(model.state_dict()), torch.get_rng_state()))
    assert results[0][0] == results[1][0]
    assert_same_state(results[1][1], results[0][1])
    assert torch.equal(results[0][2], results[1][2])
    # The first step is repeated, because nothing was known; the others take turns.
    assert learn.call_count == 1
    assert ("one after the other" in capsys.readouterr().err) != is_predictable


@pytest.mark.parametrize("first", [0, 1, 5, 623, 624, 700])
def test_the_numbers_between_two_states_are_counted(first: int) -> None:
    for count in (0, 1, 3, 600, 623, 624, 625, 1300, 5000, 100_000):
        generator = torch.Generator().manual_seed(first)
        torch.empty(first, dtype=torch.uint8).random_(generator=generator)
        begin = generator.get_state()
        torch.empty(count, dtype=torch.uint8).random_(generator=generator)
        end = generator.get_state()
        assert _random_starts._count_cpu(begin, end) == count
        assert torch.equal(_random_starts._drawn(begin, count), end)


def test_a_number_of_draws_that_cannot_be_known_is_not_guessed() -> None:
    begin = torch.Generator().manual_seed(1).get_state()
    assert _random_starts._count_cpu(begin, torch.Generator().manual_seed(2).get_state()) is None


class Around(nn.Module):
    """Contains blocks, and uses parameters of its own before and after them."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))
        self.gain = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: torch.Tensor, count: int) -> torch.Tensor:
        x = x * self.gain
        for layer in self.layers[:count]:
            x = x + torch.tanh(layer(x))
        return x * self.gain


class Nested(nn.Module):
    """Blocks in modules that have parameters of their own, in a model that has one, too."""

    def __init__(self) -> None:
        super().__init__()
        self.outer = nn.ModuleList(Around() for _ in range(3))
        self.gain = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: torch.Tensor, count: int = 2) -> torch.Tensor:
        x = x * self.gain
        for each in self.outer:
            x = each(x, count)
        return (x * self.gain).float().square().mean()


@pytest.mark.parametrize("counts", [(2, 2, 2, 2), (0, 2, 1, 2), (2, 1, 2, 0)], ids=str)
def test_parameters_around_blocks_have_their_own_gradients(
    counts: tuple[int, ...], workshop: Workshop
) -> None:
    """Also if micro-batches leave out blocks, and the first or last one has the fewest."""
    found = []
    for order in ("horizontal", "vertical"):
        model = workshop.wrap(build(Nested).bfloat16(), accumulate=COUNT, order=order, lr=1e-2)
        assert sum(unit.always for unit in inside(model).layout.units) == 4
        losses: list[float] = []
        for step in range(STEP_COUNT):
            functions = [
                functools.partial(model, vectors(10 * step + part).bfloat16(), count)
                for part, count in enumerate(counts)
            ]
            losses += [float(loss) for loss in model.lohan.accumulate(functions)]
            model.optimizer.step()
        found.append((losses, dict(model.state_dict())))
    assert found[0][0] == found[1][0]
    assert_same_state(found[1][1], found[0][1])


class Checkpointed(nn.Module):
    def __init__(self, use_reentrant: bool) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.use_reentrant = use_reentrant

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x.clone().requires_grad_()
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=self.use_reentrant)
        return x.square().mean()


def some(model: nn.Module, count: int = COUNT) -> list[Callable[[], torch.Tensor]]:
    return [lambda part=part: model(vectors(part)) for part in range(count)]


def test_torchs_checkpoints_recompute_in_turns(workshop: Workshop) -> None:
    found = []
    for order in ("horizontal", "vertical"):
        model = workshop.wrap(build(lambda: Checkpointed(False)), accumulate=COUNT, order=order)
        losses = [float(loss) for loss in model.lohan.accumulate(some(model))]
        model.optimizer.step()
        found.append((losses, dict(model.state_dict())))
    assert found[0][0] == found[1][0]
    assert_same_state(found[1][1], found[0][1])


def test_hooks_on_parameters_see_the_gradients_of_every_micro_batch(workshop: Workshop) -> None:
    found = []
    for order in ("horizontal", "vertical"):
        model = workshop.wrap(build(lambda: Checkpointed(False)), accumulate=COUNT, order=order)
        seen: list[int] = []
        model.layers[0].weight.register_hook(lambda g, seen=seen: (seen.append(1), 2 * g)[1])
        model.lohan.accumulate(some(model))
        model.optimizer.step()
        found.append((len(seen), dict(model.state_dict())))
    assert found[0][0] == found[1][0] == COUNT
    assert_same_state(found[1][1], found[0][1])


def test_a_reentrant_checkpoint_is_refused_by_name(workshop: Workshop) -> None:
    model = workshop.wrap(build(lambda: Checkpointed(True)), accumulate=COUNT, order="vertical")
    with pytest.raises(UnsupportedError, match=r"'layers\.2\.\w+' was .* reentrant checkpoint"):
        model.lohan.accumulate(some(model))
    model.optimizer.zero_grad()


@pytest.mark.parametrize("who", range(2))
def test_a_function_may_call_a_block_alone(who: int, workshop: Workshop) -> None:
    found = []
    for order in ("horizontal", "vertical"):
        model = workshop.wrap(build(), accumulate=2, order=order, host_bytes="minimal")
        parts: list[Any] = [model, model]
        parts[who] = model.blocks[0]
        for _ in range(STEP_COUNT):
            functions = [lambda f=f: f(vectors(0)).square().mean() for f in parts]
            losses = [float(loss) for loss in model.lohan.accumulate(functions)]
            model.optimizer.step()
        found.append((losses, dict(model.state_dict())))
    assert found[0][0] == found[1][0]
    assert_same_state(found[1][1], found[0][1])


class Counting(nn.Module):
    """Counts its forwards in a buffer, as a batch norm does."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.count += 1
        return self.layer(x).square().mean()


def test_a_forward_that_changes_buffers_is_refused(workshop: Workshop) -> None:
    model = workshop.wrap(build(Counting), accumulate=COUNT, order="vertical")
    with pytest.raises(UnsupportedError, match="changes its buffers"):
        model.lohan.accumulate(some(model))


@pytest.mark.parametrize("who", range(COUNT))
def test_an_error_in_one_function_ends_all_and_the_next_step_is_whole(
    who: int, workshop: Workshop
) -> None:
    model = workshop.wrap(build(), accumulate=COUNT, order="vertical")
    whole = workshop.wrap(build(), accumulate=COUNT)

    def fail() -> torch.Tensor:
        model(vectors(who))
        raise RuntimeError("no more batches")

    functions = some(model)
    functions = [lambda f=f: f().square().mean() for f in functions]
    functions[who] = fail
    with pytest.raises(RuntimeError, match="no more batches"):
        model.lohan.accumulate(functions)
    for each in (model, whole):
        each.lohan.accumulate([lambda f=f: f().square().mean() for f in some(each)])
        each.optimizer.step()
    assert_same_state(dict(model.state_dict()), dict(whole.state_dict()))


@pytest.mark.parametrize("who", [0, COUNT - 1])
def test_an_error_ends_runs_that_are_inside_of_modules_with_blocks(
    who: int, workshop: Workshop
) -> None:
    model = workshop.wrap(build(Nested), accumulate=COUNT, order="vertical")
    whole = workshop.wrap(build(Nested), accumulate=COUNT)

    def fail(*args: Any) -> None:
        raise RuntimeError("no more batches")

    def bad() -> torch.Tensor:
        handle = model.outer[0].layers[0].register_forward_hook(fail)
        try:
            found: torch.Tensor = model(vectors(who))
        finally:
            handle.remove()
        return found

    functions: list[Any] = [functools.partial(model, vectors(part)) for part in range(COUNT)]
    with pytest.raises(RuntimeError, match="no more batches"):
        model.lohan.accumulate([bad if part == who else f for part, f in enumerate(functions)])
    for each in (model, whole):
        each.lohan.accumulate([functools.partial(each, vectors(part)) for part in range(COUNT)])
        each.optimizer.step()
    assert_same_state(dict(model.state_dict()), dict(whole.state_dict()))


def test_ctrl_c_ends_all_functions(workshop: Workshop) -> None:
    model = workshop.wrap(build(), accumulate=COUNT, order="vertical")
    ended = []

    def loss_of(part: int) -> torch.Tensor:
        if part == 1:
            signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)
        loss = model(vectors(part)).square().mean()
        ended.append(part)
        return loss

    with pytest.raises(KeyboardInterrupt):
        model.lohan.accumulate([lambda part=part: loss_of(part) for part in range(COUNT)])
    assert len(ended) < COUNT
    model.lohan.accumulate([lambda f=f: f().square().mean() for f in some(model)])
    model.optimizer.step()


@pytest.mark.parametrize("order", ["horizontal", "vertical"])
def test_what_is_no_loss_and_what_does_not_fit_is_refused(order: str, workshop: Workshop) -> None:
    model = workshop.wrap(build(), accumulate=COUNT, order=order)
    session: Any = model.lohan
    with pytest.raises(
        ModelError, match="got 5 functions, and the step has 0 of gradient_accumulation_steps=4"
    ):
        session.accumulate(some(model, 5))
    with pytest.raises(ModelError, match="got 0 functions"):
        session.accumulate([])
    for wrong, said in ((lambda: 1.0, "returned float"), (lambda: torch.ones(()), "no gradient")):
        with pytest.raises(ModelError, match=said):
            session.accumulate([wrong] * 2)
    with pytest.raises(ModelError, match=r"a tensor of shape \(\d+, \d+\): each must"):
        session.accumulate(some(model))
    model.optimizer.zero_grad()
    functions = [lambda f=f: f().square().mean() for f in some(model)]
    session.accumulate(functions)
    with pytest.raises(SecondBackwardError):
        session.accumulate(functions)


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"order": "diagonal", "accumulate": 2}, "must be 'horizontal', 'vertical' or 'auto'"),
        ({"order": "vertical"}, "needs several micro-batches"),
    ],
)
def test_settings_that_do_not_go_together_are_refused(
    settings: dict[str, Any], said: str, store_dir: pathlib.Path
) -> None:
    with pytest.raises((ModelError, UnsupportedError), match=said):
        lohan.wrap(build(), store=store_dir, **settings)


def test_a_torch_without_a_counter_of_nodes_is_refused_before_there_is_a_store(
    store_dir: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def missing() -> int:
        raise NotImplementedError("this build of torch does not export the counter")

    monkeypatch.setattr(_core, "sequence_peek", missing)
    with pytest.raises(UnsupportedError, match="does not export the counter"):
        lohan.wrap(build(), store=store_dir, accumulate=2, order="vertical")
    assert not list(store_dir.iterdir())
    model = lohan.wrap(build(), store=store_dir, accumulate=2, order="auto")
    assert model.lohan.order == "horizontal"
    model.lohan.close()


def test_steps_that_cannot_be_predicted_are_counted_in_a_row(workshop: Workshop) -> None:
    model = workshop.wrap(build(Noisy), accumulate=2, order="vertical")
    session: Any = inside(model)
    torch.manual_seed(3)
    for step in range(12):  # the amounts change in every second step
        skipped = 0 if step % 4 < 2 else -1
        losses = [lambda s=skipped, n=n: model(vectors(n), s) for n in range(2)]
        session.accumulate(losses)
        model.optimizer.step()
        assert session.runs._miss_count == (step + 1) % 2


def test_a_function_that_runs_a_backward_is_refused(workshop: Workshop) -> None:
    model = workshop.wrap(build(), accumulate=2, order="vertical")

    def loss_of() -> torch.Tensor:
        loss: torch.Tensor = model(vectors(0)).square().mean()
        loss.backward()
        return loss

    with pytest.raises(UnsupportedError, match="ran a backward: each must return its loss"):
        model.lohan.accumulate([loss_of, loss_of])


def test_an_error_for_lack_of_memory_counts_the_micro_batches(workshop: Workshop) -> None:
    settings: dict[str, Any] = {"device": "emu", "device_bytes": 48 << 20, "accumulate": COUNT}
    settings["device_param_bytes"] = 4 << 20
    large = torch.ones(8192, WIDTH)
    for order in ("horizontal", "vertical"):
        model = workshop.wrap(build(), order=order, **settings)
        functions = [lambda m=model: m(large).square().mean()] * COUNT
        if order == "vertical":
            with pytest.raises(DeviceMemoryError) as refused:
                model.lohan.accumulate(functions)
            assert "the activations of 4 micro-batches at once" in refused.value.__notes__[0]
        else:
            model.lohan.accumulate(functions)
        model.optimizer.zero_grad()


def auto(workshop: Workshop, monkeypatch: pytest.MonkeyPatch, free: float, **settings: Any) -> str:
    """Train for some steps with order="auto", and return the order that was chosen.

    Args:
        workshop: wraps the models.
        monkeypatch: sets the free memory.
        free: the free memory, as a multiple of what the micro-batches keep at once.
        settings: settings of lohan.wrap().
    """
    plain = _order.fits
    asked = []

    def fits(session: Any, kept_bytes: int) -> bool:
        asked.append(kept_bytes)
        monkeypatch.setattr(_order, "_free_bytes", lambda session: int(free * kept_bytes))
        return plain(session, kept_bytes)

    monkeypatch.setattr(_order, "fits", fits)
    found = []
    for order in ("horizontal", "auto"):
        model = workshop.wrap(build(), accumulate=COUNT, order=order, **settings)
        for _ in range(STEP_COUNT):
            model.lohan.accumulate([lambda f=f: f().square().mean() for f in some(model)])
            model.optimizer.step()
        found.append(dict(model.state_dict()))
    assert_same_state(found[1], found[0])
    monkeypatch.setattr(_order, "fits", plain)
    assert len(asked) <= 1
    # Each micro-batch keeps its inputs of 4 blocks at least, and of the head.
    assert all(kept >= COUNT * 5 * vectors(0).nbytes for kept in asked)
    chosen: str = model.lohan.order
    return chosen


@pytest.mark.parametrize("kept", ["keep", "recompute"])
def test_auto_takes_the_order_that_reads_less_if_it_fits(
    kept: str, workshop: Workshop, monkeypatch: pytest.MonkeyPatch
) -> None:
    fixed: dict[str, Any] = {"activations": kept}
    assert auto(workshop, monkeypatch, 2.1, host_bytes="minimal", **fixed) == "vertical"
    assert auto(workshop, monkeypatch, 1.9, host_bytes="minimal", **fixed) == "horizontal"
    assert auto(workshop, monkeypatch, 100.0, **fixed) == "horizontal"  # nothing is read


class CountingStack(nn.Module):
    """Blocks that count their forwards."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = x + torch.tanh(layer(x))
            self.count += 1
        return x.square().mean()


def test_auto_is_horizontal_for_a_model_that_changes_buffers(workshop: Workshop) -> None:
    settings: dict[str, Any] = {"accumulate": COUNT, "host_bytes": "minimal"}
    model = workshop.wrap(build(CountingStack), order="auto", **settings)
    assert model.lohan.order == "auto"
    for _ in range(2):
        model.lohan.accumulate(some(model))
        model.optimizer.step()
        assert model.lohan.order == "horizontal"


def test_the_counter_of_nodes_can_only_be_raised() -> None:
    before = _core.sequence_peek()
    _core.sequence_raise(before + 1000)
    assert _core.sequence_peek() == before + 1000
    _core.sequence_raise(before)
    assert _core.sequence_peek() == before + 1000
    with pytest.raises(ValueError, match="the counter is at"):
        _core.sequence_raise(before + (1 << 33))
