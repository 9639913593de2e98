"""The cases of single classes: how each is built, and how its library loads it."""

from __future__ import annotations

import inspect
import pathlib
from typing import Any

import case as cases
import forms
import lohan
import tiny
from torch import nn


def case(kind: str, name: str, folder: pathlib.Path) -> cases.Case:
    """Return the case of a class."""
    return _diffusers(name, folder) if kind.startswith("diffusers") else _transformers(name, folder)


def _transformers(name: str, folder: pathlib.Path) -> cases.Case:
    import transformers

    cls: Any = getattr(transformers, name)

    def make(way: str) -> nn.Module:
        if way == "given":
            config = cls.config_class(**(forms.config(name, cls.config_class.model_type) or {}))
        else:
            config = tiny.shrink(cls.config_class(), way)
        made: nn.Module = cls(config)
        return made

    def empty(files: pathlib.Path) -> nn.Module:
        config = cls.config_class.from_pretrained(files)
        with lohan.empty():
            made: nn.Module = cls(config)
        return made

    def load(files: pathlib.Path) -> nn.Module:
        return cases.aligned(cls.from_pretrained(files))

    return cases.Case(make, empty, load, folder, forms.config(name) is not None)


def _diffusers(name: str, folder: pathlib.Path) -> cases.Case:
    import diffusers

    cls: Any = getattr(diffusers, name)
    defaults = {
        key: each.default
        for key, each in inspect.signature(cls.__init__).parameters.items()
        if each.default is not inspect.Parameter.empty
    }

    def make(way: str) -> nn.Module:
        values = forms.config(name) if way == "given" else tiny.shrunk(defaults, way)
        made: nn.Module = cls(**(values or {}))
        return made

    def empty(files: pathlib.Path) -> nn.Module:
        with lohan.empty():
            made: nn.Module = cls.from_config(cls.load_config(files))
        return made

    def load(files: pathlib.Path) -> nn.Module:
        return cases.aligned(cls.from_pretrained(files))

    return cases.Case(make, empty, load, folder, forms.config(name) is not None)
