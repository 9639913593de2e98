"""Arguments that several calls take: paths, the directories of a store, and a step to resume."""

from __future__ import annotations

import errno
import functools
import os
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

import torch

from lohan.errors import ModelError, StoreError

P = ParamSpec("P")
R = TypeVar("R")

_PATH_BYTES_MAX = 4084  # the kernel's limit, less the name of the store's file


def keywords_only(call: Callable[P, R]) -> Callable[P, R]:
    """Make call(model, optimizer), as in other libraries, fail and say what to write instead."""

    @functools.wraps(call)
    def checked(*args: P.args, **kwargs: P.kwargs) -> R:
        if len(args) > 1:
            given = args[1]
            if isinstance(given, torch.optim.Optimizer):
                meant = "lohan.wrap(model, optimizer=optimizer)"
            elif isinstance(given, str | os.PathLike):
                meant = f"lohan.wrap(model, store={os.fspath(given)!r})"
            else:
                meant = "lohan.wrap(model, NAME=VALUE)"
            raise ModelError(
                f"lohan.wrap takes only the model as a positional argument, but also got"
                f" {type(given).__name__}: write {meant}"
            )
        return call(*args, **kwargs)

    return checked


def path_of(name: str, value: Any) -> str:
    """Return a path argument as a string.

    Args:
        name: the argument's name, for the message.
        value: the argument.

    Raises:
        ModelError: the value is not a path, or cannot be the name of a file.
    """
    path = os.fspath(value) if isinstance(value, os.PathLike) else value
    if not isinstance(path, str):
        raise ModelError(f"{name} {value!r} must be a path: a str or a pathlib.Path")
    try:
        is_name = bool(path) and "\0" not in path and bool(os.fsencode(path))
    except UnicodeEncodeError:
        is_name = False
    if not is_name:
        raise ModelError(f"{name} {value!r} is not a valid file name: pass the path of a folder")
    return path


def directories_of(store: Any) -> list[str]:
    """Return the absolute paths of a store's directories.

    Args:
        store: a path, or a list or tuple of paths, one per disk.

    Raises:
        ModelError: store is something else, or a name that a directory cannot have.
        StoreError: a path is longer than any that the kernel opens, or is relative to a working
            directory that was deleted.
    """
    if isinstance(store, str | os.PathLike):
        return [_absolute("store=", store)]
    if not isinstance(store, Sequence) or isinstance(store, bytes | bytearray):
        raise ModelError(f"store= {store!r} must be a path, or a list of paths, one per disk")
    if not store:
        raise ModelError("store=[] names no directory: pass a path, or a list of paths")
    return [_absolute("an item of store=", one) for one in store]


def _absolute(name: str, value: Any) -> str:
    """Return the absolute path of a directory; see directories_of()."""
    try:
        path = str(Path(path_of(name, value)).expanduser().absolute())
    except FileNotFoundError as error:
        raise StoreError(
            errno.ENOENT,
            f"{name} {value!r} is relative to the working directory, which was deleted: change to"
            " another directory, or pass an absolute path",
        ) from error
    if len(os.fsencode(path)) > _PATH_BYTES_MAX:
        raise StoreError(
            errno.ENAMETOOLONG,
            f"{name} names a directory of {len(os.fsencode(path)):,} bytes; the maximum is"
            f" {_PATH_BYTES_MAX:,}: pass a shorter path",
        )
    return path


def resume_of(resume: Any) -> tuple[bool, int | None]:
    """Parse the resume= argument of wrap().

    Args:
        resume: a bool or None; the number of a step, from 2 up; or "step N", for any step N.

    Returns:
        Whether to resume, and at which step (None: the last).

    Raises:
        ModelError: resume is something else, or 0 or 1, which may also mean False or True.
    """
    if resume is None or isinstance(resume, bool):
        return bool(resume), None
    said = re.fullmatch(r"step ([0-9]{1,19})", resume) if isinstance(resume, str) else None
    step = int(said[1]) if said else resume
    if not isinstance(step, int) or not 0 <= step < 1 << 63:
        raise ModelError(
            f"resume= {resume!r} must be True or False; store= names the store to resume, and"
            " resume_step= the number of the step to go back to"
        )
    if step < 2 and said is None:
        raise ModelError(
            f"resume={step} may mean {bool(step)} or step {step}: pass resume={bool(step)}, or"
            f" resume_step={step} to go back to step {step} permanently"
        )
    return True, step
