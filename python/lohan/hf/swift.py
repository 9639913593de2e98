"""The callback "lohan" of ms-swift, for a file that its `external_plugins` names.

Such a file has two lines: `import lohan.hf.swift` and
`lohan.hf.swift.register(store="/nvme0/run")`. With `callbacks: [lohan]`, ms-swift's trainers then
train with lohan (docs/frameworks.md). Only such files import this module.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from swift.callbacks import callbacks_map

from lohan.errors import ModelError
from lohan.hf import _prefixed

if TYPE_CHECKING:
    from lohan.wrap import PathLike

NAME = "lohan"


def register(
    store: PathLike | list[PathLike] | tuple[PathLike, ...] | None = None, **settings: Any
) -> None:
    """Add lohan to the callbacks that ms-swift finds by name.

    Args:
        store: a directory on an SSD, or a list with one directory per SSD.
        **settings: the other settings of lohan.TrainerCallback (host_bytes=, activations=, ...).

    Raises:
        ModelError: the store is missing, or a setting is unknown or belongs among ms-swift's
            arguments.
    """
    import lohan

    if not store:
        raise ModelError(
            "lohan.hf.swift.register() needs store=: name a directory on an SSD for the parameters"
            ' and optimizer states, or a list of one per SSD, such as register(store="/nvme0/run")'
        )
    _prefixed.checked(lohan.TrainerCallback(store, **settings))
    callbacks_map[NAME] = lambda args, trainer: lohan.TrainerCallback(store, **settings)
