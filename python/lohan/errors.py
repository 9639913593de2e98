"""The errors of lohan: each says what is wrong, with the numbers, and the way out."""

from __future__ import annotations

import errno
import os
import re
from collections.abc import Callable, Sequence

# A whole number of a million or more in a message: neither the value of a keyword nor one that has
# its unit already. It may be grouped by commas.
_SIZE = re.compile(
    r"(?<![\w=.,/-])(\d{7,}+|\d{1,3}(?:,\d{3}){2,}+)( bytes)?+(?![\w/]|[.,]\d| \([\d.]+ [MGT]B\))"
)


def _with_unit(match: re.Match[str]) -> str:
    value = int(match[1].replace(",", ""))
    unit, name = next((u, n) for u, n in ((10**12, "T"), (10**9, "G"), (10**6, "M")) if value >= u)
    return f"{match[1]}{match[2] or ''} ({value / unit:.3g} {name}B)"


class LohanError(Exception):
    """Base of all errors that lohan raises."""


class ModelError(LohanError, TypeError):
    """The model cannot be wrapped: not a module, no parameters, an unsupported dtype or layout."""


class BudgetError(LohanError, MemoryError):
    """A budget of memory or disk is too small; the message says what would fit."""

    def __str__(self) -> str:
        """The message, with large numbers of bytes as people say them, too: "... (16.1 GB)"."""
        return _SIZE.sub(_with_unit, super().__str__())


class DeviceMemoryError(LohanError, MemoryError):
    """What an accelerator would have to hold is more than it has, or may have."""


class DeviceMismatchError(LohanError, RuntimeError):
    """A batch is on another device than the one that the model computes on."""


class MachineError(LohanError, ValueError):
    """A machine, a model or a batch to be simulated is not one; the message names what is wrong."""


class TraceError(LohanError, ValueError):
    """A file is no timeline of lohan's."""


class StoreError(LohanError, OSError):
    """A store cannot be made, opened, read or written."""

    def __str__(self) -> str:
        """The message; `errno` has the number, which OSError would put before it."""
        return self.strerror if self.strerror is not None else super().__str__()


class StoreExistsError(StoreError):
    """There is a store already, and `resume=True` was not given."""


class StoreLockedError(StoreError):
    """Another process has the store open."""


class StoreMismatchError(StoreError):
    """The store is of another model."""


class StaleStateError(StoreMismatchError):
    """A state dict is of another step than the one that the store was resumed at."""


class StoreVersionError(StoreError):
    """The store was written by a newer lohan."""


class StoreUncleanError(StoreError):
    """A store with one slot was not closed, so its bytes are of no known step."""


class ChecksumError(StoreError):
    """Bytes read from a store are not those that were written."""


class StepError(LohanError, RuntimeError):
    """A training step was used in an order that lohan cannot make exact."""


class SecondBackwardError(StepError):
    """A backward that the open step has no place for, or a forward before `optimizer.step()`."""


class ZeroGradError(StepError):
    """`zero_grad()` after updates of this step have begun."""


class HyperParameterError(StepError):
    """Hyper-parameters changed between backward and `optimizer.step()`."""


class OffloadedGradientError(StepError):
    """Something (clipping, a scaler) reads a gradient that has left for the optimizer."""


class StaleGraphError(StepError):
    """A backward through a graph from before `optimizer.step()`."""


class HollowParameterError(StepError):
    """A parameter was read while it was not in memory."""


class FrozenParameterError(StepError):
    """A parameter that was frozen at wrap requires a gradient now."""


class GradientError(StepError):
    """A gradient of a kind that the optimizer does not take (sparse, float64, ...)."""


class RecomputeError(StepError):
    """A block that is computed again in backward is not what it was in its forward."""


class LentError(StepError):
    """Parameters are still referenced by tensors that were kept from a forward or backward."""


class ThreadError(StepError):
    """Two threads use one wrapped model at the same time."""


class UnsupportedError(LohanError, NotImplementedError):
    """A feature that lohan refuses by name instead of doing it wrong."""


class SessionError(LohanError, RuntimeError):
    """The session is closed or has failed."""


_BY_CODE: dict[int, type[LohanError]] = {
    errno.EEXIST: StoreExistsError,
    errno.EBUSY: StoreLockedError,
    errno.EPROTO: StoreVersionError,
    errno.EUCLEAN: StoreUncleanError,
    errno.EINPROGRESS: StoreUncleanError,  # its creation was interrupted
    errno.EILSEQ: ChecksumError,
    errno.EBADMSG: StoreMismatchError,
    errno.ECANCELED: SessionError,
}

# What the engine, disks and memory say. ENOSPC here is a budget's: see _is_disk_full.
_ENGINE_BY_CODE: dict[int, type[LohanError]] = {
    errno.ENOSPC: BudgetError,
    errno.ENOMEM: BudgetError,
    errno.ECANCELED: SessionError,
    errno.ENOTRECOVERABLE: SessionError,
    errno.EILSEQ: ChecksumError,
    errno.EBADMSG: StoreMismatchError,
    errno.ESTALE: StaleGraphError,
}

# The rules of a training step that the binding watches: a code is the name of one.
_RULE_BY_CODE: dict[int, type[LohanError]] = {
    errno.EALREADY: SecondBackwardError,
    errno.EINVAL: OffloadedGradientError,
    errno.ESTALE: StaleGraphError,
    errno.ENXIO: HollowParameterError,
    errno.EPERM: FrozenParameterError,
    errno.EOPNOTSUPP: GradientError,
    errno.EBUSY: LentError,
    errno.ECANCELED: SessionError,
}

_RULE_HINTS: dict[int, str] = {
    errno.ENXIO: "call the module that owns it, or pass blocks= so that it is resident there",
    errno.ESTALE: "run the forward again after step() (in a GAN's loop the discriminator's)",
}

_HINTS: dict[int, str] = {
    errno.EEXIST: "pass resume=True to resume it",
    errno.ENOENT: "name the directories that store= had, or leave out resume=True to make a store",
    errno.EMEDIUMTYPE: "or pass allow_tmpfs=True, for tests",
    errno.EUCLEAN: 'start again from the weights; commit_every="never" keeps no committed step',
}


def _make(
    table: dict[int, type[LohanError]], hints: dict[int, str], code: int, message: str
) -> LohanError:
    cls = table.get(-code, StoreError)
    hint = hints.get(-code)
    # The core knows of no keywords: where it names the way out, that is said once.
    message = message.replace(
        "; resume it, or choose", "; pass resume=True to resume it, or choose"
    )
    text = f"{message}: {hint}" if hint and hint not in message else message
    if issubclass(cls, OSError):
        return cls(-code, text)
    return cls(text)


def store_error(code: int, message: str, is_rule: bool = False) -> LohanError:
    """The exception for -errno and a message of the store.

    Args:
        code: -errno.
        message: what the core says, with the numbers.
        is_rule: it is the binding that says so.

    Returns:
        The exception, not raised.
    """
    if -code == errno.EBUSY:
        message = message.replace(
            f"is in use by process {os.getpid()}; end it",
            "is in use by this process: model.lohan.close() of the model that has it",
        )
    # A directory that cannot be made is no question of what is in it.
    is_made = "cannot make directory" in message
    return _make(_BY_CODE, {} if is_made else _HINTS, code, message)


def reader_error(code: int, message: str, is_rule: bool = False) -> LohanError:
    """As store_error, for who only reads a store: there is no resume=True to be left out.

    Args:
        code: -errno.
        message: what the core says, with the numbers.
        is_rule: it is the binding that says so.
    """
    if code == -errno.ENOENT:
        return StoreError(errno.ENOENT, f"{message}: name the directories that store= had")
    return store_error(code, message, is_rule)


def _is_disk_full(code: int, message: str) -> bool:
    """A file system refused a write or a sync, and the message quotes it; no budget's does."""
    return code == -errno.ENOSPC and os.strerror(errno.ENOSPC) in message


def engine_raiser(
    unit_names: Sequence[str], param_names: Sequence[str]
) -> Callable[[int, str, bool], LohanError]:
    """Make the function that turns the engine's errors into exceptions, numbers into names.

    Args:
        unit_names: the name of each unit.
        param_names: the name of each parameter.

    Returns:
        A function of (-errno, message, is_rule) that returns the exception; is_rule: a rule of the
        training step is broken, and errno is its name.
    """

    def named(match: re.Match[str]) -> str:
        names = unit_names if match[1] == "unit" else param_names
        index = int(match[2])
        label = "block" if match[1] == "unit" else "parameter"
        return f"{label} {names[index]!r}" if index < len(names) else match[0]

    def raiser(code: int, message: str, is_rule: bool) -> LohanError:
        text = re.sub(r"\b(unit|param) (\d+)\b", named, message)
        if is_rule:
            return _make(_RULE_BY_CODE, _RULE_HINTS, code, text)
        if _is_disk_full(code, text):
            return _make({}, {errno.ENOSPC: "free space there, then resume the store"}, code, text)
        stale = {errno.ESTALE: _RULE_HINTS[errno.ESTALE]}
        return _make(_ENGINE_BY_CODE, stale, code, text)

    return raiser
