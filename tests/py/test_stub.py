"""The stub of lohan._core has every name that the module has, and no other."""

from __future__ import annotations

import ast
import inspect
import pathlib
import types

import pytest

pytest.importorskip("torch")

from lohan import _core

STUB = pathlib.Path(__file__).resolve().parents[2] / "python" / "lohan" / "_core.pyi"


def stub_names() -> tuple[set[str], dict[str, set[str]]]:
    """Return the functions and constants, and the methods of each class, that the stub declares."""
    names: set[str] = set()
    classes: dict[str, set[str]] = {}
    for node in ast.parse(STUB.read_text()).body:
        if isinstance(node, ast.FunctionDef):
            names.add(node.name)
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            names.add(node.target.id)
        elif isinstance(node, ast.ClassDef):
            methods = {item.name for item in node.body if isinstance(item, ast.FunctionDef)}
            classes[node.name] = {name for name in methods if not name.startswith("_")}
    return names, classes


def public(thing: type | types.ModuleType) -> set[str]:
    return {name for name in vars(thing) if not name.startswith("_")}


def test_the_stub_has_every_function_and_constant_of_the_module_and_no_other() -> None:
    names, classes = stub_names()
    assert public(_core) == names | classes.keys()


def test_the_stub_has_every_method_of_every_type_and_no_other() -> None:
    _, classes = stub_names()
    types_of_module = {n for n in public(_core) if isinstance(getattr(_core, n), type)}
    assert types_of_module == classes.keys()
    for name, methods in classes.items():
        assert public(getattr(_core, name)) == methods, name


def test_functions_of_the_stub_can_be_called_and_constants_cannot() -> None:
    for node in ast.parse(STUB.read_text()).body:
        if isinstance(node, ast.FunctionDef):
            assert inspect.isbuiltin(getattr(_core, node.name)), node.name
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            assert isinstance(getattr(_core, node.target.id), int), node.target.id


def test_keyword_names_of_the_stub_are_those_that_the_module_takes() -> None:
    for node in ast.parse(STUB.read_text()).body:
        if not isinstance(node, ast.FunctionDef) or node.args.posonlyargs or not node.args.args:
            continue
        with pytest.raises(TypeError):
            getattr(_core, node.name)(no_such_keyword=1)
        given = {argument.arg: object() for argument in node.args.args}
        with pytest.raises((TypeError, ValueError)) as caught:
            getattr(_core, node.name)(**given)
        assert "invalid keyword" not in str(caught.value), node.name
        assert "unexpected keyword" not in str(caught.value), node.name
