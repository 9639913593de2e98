"""Settings of lohan.TrainerCallback as keys of a configuration file: `lohan_store` and others.

The plugin for axolotl reads them from its YAML. A key is the name of a setting with the prefix
"lohan_". The values are checked by lohan.TrainerCallback and lohan.wrap, as keywords are.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from lohan.common._keywords import GROUPS, Settings, new_names
from lohan.errors import ModelError, UnsupportedError
from lohan.hf._trainer_args import SAID_BY_ARGS
from lohan.opening import _request
from lohan.opening._combination import Facts

if TYPE_CHECKING:
    from lohan.hf._trainer import TrainerCallback

PREFIX = "lohan_"

# Settings of lohan.TrainerCallback that are neither fields of Config nor Python objects.
_OTHERS = ("weights", "moments", "experts", "idle", "method", "eps")

# Keys with which a configuration places the model or the optimizer's states itself.
_PLACING = ("deepspeed", "fsdp", "fsdp_config")


def keys() -> list[str]:
    """Return the keys that a configuration file may have, lohan_store first."""
    names = ["store", *Settings.__annotations__, *_OTHERS]
    said = set(SAID_BY_ARGS) - set(_OTHERS)
    return [PREFIX + name for name in names if name not in said]


def former_keys() -> list[str]:
    """Return the keys that a configuration file may still have, and whose use is warned of."""
    names = new_names().keys() - set(SAID_BY_ARGS) - {"groups", *Settings.__annotations__}
    return sorted(PREFIX + name for name in names)


def check_keys(found: Mapping[str, Any], of_args: Mapping[str, str]) -> None:
    """Reject a configuration with an unknown key, without a store, or with a rival of lohan.

    Args:
        found: the configuration's keys and values.
        of_args: the configuration's own names of the settings that a Trainer's arguments have.

    Raises:
        ModelError: a key is unknown or missing; the message names the key that is meant.
        UnsupportedError: the configuration also uses DeepSpeed or FSDP.
    """
    known, former = keys(), former_keys()
    for key in found:
        if not key.lower().startswith("lohan") or key in known or key in former:
            continue
        name = key.removeprefix(PREFIX)
        if name in of_args:
            raise ModelError(
                f"{key} is not a setting of lohan's plugin: set {of_args[name]} instead"
            )
        near = difflib.get_close_matches(key, known, n=1)
        way_out = f"did you mean {near[0]}?" if near else f"valid keys are {', '.join(known)}"
        raise ModelError(f"{key} is not a setting of lohan's plugin: {way_out}")
    if not found.get(PREFIX + "store"):
        raise ModelError(
            f"{PREFIX}store is missing: name a directory on an SSD for the parameters and optimizer"
            f" states, or a list of one per SSD, such as {PREFIX}store: /nvme0/run"
        )
    for key in _PLACING:
        if found.get(key):
            raise UnsupportedError(
                f"{key} places parameters and optimizer states itself, as lohan does: remove either"
                f" {key} or lohan's plugin from the configuration"
            )


def settings_of(found: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments of lohan.TrainerCallback that a configuration sets."""
    made: dict[str, Any] = {}
    for key in (*keys(), *former_keys()):
        value = found.get(key)
        if value is None:
            continue
        name = key.removeprefix(PREFIX)
        group: Any = GROUPS.get(name)
        if group is not None and isinstance(value, Mapping):  # lohan_io: {depth: 32}
            value = group(**value)
        made[name] = value
    return made


def checked(callback: TrainerCallback) -> TrainerCallback:
    """Return a callback after checking the values of its settings, before any model is loaded.

    Raises:
        ModelError: a value is invalid; the message says which values are valid.
    """
    _request.check(Facts(callback._config, processes=None))
    return callback
