"""Steps in milliseconds: what the timeline of csrc/plan predicts for policy `auto`, without torch.

It is the first answer of `lohan plan`; the simulator, which runs the engine in virtual time,
refines it. Both make the same plans; the timeline ignores latencies and buffers (docs/planning.md).
"""

from __future__ import annotations

import dataclasses
import math
from typing import TYPE_CHECKING, Any

from lohan.errors import MachineError
from lohan.planning import _base, _hub, _plan, _policies, _sketch
from lohan.planning._pieces import capacity_check

if TYPE_CHECKING:
    from lohan.planning._machines import Machine

_DAY_S = 86_400
_LIFE_DAYS = 730
_INTERVAL_MAX_S = 7200


@dataclasses.dataclass(frozen=True)
class Step:
    """The figures of a step.

    Attributes:
        step_s: its time, with its share of a commit.
        tokens_per_s: the tokens, or patches of images, of a second.
        bound_by: the busiest resource.
        written_bytes: what it writes to all SSDs.
        life_days: how long the SSDs last; None if their endurance is unknown.
        gpu_bytes, host_bytes: the memory that the plan uses.
        swapped: the activations that leave the GPU for main memory, and for the SSDs.
    """

    step_s: float
    tokens_per_s: float
    bound_by: str
    written_bytes: int
    life_days: float | None
    gpu_bytes: int
    host_bytes: int
    swapped: tuple[int, int]


def config_of(name: str) -> dict[str, Any] | None:
    """Return the config of a model: by its name, or from a file or folder; None: not known.

    Raises:
        MachineError: the file is not a config.json, or the Hub does not give it.
        UnsupportedError: the name is one of the Hub's, and huggingface_hub is not installed.
    """
    return _sketch.config_of(_hub.own_name(name), _hub.config_path(name))


def sketch(
    name: str,
    batch: int,
    seq: int,
    loss: str = "logits",
    base: str | None = None,
    adapter_params: int | None = None,
) -> _plan.Model | None:
    """Return a model as _models.load() does, from its sizes alone; None if they are not known.

    Raises:
        MachineError, ModelError: the file is not a config.json, or an argument is invalid.
        UnsupportedError: the model has no head for the loss.
    """
    config = config_of(name)
    if config is None:
        if name not in _plan.model_names():
            return None
        model = _plan.named_model(name, batch=batch, seq=seq, loss=loss)
    else:
        _sketch.check_loss(name, config, loss)
        if "text_config" in config and "vocab_size" not in config and "projection_dim" in config:
            return None  # towers of images and texts, as CLIP's
        try:
            model = _sketch.of_config(config, name, batch, seq, loss)
        except MachineError:  # sizes in words of its own: the model itself is run for the answer
            return None
    if adapter_params is None:
        return model
    return _base.adapt(model, base or _base.PLAIN, adapter_params)


def step(model: _plan.Model, machine: Machine, states: str = "fp32", rule: str = "adamw") -> Step:
    """Predict a step of policy `auto`.

    Args:
        model: the model at one batch size.
        machine: a machine with one GPU.
        states: how moments are stored.
        rule: the update rule: a key of RULES.

    Raises:
        BudgetError: the model does not fit; the message has the numbers.
    """
    model = model.with_rule(rule, states).on(machine.worker_count, machine.adam_params_per_s)
    capacity_check(model, machine, model.residual_bytes)
    found: dict[str, Any] = _policies.make(model, machine, "auto")["step"]
    seconds = found["iteration_s"]
    endurance = machine.ssd_count * machine.ssd_endurance_bytes
    interval_s = 0.0
    if endurance:  # as [Note: Commits by cost] in session/_commit_rule.py
        interval_s = min(found["commit_bytes"] * _LIFE_DAYS * _DAY_S / endurance, _INTERVAL_MAX_S)
    every = max(found["commit_every"], math.ceil(interval_s / seconds))
    written = found["ssd_write_bytes"] + found["commit_bytes"] // every
    days = endurance / written * seconds / _DAY_S if endurance and written else None
    return Step(
        step_s=seconds,
        tokens_per_s=model.tokens / seconds,
        bound_by=found["bound_by"],
        written_bytes=written,
        life_days=days,
        gpu_bytes=found["gpu_bytes"],
        host_bytes=found["host_bytes"],
        swapped=(found["swapped_bytes"] - found["swapped_ssd_bytes"], found["swapped_ssd_bytes"]),
    )
