"""A plugin that trains axolotl's models with lohan: `plugins: [lohan.hf.axolotl.LohanPlugin]`.

Only axolotl imports this module. It adds one key for each setting of lohan.TrainerCallback to
axolotl's configuration, `lohan_store` and others (docs/frameworks.md), and passes the callback to
the constructor of axolotl's trainer.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import pydantic
from axolotl.integrations.base import BasePlugin

from lohan.errors import StoreError
from lohan.hf import _prefixed

if TYPE_CHECKING:
    from lohan.hf._trainer import TrainerCallback

# What axolotl calls the settings of lohan.wrap that belong to the arguments of a Trainer.
_OF_AXOLOTL = {
    "lr": "learning_rate",
    "learning_rate": "learning_rate",
    "betas": "adam_beta1 and adam_beta2",
    "eps": "adam_epsilon",
    "weight_decay": "weight_decay",
    "max_grad_norm": "max_grad_norm",
    "accumulate": "gradient_accumulation_steps",
    "gradient_accumulation_steps": "gradient_accumulation_steps",
    "loss_scaling": "fp16",
    "params": "weight_decay, embedding_lr or lr_groups",
    "optimizer": "optimizer",
    "resume": "resume_from_checkpoint or auto_resume_from_checkpoints",
    "resume_step": "resume_from_checkpoint",
}


class _Keys(pydantic.BaseModel):
    """The base of LohanArgs, which checks the keys of the whole configuration."""

    @pydantic.model_validator(mode="before")
    @classmethod
    def _check(cls, data: Any) -> Any:
        """Reject unknown keys, a missing store, and settings that lohan does not support.

        Raises:
            ModelError, UnsupportedError: the message names the key, and what to do instead.
        """
        if isinstance(data, dict):
            _prefixed.check_keys(data, _OF_AXOLOTL)
            _prefixed.checked(_callback(data))
        return data


_KEYS = (*_prefixed.keys(), *_prefixed.former_keys())
_FIELDS: dict[str, Any] = {key: (Any, None) for key in _KEYS}
LohanArgs = pydantic.create_model("LohanArgs", __base__=_Keys, __module__=__name__, **_FIELDS)
LohanArgs.__doc__ = "The keys that the plugin adds to axolotl's configuration."


class LohanPlugin(BasePlugin):  # type: ignore[misc]
    """Train with parameters and optimizer states on SSD, in the directories of `lohan_store`."""

    def get_input_args(self) -> str:
        """Return the name of the class with the plugin's keys."""
        return f"{__name__}.LohanArgs"

    def add_callbacks_pre_trainer(self, cfg: Any, model: Any) -> list[TrainerCallback]:
        """Return the callback, which axolotl passes to the constructor of its trainer."""
        return [_callback(cfg)] if _is_used(cfg) else []

    def post_trainer_create(self, cfg: Any, trainer: Any) -> None:
        """Replace the trainer's train(), for the folder to resume from and for messages."""
        if _is_used(cfg):
            finds = cfg.auto_resume_from_checkpoints and not cfg.resume_from_checkpoint
            trainer.train = functools.partial(_train, trainer.train, bool(finds))


def _is_used(cfg: Any) -> bool:
    """Return whether a configuration names the plugin; axolotl keeps those of earlier ones."""
    return f"{__name__}.LohanPlugin" in (cfg.plugins or ())


def _callback(cfg: Any) -> TrainerCallback:
    """Return the callback of a configuration, whose keys have been checked."""
    import lohan

    return lohan.TrainerCallback(**_prefixed.settings_of(cfg))


def _train(
    plain: Callable[..., Any], finds: bool, resume_from_checkpoint: Any = None, **kwargs: Any
) -> Any:
    """Call the trainer's train().

    Args:
        plain: the trainer's method, which lohan's callback has replaced.
        finds: whether axolotl looks for the folder. Its last folder may be incomplete; True lets
            the callback pass it over.
        resume_from_checkpoint: the folder that axolotl passes, or None.
        **kwargs: the other arguments of train().

    Raises:
        StoreError: with a note that names axolotl's keys.
    """
    if finds and resume_from_checkpoint is not None:
        resume_from_checkpoint = True
    try:
        return plain(resume_from_checkpoint=resume_from_checkpoint, **kwargs)
    except StoreError as error:
        error.add_note(
            "In axolotl's configuration, auto_resume_from_checkpoints: true resumes from the last"
            " complete checkpoint, and resume_from_checkpoint: FOLDER from the one that it names"
        )
        raise
