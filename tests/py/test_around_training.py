"""What scripts do around a step: load states of outer modules, test learning rates, and so on."""

from __future__ import annotations

import pathlib
from typing import Any

import lohan
import pytest
import torch
from lohan.activations._shapes import SHAPE_COUNT_MAX, Shapes
from lohan.common._inside import inside
from lohan.errors import FrozenParameterError, ModelError, StaleGraphError, StaleStateError
from rules_helper import Workshop, assert_same_state, build, train_step
from torch import nn

# --- A backward inside of a backward -------------------------------------------------------------


def parts_of(step: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(step)
    return [torch.randn(2, 32, generator=generator) for _ in range(3)]


def inside_a_hook(model: nn.Module, step: int) -> None:
    """Run the model, and its backwards, in a hook of another backward, as a cached loss does."""

    def hook(gradient: torch.Tensor) -> None:
        with torch.enable_grad():
            for part in parts_of(step):
                model(part).square().sum().mul(gradient).backward()

    loss = torch.ones((), requires_grad=True)
    loss.register_hook(hook)
    loss.backward()


@pytest.mark.parametrize("settings", [{}, {"activations": "recompute"}, {"accumulate": 3}])
def test_backwards_inside_of_a_backward_are_summed(
    settings: dict[str, Any], workshop: Workshop
) -> None:
    states = []
    for is_nested in (False, True):
        model = workshop.wrap(build(), **({"accumulate": "manual"} | settings))
        for step in range(3):
            if is_nested:
                inside_a_hook(model, step)
            else:
                for index, part in enumerate(parts_of(step)):
                    loss = model(part).square().sum()
                    if index < 2 and "accumulate" not in settings:
                        with model.no_sync():
                            loss.backward()
                    else:
                        loss.backward()
            model.optimizer.step()
            model.optimizer.zero_grad()
        states.append(dict(model.state_dict()))
        model.lohan.close()
    assert_same_state(states[1], states[0])


def test_backwards_inside_of_a_backward_that_cannot_be_summed_name_the_setting(
    workshop: Workshop,
) -> None:
    model = workshop.wrap(build())
    with pytest.raises(StaleGraphError, match=r'gradient_accumulation_steps="manual"'):
        inside_a_hook(model, 0)
    with pytest.raises(StaleGraphError, match="began"):
        model.lohan.close()


# --- The state dict of an outer module -----------------------------------------------------------


class Outer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = build()
        self.scale = nn.Parameter(torch.ones(()))


def test_a_module_around_the_model_loads_its_state_dict(workshop: Workshop) -> None:
    outer = Outer()
    workshop.wrap(outer.net)
    before = {name: value.clone() for name, value in outer.state_dict().items()}
    train_step(outer.net, 0)
    with torch.no_grad():
        outer.scale.fill_(2)
    result = outer.load_state_dict(before)
    assert not result.missing_keys and not result.unexpected_keys
    assert inside(outer.net).edits.is_pending
    assert_same_state(outer.state_dict(), before)
    again = nn.ModuleDict({"a": nn.ModuleDict({"b": outer})})
    doubled = {f"a.b.{name}": value * 2 for name, value in before.items()}
    again.load_state_dict(doubled, assign=True)
    assert_same_state(again.state_dict(), doubled)
    outer.net.lohan.close()
    resumed = lohan.wrap(build(), store=workshop.folder / "store0", resume=True)
    workshop.made.append(resumed)
    assert all(torch.equal(v, doubled[f"a.b.net.{k}"]) for k, v in resumed.state_dict().items())


def test_a_module_around_the_model_reports_what_does_not_fit(workshop: Workshop) -> None:
    outer = Outer()
    workshop.wrap(outer.net)
    state = outer.state_dict()
    names = [name for name in state if name.startswith("net.")]
    state[names[0]] = state[names[0]][:1]
    state["net.other"] = torch.ones(1)
    del state[names[1]]
    with pytest.raises(RuntimeError, match="size mismatch") as told:
        outer.load_state_dict(state)
    assert all(name in str(told.value) for name in (names[0], names[1], "net.other"))
    result = outer.load_state_dict({"scale": torch.ones(())}, strict=False)
    assert sorted(result.missing_keys) == sorted(names)


def test_the_rules_of_loading_hold_for_outer_modules(workshop: Workshop) -> None:
    outer = Outer()
    frozen = next(iter(outer.net.parameters())).requires_grad_(False)
    name = next(n for n, p in outer.named_parameters() if p is frozen)
    workshop.wrap(outer.net)
    first = outer.state_dict()
    train_step(outer.net, 0)
    with pytest.raises(FrozenParameterError, match=name.removeprefix("net.")):
        outer.load_state_dict({name: first[name] + 1}, strict=False)
    outer.net.lohan.close()
    again = Outer()
    next(iter(again.net.parameters())).requires_grad_(False)
    again.net = lohan.wrap(again.net, store=workshop.folder / "store0", resume=True)
    workshop.made.append(again.net)
    with pytest.raises(StaleStateError, match="of step 1 with those of step 0"):
        again.load_state_dict(first)


# --- A learning-rate range test ------------------------------------------------------------------


@pytest.mark.parametrize("states", ["fp32", "8bit"])
def test_after_a_range_test_training_begins_again(states: str, workshop: Workshop) -> None:
    expected = workshop.wrap(build(), states=states)
    for step in range(3):
        train_step(expected, step)
    model = workshop.wrap(build(), states=states)
    weights, optimizer = model.state_dict(), model.optimizer.state_dict()
    for step in range(4):
        model.optimizer.param_groups[0]["lr"] = 10.0**-step
        train_step(model, step)
    model.load_state_dict(weights)
    model.optimizer.load_state_dict(optimizer)
    for step in range(2):
        train_step(model, step)
    model.lohan.close()
    model = lohan.wrap(build(), store=workshop.folder / "store1", resume=True, states=states)
    workshop.made.append(model)
    train_step(model, 2)
    assert_same_state(model.state_dict(), expected.state_dict())


def test_the_optimizer_state_of_an_earlier_step_names_a_snapshot(workshop: Workshop) -> None:
    model = workshop.wrap(build())
    train_step(model, 0)
    state = model.optimizer.state_dict()
    train_step(model, 1)
    with pytest.raises(StaleStateError, match=r"of step 1, but .* at step 2.*snapshot"):
        model.optimizer.load_state_dict(state)


# --- Random numbers before the first step --------------------------------------------------------


@pytest.mark.parametrize("init", [None, nn.Module.requires_grad_])
def test_a_run_that_ends_before_its_first_step_resumes_with_its_random_numbers(
    init: Any, workshop: Workshop
) -> None:
    model = build()
    torch.manual_seed(42)
    model = workshop.wrap(model)
    expected = torch.rand(3)
    model.lohan.close()
    again = build()
    torch.manual_seed(7)
    workshop.made.append(lohan.wrap(again, store=workshop.folder / "store0", resume=True))
    assert torch.equal(torch.rand(3), expected)


# --- Caches of keys and values -------------------------------------------------------------------


def test_activations_do_not_change_what_a_model_with_a_cache_computes(
    store_dir: pathlib.Path,
) -> None:
    transformers = pytest.importorskip("transformers")
    sizes = {"d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 2, "num_heads": 4}
    config = transformers.T5Config(vocab_size=128, decoder_start_token_id=0, **sizes)
    states = []
    for activations in ("keep", "recompute"):
        torch.manual_seed(0)
        model = transformers.T5ForConditionalGeneration(config).train()
        model = lohan.wrap(model, store=store_dir / activations, activations=activations, lr=1e-3)
        for step in range(2):
            torch.manual_seed(step)
            tokens = torch.randint(3, 126, (2, 12))
            model(input_ids=tokens, labels=tokens).loss.backward()
            model.optimizer.step()
        states.append(dict(model.state_dict()))
        model.lohan.close()
    assert_same_state(states[1], states[0])


# --- Batches of many shapes ----------------------------------------------------------------------


def key(*sizes: int) -> str:
    return f"train input_ids= torch.int64[{'x'.join(map(str, sizes))}] labels= None 3"


def rounds(lengths: list[int]) -> int:
    """Return how many of these batches are profiled, if a profile takes one step."""
    shapes, profiled = Shapes(), 0
    for length in lengths:
        shape = shapes.of(key(2, length), 1)
        if shape.profile is None:
            profiled += 1
            shape.profile, shape.profiled = object(), shape.batch  # type: ignore[assignment]
    return profiled


def test_an_empty_model_that_is_wrapped_in_inference_mode_can_be_trained(
    workshop: Workshop,
) -> None:
    states = []
    for is_inference in (False, True):
        with lohan.empty():
            model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 2))
        torch.manual_seed(3)
        with torch.inference_mode(is_inference):
            workshop.wrap(model, init="model")
        model(torch.ones(2, 4)).square().sum().backward()
        model.optimizer.step()
        states.append(dict(model.state_dict()))
    assert_same_state(*states)


def test_few_shapes_are_profiled_one_by_one() -> None:
    assert rounds([*range(10, 26)] * 3) == 16


def test_batches_of_many_lengths_share_plans() -> None:
    generator = torch.Generator().manual_seed(0)
    lengths = (torch.randperm(600, generator=generator) + 8).tolist()
    assert rounds(lengths) < 90
    assert rounds(lengths + lengths) - rounds(lengths) < 10


def test_a_plan_is_that_of_the_largest_batch_that_shares_it() -> None:
    shapes = Shapes()
    for length in range(100, 120):
        shape = shapes.of(key(2, length), 1)
        shape.profile, shape.profiled = object(), shape.batch  # type: ignore[assignment]
    assert shapes.of(key(2, 101), 1).profiled == key(2, 119)
    assert shapes.of(key(2, 120), 1).profile is None
    assert shapes.of(key(2, 101).replace("train", "eval"), 1).profile is None


def test_any_number_of_shapes_ends_in_few_plans() -> None:
    shapes = Shapes()
    for a in range(1, 200, 3):
        for b in range(1, 20):
            shapes.of(key(a, b, 1 << b), 1)
    assert len([*shapes]) <= SHAPE_COUNT_MAX


def test_steps_that_mix_shapes_are_planned_in_the_end() -> None:
    shapes = Shapes()
    for _ in range(40):
        found = {id(shapes.of(key(2, length), 1)) for length in (8, 100, 900)}
        if len(found) == 1:
            return
        shapes.mixed(True)
    raise AssertionError("shapes are still told apart")


# --- Parameter groups by a function --------------------------------------------------------------


def test_groups_by_a_function_are_those_of_a_list(workshop: Workshop) -> None:
    def groups(model: nn.Module) -> list[dict[str, Any]]:
        named = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
        small = {id(p) for name, p in named if p.ndim < 2 or name.startswith("blocks.0.up.")}
        return [
            {"params": [p for _, p in named if id(p) not in small]},
            {"params": [p for _, p in named if id(p) in small], "weight_decay": 0.0},
        ]

    plain = build()
    states = []
    for model, params in (
        (plain, groups(plain)),
        (build(), groups),
        (build(), lohan.no_decay("blocks.0.up.*")),
    ):
        workshop.wrap(model, params=params, weight_decay=0.5)
        assert [g["weight_decay"] for g in model.optimizer.param_groups] == [0.5, 0.0]
        for step in range(2):
            train_step(model, step)
        states.append(dict(model.state_dict()))
    assert_same_state(states[1], states[0])
    assert_same_state(states[2], states[0])


def test_a_function_of_groups_is_called_again_by_a_resumed_run(workshop: Workshop) -> None:
    model = workshop.wrap(build(), params=lohan.no_decay())
    train_step(model, 0)
    model.lohan.close()
    store = workshop.folder / "store0"
    again = lohan.wrap(build(), store=store, resume=True, params=lohan.no_decay())
    workshop.made.append(again)
    train_step(again, 1)
    assert len(again.optimizer.param_groups) == 2


def test_a_pattern_matches_any_name_of_a_tied_parameter() -> None:
    model = nn.ModuleDict({"first": nn.Linear(4, 4), "second": nn.Linear(4, 4)})
    model["second"].weight = model["first"].weight
    for names in ((), ("first.weight",), ("second.weight",)):
        groups = lohan.no_decay(*names)(model)
        parts = [p for group in groups for p in group["params"]]
        assert sorted(map(id, parts)) == sorted(map(id, model.parameters()))
        assert ("weight_decay" in groups[0]) == bool(names)


def test_what_is_wrong_with_a_function_of_groups_is_named(store_dir: pathlib.Path) -> None:
    with pytest.raises(ModelError, match=r"'\*\.other', which matches none of the model's"):
        lohan.wrap(build(), store=store_dir / "a", params=lohan.no_decay("*.other"))
    with pytest.raises(ModelError, match=r"returned function .*no_decay\(\) needs the brackets"):
        lohan.wrap(build(), store=store_dir / "a", params=lohan.no_decay)
    with pytest.raises(ModelError, match="params="):
        lohan.wrap(build(), store=store_dir / "b", params=lambda model: "all")


def test_a_model_that_is_unwrapped_in_inference_mode_can_be_trained(workshop: Workshop) -> None:
    model: Any = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
    optimizer = torch.optim.AdamW(model.parameters())
    lohan.wrap(model, store=workshop.folder / "store", optimizer=optimizer)
    for train in (model.optimizer, optimizer):
        model(torch.randn(3, 4)).pow(2).mean().backward()
        train.step()
        train.zero_grad()
        if train is not optimizer:
            with torch.inference_mode():
                lohan.unwrap(model)
    assert all(state["step"] == 2 for state in optimizer.state.values())
