"""Initial values of parameters that neither memory nor files have, by the code that knows them."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import nn

from lohan.errors import ModelError
from lohan.torch_glue import _peft
from lohan.torch_glue._buffers import no_storage
from lohan.torch_glue._tensor import give_back, nbytes_of

if TYPE_CHECKING:
    from lohan.layout._block import Layout, Param

# Bytes of freed tensors after which the C library is asked to return memory to the system.
TRIM_BYTES = 256 << 20
# The name of a parameter in a list of modules.
_LIST = re.compile(r"\.\d+\.")

Init = Callable[[nn.Module], None]
Write = Callable[["Param", torch.Tensor], None]
Read = Callable[[nn.Parameter], torch.Tensor | None]


def check_may_be_fresh(
    model: nn.Module,
    layout: Layout,
    missing: Sequence[Param],
    weights: Path,
) -> None:
    """Reject missing values of a base, which only init= may initialise.

    Heads and adapters are not in the files of a base. But if files lack layers of a list, a part of
    a module, the input embeddings, or everything, the names may not match, and random numbers would
    replace trained ones.

    Raises:
        ModelError: names the first parameter, and says what to do.
    """
    from lohan.layout import _resized

    found = {p.name.rpartition(".")[0] for p in layout.params if p.source is not None}
    is_ours, inputs = _peft.is_adapter(model), _resized.inputs(model)

    def is_of_base(param: Param) -> bool:
        is_odd = not found or param.name.rpartition(".")[0] in found
        return is_odd or id(param.tensor) in inputs or _LIST.search(param.name) is not None

    of_base = [p.name for p in missing if not is_ours(p.tensor) and is_of_base(p)]
    if of_base:
        raise ModelError(
            f"weights={weights} has no value for {len(of_base)} parameters ({of_base[0]!r}, ...):"
            " if the files are right, pass init='model' or init=FUNCTION to initialise what they"
            " lack"
        )


def initialise(
    model: nn.Module,
    wanted: Mapping[int, Param],
    init: Init | None,
    write: Write,
    read: Read,
    replaced: Mapping[int, nn.Parameter],
) -> dict[int, str]:
    """Compute and write initial values module by module; only one module's are in memory.

    Args:
        model: the model.
        wanted: the parameters without values, by the ids of their tensors.
        init: called with each module that has such parameters; None: the model's own code.
        write: called with each parameter and its values.
        read: returns the values of another parameter.
        replaced: the parameters that were empty, by the ids of those in their place.

    Returns:
        What computed each value, by the id of the tensor.

    Raises:
        ModelError: a module has no initialisation, or it needs values that are not in memory.
    """
    if init is None:
        _check_whole(model, wanted, replaced)
    made: dict[int, str] = {}
    copies = _peft.copies(model)
    after: dict[int, list[Param]] = {}
    for key, original in copies.items():
        if key in wanted:
            after.setdefault(id(original), []).append(wanted[key])

    def put(tensor: nn.Parameter, how: str) -> None:
        write(wanted[id(tensor)], tensor.data)
        made[id(tensor)] = how
        for copy in after.pop(id(tensor), ()):
            write(copy, tensor.data)
            made[id(copy.tensor)] = how

    _peft.initialise(model, {*wanted} - {*copies}, put, read)
    owners = _initialisers(model)
    freed = 0
    for name, module in model.named_modules():
        own = [t for t in module._parameters.values() if t is not None and t.numel()]
        fresh = [t for t in own if id(t) in wanted and id(t) not in made and id(t) not in copies]
        if not fresh:
            continue
        before = [tensor.data for tensor in own]
        for tensor in own:
            tensor.data = torch.empty(tensor.shape, dtype=tensor.dtype)
        how = _run(name, module, fresh, init, owners.get(id(module)), replaced)
        for tensor in fresh:
            put(tensor, how)
        for tensor, data in zip(own, before, strict=True):
            freed += nbytes_of(tensor)
            tensor.data = data
        if freed >= TRIM_BYTES:
            give_back()
            freed = 0
    for originals in after.values():
        for param in originals:
            values = read(copies[id(param.tensor)])
            if values is None:
                raise ModelError(f"{param.name!r} is a copy of a parameter that has no value")
            write(param, values)
            made[id(param.tensor)] = "a copy of its original"
    for key in made:
        wanted[key].tensor.data = no_storage(wanted[key].tensor)
    return made


def _check_whole(
    model: nn.Module, wanted: Mapping[int, Param], replaced: Mapping[int, nn.Parameter]
) -> None:
    """Reject a parameter that has lost values: a part of it, or those it was computed from.

    from_pretrained does not compute those in its model either, but initialises them.
    """
    inner, prefix = _peft.inner(model)
    for key, param in wanted.items():
        from lohan.torch_glue import _empty

        empty = replaced.get(key, param.tensor)
        is_known = inner is not None and param.name.startswith(prefix)
        if _empty.is_computed(empty) and not is_known:
            raise ModelError(
                f"{param.name!r} is in no file, and was computed from the values of another"
                " parameter, which lohan.empty() does not create: if it is an adapter's, call"
                " get_peft_model on a base that is in memory (from_pretrained); otherwise create"
                " its module outside of lohan.empty(), or pass init=FUNCTION"
            )
        if _empty.is_in_part(empty):
            raise ModelError(
                f"{param.name!r} is in no file, and values were written to a part of it inside"
                " lohan.empty(), which does not keep them: create its module outside of"
                " lohan.empty(), or pass init=FUNCTION and write the values after lohan.wrap()"
            )


def _initialisers(model: nn.Module) -> dict[int, Init]:
    """Return the innermost `_init_weights` (Hugging Face's convention) for each module."""
    found: dict[int, Init] = {}

    def walk(module: nn.Module, function: Init | None) -> None:
        function = getattr(module, "_init_weights", function)
        if function is not None:
            found.setdefault(id(module), function)
        for child in module.children():
            walk(child, function)

    walk(model, None)
    return found


def _run(
    name: str,
    module: nn.Module,
    fresh: Sequence[nn.Parameter],
    init: Init | None,
    owner: Init | None,
    replaced: Mapping[int, nn.Parameter],
) -> str:
    """Set a module's own parameters by init, or else by its model's `_init_weights`.

    What constructors have written is written again, and neither is called if that is all.

    `reset_parameters` comes first only if the function leaves a value unset: one thread draws its
    random numbers, which takes longer than everything else.

    Returns:
        The name of what computed the values.
    """
    from lohan.torch_glue import _empty

    function = init or owner
    reset = getattr(module, "reset_parameters", None)
    how = "" if function is None else str(getattr(function, "__qualname__", function))

    def repeat() -> bool:
        found = [_empty.initial(replaced.get(id(tensor)), tensor.data) for tensor in fresh]
        return all(found)

    def call() -> None:
        try:
            if function is not None:
                function(module)
        except RuntimeError as error:  # it writes to modules inside of this one
            if init is not None:
                raise
            raise ModelError(
                f"{name or type(module).__name__}: {how} cannot initialise this module alone"
                f" ({error}): pass init=FUNCTION, or weights=FOLDER"
            ) from error

    with torch.no_grad():
        _unset(module)
        if init is None and repeat():
            return how or str(getattr(reset, "__qualname__", f"{type(module).__qualname__}()"))
        call()
        missing = _missing(module, fresh)
        if missing is not None and reset is not None:
            _unset(module)
            reset()
            how = str(getattr(reset, "__qualname__", reset))
            call()
            missing = _missing(module, fresh)
        if init is None:
            repeat()
            missing = _missing(module, fresh)
    if missing is not None:
        raise ModelError(
            f"{name}.{missing} has no initialisation in {type(module).__name__}: pass"
            " init=FUNCTION, or weights=FOLDER"
        )
    return how or f"{type(module).__qualname__}()"


def _unset(module: nn.Module) -> None:
    """Fill a module's own parameters with NaN, and integers with 0."""
    for tensor in module._parameters.values():
        if tensor is not None:
            tensor.data.fill_(float("nan") if tensor.is_floating_point() else 0)


def _missing(module: nn.Module, fresh: Sequence[nn.Parameter]) -> str | None:
    """Return the name of a parameter among fresh that still has a NaN."""
    ids = {id(tensor) for tensor in fresh}
    for name, tensor in module._parameters.items():
        if tensor is None or id(tensor) not in ids or not tensor.is_floating_point():
            continue
        if bool(tensor.data.isnan().any()):
            return name
    return None
