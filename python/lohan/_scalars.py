"""What a commit carries besides tensors: hyper-parameters, and torch's CPU generator."""

from __future__ import annotations

import base64
import json
from typing import Any

import torch

from lohan._optim import hyper_of
from lohan.errors import StoreMismatchError


def pack(groups: list[dict[str, Any]]) -> bytes:
    """The state of now, as a commit keeps it."""
    state = {
        "groups": [list(hyper_of(group)) for group in groups],
        "rng": base64.b64encode(torch.get_rng_state().numpy().tobytes()).decode(),
    }
    return json.dumps(state).encode()


def restore(blob: bytes, groups: list[dict[str, Any]]) -> None:
    """Put what a commit kept into the groups and into torch's CPU generator.

    Raises:
        StoreMismatchError: the commit was of another number of groups.
    """
    if not blob:
        return
    state = json.loads(blob)
    if len(state["groups"]) != len(groups):
        raise StoreMismatchError(
            0,
            f"the store was trained with {len(state['groups'])} parameter groups, params= has"
            f" {len(groups)}: pass as many, in the same order",
        )
    for group, hyper in zip(groups, state["groups"], strict=True):
        group["lr"], beta1, beta2, group["eps"], group["weight_decay"] = hyper
        group["betas"] = (beta1, beta2)
    rng = bytearray(base64.b64decode(state["rng"]))
    torch.set_rng_state(torch.frombuffer(rng, dtype=torch.uint8))
