"""Clipping by the norm of all gradients is exact, wherever gradients wait for the norm."""

from __future__ import annotations

import math
import pathlib
from typing import Any, ClassVar

import kit as helper
import lohan
import pytest
import torch
from lohan.common._inside import inside
from lohan.config import SCHEDULES_AT_STEP
from lohan.errors import (
    ChecksumError,
    LentError,
    ModelError,
    OffloadedGradientError,
    SecondBackwardError,
    StepError,
    UnsupportedError,
)
from lohan.session._clipping import Clipping
from torch import nn
from transformers.pytorch_utils import Conv1D

STEP_COUNT = 4
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def train(folder: pathlib.Path, dtype: str, **settings: Any) -> tuple[list[float], dict[str, Any]]:
    """Return the norms of all steps, and the parameters after them."""
    model = lohan.wrap(helper.build("gpt2", DTYPES[dtype]), store=folder, **settings, lr=1e-2)
    norms = []
    for step in range(STEP_COUNT):
        helper.language_loss(model, step).backward()
        model.optimizer.step()
        norms.append(model.optimizer.grad_norm)
    state = dict(model.state_dict())
    model.lohan.close()
    return norms, state


def test_norm_and_parameters_are_the_same_bits_however_blocks_are_split(
    store_dir: pathlib.Path,
) -> None:
    made = []
    for name, kinds in (("default", None), ("parts", (nn.LayerNorm, Conv1D, nn.Embedding))):
        plain = helper.build("gpt2", torch.float32)
        blocks = None
        if kinds is not None:
            blocks = [module for module in plain.modules() if isinstance(module, kinds)]
        model = lohan.wrap(plain, store=store_dir / name, blocks=blocks, max_grad_norm=0.5, lr=1e-2)
        count = len(inside(model).layout.units)
        norms = []
        for step in range(STEP_COUNT):
            helper.language_loss(model, step).backward()
            model.optimizer.step()
            norms.append(model.optimizer.grad_norm)
        made.append((count, norms, dict(model.state_dict())))
        model.lohan.close()
    (few, norms, state), (many, others, other) = made
    assert few < many and norms == others and max(norms) > 0.5
    helper.assert_same_state(other, state)


def test_clipped_training_is_torchs(store_dir: pathlib.Path) -> None:
    plain = helper.build("gpt2", torch.float32)
    optimizer = torch.optim.AdamW(plain.parameters(), lr=1e-2)
    expected = []
    for step in range(STEP_COUNT):
        helper.language_loss(plain, step).backward()
        gradients = [p.grad.double() for p in plain.parameters()]
        expected.append(math.sqrt(sum(float(g.square().sum()) for g in gradients)))
        torch.nn.utils.clip_grad_norm_(plain.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
    norms, state = train(store_dir / "s", "fp32", max_grad_norm=0.5)
    assert norms[0] == pytest.approx(expected[0], rel=1e-12)
    assert norms == pytest.approx(expected, rel=1e-3)
    for name, value in plain.state_dict().items():
        torch.testing.assert_close(state[name], value, rtol=2e-3, atol=2e-4)


def test_a_norm_below_the_limit_changes_nothing(store_dir: pathlib.Path) -> None:
    _, clipped = train(store_dir / "a", "bf16", max_grad_norm=1e9)
    _, free = train(store_dir / "b", "bf16", schedule="deferred")
    for name, value in free.items():
        assert torch.equal(clipped[name], value)


class Scaled(nn.Module):
    """A model with a loss that one batch makes infinite."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 16))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x).square().mean()


def test_a_norm_that_is_not_finite_is_refused_and_the_step_can_be_forgotten(
    store_dir: pathlib.Path,
) -> None:
    model = lohan.wrap(Scaled(), store=store_dir / "s", max_grad_norm=1.0, lr=1e-2)
    reference = Scaled()
    optimizer = torch.optim.AdamW(reference.parameters(), lr=1e-2)
    for step in range(4):
        x = torch.full((2, 16), float("inf") if step == 1 else 0.1)
        model(x).backward()
        if step == 1:
            with pytest.raises(StepError, match=r"norm of all gradients is (nan|inf)"):
                model.optimizer.step()
            model.optimizer.zero_grad()
            continue
        model.optimizer.step()
        reference(x).backward()
        torch.nn.utils.clip_grad_norm_(reference.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    state = dict(model.state_dict())
    model.lohan.close()
    for name, value in reference.state_dict().items():
        torch.testing.assert_close(state[name], value)


def test_an_fp16_gradient_that_overflows_is_refused_by_its_norm_and_else_trained_in_as_in_torch(
    store_dir: pathlib.Path,
) -> None:
    def overflow(model: nn.Module) -> None:
        (model(torch.ones(2, 8, dtype=torch.float16)).float() * 1e6).sum().backward()

    plain = nn.Linear(8, 4).half()
    masters = [param.detach().float() for param in plain.parameters()]
    overflow(plain)
    for master, param in zip(masters, plain.parameters(), strict=True):
        assert not param.grad.isfinite().any()
        master.grad = param.grad.float()
    torch.optim.AdamW(masters).step()
    for norm in (None, 1.0):
        store = store_dir / str(norm)
        model = lohan.wrap(nn.Linear(8, 4).half(), store=store, max_grad_norm=norm, on_nan="accept")
        before = dict(model.state_dict())
        overflow(model)
        if norm:
            with pytest.raises(StepError, match="norm of all gradients is inf"):
                model.optimizer.step()
            model.optimizer.zero_grad()
        else:
            model.optimizer.step()
        after = dict(model.state_dict())
        model.lohan.close()
        assert all(bool(master.isnan().all()) for master in masters)
        for name, value in after.items():
            assert torch.equal(value, before[name]) if norm else bool(value.isnan().all()), name


def test_a_step_whose_gradients_wait_on_the_ssd_can_be_forgotten(store_dir: pathlib.Path) -> None:
    def build() -> nn.Module:
        return helper.build("gpt2", torch.bfloat16)

    least = helper.host_bytes_min(build(), store_dir, schedule="deferred")
    settings: dict[str, Any] = {"schedule": "deferred", "lr": 1e-2, "host_bytes": least}
    states = []
    for name, forgets in (("a", False), ("b", True)):
        model = lohan.wrap(build(), store=store_dir / name, **settings)
        assert inside(model).budget["gradient_waiting_bytes"] == 0
        for step in range(STEP_COUNT):
            if forgets:
                helper.language_loss(model, 10 + step).backward()
                model.optimizer.zero_grad()
            helper.language_loss(model, step).backward()
            model.optimizer.step()
        states.append(dict(model.state_dict()))
        model.lohan.close()
    for key, value in states[0].items():
        assert torch.equal(states[1][key], value), key


def test_a_flipped_bit_in_a_gradient_that_waits_is_found_and_the_committed_step_is_whole(
    store_dir: pathlib.Path,
) -> None:
    def build() -> nn.Module:
        return helper.build("gpt2", torch.bfloat16)

    least = helper.host_bytes_min(build(), store_dir, schedule="deferred")
    settings: dict[str, Any] = {"schedule": "deferred", "lr": 1e-2, "host_bytes": least}
    model = lohan.wrap(build(), store=store_dir / "s", **settings)
    helper.language_loss(model, 0).backward()
    model.optimizer.step()
    model.lohan.flush()
    data = store_dir / "s" / "lohan.data"
    before = data.read_bytes()
    helper.language_loss(model, 1).backward()
    model.lohan.flush()
    after = data.read_bytes()
    place = next(i for i in range(len(after)) if after[i] != before[i])
    with data.open("r+b") as file:
        file.seek(place)
        file.write(bytes([after[place] ^ 4]))
    with pytest.raises(ChecksumError, match="gradients read from"):
        model.optimizer.step()
        model.lohan.flush()
    with pytest.raises(ChecksumError):
        model.lohan.close()
    model = lohan.wrap(build(), store=store_dir / "s", resume=True, **settings)
    assert model.lohan.step == 1
    model.lohan.close()


def clip_all(model: nn.Module, **settings: Any) -> torch.Tensor:
    """Clip with torch's own function, on all parameters."""
    return nn.utils.clip_grad_norm_(model.parameters(), 0.5, **settings)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("foreach", [None, True])
def test_torchs_clip_grad_norm_has_the_bits_of_max_grad_norm(
    foreach: bool | None, dtype: str, store_dir: pathlib.Path
) -> None:
    norms, state = train(store_dir / "expected", dtype, max_grad_norm=0.5)
    least = helper.host_bytes_min(
        helper.build("gpt2", DTYPES[dtype]), store_dir, schedule="deferred"
    )
    settings: list[dict[str, Any]] = [{"schedule": name} for name in SCHEDULES_AT_STEP]
    settings += [{"schedule": "deferred", "host_bytes": least}, {"accumulate": 2}]
    for index, setting in enumerate(settings):
        folder = store_dir / str(index)
        model = lohan.wrap(helper.build("gpt2", DTYPES[dtype]), store=folder, **setting, lr=1e-2)
        for step in range(STEP_COUNT):
            helper.language_loss(model, step).backward()
            assert clip_all(model, foreach=foreach).item() == norms[step], setting
            model.optimizer.step()
        other = dict(model.state_dict())
        model.lohan.close()
        helper.assert_same_state(other, state)


def test_a_norm_of_a_step_of_several_backwards_is_that_of_the_sum(
    store_dir: pathlib.Path,
) -> None:
    plain = helper.build("gpt2", torch.float32)
    model = helper.build("gpt2", torch.float32)
    model = lohan.wrap(model, store=store_dir / "s", accumulate=3)
    for step in range(2):
        plain.zero_grad()
        plain.load_state_dict(model.state_dict())
        for part in range(3):
            for each in (plain, model):
                helper.language_loss(each, 3 * step + part).backward()
        exact = math.sqrt(sum(float(p.grad.double().square().sum()) for p in plain.parameters()))
        assert clip_all(model).item() == pytest.approx(exact, rel=1e-12)
        with pytest.raises(SecondBackwardError, match=r"optimizer\.step\(\)"):
            helper.language_loss(model, 0)
        model.optimizer.step()
    model.lohan.close()


def test_clipping_twice_multiplies_twice(store_dir: pathlib.Path) -> None:
    model = lohan.wrap(Scaled(), store=store_dir / "s", schedule="deferred")
    model(torch.ones(2, 16)).backward()
    first = float(nn.utils.clip_grad_norm_(model.parameters(), 1e-3))
    second = float(nn.utils.clip_grad_norm_(model.parameters(), 1e-4))
    assert second == pytest.approx(first * (1e-3 / (first + 1e-6)), rel=1e-12)
    model.optimizer.step()
    model(torch.ones(2, 16)).backward()
    assert float(clip_all(model)) > 2e-3
    model.lohan.close()


class Counted(torch.Tensor):
    """A number that counts how often its value is read, which would wait for an accelerator."""

    reads = 0

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        cls.reads += func in (torch.Tensor.__float__, torch.Tensor.item)
        return super().__torch_function__(func, types, args, kwargs or {})


def test_a_factor_of_all_gradients_is_read_once_and_again_if_it_changes(
    store_dir: pathlib.Path,
) -> None:
    plain = helper.build("gpt2", torch.float32)
    model = lohan.wrap(plain, store=store_dir / "s", schedule="deferred")
    factor = torch.full((), 0.5).as_subclass(Counted)
    helper.language_loss(model, 0).backward()
    gradients = [p.grad for p in model.parameters()]
    norm = float(nn.utils.clip_grad_norm_(model.parameters(), 1e9))
    for count in (1, 2):
        for gradient in gradients:
            gradient.mul_(factor)
        assert Counted.reads == count
        factor.mul_(0.5)
    assert float(nn.utils.clip_grad_norm_(model.parameters(), 1e9)) == pytest.approx(
        norm * 0.125, rel=1e-6
    )
    model.optimizer.step()
    model.lohan.close()


def test_what_is_not_the_norm_of_all_gradients_is_refused(store_dir: pathlib.Path) -> None:
    model = lohan.wrap(Scaled(), store=store_dir / "s", schedule="deferred", lr=1e-2)
    model(torch.ones(2, 16)).backward()
    for norm_type in (1.0, math.inf):
        for foreach in (None, True):
            with pytest.raises(UnsupportedError, match="norm_type"):
                clip_all(model, norm_type=norm_type, foreach=foreach)
    with pytest.raises(UnsupportedError, match=r"of only 2 of 4 gradients .*layers\.1\.weight"):
        nn.utils.clip_grad_norm_(model.layers[0].parameters(), 1.0)
    for foreach in (None, True):
        with pytest.raises(OffloadedGradientError, match=r"param\.register_hook"):
            nn.utils.clip_grad_value_(model.parameters(), 1.0, foreach=foreach)
    free = nn.Parameter(torch.ones(3))
    free.grad = torch.ones(3)
    with pytest.raises(OffloadedGradientError, match="no others"):
        nn.utils.clip_grad_norm_([*model.parameters(), free], 1.0)
    model.optimizer.step()
    model(torch.ones(2, 16)).backward()
    model.layers[0]._parameters["weight"].grad.mul_(0.5)
    with pytest.raises(UnsupportedError, match=r"layers\.0\.weight' was multiplied by 0\.5"):
        model.optimizer.step()
    model.optimizer.zero_grad()
    kept = model.layers[0]._parameters["weight"].grad
    assert kept is None
    model.lohan.close()


def test_torchs_clipping_of_a_norm_that_is_not_finite(store_dir: pathlib.Path) -> None:
    model = lohan.wrap(Scaled(), store=store_dir / "s", schedule="deferred", lr=1e-2)
    before = dict(model.state_dict())
    model(torch.full((2, 16), float("inf"))).backward()
    with pytest.raises(RuntimeError, match="non-finite"):
        clip_all(model, error_if_nonfinite=True)
    assert not math.isfinite(clip_all(model))
    with pytest.raises(StepError, match=r"norm of all gradients is (nan|inf)"):
        model.optimizer.step()
    model.optimizer.zero_grad()
    for name, value in before.items():
        assert torch.equal(model.state_dict()[name], value)
    model(torch.ones(2, 16)).backward()
    assert math.isfinite(clip_all(model))
    model.optimizer.step()
    model.lohan.close()


def test_schedules_that_update_in_backward_are_refused(store_dir: pathlib.Path) -> None:
    with pytest.raises(ModelError, match="'naive' updates before the norm"):
        lohan.wrap(Scaled(), store=store_dir / "s", max_grad_norm=1.0, schedule="naive")
    with pytest.raises(ModelError, match="max_grad_norm -1"):
        lohan.wrap(Scaled(), store=store_dir / "s", max_grad_norm=-1)


def by_foreach(parameters: list[nn.Parameter]) -> torch.Tensor:
    """What scripts write out that clip by hand."""
    gradients = [parameter.grad for parameter in parameters]
    norm = torch.linalg.vector_norm(torch.stack(torch._foreach_norm(gradients)))
    torch._foreach_mul_(gradients, (0.5 / (norm + 1e-6)).clamp(max=1.0))
    return norm


def by_total_norm(parameters: list[nn.Parameter]) -> torch.Tensor:
    norm = torch.nn.utils.get_total_norm([parameter.grad for parameter in parameters])
    torch.nn.utils.clip_grads_with_norm_(parameters, 0.5, norm)
    return norm


@pytest.mark.parametrize("clip", [by_foreach, by_total_norm])
def test_other_functions_of_torch_clip_with_the_bits_of_max_grad_norm(
    store_dir: pathlib.Path, clip: Any
) -> None:
    norms, expected = train(store_dir / "named", "fp32", max_grad_norm=0.5)
    model = lohan.wrap(
        helper.build("gpt2", torch.float32), store=store_dir, schedule="deferred", lr=1e-2
    )
    for step in range(STEP_COUNT):
        helper.language_loss(model, step).backward()
        assert clip(list(model.parameters())).item() == norms[step]
        model.optimizer.step()
    helper.assert_same_state(dict(model.state_dict()), expected)
    model.lohan.close()
    model = lohan.wrap(helper.build("gpt2", torch.float32), store=store_dir / "eager", lr=1e-2)
    helper.language_loss(model, 0).backward()
    with pytest.raises(OffloadedGradientError, match='schedule="deferred"'):
        clip(list(model.parameters()))
    model.optimizer.step()
    model.lohan.close()


# --- Updates that do not wait for the norm --------------------------------------------------------


def scaled(step: int) -> float:
    """A factor of a step's loss: some steps have a norm above the limit, others do not."""
    return 1e2 if step in (1, 2, 4) else 1e-2


def train_scaled(folder: pathlib.Path, steps: int = 6, **settings: Any) -> tuple[Any, ...]:
    """Return norms, parameters and statistics of training in which some steps are clipped."""
    model = lohan.wrap(Scaled(), store=folder, lr=1e-2, max_grad_norm=1.0, **settings)
    norms = []
    for step in range(steps):
        (model(torch.full((2, 16), 0.5)) * scaled(step)).backward()
        model.optimizer.step()
        norms.append(model.optimizer.grad_norm)
    state = dict(model.state_dict())
    inside(model).flush()
    stats = model.lohan.stats()
    model.lohan.close()
    return norms, state, stats


def test_repeated_steps_have_the_bits_of_those_that_wait_and_are_counted(
    store_dir: pathlib.Path,
) -> None:
    norms, state, stats = train_scaled(store_dir / "w")
    others, other, repeated = train_scaled(store_dir / "r", io=lohan.IO(clip="repeat"))
    assert norms == others and [norm > 1 for norm in norms] == [scaled(s) > 1 for s in range(6)]
    helper.assert_same_state(other, state)
    # steps 1 and 4 are repeated; those after a clipped one wait: 2, 3 and 5
    assert (repeated.clip_repeats, repeated.clip_waits) == (2, 3)
    assert (stats.clip_repeats, stats.clip_waits) == (0, 0)


class Keeping(nn.Linear):
    """A layer that keeps a view of its weight."""

    kept: ClassVar[list[torch.Tensor]] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.kept.append(self.weight.detach())
        return super().forward(x)


def test_a_step_that_could_not_be_repeated_is_when_it_is_tried_again(
    store_dir: pathlib.Path,
) -> None:
    states = []
    for clip in ("wait", "repeat"):
        plain = Scaled()
        plain.layers[0] = Keeping(16, 16)
        io: Any = lohan.IO(clip=clip)  # type: ignore[arg-type]
        model = lohan.wrap(plain, store=store_dir / clip, lr=1e-2, max_grad_norm=1.0, io=io)
        (model(torch.full((2, 16), 0.5)) * 1e2).backward()
        inside(model).engine.flush(False)  # until the other layer is updated
        with pytest.raises(LentError, match="tensors are still views of its parameters"):
            model.optimizer.step()
        Keeping.kept.clear()
        model.optimizer.step()
        states.append(dict(model.state_dict()))
        model.lohan.close()
    helper.assert_same_state(states[1], states[0])


def clipping_after(steps: int, times: dict[str, float], is_clipped: Any) -> Clipping:
    """Return the choices after steps whose times depend on whether they wait or are repeated."""
    now = 0.0
    clipping = Clipping(speaks=False, clock=lambda: now)
    for step in range(steps):
        kind = "waits" if clipping.begin() else "runs"
        before = clipping.repeats
        clipping.norm_came(is_clipped(step), lambda: None)
        kind = "repeated" if clipping.repeats > before else kind
        now += times[kind]
        clipping.closed()
    return clipping


@pytest.mark.parametrize(
    ("wait_s", "every", "waits"), [(1.2, 1000, False), (0.9, 1000, True), (1.2, 3, True)]
)
def test_updates_wait_for_the_norm_where_that_was_measured_to_be_faster(
    wait_s: float, every: int, waits: bool
) -> None:
    times = {"runs": 1.0, "waits": wait_s, "repeated": 2.5}
    clipping = clipping_after(60, times, lambda step: step % every == every - 1)
    assert clipping.wait_count >= 5  # those of the trial
    clipping.was_clipped = False
    assert clipping.begin() == waits


def test_what_was_chosen_is_measured_again() -> None:
    now = 0.0
    clipping = Clipping(speaks=False, clock=lambda: now)
    chosen = []
    for step in range(600):
        waits = clipping.begin()
        chosen.append(waits)
        clipping.norm_came(False, lambda: None)
        now += (0.9 if step < 260 else 1.1) if waits else 1.0
        clipping.closed()
    assert chosen[100:250] == [True] * 150 and chosen[300:500] == [False] * 200


@pytest.mark.parametrize("on_nan", ["raise", "skip"])
def test_a_step_with_updates_that_is_not_finite_leaves_the_bits_of_a_run_without_it(
    store_dir: pathlib.Path, on_nan: str
) -> None:
    states = []
    for name, steps in (("with", range(4)), ("without", (0, 2, 3))):
        settings: Any = {
            "max_grad_norm": 1.0,
            "io": lohan.IO(clip="repeat"),
            "on_nan": on_nan,
            "lr": 1e-2,
        }
        model = lohan.wrap(Scaled(), store=store_dir / name, **settings)
        for step in steps:
            model(torch.full((2, 16), math.inf if step == 1 else 0.1)).backward()
            if step == 1 and on_nan == "raise":
                with pytest.raises(StepError, match=r"norm of all gradients is (nan|inf)"):
                    model.optimizer.step()
                model.optimizer.zero_grad()
            else:
                model.optimizer.step()
        states.append(dict(model.state_dict()))
        model.lohan.close()
    helper.assert_same_state(*states)


@pytest.mark.parametrize(
    ("why", "settings"),
    [
        ("IO(single_slot=True)", {"io": lohan.IO(clip="repeat", single_slot=True)}),
        ("schedule='auto'", {"schedule": "auto"}),
        ("gradient_accumulation_steps=", {"gradient_accumulation_steps": 2}),
        ("loss_scaling=True", {"loss_scaling": True}),
        ("commit_every=3", {"commit_every": 3}),
        ("method='adam_mini'", {"method": "adam_mini"}),
    ],
)
def test_where_steps_cannot_be_repeated_updates_wait_and_a_line_says_why(
    store_dir: pathlib.Path, capfd: pytest.CaptureFixture[str], why: str, settings: dict[str, Any]
) -> None:
    settings = {"io": lohan.IO(clip="repeat"), **settings}
    model = lohan.wrap(Scaled(), store=store_dir / "s", max_grad_norm=1.0, **settings)
    assert f"IO(clip='repeat') has no effect, because of {why}" in capfd.readouterr().err
    assert inside(model).config.schedule in SCHEDULES_AT_STEP
    model.lohan.close()
