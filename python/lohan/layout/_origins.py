"""Where the value of each parameter and buffer came from when the model was wrapped."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from torch import nn

from lohan.common import _log

if TYPE_CHECKING:
    from lohan.layout._block import Layout
    from lohan.layout._files import File

# The names that the line at wrap lists for each kind of which there are few.
_NAMED_MAX = 3
_SHOWN = {
    "file": "from files",
    "memory": "as given",
    "init": "by init=",
    "fresh": "fresh",
    "store": "from the store",
    "tied": "tied",
}


@dataclasses.dataclass(frozen=True)
class Origin:
    """The origin of a value.

    Attributes:
        kind: "file" (of weights=), "memory" (it was in the model that was wrapped), "init" (init=),
            "fresh" (an initialisation of its module, because nothing else had a value), "store"
            (a resumed store) or "tied" (it is another parameter of the model).
        where: the path of the file; what computed the value; or the name of the other parameter.
        name: the tensor's name in the file; "" if it was not recorded.
        rows: how many rows the file has, if the others come from elsewhere; 0: all.
        rest: where the other rows come from.
    """

    kind: str
    where: str = ""
    name: str = ""
    rows: int = 0
    rest: str = ""

    def __str__(self) -> str:
        """Return the origin as text."""
        parts = [_SHOWN[self.kind], self.where, self.name]
        text = ": ".join(part for part in parts if part)
        return text + f" (its first {self.rows} rows; the others: {self.rest})" * bool(self.rows)


def said(init: Any) -> str:
    """Return the name of the argument init=."""
    return init if isinstance(init, str) else str(getattr(init, "__qualname__", init))


def of_files(layout: Layout, files: Sequence[File]) -> None:
    """Record the origins of the parameters that files have."""
    for param in layout.params:
        source = param.source
        if source is not None and param.name not in layout.origins:
            where = str(files[source.file].path)
            new = layout.new_rows.get(param.index)
            rows, rest = (0, "") if new is None else (len(param.tensor) - len(new[0]), new[1])
            layout.origins[param.name] = Origin("file", where, source.name, rows, rest)


def complete(model: nn.Module, layout: Layout, kind: str) -> None:
    """Record the origins of parameters and buffers that are not recorded yet, and of tied names.

    Args:
        model: the model.
        layout: the layout of its parameters.
        kind: the kind of origin of what is not recorded.
    """
    origins = layout.origins
    first = {id(param.tensor): param.name for param in layout.params}
    for prefix, module in model.named_modules(remove_duplicate=False):
        for own, tensor in module._parameters.items():
            name = f"{prefix}.{own}" if prefix else own
            if tensor is None:
                continue
            if first.setdefault(id(tensor), name) != name:
                origins[name] = Origin("tied", first[id(tensor)])
            else:
                origins.setdefault(name, Origin(kind))
        for own, buffer in module._buffers.items():
            if buffer is not None and own not in module._non_persistent_buffers_set:
                origins.setdefault(f"{prefix}.{own}" if prefix else own, Origin(kind))


def line(origins: Mapping[str, Origin]) -> str:
    """Return one line that counts the origins, and names those that are not from files."""
    parts = []
    for kind, text in _SHOWN.items():
        names = [name for name, origin in origins.items() if origin.kind == kind]
        part = f"{len(names):,} {text}"
        if kind in ("fresh", "init"):
            part += f" ({', '.join(names[:_NAMED_MAX])}{', ...' * (len(names) > _NAMED_MAX)})"
        if names:
            parts.append(part)
    for name, origin in origins.items():
        if origin.rows:
            parts.append(f"{name}: {origin.rows:,} rows from files, the others {origin.rest}")
    return f"values: {', '.join(parts)} (model.lohan.origins() lists all)"


def say(origins: Mapping[str, Origin], *, trains: bool) -> None:
    """Print the line, unless all values were in memory or in the store, or all are from init=.

    It is a note if something is fresh, which a user may not expect. A session that trains nothing
    prints only that.
    """
    kinds = {origin.kind for origin in origins.values()} - {"tied"}
    rows = any(origin.rows for origin in origins.values())
    if "fresh" in kinds or rows:
        _log.note(line(origins))
    elif "file" in kinds and trains:
        _log.inform(line(origins))
