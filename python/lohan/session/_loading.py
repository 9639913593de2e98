"""load_state_dict() of a module that contains a wrapped model.

torch's load_state_dict() of the outer module does not call that of the model. It calls a method of
each module, `_load_from_state_dict`, which this file's function replaces.
"""

from __future__ import annotations

import types
from typing import TYPE_CHECKING, Any

from torch import nn

from lohan.store import _stale
from lohan.torch_glue._tensor import check_bytes, is_same

if TYPE_CHECKING:
    from lohan.session._guard import Guard


def load_module(
    guard: Guard,
    owner: nn.Module,
    state: dict[str, Any],
    prefix: str,
    metadata: dict[str, Any],
    strict: bool,
    missing: list[str],
    unexpected: list[str],
    errors: list[str],
) -> None:
    """Load one module's own parameters into the store, and its buffers as torch does.

    Args:
        guard: the guard of the wrapped model.
        owner: a module of that model.
        state: the values by name; others are in it as well.
        prefix: the beginning of the names of this module's values.
        metadata: what the state dict records about this module.
        strict: whether missing and unexpected names are to be reported.
        missing: a list for missing names.
        unexpected: a list for unexpected names.
        errors: a list for messages; torch raises them together at the end.

    Raises:
        FrozenParameterError: the value of a frozen parameter would change.
        StaleStateError: right after a resume, the values are of another step of the store.
    """
    session, all_params = guard.session, owner._parameters
    names = {
        prefix + name: guard.index[id(tensor)]
        for name, tensor in all_params.items()
        if tensor is not None and id(tensor) in guard.index
    }
    before = [(buffer, buffer.clone()) for buffer in owner._buffers.values() if buffer is not None]
    rest = {name: p for name, p in all_params.items() if prefix + name not in names}
    own_unexpected: list[str] = []
    own = (missing, own_unexpected, errors)
    try:  # hide the parameters from torch, which would write to them in memory
        object.__setattr__(owner, "_parameters", rest)
        type(owner)._load_from_state_dict(owner, state, prefix, metadata, strict, *own)
    finally:
        object.__setattr__(owner, "_parameters", all_params)
    unexpected += [key for key in own_unexpected if key not in names]
    given = {key: state[key] for key in names if key in state}
    missing += [key for key in names if strict and key not in given]
    for key in [*given]:
        check_bytes(given[key], f"{key!r} in the state dict of load_state_dict()")
        shape, mine = given[key].shape, session.layout.params[names[key]].tensor.shape
        if shape != mine:
            errors.append(f"size mismatch for {key}: {tuple(shape)} for {tuple(mine)}")
            del given[key]
    if _stale.is_fresh(session):
        different = guard.first_difference(owner, given, names)
        if different is not None:
            stamped: Any = types.SimpleNamespace(_metadata={"": metadata})
            guard.check_stale(stamped, different)
    news = guard.news(given, names)
    guard.write(news, names)
    if not news and any(not is_same(old, new) for new, old in before):
        session.edits.made_of_buffers()
