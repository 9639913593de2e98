"""The names of settings: keywords and groups that users write, and former names, for a release."""

from __future__ import annotations

import dataclasses
import inspect
import pathlib
import typing
import warnings
from typing import Any

import lohan
import pytest
from lohan.common import _arguments, _setting
from lohan.common import _keywords as settings
from lohan.common._inside import inside
from lohan.config import Config
from lohan.errors import ModelError
from lohan.opening import _request
from torch import nn

KEYWORD_COUNT_MAX = 32
# Values that differ from the defaults, of settings whose default does not show one.
VALUES: dict[str, Any] = {
    "ablate": ("overlap",),
    "emu_bytes_per_s": (1, 2),
    "groups": {"experts": None},
    "rng": "torch",
    "states": "8bit",
    "storage": "bf16",
    "wear_budget": "50TB",
}
FORMER = settings.new_names()


def value_of(name: str) -> Any:
    """Return a valid value of a setting, under its flat name, that is not its default."""
    default = getattr(Config(), name, None)
    if name in VALUES:
        return VALUES[name]
    if choices := _setting.choices(Config, name) if hasattr(Config(), name) else ():
        return next(each for each in choices if each != default)
    return not default if isinstance(default, bool) else (default or 0) + (1 << 20)


def spelled(public: str, value: Any) -> dict[str, Any]:
    """Return the keywords of a call that passes a setting under its new name."""
    group, _, name = public.rpartition(".")
    return {group: settings.GROUPS[group](**{name: value})} if group else {name: value}


def requested(**given: Any) -> tuple[Config, dict[str, Any]]:
    """Return the settings of a call of lohan.wrap, and its other arguments, opening nothing."""
    flat = _request.flat(given, lohan.wrap)
    fields = {name: flat.pop(name) for name in [*flat] if name in _setting.declared(Config)}
    return Config(**fields), flat


@pytest.mark.parametrize(("name", "public"), FORMER.items(), ids=FORMER.keys())
def test_a_former_name_has_the_effect_of_the_new_one_and_one_warning_that_names_it(
    name: str, public: str
) -> None:
    value = value_of(name)
    said = _setting.declared(Config).get(name)
    new = said.flag.index(value) == 1 if said is not None and said.flag else value
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with_new = requested(**spelled(public, new))
    assert not caught, "a new name warns of nothing"
    extra = {"method": "mezo"} if public.startswith("method.") else {}
    with pytest.warns(DeprecationWarning) as found:
        with_former = requested(**{name: value}, **extra)
    assert with_former == with_new
    assert with_new != requested(**extra), "the setting has no effect"
    (only,) = found
    assert f"{name}= is now {settings.spelled(public)}" in str(only.message)
    assert only.filename == __file__, "the warning names the line of the user's call"


@pytest.mark.parametrize(
    ("former", "new", "said"),
    [
        (
            {"commit_every": "never"},
            {"io": lohan.IO(single_slot=True)},
            'commit_every="never" is now io=lohan.IO(single_slot=True)',
        ),
        ({"resume": "step 1"}, {"resume_step": 1}, "resume='step 1' is now resume_step=1"),
        ({"resume": 41}, {"resume_step": 41}, "resume=41 is now resume_step=41"),
        (
            {"share": True},
            {"parallel": lohan.Parallel(share=True)},
            "share= is now parallel=lohan.Parallel(share=)",
        ),
    ],
)
def test_a_former_value_has_the_effect_of_the_new_setting(
    former: dict[str, Any], new: dict[str, Any], said: str
) -> None:
    with pytest.warns(DeprecationWarning) as found:
        before = _request.flat(former, lohan.wrap)
    assert [str(each.message) for each in found] == [f"lohan: {said}"]
    after = _request.flat(new, lohan.wrap)
    for flat in (before, after):
        flat["resume"] = _arguments.resume_of(flat.get("resume"))
    assert before == after


def test_config_still_works_and_its_warning_lists_the_keywords(store_dir: pathlib.Path) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    config = lohan.Config(accumulate=2, io_depth=3)
    with pytest.warns(DeprecationWarning, match=r"io=lohan\.IO\(depth=\), gradient_accumulat"):
        lohan.wrap(model, store=store_dir / "a", config=config)
    assert (inside(model).config.accumulate, inside(model).config.io_depth) == (2, 3)
    model.lohan.close()


@pytest.mark.parametrize(
    "given",
    [
        {"accumulate": 2, "gradient_accumulation_steps": 2},
        {"io_depth": 2, "io": lohan.IO(backend="threads")},
        {"share": "on", "parallel": lohan.Parallel()},
        {"num_samples": 2, "method": lohan.MeZO(seed=3)},
        {"states": "8bit", "moments": "bf16"},
        {"resume": "step 3", "resume_step": 4},
        {"commit_every": 3, "io": lohan.IO(single_slot=True)},
    ],
    ids=lambda given: " ".join(given),
)
def test_a_setting_under_both_names_is_refused_with_both(given: dict[str, Any]) -> None:
    with (
        warnings.catch_warnings(action="ignore"),
        pytest.raises(ModelError, match=r"the call (also )?has") as caught,
    ):
        _request.flat(given, lohan.wrap)
    assert all(f"{name}=" in str(caught.value) for name in given)


def test_users_see_at_most_32_keywords() -> None:
    own = inspect.signature(lohan.wrap).parameters.values()
    named = [each.name for each in own if each.kind is each.KEYWORD_ONLY]
    visible = [*named, *settings.Settings.__annotations__]
    assert len(visible) == len(set(visible)) <= KEYWORD_COUNT_MAX
    ungrouped = {
        said.public or name
        for name, said in _setting.declared(Config).items()
        if "." not in said.public
    }
    assert ungrouped | {"io", "parallel", "debug"} == set(settings.Settings.__annotations__)


def test_each_setting_is_in_one_place_with_the_default_that_is_declared() -> None:
    places = [FORMER.get(name, name) for name in _setting.declared(Config)]
    assert len(places) == len(set(places))
    for group, made in settings.GROUPS.items():
        fields = {f"{group}.{field.name}" for field in dataclasses.fields(made)}
        expected = {public for public in FORMER.values() if public.startswith(f"{group}.")}
        assert fields - {"io.single_slot"} == expected
        hints = typing.get_type_hints(made, localns={"torch": None})
        assert fields == {f"{group}.{name}" for name in hints}
        neutral = settings.flat({group: made()}, ["method"])
        assert neutral == ({"method": "mezo"} if group == "method" else {}), "a default differs"


# The checker of types would find these mistakes.
IO: Any = lohan.IO
PARALLEL: Any = lohan.Parallel


@pytest.mark.parametrize(
    ("make", "meant"),
    [
        (lambda: IO(dept=3), "depth="),
        (lambda: IO(io_depth=3), "depth="),
        (lambda: PARALLEL(shard_optimiser=True), "shard_optimizer="),
        (lambda: IO(trace_events=3), "debug=lohan.Debug(trace_events=)"),
        (lambda: _request.flat({"depth": 3}, lohan.wrap), "io=lohan.IO(depth=)"),
        (lambda: _request.flat({"shard_optimizer": 3}, lohan.wrap), "Parallel(shard_optimizer=)"),
        (lambda: _request.flat({"accumulates": 3}, lohan.wrap), "gradient_accumulation_steps="),
        (lambda: _request.flat({"io": {"depth": 3}}, lohan.wrap), "io=lohan.IO(...)"),
        (lambda: _request.flat({"debug": 3}, lohan.wrap), "debug=lohan.Debug(...)"),
    ],
)
def test_a_wrong_name_or_group_is_told_the_right_one(make: Any, meant: str) -> None:
    with pytest.raises(TypeError) as caught:
        make()
    assert meant in str(caught.value)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"io": lohan.IO(depth=0)}, "io.depth 0 must be"),
        ({"parallel": PARALLEL(share="on")}, "parallel.share 'on' must be True or False"),
        ({"debug": lohan.Debug(threads=0)}, "debug.threads 0 must be"),
        ({"gradient_accumulation_steps": 0}, "gradient_accumulation_steps 0 must be"),
        ({"activation_offload_bytes": "lots"}, "activation_offload_bytes 'lots' is not a size"),
        ({"method": lohan.MeZO(runs="x")}, "method.runs 'x' must be"),  # type: ignore[arg-type]
    ],
)
def test_an_invalid_value_is_refused_under_the_new_name(given: dict[str, Any], said: str) -> None:
    with pytest.raises(ModelError) as caught:
        lohan.wrap(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), **given)
    assert str(caught.value).startswith(said)
