"""lohan: fine-tune models larger than memory, with their states on SSD.

`model = lohan.wrap(model)` is all that a training script needs; see `lohan.wrap`.
"""

from lohan import errors
from lohan._build import build_info
from lohan._export import export
from lohan._optim import Optimizer
from lohan._session import Session
from lohan._snapshot import Snapshot, snapshot
from lohan._stats import StepStats
from lohan._verify import Verified, verify
from lohan._weights import empty
from lohan.config import Config
from lohan.errors import LohanError
from lohan.wrap import unwrap, wrap

__version__ = "0.1.0"

__all__ = [
    "Config",
    "LohanError",
    "Optimizer",
    "Session",
    "Snapshot",
    "StepStats",
    "Verified",
    "__version__",
    "build_info",
    "empty",
    "errors",
    "export",
    "snapshot",
    "unwrap",
    "verify",
    "wrap",
]
