"""`model.lohan` has the names that docs/api.md documents: [Note: Sessions] in common/_inside.py."""

from __future__ import annotations

import ast
import pathlib
import re
from collections.abc import Iterator
from typing import Any

import kit
import lohan
from lohan.common._inside import inside
from lohan.session._training import Training

ROOT = pathlib.Path(__file__).resolve().parents[2]
PACKAGES = ROOT / "python" / "lohan"
NAME_COUNT = 16


def documented() -> set[str]:
    """Return the names of a session that docs/api.md lists."""
    text = (ROOT / "docs" / "api.md").read_text(encoding="utf-8")
    found = re.search(r"::: lohan\.Session\n    options:\n      members: \[(.*)\]", text)
    assert found is not None
    return set(found[1].split(", "))


def test_a_session_is_one_class_with_the_documented_names(store_dir: pathlib.Path) -> None:
    model: Any = lohan.wrap(kit.linears(8, 2), store=store_dir)
    assert type(model.lohan) is lohan.Session
    assert lohan.Session.__mro__ == (lohan.Session, object)
    names = {name for name in dir(model.lohan) if not name.startswith("_")}
    assert names == documented() and len(names) == NAME_COUNT
    assert all(getattr(lohan.Session, name).__doc__ for name in names)
    model.lohan.close()


def test_a_model_and_its_session_lead_to_what_trains_it(store_dir: pathlib.Path) -> None:
    model: Any = lohan.wrap(kit.linears(8, 2), store=store_dir)
    session = model.lohan
    assert isinstance(inside(model), Training) and inside(session) is inside(model)
    lohan.unwrap(model)
    assert inside(model) is None and inside(session) is not None
    assert [inside(other) for other in (None, [], "store", object())] == [None] * 4


def private_reads(path: pathlib.Path) -> Iterator[tuple[str, str]]:
    """Yield private attributes of a session or a Training that a file reads, with their places."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Attribute) and re.match(r"_[^_]", node.attr):
            owner = ast.unparse(node.value)
            if re.search(r"(\b|_)(session|training)$|\binside\([^()]*\)$", owner):
                yield node.attr, f"{path.relative_to(ROOT)}:{node.lineno}: {owner}.{node.attr}"


def test_no_module_reads_private_names_of_a_session() -> None:
    folder = PACKAGES / "session"
    tree = ast.parse((folder / "_training.py").read_text(encoding="utf-8"))
    nodes = [node for node in ast.walk(tree) if isinstance(node, ast.Attribute)]
    own = {*vars(Training), *(node.attr for node in nodes if ast.unparse(node.value) == "self")}
    fronts = {folder / "_session.py", folder / "_training.py"}
    found = [
        place
        for path in {*PACKAGES.rglob("*.py")} - fronts
        for name, place in private_reads(path)
        # Other objects of session/ that belong to a session may be read there by that name.
        if path.parent != folder or name in own
    ]
    assert found == []
