"""What a script does around a wrapped model is named where lohan would not train it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from lohan.errors import HyperParameterError, UnsupportedError
from lohan.session import _outside
from rules_helper import (
    WIDTH,
    Workshop,
    assert_same_state,
    build,
    square_loss,
    train_step,
    vectors,
)
from torch import nn
from torch.optim.lr_scheduler import LinearLR

# --- Parameters that no optimizer has ------------------------------------------------------------


def test_a_replaced_parameter_and_a_replaced_module_are_named(workshop: Workshop) -> None:
    model = workshop.wrap(build())
    train_step(model, 0)
    model.head.weight = nn.Parameter(torch.randn(10, WIDTH))
    with pytest.raises(UnsupportedError, match=r"^parameter 'head\.weight' was added after lohan"):
        train_step(model, 1)
    model = workshop.wrap(build())
    model.head = nn.Linear(WIDTH, 10)
    with pytest.raises(UnsupportedError, match=r"'head\.weight' .* with 1 more \('head\.bias'\)"):
        train_step(model, 0)


def test_added_parameters_are_counted_and_the_first_five_named(workshop: Workshop) -> None:
    model = workshop.wrap(build())
    model.more = nn.ModuleList(nn.Linear(2, 2) for _ in range(4))
    others = r"'more\.0\.bias', 'more\.1\.weight', 'more\.1\.bias', 'more\.2\.weight', \.\.\."
    with pytest.raises(UnsupportedError, match=rf"'more\.0\.weight'.*7 more \({others}\), and"):
        train_step(model, 0)


def test_step_names_what_was_added_if_only_parts_of_the_model_are_called(
    workshop: Workshop,
) -> None:
    model = workshop.wrap(build())
    model.extra = nn.Linear(WIDTH, WIDTH)
    model.head(model.extra(model.blocks[0](vectors(0)))).square().mean().backward()
    with pytest.raises(UnsupportedError, match=r"'extra\.weight' was added after"):
        model.optimizer.step()
    assert model.lohan.step == 0


def test_the_search_for_added_parameters_is_not_part_of_every_step(
    workshop: Workshop, monkeypatch: pytest.MonkeyPatch
) -> None:
    searches = 0
    plain = _outside.Outside._search

    def search(*args: Any) -> Iterator[tuple[str, nn.Parameter]]:
        nonlocal searches
        searches += 1
        return plain(*args)

    monkeypatch.setattr(_outside.Outside, "_search", search)
    model = workshop.wrap(build())
    for step in range(4):
        train_step(model, step)
    assert searches == 1
    nn.Linear(2, 2)  # torch registers its parameters, wherever they will be used
    train_step(model, 4)
    train_step(model, 5)
    assert searches == 2


# --- Optimizers and schedulers from before -------------------------------------------------------


def optimized() -> tuple[nn.Module, torch.optim.AdamW]:
    model = build()
    return model, torch.optim.AdamW(model.parameters(), lr=1e-2)


@pytest.mark.parametrize("is_before", [True, False])
def test_a_scheduler_of_the_replaced_optimizer_is_named_at_step(
    is_before: bool, workshop: Workshop, capfd: pytest.CaptureFixture[str]
) -> None:
    model, optimizer = optimized()
    scheduler = LinearLR(optimizer, 1.0, 0.1, total_iters=9) if is_before else None
    model = workshop.wrap(model)
    assert ("LinearLR has no effect" in capfd.readouterr().err) == is_before
    scheduler = scheduler or LinearLR(optimizer, 1.0, 0.1, total_iters=9)
    train_step(model, 0)
    optimizer._opt_called = True  # type: ignore[attr-defined]  # no warning of torch's
    scheduler.step()
    wanted = (
        r"rate of AdamW, .* from 0\.01 to 0\.009, but model\.optimizer, .* has 0\.01: create the"
        r" scheduler from model\.optimizer, or pass that AdamW to lohan\.wrap\(optimizer="
    )
    loss = square_loss(model, 1)
    loss.backward()
    for _ in range(2):
        with pytest.raises(HyperParameterError, match=wanted):
            model.optimizer.step()
    assert model.lohan.step == 1


def test_loading_a_state_does_not_hide_a_scheduler_of_the_replaced_optimizer(
    workshop: Workshop,
) -> None:
    model, optimizer = optimized()
    model = workshop.wrap(model)
    state = model.optimizer.state_dict()
    state["param_groups"][0]["lr"] = 2e-3
    model.optimizer.load_state_dict(state)
    train_step(model, 0)
    optimizer.param_groups[0]["lr"] = 5e-3
    square_loss(model, 1).backward()
    with pytest.raises(HyperParameterError, match=r"from 0\.01 to 0\.005, but .* has 0\.002:"):
        model.optimizer.step()


def test_a_script_that_sets_both_learning_rates_or_adopts_its_optimizer_is_not_refused(
    workshop: Workshop,
) -> None:
    states = []
    for way in ("copies", "adopts"):
        model, optimizer = optimized()
        scheduler = LinearLR(optimizer, 1.0, 0.1, total_iters=9)
        given = {"optimizer": optimizer, "lr": None} if way == "adopts" else {}
        model = workshop.wrap(model, **given)
        for step in range(3):
            train_step(model, step)
            optimizer._opt_called = True  # type: ignore[attr-defined]
            scheduler.step()
            model.optimizer.param_groups[0]["lr"] = optimizer.param_groups[0]["lr"]
        states.append(dict(model.state_dict()))
    assert_same_state(*states)


def test_a_replaced_optimizer_that_is_gone_is_not_watched(workshop: Workshop) -> None:
    model, optimizer = optimized()
    model = workshop.wrap(model)
    optimizer.param_groups[0]["lr"] = 0.5
    del optimizer
    train_step(model, 0)
    assert model.lohan.step == 1


# --- Replicas ------------------------------------------------------------------------------------


def test_data_parallel_is_named_around_and_inside_a_wrapped_model(workshop: Workshop) -> None:
    with pytest.raises(UnsupportedError, match=r"is a DataParallel module.*model\.module"):
        workshop.wrap(nn.DataParallel(build()))
    inside = build()
    inside.blocks[1] = nn.DataParallel(inside.blocks[1])
    with pytest.raises(UnsupportedError, match=r"'blocks\.1' is a DataParallel module"):
        workshop.wrap(inside)
    plain = build()
    around = nn.DataParallel(plain)
    model = workshop.wrap(plain)
    calls = [nn.DataParallel(model), around, nn.DataParallel(nn.Sequential(model))]
    for call in calls:
        with pytest.raises(UnsupportedError, match=r"DataParallel cannot run .*torchrun"):
            call(vectors(0))
        with torch.no_grad(), pytest.raises(UnsupportedError, match="DataParallel cannot run"):
            call(vectors(0))
    train_step(model, 0)
    assert model.lohan.step == 1


def test_data_parallel_is_named_before_it_reads_parameters(
    workshop: Workshop, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With several GPUs, its forward first reads the device of each parameter."""
    model = workshop.wrap(build())
    parallel = nn.DataParallel(model)
    monkeypatch.setattr(parallel, "device_ids", [0, 1])
    monkeypatch.setattr(parallel, "src_device_obj", torch.device("cpu"), raising=False)
    with pytest.raises(UnsupportedError, match=r"DataParallel cannot run"):
        parallel(vectors(0))
    train_step(model, 0)
