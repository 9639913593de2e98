"""The choice of the frozen parameters that are read in place."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from torch import nn

from lohan import _core
from lohan.common import _log
from lohan.layout._dtypes import NAMES
from lohan.layout._packed import Entry
from lohan.layout._resized import rows_in_file


def choose(model: nn.Module, found: Mapping[int, Entry], *, speaks: bool = True) -> set[int]:
    """Return the ids of the frozen parameters that can be read in place.

    They have the same dtype in the files as in the model, or are quantized there. For all other
    frozen parameters, one line per reason is printed to stderr, if speaks.
    """
    frozen = [(n, p) for n, p in model.named_parameters() if not p.requires_grad and p.numel() > 0]
    if not frozen:
        return set()
    could = {
        id(param)
        for _, param in frozen
        if (entry := found.get(id(param)))
        and not entry.made
        and entry.is_joinable
        and (entry.packed or entry.dtype == NAMES.get(param.dtype))
    }
    too_many = len(needed(found[key] for key in could)) > _core.IN_PLACE_FILE_COUNT_MAX
    left: dict[str, list[tuple[str, int]]] = {}
    for name, param in frozen:
        if id(param) in could and not too_many:
            continue
        entry = found.get(id(param))
        if entry is None:
            why = "the files do not have them"
        elif entry.made:
            why = f"they are converted by {entry.made.what}"
        elif rows_in_file(entry):
            why = "the files lack their last rows"
        elif not entry.is_joinable:
            align = _core.IN_PLACE_ALIGN
            why = f"the files have their parts in several places, not all of {align} * n bytes"
        elif id(param) in could:
            why = f"they are in more than {_core.IN_PLACE_FILE_COUNT_MAX} files"
        else:
            why = f"{entry.dtype} in the files, {str(param.dtype).removeprefix('torch.')} here"
        left.setdefault(why, []).append((name, param.numel() * param.element_size()))
    for why, params in left.items() if speaks else ():
        nbytes = sum(nbytes for _, nbytes in params)
        _log.note(
            f"{len(params)} parameters ({nbytes / 1e6:.1f} MB) are copied into the"
            f" store: {why} ({params[0][0]!r}, ...)"
        )
    return set() if too_many else could


def needed(entries: Iterable[Entry]) -> set[int]:
    """Return the files that have the entries and what they are decoded with."""
    found: set[int] = set()
    for entry in entries:
        for place in entry.places:
            parts = () if place.packed is None else place.packed.parts
            found |= {place.file, *(part.file for part in parts if part is not None)}
    return found
