"""wrap(ema=) keeps the averages that AveragedModel of torch computes, bit for bit, in the store."""

from __future__ import annotations

import copy
import os
import pathlib
import signal
from multiprocessing.connection import Connection
from typing import Any

import crash_worker
import lohan
import pytest
import rules_helper as helper
import torch
from lohan.common._inside import inside
from lohan.errors import (
    GradientError,
    HollowParameterError,
    ModelError,
    SessionError,
    StepError,
    StoreMismatchError,
    UnsupportedError,
)
from safetensors.torch import load_file
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

STEP_COUNT = 4
KEPT_STEPS = 2  # those before a resume
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def wrapped(folder: pathlib.Path, dtype: torch.dtype = torch.float32, **settings: Any) -> nn.Module:
    model = helper.build().to(dtype)
    return lohan.wrap(model, store=folder, lr=1e-2, allow_tmpfs=True, **settings)


def train_step(model: nn.Module, step: int) -> None:
    dtype = next(model.parameters()).dtype
    model(helper.vectors(step).to(dtype)).float().pow(2).mean().backward()
    model.optimizer.step()


def masters(model: nn.Module, folder: pathlib.Path, **kinds: Any) -> dict[str, torch.Tensor]:
    """Return the fp32 masters of an open session, or their averages."""
    lohan.export(model, folder, dtype="float32", overwrite=True, **kinds)
    return load_file(folder / "model.safetensors")


def multi_avg_fn(decay: float) -> Any:
    """Return torch's function, or one with its bits on processors with AVX2.

    There, lerp rounds once, by fused multiply-adds. For a product of two fp32 numbers and a sum,
    fp64 is exact enough.
    """
    if torch.backends.cpu.get_cpu_capability() != "DEFAULT":
        return get_ema_multi_avg_fn(decay)
    rest = torch.tensor(1 - decay, dtype=torch.float32)
    small = bool(rest < 0.5)
    weight = (rest if small else rest - 1).double()

    def update(averages: list[torch.Tensor], values: list[torch.Tensor], _: Any) -> None:
        for average, value in zip(averages, values, strict=True):
            begin = average if small else value
            average.copy_(weight * (value - average).double() + begin.double())

    return update


class Reference:
    """torch's averages of the masters that lohan has computed."""

    def __init__(self, decay: float) -> None:
        self.plain = helper.build().float()
        self.made = AveragedModel(self.plain, multi_avg_fn=multi_avg_fn(decay))

    def take(self, values: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        self.plain.load_state_dict(values)
        self.made.update_parameters(self.plain)
        return dict(self.made.module.state_dict())


def same(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


@pytest.mark.parametrize(
    ("dtype", "decay", "settings"),
    [
        ("fp32", 0.9, {}),
        ("fp32", 0.3, {"schedule": "naive", "verify": False}),
        ("bf16", 0.9, {"commit_every": 3}),
        ("bf16", 0.9, {"states": "8bit", "accumulate": 1}),
        ("bf16", 0.5, {"states": "bf16", "commit_every": "manual"}),
        ("fp16", 0.9, {"commit_every": "never", "schedule": "serial"}),
    ],
)
def test_averages_have_torchs_bits_and_survive_a_resume(
    store_dir: pathlib.Path, dtype: str, decay: float, settings: dict[str, Any]
) -> None:
    settings = {"ema": decay, **settings}
    model = wrapped(store_dir / "s", DTYPES[dtype], **settings)
    reference = Reference(decay)
    expected: dict[str, torch.Tensor] = {}
    for step in range(STEP_COUNT):
        if step == KEPT_STEPS:
            model.lohan.commit()
            model.lohan.close()
            model = wrapped(store_dir / "s", DTYPES[dtype], resume=True, **settings)
        train_step(model, step)
        expected = reference.take(masters(model, store_dir / "out"))
    assert same(masters(model, store_dir / "out", ema=True), expected)
    before = masters(model, store_dir / "out")
    assert not same(before, expected)
    with lohan.ema(model):
        assert same(masters(model, store_dir / "out"), expected)
        assert model(helper.vectors(0).to(DTYPES[dtype])).isfinite().all()
        assert inside(model).averages.is_swapped
    assert same(masters(model, store_dir / "out"), before)
    assert same(masters(model, store_dir / "out", ema=True), expected)
    model.lohan.commit()
    model.lohan.close()
    files = lohan.export(store_dir / "s", store_dir / "closed", ema=True)
    narrow = load_file(files[0])
    assert all(value.dtype == DTYPES[dtype] for value in narrow.values())
    assert lohan.verify(store_dir / "s").is_whole


def test_averages_begin_again_with_the_moments_also_in_a_resumed_run(
    tmp_path: pathlib.Path,
) -> None:
    """A learning-rate range test trains, and goes back to the states of step 0."""
    folder, settings = tmp_path / "store", {"ema": 0.9}
    model, other = wrapped(folder, **settings), wrapped(tmp_path / "other", **settings)
    at_start = copy.deepcopy((model.state_dict(), model.optimizer.state_dict()))
    for step in range(KEPT_STEPS):
        train_step(model, step)
    model.load_state_dict(at_start[0])
    model.optimizer.load_state_dict(at_start[1])
    model.lohan.close()
    model = wrapped(folder, resume=True, **settings)
    for step in range(STEP_COUNT):
        for each in (model, other):
            train_step(each, step)
    with lohan.ema(model), lohan.ema(other):
        helper.assert_same_state(model.state_dict(), other.state_dict())
    for each in (model, other):
        each.lohan.close()


def test_training_continues_as_if_averages_had_not_been_evaluated(store_dir: pathlib.Path) -> None:
    made = []
    for name in ("with", "without"):
        model = wrapped(store_dir / name, ema=0.9)
        for step in range(STEP_COUNT):
            train_step(model, step)
            if name == "with":
                with lohan.ema(model):
                    model(helper.vectors(step))
        made.append((masters(model, store_dir / "out"), model.lohan.step))
        made.append((masters(model, store_dir / "out", ema=True), 0))
        model.lohan.close()
    plain = wrapped(store_dir / "plain")
    for step in range(STEP_COUNT):
        train_step(plain, step)
    assert same(made[0][0], made[2][0])
    assert same(made[1][0], made[3][0])
    assert same(made[0][0], masters(plain, store_dir / "out")), "ema= changed the training"
    plain.lohan.close()


def test_bytes_of_steps_are_as_planned(store_dir: pathlib.Path) -> None:
    model, plain = wrapped(store_dir / "e", ema=0.9), wrapped(store_dir / "p")
    sizes = []
    for each in (model, plain):
        for step in range(STEP_COUNT):
            train_step(each, step)
        each.lohan.flush()
        stats = each.lohan.stats()
        assert stats.bytes == stats.planned_bytes
        sizes.append(stats.bytes["state_write"])
        each.lohan.close()
    elements = sum(unit.elements for unit in inside(model).layout.units)
    assert sizes[0] - sizes[1] == 4 * elements


def test_the_averages_place_refuses_what_would_commit_or_change_them(
    store_dir: pathlib.Path,
) -> None:
    model = wrapped(store_dir / "s", ema=0.9)
    train_step(model, 0)
    train_step(model, 1)
    state = model.state_dict()
    with lohan.ema(model):
        with pytest.raises(StepError, match="a backward inside"):
            model(helper.vectors(2)).pow(2).mean().backward()
        model.optimizer.zero_grad()
        for call in (
            model.lohan.commit,
            lambda: lohan.unwrap(model),
            lambda: model.lohan.snapshot(store_dir / "copy"),
            lambda: lohan.ema(model).__enter__(),
            lambda: lohan.export(model, store_dir / "out", ema=True),
            lambda: model.load_state_dict({name: value + 1 for name, value in state.items()}),
        ):
            with pytest.raises(StepError, match=r"lohan\.ema\(model\)"):
                call()
    assert same(dict(model.state_dict()), dict(state))
    train_step(model, 2)
    model.lohan.close()


def test_closing_inside_the_block_keeps_the_last_commit(
    store_dir: pathlib.Path, capfd: pytest.CaptureFixture[str]
) -> None:
    model = wrapped(store_dir / "s", ema=0.9)
    for step in range(STEP_COUNT):
        train_step(model, step)
    before = masters(model, store_dir / "out")
    with lohan.ema(model):
        model.lohan.close()
    lohan.export(store_dir / "s", store_dir / "closed", dtype="float32")
    assert same(load_file(store_dir / "closed" / "model.safetensors"), before)
    with pytest.raises(SessionError, match="the session is closed"), lohan.ema(model):
        pass
    assert "Exception ignored" not in capfd.readouterr().err


def test_an_interrupted_exchange_ends_the_session_at_its_last_commit(
    store_dir: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from lohan.store import _average

    model = wrapped(store_dir / "s", ema=0.9)
    for step in range(STEP_COUNT):
        train_step(model, step)
    before = masters(model, store_dir / "out")
    calls = []

    def fail(*args: Any) -> None:
        calls.append(args)
        raise KeyboardInterrupt

    monkeypatch.setattr(_average, "_write", fail)
    with pytest.raises(KeyboardInterrupt) as caught, lohan.ema(model):
        raise AssertionError("the block was entered")
    assert calls
    assert "last commit" in caught.value.__notes__[0]
    with pytest.raises(SessionError, match="closed"):
        train_step(model, STEP_COUNT)
    monkeypatch.undo()
    model = wrapped(store_dir / "s", ema=0.9, resume=True)
    assert model.lohan.step == STEP_COUNT
    assert same(masters(model, store_dir / "out"), before)
    model.lohan.close()


def evaluate_until_killed(pipe: Connection, folder: pathlib.Path) -> None:
    model = wrapped(folder, ema=0.9)
    for step in range(STEP_COUNT):
        train_step(model, step)
    masters(model, folder / "before")
    masters(model, folder / "averages", ema=True)
    with lohan.ema(model):
        model(helper.vectors(0))
        os.kill(os.getpid(), signal.SIGKILL)


def test_a_process_killed_while_it_evaluates_averages_loses_nothing(
    store_dir: pathlib.Path,
) -> None:
    folder = store_dir / "s"
    process, _ = crash_worker.start(evaluate_until_killed, folder)
    process.join()
    assert process.exitcode == -signal.SIGKILL
    model = wrapped(folder, ema=0.9, resume=True)
    for name, is_average in (("before", False), ("averages", True)):
        made = load_file(folder / name / "model.safetensors")
        assert same(masters(model, store_dir / "out", ema=is_average), made)
    model.lohan.close()


class Branches(nn.Module):
    """A model with a branch that some steps leave out."""

    def __init__(self) -> None:
        super().__init__()
        self.always = nn.Linear(8, 8)
        self.sometimes = nn.Linear(8, 8)
        self.never = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor, both: bool) -> torch.Tensor:
        x = self.always(x)
        return self.sometimes(x) if both else x


def test_a_parameter_that_loses_its_gradient_is_an_error_and_one_without_any_is_its_own_average(
    store_dir: pathlib.Path,
) -> None:
    torch.manual_seed(0)
    model = lohan.wrap(Branches(), store=store_dir / "s", ema=0.9, lr=1e-2)
    never = {n: v.clone() for n, v in model.state_dict().items() if n.startswith("never")}
    for both in (False, True, True):  # it may begin late
        model(torch.ones(2, 8), both).pow(2).mean().backward()
        model.optimizer.step()
    averages = masters(model, store_dir / "out", ema=True)
    assert all(torch.equal(averages[name], value) for name, value in never.items())
    with pytest.raises(GradientError, match=r"'sometimes\.weight' has no gradient in step 4"):
        model(torch.ones(2, 8), False).pow(2).mean().backward()
        model.optimizer.step()
        model.lohan.commit()
    with pytest.raises(GradientError, match="sometimes"):
        model.lohan.close()
    model = lohan.wrap(Branches(), store=store_dir / "s", ema=0.9, resume=True)
    assert model.lohan.step == 3
    model.lohan.close()


def test_wrong_uses_are_named(store_dir: pathlib.Path) -> None:
    with pytest.raises(ModelError, match=r"ema 1\.5 must be"):
        wrapped(store_dir / "s", ema=1.5)
    with pytest.raises(UnsupportedError, match="method='mezo'"):
        wrapped(store_dir / "s", ema=0.9, method="mezo")
    with pytest.raises(ModelError, match=r"lohan\.wrap\(model, ema="):
        lohan.ema(nn.Linear(2, 2))
    model = wrapped(store_dir / "s")
    with pytest.raises(ModelError, match=r"ema=None: pass .* ema=0\.9 in lohan\.wrap"):
        lohan.ema(model, 0.9)
    with pytest.raises(UnsupportedError, match="pass ema=DECAY"), lohan.ema(model):
        pass
    with pytest.raises(UnsupportedError, match="wrapped without ema="):
        lohan.export(model, store_dir / "out", ema=True)
    model.lohan.close()
    with pytest.raises(StoreMismatchError, match="no room for averages"):
        wrapped(store_dir / "s", ema=0.9, resume=True)
    frozen = helper.build().requires_grad_(False)
    model = lohan.wrap(frozen, store=store_dir / "frozen", ema=0.9)
    with (
        pytest.raises(UnsupportedError, match="none of its parameters is trained"),
        lohan.ema(model),
    ):
        pass
    model.lohan.close()
    model = wrapped(store_dir / "e", ema=0.9)
    train_step(model, 0)
    model.lohan.close()
    with pytest.raises(StoreMismatchError, match="pass ema= with"):
        wrapped(store_dir / "e", resume=True)


class OtherEMA:
    """What averaging classes of other libraries do with the parameters they are given."""

    def __init__(self, model: nn.Module) -> None:
        self.shadow = [parameter.clone() for parameter in list(model.parameters())]


def test_averages_of_other_libraries_are_exact_or_refused_with_the_way_out(
    store_dir: pathlib.Path,
) -> None:
    plain = helper.build()
    made = AveragedModel(plain, multi_avg_fn=multi_avg_fn(0.9))
    model = lohan.wrap(plain, store=store_dir / "s", lr=1e-2, ema=0.9)
    shadow = [value.detach().clone() for value in model.state_dict().values()]
    for step in range(STEP_COUNT):
        train_step(model, step)
        made.update_parameters(model)
        torch._foreach_lerp_(shadow, [p.detach() for p in model.parameters()], 0.1)
    assert same(dict(made.module.state_dict()), masters(model, store_dir / "out", ema=True))
    assert all(value.isfinite().all() for value in shadow)
    for make in (AveragedModel, OtherEMA):
        with pytest.raises((UnsupportedError, HollowParameterError), match="pass ema=DECAY"):
            make(model)
    params = list(model.parameters())
    for update in (torch._foreach_lerp_, lambda a, b, weight: a[0].lerp_(b[0], weight)):
        with (
            torch.no_grad(),
            pytest.raises(HollowParameterError, match=r"lerp_\(\) reads .*ema=DECAY"),
        ):
            update(shadow, params, 0.1)
    model.lohan.close()
