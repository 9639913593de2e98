"""lohan: fine-tune models larger than memory, with their states on SSD.

`model = lohan.wrap(model)` is all that a training script needs; see `lohan.wrap`.
"""

import importlib
import sys
import types
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lohan import config as config
    from lohan import errors, losses
    from lohan.common._build import build_info
    from lohan.common._decay import no_decay
    from lohan.common._keywords import (
        IO,
        SGD,
        Adafactor,
        Adagrad,
        Debug,
        MeZO,
        Muon,
        Parallel,
        RMSprop,
        Settings,
    )
    from lohan.common._stats import ReplicaStats, StepStats, Traffic
    from lohan.common._version import __version__
    from lohan.config import Config as Config
    from lohan.errors import LohanError, WearBudgetError
    from lohan.frozen._reference import reference
    from lohan.hf._merge import Merged, merge
    from lohan.hf._trainer import Trainer as Trainer
    from lohan.hf._trainer import TrainerCallback as TrainerCallback
    from lohan.hf._trainer import TrainerMixin as TrainerMixin
    from lohan.hf._trainer_copies import TrainerCopies as TrainerCopies
    from lohan.layout._origins import Origin
    from lohan.replicas._reshard import Resharded, reshard
    from lohan.session._average import ema
    from lohan.session._block_swap import block_swap
    from lohan.session._optim import Optimizer
    from lohan.session._session import Session
    from lohan.store._convert import Converted, convert
    from lohan.store._export import export
    from lohan.store._snapshot import Snapshot, snapshot
    from lohan.store._verify import Verified, verify
    from lohan.store._weights import empty
    from lohan.wrap import unwrap, wrap

# Where each public name is. A module is imported when one of its names is first used, so that
# `lohan --help` does not import torch.
_MODULES = {
    "common._build": ("build_info",),
    "common._decay": ("no_decay",),
    "common._keywords": (
        "IO",
        "SGD",
        "Adafactor",
        "Adagrad",
        "Debug",
        "MeZO",
        "Muon",
        "Parallel",
        "RMSprop",
        "Settings",
    ),
    "common._stats": ("ReplicaStats", "StepStats", "Traffic"),
    "common._version": ("__version__",),
    "config": ("Config",),
    "errors": ("LohanError", "WearBudgetError"),
    "frozen._reference": ("reference",),
    "hf._merge": ("Merged", "merge"),
    "hf._trainer": ("Trainer", "TrainerCallback", "TrainerMixin"),
    "hf._trainer_copies": ("TrainerCopies",),
    "layout._origins": ("Origin",),
    "replicas._reshard": ("Resharded", "reshard"),
    "session._average": ("ema",),
    "session._block_swap": ("block_swap",),
    "session._optim": ("Optimizer",),
    "session._session": ("Session",),
    "store._convert": ("Converted", "convert"),
    "store._export": ("export",),
    "store._snapshot": ("Snapshot", "snapshot"),
    "store._verify": ("Verified", "verify"),
    "store._weights": ("empty",),
    "wrap": ("unwrap", "wrap"),
}
_PLACES = {name: module for module, names in _MODULES.items() for name in names}
_PUBLIC_MODULES = ("config", "errors", "losses")
# These names are also public, but not in __all__: a star import must not need transformers.
_OF_TRAINER = ("Trainer", "TrainerCallback", "TrainerCopies", "TrainerMixin")

__all__ = [
    "IO",
    "SGD",
    "Adafactor",
    "Adagrad",
    "Converted",
    "Debug",
    "LohanError",
    "MeZO",
    "Merged",
    "Muon",
    "Optimizer",
    "Origin",
    "Parallel",
    "RMSprop",
    "ReplicaStats",
    "Resharded",
    "Session",
    "Settings",
    "Snapshot",
    "StepStats",
    "Traffic",
    "Verified",
    "WearBudgetError",
    "__version__",
    "block_swap",
    "build_info",
    "convert",
    "ema",
    "empty",
    "errors",
    "export",
    "losses",
    "merge",
    "no_decay",
    "reference",
    "reshard",
    "snapshot",
    "unwrap",
    "verify",
    "wrap",
]


def __getattr__(name: str) -> Any:
    """Import a public name when it is first used."""
    if name in _PUBLIC_MODULES:
        return importlib.import_module(f"lohan.{name}")
    if name not in _PLACES:
        raise AttributeError(f"module 'lohan' has no attribute {name!r}")
    try:
        value = getattr(importlib.import_module(f"lohan.{_PLACES[name]}"), name)
    except ImportError as error:
        if name in _OF_TRAINER:
            error.add_note(
                f"lohan.{name} needs transformers and accelerate: pip install 'lohan[hf]'"
            )
        raise
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__, *_OF_TRAINER})


class _Package(types.ModuleType):
    """The package: importing the module `lohan.wrap` does not replace the function `lohan.wrap`."""

    def __setattr__(self, name: str, value: Any) -> None:
        """Set an attribute, unless the import system sets a module in place of a public name."""
        if not (name in _PLACES and isinstance(value, types.ModuleType)):
            super().__setattr__(name, value)


sys.modules[__name__].__class__ = _Package
