"""lohan: fine-tune models larger than memory, with their states on SSD.

`model = lohan.wrap(model)` is all that a training script needs; see `lohan.wrap`.
"""

import importlib
from typing import TYPE_CHECKING, Any

from lohan import errors, losses
from lohan.common._build import build_info
from lohan.common._stats import ReplicaStats, StepStats, Traffic
from lohan.common._version import __version__
from lohan.config import Config
from lohan.errors import LohanError, WearBudgetError
from lohan.frozen._reference import reference
from lohan.replicas._reshard import Resharded, reshard
from lohan.session._block_swap import block_swap
from lohan.session._optim import Optimizer
from lohan.session._session import Session
from lohan.store._convert import Converted, convert
from lohan.store._export import export
from lohan.store._snapshot import Snapshot, snapshot
from lohan.store._verify import Verified, verify
from lohan.store._weights import empty
from lohan.wrap import unwrap, wrap

if TYPE_CHECKING:
    from lohan.hf._trainer import Trainer as Trainer
    from lohan.hf._trainer import TrainerCallback as TrainerCallback
    from lohan.hf._trainer import TrainerMixin as TrainerMixin

# These names are also public, but not in __all__: a star import must not need transformers.
_OF_TRAINER = ("Trainer", "TrainerCallback", "TrainerMixin")

__all__ = [
    "Config",
    "Converted",
    "LohanError",
    "Optimizer",
    "ReplicaStats",
    "Resharded",
    "Session",
    "Snapshot",
    "StepStats",
    "Traffic",
    "Verified",
    "WearBudgetError",
    "__version__",
    "block_swap",
    "build_info",
    "convert",
    "empty",
    "errors",
    "export",
    "losses",
    "reference",
    "reshard",
    "snapshot",
    "unwrap",
    "verify",
    "wrap",
]


def __getattr__(name: str) -> Any:
    """Import the names that need transformers when they are first used."""
    if name not in _OF_TRAINER:
        raise AttributeError(f"module 'lohan' has no attribute {name!r}")
    try:
        return getattr(importlib.import_module("lohan.hf._trainer"), name)
    except ImportError as error:
        error.add_note(f"lohan.{name} needs transformers and accelerate: pip install 'lohan[hf]'")
        raise


def __dir__() -> list[str]:
    return sorted([*globals(), *_OF_TRAINER])
