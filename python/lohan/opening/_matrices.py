"""Which parameters a rule of matrices updates as such."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from torch import nn

from lohan.errors import HyperParameterError, ModelError, StoreMismatchError
from lohan.layout import _experts
from lohan.opening._groups import groups_of
from lohan.store import _scalars

if TYPE_CHECKING:
    from lohan import _core
    from lohan.layout._block import Layout
    from lohan.session._optim import Optimizer


def with_matrices(
    params: Any, model: nn.Module, hyper: dict[str, Any]
) -> tuple[list[dict[str, Any]], dict[int, float]]:
    """Return the groups of a rule of matrices, each with use_muon, and the matrices.

    Without params=, the matrices are the trained parameters of two dimensions in modules of a
    ModuleList or Sequential, except the weights of embeddings and the biases of several experts in
    one parameter. An expert's slice of a parameter is updated as the parameter is, which is no
    matrix: [Note: Experts apart] in layout/_experts.py.

    Args:
        params: params= of `lohan.wrap`, or None.
        model: the model.
        hyper: the hyper-parameters of groups that do not set their own, or None for each.

    Returns:
        The groups; and what the shape of each matrix makes of the learning rate, by its id.

    Raises:
        ModelError: a group does not say whether it is updated so, or cannot be, or none is.
        HyperParameterError: adjust_lr_fn is unknown.
    """
    if params is None:
        trained = [p for p in model.parameters() if p.requires_grad]
        found = hidden(model)
        chosen = [p for p in trained if id(p) in found]
        others = [p for p in trained if id(p) not in found]
        groups: list[dict[str, Any]] = [{"params": chosen, "use_muon": True}]
        groups += [{"params": others, "use_muon": False}] if others else []
    else:
        groups = groups_of(params)
    names = {id(p): name for name, p in model.named_parameters()}
    slices = _slices(model)
    ratios: dict[int, float] = {}
    for number, group in enumerate(groups):
        if not isinstance(group.get("use_muon"), bool):
            raise ModelError(
                f'group {number} of params= has no use_muon: with method="muon", each group says'
                " whether it is updated by Muon (use_muon=True, matrices only) or by AdamW"
                " (use_muon=False)"
            )
        how = group.get("adjust_lr_fn", hyper.get("adjust_lr_fn"))
        if not isinstance(how, str | None) or how not in _RATIOS:
            raise HyperParameterError(
                f"adjust_lr_fn {how!r} must be None, 'original' or 'match_rms_adamw'"
            )
        for tensor in group["params"] if group["use_muon"] else ():
            name = names.get(id(tensor), "a tensor")
            if id(tensor) in slices:
                raise ModelError(
                    f"{name} is an expert's slice of a parameter of more than two dimensions or of"
                    " a bias, but Muon updates contiguous matrices only: put it into a group with"
                    " use_muon=False"
                )
            if tensor.dim() != 2 or not tensor.is_contiguous():
                raise ModelError(
                    f"{name} has shape {tuple(tensor.shape)} and strides {tensor.stride()}, but"
                    " Muon updates contiguous matrices only: put it into a group with"
                    " use_muon=False"
                )
            if tensor.requires_grad and tensor.numel() > 0:
                ratios[id(tensor)] = _RATIOS[how](*tensor.shape)
    if not ratios:
        raise ModelError(
            'method="muon" updates matrices of hidden layers, and finds none in this model: pass'
            " groups with use_muon=True as params=, or another method"
        )
    return groups, ratios


# What a matrix's shape makes of the learning rate. Source: torch.optim._muon._adjust_lr.
_RATIOS: dict[str | None, Callable[[int, int], float]] = {
    None: lambda rows, columns: math.sqrt(max(1, rows / columns)),
    "original": lambda rows, columns: math.sqrt(max(1, rows / columns)),
    "match_rms_adamw": lambda rows, columns: 0.2 * math.sqrt(max(rows, columns)),
}


def resume(
    layout: Layout, optimizer: Optimizer, group_of: dict[int, int], store: _core.Store
) -> None:
    """Take adjust_lr_fn of each group from a store's last commit, unless this call was given one.

    Args:
        layout: the model's layout, whose parameters get the factors of their learning rates.
        optimizer: the optimizer, whose groups are changed.
        group_of: the group of each parameter, by its index.
        store: the store that is resumed.

    Raises:
        StoreMismatchError: a group of matrices is in the place of another one.
    """
    state, _ = _scalars.parse(store.describe()["caller_scalars"])
    groups = optimizer.param_groups
    chosen = [group["use_muon"] for group in groups]
    then = state.get("use_muon", chosen)
    if len(then) == len(chosen) and then != chosen:  # of another number, restore() says so
        raise StoreMismatchError(
            f"the groups of params= have use_muon={chosen}, but those of the store {then}: pass the"
            " same groups in the same order"
        )
    for index, (group, was) in enumerate(zip(groups, state.get("adjust_lr_fn", ()), strict=False)):
        now = group.get("adjust_lr_fn")
        if not group["use_muon"] or (now or "original") == (was or "original"):
            continue
        if "adjust_lr_fn" in optimizer.given[index]:
            _scalars.overrule(group, index, "adjust_lr_fn", now, was)
        else:
            group["adjust_lr_fn"] = was
    for param in layout.params:
        if param.lr_ratio:
            how = groups[group_of[param.index]].get("adjust_lr_fn")
            param.lr_ratio = _RATIOS[how](*param.tensor.shape)
    optimizer.fix_matrices()


def hidden(model: nn.Module) -> set[int]:
    """Return the ids of matrices in modules of lists that are not excepted."""
    found: set[int] = set()
    for parent in model.modules():
        if isinstance(parent, nn.ModuleList | nn.Sequential):
            found |= {
                id(p)
                for name, p in parent.named_parameters()
                if p.dim() == 2 and not name.endswith("bias")
            }
    embeddings = (m for m in model.modules() if isinstance(m, nn.Embedding | nn.EmbeddingBag))
    return found - {id(m.weight) for m in embeddings} - _slices(model)


def _slices(model: nn.Module) -> set[int]:
    """Return the ids of parameters that are an expert's slice of another one."""
    return {id(p) for expert in _experts.all_of(model) for p in expert.parameters()}
