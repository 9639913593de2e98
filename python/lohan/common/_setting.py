"""The declaration of a setting, from which its checks and its row in docs/settings.md are made."""

from __future__ import annotations

import dataclasses
import functools
import types
import typing
from typing import Any

from lohan.errors import ModelError

_KEY = "declared"


@dataclasses.dataclass(frozen=True)
class Declared:
    """What is declared of a setting, beside the type and the default of its field.

    Attributes:
        default: the default in docs/settings.md, as Markdown.
        meaning: what the setting does, and why it exists, as Markdown.
        least: the smallest valid number; None if the setting is not a number.
        most: the largest valid number; None: there is no limit.
        multiple: what a number must be a multiple of, in bytes; None: any number is valid.
        what: the words for a valid number, for messages; "": a whole number from least to most.
        public: the name that users write, "depth" in the group "io" as "io.depth"; "": the field's.
        flag: the names that mean False and True if users write a bool instead.
        former: names that are accepted, but that users now write as another setting.
    """

    default: str
    meaning: str
    least: int | None = None
    most: int | None = None
    multiple: int | None = None
    what: str = ""
    public: str = ""
    flag: tuple[str, str] | None = None
    former: tuple[str, ...] = ()


@dataclasses.dataclass(frozen=True)
class _Kind:
    """What the type of a field allows: names, None, and types."""

    choices: tuple[str, ...]
    types: frozenset[type]


def setting(default: Any, shown: str, meaning: str, **limits: Any) -> Any:
    """Return the field of a setting.

    Args:
        default: the default.
        shown: the default as the documentation shows it.
        meaning: see Declared.
        **limits: the other fields of Declared.
    """
    declared = Declared(shown, meaning, **limits)
    return dataclasses.field(default=default, metadata={_KEY: declared})


def declared(settings: type) -> dict[str, Declared]:
    """Return what is declared of each setting of a dataclass, in the order of its fields."""
    fields = dataclasses.fields(settings)
    return {field.name: field.metadata[_KEY] for field in fields if _KEY in field.metadata}


def choices(settings: type, name: str) -> tuple[str, ...]:
    """Return the names that a setting's type allows."""
    return _kinds(settings)[name].choices


def public(settings: type, name: str) -> str:
    """Return the name of a setting as users write it, such as "io.depth"."""
    said = declared(settings).get(name)
    return (said and said.public) or name


@functools.cache
def _kinds(settings: type) -> dict[str, _Kind]:
    return {name: _kind(hint) for name, hint in typing.get_type_hints(settings).items()}


def _kind(hint: Any) -> _Kind:
    is_union = typing.get_origin(hint) in (typing.Union, types.UnionType)
    parts = typing.get_args(hint) if is_union else (hint,)
    named = [part for part in parts if typing.get_origin(part) is typing.Literal]
    names = tuple(name for part in named for name in typing.get_args(part))
    return _Kind(names, frozenset(part for part in parts if isinstance(part, type)))


def check(settings: Any) -> None:
    """Reject a value that is not one of a setting's choices, or not in its range.

    Settings that are neither numbers nor one of a list of names have checks of their own.

    Args:
        settings: an instance of a dataclass whose fields are made by setting().

    Raises:
        ModelError: a setting is invalid; the message says which values are valid.
    """
    kinds = _kinds(settings.__class__)
    for name, said in declared(type(settings)).items():
        wrong = _wrong(getattr(settings, name), name, kinds[name], said)
        if wrong:
            shown = said.public or name
            raise ModelError(f"{shown} {getattr(settings, name)!r} must be {wrong}")


def _wrong(value: Any, name: str, kind: _Kind, said: Declared) -> str:
    """Return what a value must be; "" if it is valid, or has a check of its own."""
    is_chosen = isinstance(value, str) and value in kind.choices
    if is_chosen or (value is None and type(None) in kind.types):
        return ""
    if said.least is not None:
        return _wrong_number(value, name, kind, said)
    if kind.choices and said.flag is None:
        return one_of(kind.choices)
    if said.flag is not None:
        return "True or False"
    return "" if kind.types != {bool} or isinstance(value, bool) else "True or False"


def _wrong_number(value: Any, name: str, kind: _Kind, said: Declared) -> str:
    least, most = said.least or 0, float("inf") if said.most is None else said.most
    is_number = isinstance(value, int | float if float in kind.types else int)
    if isinstance(value, bool) or not is_number or not least <= value <= most:
        if said.what:
            names = [repr(choice) for choice in kind.choices if choice not in said.former]
            return ", ".join((*names[:-1], "")) + " or ".join((*names[-1:], said.what))
        also = ', or a size as "16GB"' if name.endswith("_bytes") else ""
        return f"a whole number from {said.least} to {said.most}{also}"
    if said.multiple is not None and value % said.multiple:
        return f"a multiple of {said.multiple} ({said.multiple >> 20} MiB)"
    return ""


def one_of(names: tuple[str, ...]) -> str:
    """Return names as a message lists them: 'a', 'b' or 'c'."""
    return " or ".join(filter(None, (", ".join(map(repr, names[:-1])), repr(names[-1]))))
