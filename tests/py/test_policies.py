"""`activations=` with a policy: the same bits, a plan that is followed, memory as planned."""

from __future__ import annotations

import json
import pathlib
import re
import time
from typing import Any

import kit
import lohan
import pytest
import torch
from lohan.activations import _swap
from lohan.activations._profile import Profile
from lohan.common._inside import inside
from lohan.config import POLICIES
from lohan.errors import BudgetError, ModelError
from lohan.session._hooks import Planned
from quick_helper import half_quick
from torch import nn

STEPS, VOCABULARY = 5, 500
MIB = 1 << 20


def build(dropout: float = 0.1, dtype: torch.dtype = torch.float32) -> nn.Module:
    sizes = {"vocab_size": VOCABULARY, "n_positions": 128}
    return kit.seeded(lambda: kit.gpt2(dropout=dropout, **sizes), dtype)


def tokens(step: int, rows: int = 8, columns: int = 128) -> torch.Tensor:
    generator = torch.Generator().manual_seed(step)
    return torch.randint(0, VOCABULARY, (rows, columns), generator=generator)


def train(model: nn.Module, shapes: Any = ((8, 128),) * STEPS, begin: int = 0) -> list[Any]:
    """Return the losses, and the peak of an emulated device in each step."""
    found, peaks = [], []
    for step, shape in enumerate(shapes, begin):
        torch.manual_seed(step)
        batch = tokens(step, *shape)
        meter = inside(model).saving.meter
        if meter is not None:
            meter.peak_bytes = 0
        loss = model(input_ids=batch, labels=batch).loss
        loss.backward()
        model.optimizer.step()
        found.append(loss.detach().clone())
        peaks.append(0 if meter is None else meter.peak_bytes)
    return [found, peaks]


def values(model: nn.Module) -> list[torch.Tensor]:
    return [value.clone() for value in model.state_dict().values()]


def run(folder: pathlib.Path, dtype: torch.dtype, dropout: float, **settings: Any) -> list[Any]:
    model = lohan.wrap(build(dropout, dtype), store=folder, lr=1e-3, **settings)
    try:
        losses, _ = train(model)
        found = [*losses, *values(model)]
        model.lohan.flush()
        stats = model.lohan.stats()
        assert stats.bytes == stats.planned_bytes
        return found
    finally:
        model.lohan.close()


TIGHT = {
    "device": "emu",
    "device_param_bytes": 1 * MIB,
    "device_bytes": 18 * MIB,
    "swap_bytes": 96 * MIB,
    "swap_ssd_bytes": 64 * MIB,
}
NO_SWAP = {"swap_bytes": 0, "swap_ssd_bytes": None}
WIDE = {"device": "emu", "swap_bytes": 96 * MIB, "swap_ssd_bytes": 64 * MIB}


@pytest.fixture(scope="module")
def kept(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Return the numbers of a run that keeps everything, by dtype and dropout."""
    made: dict[Any, list[Any]] = {}

    def get(dtype: torch.dtype, dropout: float) -> list[Any]:
        if (dtype, dropout) not in made:
            made[dtype, dropout] = run(tmp_path_factory.mktemp("kept") / "s", dtype, dropout)
        return made[dtype, dropout]

    return get


# The dtype, the dropout and the settings of wrap().
ROWS: dict[str, tuple[torch.dtype, float, dict[str, Any]]] = {
    "float32-dropout-tight": (torch.float32, 0.1, TIGHT),
    "bfloat16-tight": (torch.bfloat16, 0.0, TIGHT),
    "bfloat16-dropout-wide": (torch.bfloat16, 0.1, WIDE),
}


@pytest.mark.parametrize(("row", "policy"), half_quick(ROWS, POLICIES))
def test_every_policy_has_the_bits_of_keep(
    store_dir: pathlib.Path, kept: Any, row: str, policy: str
) -> None:
    dtype, dropout, settings = ROWS[row]
    found = run(store_dir / "b", dtype, dropout, activations=policy, **settings)
    assert all(torch.equal(a, b) for a, b in zip(kept(dtype, dropout), found, strict=True))


@pytest.mark.parametrize(
    "settings",
    [NO_SWAP, {"swap_bytes": 16 * MIB, "swap_ssd_bytes": 64 * MIB}],
    ids=["recompute", "swap"],
)
def test_auto_where_computation_is_in_main_memory(
    store_dir: pathlib.Path, kept: Any, settings: dict[str, Any]
) -> None:
    limits = {"device_bytes": 8 * MIB, **settings}
    model = lohan.wrap(build(), store=store_dir / "b", lr=1e-3, activations="auto", **limits)
    losses, _ = train(model)
    found = [*losses, *values(model)]
    plan = model.lohan.plan()
    model.lohan.close()
    assert all(torch.equal(a, b) for a, b in zip(kept(torch.float32, 0.1), found, strict=True))
    assert plan.kept_bytes <= 8 * MIB  # all activations together have 48 MiB
    assert plan.swapped_bytes > 0 or settings is NO_SWAP
    assert plan.recompute_s > 0 or settings is not NO_SWAP


@pytest.mark.parametrize("commit_every", ["never", "manual"])
def test_auto_plans_for_an_accelerator_where_steps_are_not_committed(
    store_dir: pathlib.Path, kept: Any, commit_every: str
) -> None:
    """The commit that the engine predicts once is divided by the steps between commits."""
    made = {**TIGHT, "commit_every": commit_every}
    model = lohan.wrap(build(), store=store_dir / "a", lr=1e-3, activations="auto", **made)
    losses, _ = train(model)
    plan = model.lohan.plan()
    model.lohan.close()
    assert plan.step_s > 0
    expected = kept(torch.float32, 0.1)
    assert all(torch.equal(a, b) for a, b in zip(expected, losses, strict=False))


BUFFER = 2 * MIB  # the largest saved tensor: the product of a dropout, of 8 x 4 x 128 x 128


@pytest.mark.parametrize(
    ("policy", "device_bytes", "settings"),
    [
        ("auto", 18 * MIB, NO_SWAP),
        ("auto", 32 * MIB, NO_SWAP),
        ("lohan", 24 * MIB, {}),
        ("fuyou", 18 * MIB, {"swap_ssd_bytes": 256 * MIB}),
        ("fuyou", 40 * MIB, {}),
    ],
)
def test_the_device_holds_what_the_plan_says(
    store_dir: pathlib.Path, policy: str, device_bytes: int, settings: dict[str, Any]
) -> None:
    made = {**TIGHT, "device_bytes": device_bytes, "emu_bytes_per_s": (200 << 20, 200 << 20)}
    made.update(settings)
    model = lohan.wrap(build(), store=store_dir / "a", lr=1e-3, activations=policy, **made)
    _, peaks = train(model)
    plan = model.lohan.plan()
    model.lohan.flush()
    moved = model.lohan.stats().bytes
    swap = inside(model).saving._swap
    window_bytes = swap.window_now if swap is not None else 0
    model.lohan.close()
    assert max(peaks) <= device_bytes
    assert peaks[-1] <= plan.device_bytes + BUFFER
    # The plan includes a full window of tensors on their way out. How much of it is in use at the
    # peak depends on how fast the machine computes between them.
    in_flight = min(window_bytes, plan.swapped_bytes)
    assert peaks[-1] >= plan.device_bytes - in_flight - BUFFER
    assert moved["saved_out"] == plan.swapped_bytes


def test_a_batch_that_fits_only_when_it_leaves_trains(store_dir: pathlib.Path, kept: Any) -> None:
    tight = {**TIGHT, "device_bytes": 18 * MIB}
    model = lohan.wrap(
        build(),
        store=store_dir / "a",
        lr=1e-3,
        **{**tight, "swap_bytes": None, "swap_ssd_bytes": None},
    )
    with pytest.raises(lohan.errors.DeviceMemoryError):
        train(model)
    model.lohan.close()
    model = lohan.wrap(build(), store=store_dir / "b", lr=1e-3, activations="auto", **tight)
    losses, _ = train(model)
    model.lohan.close()
    expected = kept(torch.float32, 0.1)
    assert all(torch.equal(a, b) for a, b in zip(expected, losses, strict=False))


def test_without_room_on_ssd_a_policy_uses_main_memory_alone(
    store_dir: pathlib.Path, kept: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_swap, "_POLICY_LEAST", MIB)  # the model is small
    settings = {**TIGHT, "swap_bytes": None, "swap_ssd_bytes": 0}
    model = lohan.wrap(build(), store=store_dir, lr=1e-3, activations="auto", **settings)
    losses, _ = train(model)
    moved = model.lohan.stats().bytes
    model.lohan.close()
    assert moved["saved_out"] > 0 and moved["saved_write"] == 0
    expected = kept(torch.float32, 0.1)
    assert all(torch.equal(a, b) for a, b in zip(expected, losses, strict=False))


def test_without_room_on_ssd_nothing_is_offloaded_where_main_memory_computes(
    store_dir: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_swap, "_POLICY_LEAST", MIB)
    model = lohan.wrap(build(), store=store_dir, lr=1e-3, activations="auto", swap_ssd_bytes=0)
    train(model)
    moved = model.lohan.stats().bytes
    model.lohan.close()
    assert inside(model).config.swap_bytes is None
    assert moved["saved_out"] == moved["saved_write"] == 0


def test_each_shape_has_a_plan_of_its_own_and_its_first_forward_is_conservative(
    store_dir: pathlib.Path,
) -> None:
    shapes = [(8, 128)] * 3 + [(3, 64)] * 2 + [(8, 128)]
    plain = lohan.wrap(build(), store=store_dir / "a", lr=1e-3)
    expected, _ = train(plain, shapes)
    plain.lohan.close()
    model = lohan.wrap(build(), store=store_dir / "b", lr=1e-3, activations="auto", **TIGHT)
    seen, found = [], []
    for step, shape in enumerate(shapes):
        losses, _ = train(model, [shape], step)
        found += losses
        seen.append(model.lohan.plan())
    model.lohan.close()
    assert all(torch.equal(a, b) for a, b in zip(expected, found, strict=True))
    # Two steps have the first shape, one the next; a known shape uses its plan at once.
    assert [plan is None for plan in seen] == [True, True, False, True, False, False]
    assert seen[4].device_bytes < seen[2].device_bytes
    assert seen[5] == seen[2]


def test_a_profile_is_kept_beside_the_store_until_it_is_asked_for_again(
    store_dir: pathlib.Path,
) -> None:
    settings = {"store": store_dir / "a", "activations": "auto", **TIGHT}
    model = lohan.wrap(build(), lr=1e-3, **settings)
    train(model)
    plan = model.lohan.plan()
    model.lohan.close()
    assert (store_dir / "a" / "profile.json").exists()
    for profile, is_there in [("reuse", True), ("again", False)]:
        model = lohan.wrap(build(), resume=True, profile=profile, **settings)
        train(model, [(8, 128)], STEPS)
        found = model.lohan.plan()
        model.lohan.close()
        assert (found is not None) == is_there
        if found is not None:
            assert found.layers.keys() == plan.layers.keys()
    key = next(iter(json.loads((store_dir / "a" / "profile.json").read_text())))
    for text in ("{ not one", "[1]", json.dumps({key: 3}), json.dumps({key: {"a": "[2]"}})):
        (store_dir / "a" / "profile.json").write_text(text)
        model = lohan.wrap(build(), resume=True, **settings)
        train(model, [(8, 128)] * 2, STEPS)
        assert model.lohan.plan() is None
        model.lohan.close()
        assert key in json.loads((store_dir / "a" / "profile.json").read_text())


def test_forwards_without_a_backward_do_not_ask_for_a_new_plan_each(
    store_dir: pathlib.Path,
) -> None:
    model = lohan.wrap(build(), store=store_dir / "a", lr=1e-3, activations="auto", **TIGHT)
    train(model)
    made = []
    for step in range(14):
        model(input_ids=tokens(step), labels=tokens(step))
        made.append(inside(model).extensions.get(Planned).planner.shape.made)
    train(model, [(8, 128)], STEPS)
    model.lohan.close()
    assert made[-1] is made[-2] is made[-5]


def test_batches_that_are_summed_are_profiled_and_planned(store_dir: pathlib.Path) -> None:
    found = []
    for name, settings in [("a", {}), ("b", {"activations": "auto", **TIGHT})]:
        model = lohan.wrap(build(), store=store_dir / name, lr=1e-3, accumulate=2, **settings)
        for step in range(8):
            torch.manual_seed(step)
            batch = tokens(step)
            (model(input_ids=batch, labels=batch).loss / 2).backward()
            if step % 2:
                model.optimizer.step()
        found.append(values(model))
        plan = model.lohan.plan()
        model.lohan.close()
    assert plan is not None
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


def test_forwards_whose_backward_is_one_are_there_at_once(store_dir: pathlib.Path) -> None:
    found, settings = [], {**TIGHT, "device_bytes": 40 * MIB, "swap_ssd_bytes": 256 * MIB}
    for name, made in [("a", {}), ("b", {"activations": "auto", **settings})]:
        model = lohan.wrap(build(), store=store_dir / name, lr=1e-3, **made)
        for step in range(5):
            torch.manual_seed(step)
            batches = [tokens(2 * step), tokens(2 * step + 1)]
            losses = [model(input_ids=batch, labels=batch).loss for batch in batches]
            torch.stack(losses).sum().backward()
            model.optimizer.step()
        found.append(values(model))
        plan = model.lohan.plan()
        model.lohan.close()
    assert plan is not None
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


class Flaky(nn.Module):
    """A model whose forward fails on request."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = build()
        self.fails = False

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        loss: torch.Tensor = self.inner(input_ids=batch, labels=batch).loss
        if self.fails:
            raise RuntimeError("told to")
        return loss


def test_steps_that_are_forgotten_are_in_no_profile(store_dir: pathlib.Path) -> None:
    model = lohan.wrap(
        Flaky(), store=store_dir / "a", lr=1e-3, activations="auto", schedule="deferred", **TIGHT
    )
    for step in range(5):
        batch = tokens(step)
        model.fails = True
        with pytest.raises(RuntimeError, match="told to"):
            model(batch)
        model.fails = False
        model(batch).backward()
        model.optimizer.zero_grad()  # discards the step
        with torch.no_grad():
            model.eval()
            model(batch)
            model.train()
        model(batch).backward()
        model.optimizer.step()
    session = inside(model)
    profile = session.extensions.get(Planned).planner.shape.profile
    forward_ns = sum(ns for visit in profile.visits for ns in visit.ns)
    assert len(profile.visits) == len({visit.block for visit in profile.visits})
    assert forward_ns < profile.compute_ns < 30 * forward_ns
    session.close()


def test_a_profile_read_back_is_the_same(store_dir: pathlib.Path) -> None:
    model = lohan.wrap(build(), store=store_dir / "a", lr=1e-3, activations="auto", **TIGHT)
    train(model)
    profile = inside(model).extensions.get(Planned).planner.shape.profile
    model.lohan.close()
    assert type(profile).from_json(profile.as_json()) == profile
    assert sum(flop for visit in profile.visits for flop in visit.flop) > 0


def test_a_shape_that_comes_late_is_timed_without_the_waits_of_before(
    store_dir: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = lohan.wrap(build(), store=store_dir / "a", lr=1e-3, activations="fuyou", **TIGHT)
    train(model, [(8, 128)] * 4)
    waits_ns = [10**18]
    saving = inside(model).saving
    monkeypatch.setattr(saving, "wait_take_ns", lambda: waits_ns.pop() if waits_ns else 0)
    train(model, [(8, 120)], 4)
    late = inside(model).extensions.get(Planned).planner.shape
    model.lohan.close()
    assert waits_ns == []
    assert late.profile is not None or late.held_up is not None


def test_a_step_that_something_held_up_is_not_what_plans_go_by(
    store_dir: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = []

    def look(profile: Profile) -> bool:
        seen.append(profile.compute_ns)
        return is_held_up(profile)

    is_held_up = Profile.may_be_held_up
    monkeypatch.setattr(Profile, "may_be_held_up", look)
    model = lohan.wrap(build(), store=store_dir / "a", lr=1e-3, activations="auto", **TIGHT)
    train(model, [(8, 128)])
    batch = tokens(1, 8, 128)
    begin = time.monotonic()
    model(input_ids=batch, labels=batch).loss.backward()
    # Someone looks at gradients, or another process has the machine.
    time.sleep(2.0 + 12 * (time.monotonic() - begin))
    model.optimizer.step()
    assert inside(model).extensions.get(Planned).planner.shape.profile is None
    train(model, [(8, 128)] * 2, 2)
    profile = inside(model).extensions.get(Planned).planner.shape.profile
    model.lohan.close()
    assert len(seen) == 1 and profile.compute_ns < seen[0]


def test_a_block_that_is_the_model_itself_is_planned(store_dir: pathlib.Path) -> None:
    torch.manual_seed(0)
    found = []
    for name, settings in [("a", {}), ("b", {"activations": "auto", "device_bytes": 1, **NO_SWAP})]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 64))
        model = lohan.wrap(model, store=store_dir / name, lr=1e-3, blocks=[model], **settings)
        for step in range(5):
            model(torch.full((512, 64), 1.0 + step)).square().mean().backward()
            model.optimizer.step()
        found.append(values(model))
        plan = model.lohan.plan()
        model.lohan.close()
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))
    assert plan.kept_bytes == 512 * 64 * 4  # only its input is kept


def test_what_a_policy_cannot_do_is_reported_with_the_memory_that_it_needs(
    store_dir: pathlib.Path,
) -> None:
    def choose(name: str, settings: dict[str, Any]) -> str:
        path = store_dir / name
        model = lohan.wrap(build(), store=path, lr=1e-3, activations="lohan", **settings)
        try:
            for _ in range(4):  # a step that the machine delayed is profiled again
                if model.lohan.plan() is None:
                    train(model, [(8, 128)] * 3)
            planner = inside(model).extensions.get(Planned).planner
            made = planner.choose(inside(model), planner.shape.profile, "zero")
            return str(made.plan.policy)
        finally:
            model.lohan.close()

    settings = {**TIGHT, **NO_SWAP, "device_bytes": 24 * MIB}
    with pytest.raises(
        BudgetError, match=r"activations 'zero'.*set activation_offload_bytes=\d+"
    ) as caught:
        choose("a", settings)
    enough = int(re.findall(r"set activation_offload_bytes=(\d+)", str(caught.value))[0])
    settings |= {"swap_bytes": enough, "swap_ssd_bytes": 64 * MIB, "host_bytes": 512 * MIB}
    assert choose("b", settings) == "zero"


def test_a_policy_that_is_only_simulated_is_refused_by_name(store_dir: pathlib.Path) -> None:
    for bad in ({"profile": "never"}, {"activations": "best"}, {"activations": "g10"}):
        with pytest.raises(ModelError, match=next(iter(bad))):
            lohan.wrap(build(), store=store_dir / "b", lr=1e-3, **bad)


def test_sizes_that_are_not_whole_pages_are_planned_and_the_plan_is_a_line(
    store_dir: pathlib.Path,
) -> None:
    settings = {"swap_bytes": 3_000_000, "swap_ssd_bytes": 50_000_001, "device": "emu"}
    settings |= {"device_bytes": 24_000_001, "emu_bytes_per_s": (1e9, 2e9)}
    model = lohan.wrap(build(), store=store_dir, lr=1e-3, activations="auto", **settings)
    train(model, [(8, 128)] * 4)
    plan = model.lohan.plan()
    assert "'auto'" in str(plan) and f"bound by {plan.bound_by}" in str(plan)
    assert "\n" not in str(plan) and len(str(plan)) < 300
    model.lohan.close()
