"""profile.json beside a store: profiles by model and machine, then by shape of the batch."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import stat
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

_FILE_BYTES_MAX = 256 << 20


def load(path: str) -> dict[str, Any]:
    """Return the profiles of a file by model and machine; an empty dict if the file is invalid.

    The file is a cache: steps are profiled again if their profiles are missing or invalid.
    """
    try:
        flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
        with os.fdopen(os.open(path, flags), encoding="utf-8") as file:
            found = os.fstat(file.fileno())
            if not stat.S_ISREG(found.st_mode) or found.st_size > _FILE_BYTES_MAX:
                return {}
            read = json.load(file)
    except (OSError, ValueError, RecursionError):
        return {}
    return read if isinstance(read, dict) else {}


def save(path: str, profiles: dict[str, Any]) -> None:
    """Replace the file. If that fails, leave it unchanged: the next run then profiles again."""
    temporary = f"{path}.{os.getpid()}.new"
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    with contextlib.suppress(OSError):
        with contextlib.suppress(FileNotFoundError):
            os.unlink(temporary)  # a process that had the same id may have left it
        try:
            with os.fdopen(os.open(temporary, flags, 0o600), "w", encoding="utf-8") as file:
                json.dump(profiles, file)
            os.replace(temporary, path)
        except BaseException:
            os.unlink(temporary)
            raise


def key_of(module: nn.Module, args: Any, kwargs: Any) -> str:
    """Return a text of what a plan depends on: mode, shapes, dtypes, needed gradients, autocast."""
    found = ["train" if module.training else "eval"]

    def look(value: Any) -> None:
        if isinstance(value, torch.Tensor):
            sizes = "x".join(map(str, value.shape))
            found.append(f"{value.dtype}[{sizes}]{'g' if value.requires_grad else ''}")
        elif isinstance(value, Mapping):
            for name, item in value.items():
                found.append(f"{name}=")
                look(item)
        elif isinstance(value, list | tuple):
            for item in value:
                look(item)
        elif dataclasses.is_dataclass(value) and not isinstance(value, type):
            for field in dataclasses.fields(value):  # a class with slots has no vars()
                look(getattr(value, field.name, None))
        elif value is None or isinstance(value, bool | int | str):
            found.append(str(value))

    look((args, kwargs))
    for kind in ("cpu", "cuda"):
        if torch.is_autocast_enabled(kind):
            found.append(f"{kind} autocast {torch.get_autocast_dtype(kind)}")
    return " ".join(found)
