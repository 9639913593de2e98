"""The AdamW optimizers of bitsandbytes and torchao, from which `wrap(optimizer=...)` continues.

Their moments are decoded to fp32, as the libraries themselves decode them before an update.

They are those of bitsandbytes 0.50 (Optimizer2State of optim/optimizer.py, dequantize_blockwise of
functional.py) and of torchao 0.18 (optim/adam.py, optim/subclass_8bit.py).
"""

from __future__ import annotations

from typing import Any

import torch

from lohan.errors import UnsupportedError

# The classes with the rule of AdamW, by the module that defines them.
_CLASSES = {
    "bitsandbytes.optim.adamw": {
        "AdamW",
        "AdamW8bit",
        "AdamW32bit",
        "PagedAdamW",
        "PagedAdamW8bit",
        "PagedAdamW32bit",
    },
    "torchao.optim.adam": {"AdamW8bit", "AdamW4bit", "AdamWFp8"},
}
# Options of bitsandbytes that change the rule, and the values that do not.
_RULE = {"max_unorm": 0.0, "skip_zeros": False, "percentile_clipping": 100}
# What overrides of bitsandbytes may change for one parameter, besides the format of its moments.
_OVERRIDDEN = ("lr", "betas", "eps", "weight_decay", "max_unorm", "skip_zeros")
# Elements of a tensor that share a scale in bitsandbytes.
_BLOCK = 256


def is_known(optimizer: object) -> bool:
    """Return whether an optimizer is one of those that this module reads."""
    kind = type(optimizer)
    return kind.__qualname__ in _CLASSES.get(kind.__module__, ())


def check(optimizer: Any) -> None:
    """Reject options that change the rule of AdamW, or the values of a parameter's group.

    Raises:
        UnsupportedError: there is such an option; the message names it.
    """
    options = getattr(optimizer, "args", None)
    for name, value in _RULE.items():
        given = getattr(options, name, value)
        if given != value:
            raise UnsupportedError(
                f"{name}={given!r} of {type(optimizer).__name__} is not supported: lohan's"
                f" optimizer is AdamW with {name}={value!r}"
            )
    _check_overrides(optimizer)


def _check_overrides(optimizer: Any) -> None:
    """Reject parameters for which bitsandbytes' GlobalOptimManager has other values than a group.

    They are in no parameter group and in no state dict.
    """
    if not hasattr(optimizer, "get_config"):
        return
    optimizer.check_overrides()  # as its first step does
    for number, group in enumerate(optimizer.param_groups):
        for at, param in enumerate(group["params"]):
            config = optimizer.get_config(number, at, group)
            for name in _OVERRIDDEN:
                value = group[name] if name in group else _RULE[name]
                if config[name] != value:
                    raise UnsupportedError(
                        f"bitsandbytes' GlobalOptimManager overrides {name} of parameter {at} of"
                        f" group {number} (shape {tuple(param.shape)}): {config[name]!r} instead of"
                        f" {value!r}. lohan has the values of optimizer.param_groups: put such"
                        " parameters into a group of their own there, and drop the overrides with"
                        " bitsandbytes.optim.GlobalOptimManager.get_instance().initialize()"
                    )


def moments(state: dict[str, Any]) -> tuple[Any, Any]:
    """Return the two moments of a parameter in fp32, from the state that an optimizer has of it."""
    if "state1" in state:
        return _blockwise(state, 1), _blockwise(state, 2)
    return _dequantized(state.get("exp_avg")), _dequantized(state.get("exp_avg_sq"))


def _blockwise(state: dict[str, Any], number: int) -> Any:
    """Decode a moment of bitsandbytes: an entry of a table, times the largest of its block."""
    stored = state.get(f"state{number}")
    if not isinstance(stored, torch.Tensor) or stored.dtype != torch.uint8:
        return stored  # small parameters, and those of AdamW32bit
    table, scales = (state[f"{name}{number}"].to("cpu") for name in ("qmap", "absmax"))
    codes = stored.detach().to("cpu").flatten()
    values = table.index_select(0, codes.int())
    return (values * scales.repeat_interleave(_BLOCK)[: len(values)]).view(stored.shape)


def _dequantized(value: Any) -> Any:
    """Decode a moment of torchao, whose tensors are of its own classes."""
    if type(value).__module__.startswith("torchao."):
        return value.dequantize()
    return value
