"""Parameter groups by a rule, for params= of lohan.wrap."""

from __future__ import annotations

import fnmatch
from collections.abc import Callable
from typing import Any

from torch import nn

from lohan.errors import ModelError

# A tensor with fewer dimensions is a bias, a scale of a norm, or a gate.
_DIMENSIONS_MIN = 2


def no_decay(*patterns: str) -> Callable[[nn.Module], list[dict[str, Any]]]:
    """Return a function that makes parameter groups for lohan.wrap(params=).

    Biases, norms and everything else with fewer than two dimensions get no weight decay, and
    neither do parameters whose names match a pattern. All others get wrap's weight_decay.

    Args:
        patterns: names of parameters, in which * stands for any text: "*.embed_tokens.weight".

    Returns:
        A function of the model, which returns the groups: first the parameters with weight decay,
        then those without; a group without parameters is left out.

    Raises:
        ModelError: when the function is called, a pattern matches no trainable parameter.
    """

    def groups(model: nn.Module) -> list[dict[str, Any]]:
        trained = [p for p in model.parameters() if p.requires_grad]
        every = model.named_parameters(remove_duplicate=False)  # tied ones by all of their names
        named = [(name, p) for name, p in every if p.requires_grad]
        for pattern in patterns:
            if not any(fnmatch.fnmatchcase(name, pattern) for name, _ in named):
                raise ModelError(
                    f"no_decay() has the pattern {pattern!r}, which matches none of the model's"
                    f" {len(trained)} trainable parameters; the first is"
                    f" {named[0][0] if named else None!r}"
                )
        without = {
            id(p)
            for name, p in named
            if p.ndim < _DIMENSIONS_MIN or any(fnmatch.fnmatchcase(name, one) for one in patterns)
        }
        decayed = [p for p in trained if id(p) not in without]
        rest = [p for p in trained if id(p) in without]
        made: list[dict[str, Any]] = [{"params": decayed}, {"params": rest, "weight_decay": 0.0}]
        return [group for group in made if group["params"]]

    return groups
