"""What follows the steps of a session: [Note: Extensions] in session/_extension.py."""

from __future__ import annotations

import ast
import pathlib
from typing import Any

import kit
import lohan
import torch
from lohan.common._inside import inside
from lohan.session import _extension
from lohan.session._extension import Extension, Extensions, Place

EVENTS = sorted(name for name in vars(Extension) if not name.startswith("_") and name != "place")


class _Seen(Extension):
    """Writes down each event."""

    place = Place.IDLE  # the first one

    def __init__(self, events: list[str]) -> None:
        self.events = events

    def __getattribute__(self, name: str) -> Any:
        if name in EVENTS:
            object.__getattribute__(self, "events").append(name)
        return object.__getattribute__(self, name)


def _kind(place: int) -> Extension:
    kind: type[Extension] = type("Kind", (Extension,), {"place": place})
    return kind()


def test_extensions_are_in_the_order_of_their_places_however_they_were_added() -> None:
    extensions, made = Extensions(), {place: _kind(place) for place in (2, 3, 1)}
    for extension in made.values():
        extensions.add(extension)
    assert [*extensions] == [made[1], made[2], made[3]]
    assert extensions.get(type(made[2])) is made[2]
    assert extensions.get(_Seen) is None


def test_each_place_belongs_to_an_extension() -> None:
    folder = pathlib.Path(_extension.__file__).parents[1]
    places = {
        node.value.attr
        for path in folder.rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Assign)
        and isinstance(node.value, ast.Attribute)
        and isinstance(node.value.value, ast.Name)
        and node.value.value.id == "Place"
    }
    assert places == {*Place.__members__}


def test_a_step_has_its_events_in_order(store_dir: pathlib.Path) -> None:
    model: Any = lohan.wrap(kit.linears(8, 2), store=store_dir, step_records=False)
    seen: list[str] = []
    inside(model).extensions.add(_Seen(seen))
    model(torch.ones(1, 8)).sum().backward()
    model.lohan.note(loss=1.0)
    model.optimizer.step()
    model.lohan.close()
    assert seen == [
        *("forward_begins", "forward_ended", "admit", "backward_begins", "backward_ended"),
        *("noted", "step_begins", "state", "before_close", "closed"),
        *("summary", "closing", "release"),
    ]
