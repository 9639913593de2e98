"""The errors of lohan. Each message says what is wrong, with the numbers, and what to do."""

from __future__ import annotations

import errno
import os
import re
from collections.abc import Callable, Sequence

# Whole numbers in a message, possibly grouped by commas: 10,000 bytes or more, and without the word
# "bytes" a million or more. Values of keywords and numbers that already have a unit do not match.
_BEFORE = r"(?<![\w=.,/-])"
_AFTER = r"(?![\w/]|[.,]\d| \([\d.]+ [kMGT]B\))"
_MILLIONS = r"\d{7,}+|\d{1,3}(?:,\d{3}){2,}+"
_BYTES = rf"(?:{_MILLIONS}|\d{{5,6}}|\d{{2,3}},\d{{3}}) bytes"
_SIZE_OF_BYTES = re.compile(f"{_BEFORE}({_BYTES}){_AFTER}")
_SIZE = re.compile(f"{_BEFORE}({_BYTES}|(?:{_MILLIONS})(?! bytes)){_AFTER}")
_ERRNO = re.compile(r"\[Errno -?\d+\] ")  # how the message of an OSError begins


def _with_unit(match: re.Match[str]) -> str:
    value = int(match[1].removesuffix(" bytes").replace(",", ""))
    units = ((10**12, "T"), (10**9, "G"), (10**6, "M"), (10**3, "k"))
    unit, name = next((u, n) for u, n in units if value >= u)
    return f"{match[1]} ({value / unit:.3g} {name}B)"


class LohanError(Exception):
    """Base class of all errors that lohan raises."""

    _sizes = _SIZE_OF_BYTES

    def __str__(self) -> str:
        """Return the message, with a readable size after large ones: "... bytes (16.1 GB)"."""
        return self._readable(super().__str__())

    def _readable(self, text: str) -> str:
        return self._sizes.sub(_with_unit, _ERRNO.sub("", text))


class ModelError(LohanError, TypeError):
    """A model or an argument is invalid: no parameters, an unsupported dtype, a wrong value, ..."""


class TargetError(LohanError, IndexError):
    """A target of a loss is not an entry of the vocabulary."""


class BudgetError(LohanError, MemoryError):
    """A memory or disk budget is too small; the message says what would be enough."""

    _sizes = _SIZE


class WearBudgetError(LohanError, RuntimeError):
    """A further step would write more to the store's drives than `io.wear_budget` allows."""


class DeviceMemoryError(LohanError, MemoryError):
    """An accelerator would need more memory than it has, or than it may use."""

    _sizes = _SIZE


class DeviceMismatchError(LohanError, RuntimeError):
    """A batch is on a different device than the model's computation."""


class MachineError(LohanError, ValueError):
    """A machine, model or batch to simulate is invalid; the message names what is wrong."""


class TraceError(LohanError, ValueError):
    """A file is not a timeline written by lohan."""


class StoreError(LohanError, OSError):
    """A store cannot be created, opened, read or written."""

    def __str__(self) -> str:
        """Return the message without the error number, which is in `errno`."""
        return super().__str__() if self.strerror is None else self._readable(self.strerror)


class StoreExistsError(StoreError):
    """A place to write to already contains a store, or files that must not be replaced."""


class StoreLockedError(StoreError):
    """Another process has the store open."""


class StoreMismatchError(StoreError):
    """A store does not fit the model or the session, or its description is invalid."""


class StaleStateError(StoreMismatchError):
    """A state dict was saved at a different step than the one the store was resumed at."""


class StoreVersionError(StoreError):
    """The store was written by a newer version of lohan."""


class StoreUncleanError(StoreError):
    """The writing of a store was interrupted, so its contents match no known step."""


class StoreDeletedError(StoreError):
    """A file of the store was deleted while a session or a program had it open."""


class ChecksumError(StoreError):
    """Bytes read from a store differ from those that were written."""


class StepError(LohanError, RuntimeError):
    """The calls of a training step came in an order for which lohan cannot compute exactly."""


class SecondBackwardError(StepError):
    """The open step allows no further backward, or a forward ran before `optimizer.step()`."""


class ZeroGradError(StepError):
    """`zero_grad()` was called after updates of this step had begun."""


class HyperParameterError(StepError):
    """A hyper-parameter is invalid, or changed between backward and `optimizer.step()`."""


class OffloadedGradientError(StepError):
    """Code outside lohan (clipping, a scaler) used or replaced a gradient that lohan manages."""


class StaleGraphError(StepError):
    """A backward pass used a graph that was built before `optimizer.step()`."""


class HollowParameterError(StepError):
    """A parameter was read while it was not in memory."""


class FrozenParameterError(StepError):
    """A parameter that was frozen when the model was wrapped now requires a gradient."""


class NonFiniteError(StepError, FloatingPointError):
    """A gradient is NaN or infinite; the store stays at its last commit."""


class GradientError(StepError):
    """A gradient is of a kind that the optimizer does not support (sparse, float64, ...)."""


class RecomputeError(StepError):
    """A block that was recomputed in backward does not match its forward."""


class LentError(StepError):
    """Tensors kept from a forward or backward still reference parameters."""


class ThreadError(StepError):
    """Two threads used one wrapped model at the same time."""


class UnsupportedError(LohanError, NotImplementedError):
    """A feature is not supported; lohan rejects it by name rather than compute wrong results."""


def needs(what: str, library: str, package: str) -> UnsupportedError:
    """Return the error for what needs a library that is not installed, with the way to get it."""
    return UnsupportedError(f"{what} needs {library}: pip install {package}")


def lacks(what: str, part: str, way_out: str = "use another build of torch") -> UnsupportedError:
    """Return the error for what needs a part of torch that this build of torch does not have."""
    return UnsupportedError(f"{what} needs {part}, which this build of torch lacks: {way_out}")


class WorldMismatchError(LohanError, RuntimeError):
    """The processes of a run differ in a setting, the model, or the order of their calls."""


class PeerLostError(LohanError, RuntimeError):
    """Another process of the run died, was stopped, or cannot be reached."""


class PeerStepError(StepError):
    """Another process of the run left a step with an error, or closed its session."""


class NetworkError(LohanError, RuntimeError):
    """Bytes that came from another process of the run are wrong."""


class SessionError(LohanError, RuntimeError):
    """The session is closed or has failed, or a copy of its store is in progress or cancelled."""


_BY_CODE: dict[int, type[LohanError]] = {
    errno.EEXIST: StoreExistsError,
    errno.EBUSY: StoreLockedError,
    errno.EPROTO: StoreVersionError,
    errno.EUCLEAN: StoreUncleanError,
    errno.EINPROGRESS: StoreUncleanError,  # its creation was interrupted
    errno.EIDRM: StoreDeletedError,
    errno.EILSEQ: ChecksumError,
    errno.EBADMSG: StoreMismatchError,
    errno.ECANCELED: SessionError,
}

# Errors of the engine, disks and memory. ENOSPC means a budget here; see _is_disk_full.
_ENGINE_BY_CODE: dict[int, type[LohanError]] = {
    errno.ENOSPC: BudgetError,
    errno.ENOMEM: BudgetError,
    errno.ECANCELED: SessionError,
    errno.ENOTRECOVERABLE: SessionError,
    errno.EIDRM: StoreDeletedError,
    errno.EILSEQ: ChecksumError,
    errno.EBADMSG: StoreMismatchError,
    errno.ESTALE: StaleGraphError,
    errno.EDOM: NonFiniteError,
    errno.ENOMSG: GradientError,
}

# The rules of a training step that the binding checks: each code identifies one rule.
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

_ENGINE_HINTS: dict[int, str] = {
    errno.ESTALE: _RULE_HINTS[errno.ESTALE],
    errno.EDOM: "the store is at its last commit, without this step: wrap again with resume=True"
    " and other batches, a lower learning rate or max_grad_norm=. on_nan='accept' trains on, as"
    " torch does; on_nan='skip' leaves such steps out",
    errno.ENOMSG: "the store is at its last commit, without this step: wrap again with resume=True"
    " and use the parameter in every step (loss + 0 * output of its module), or train without ema=",
}

_HINTS: dict[int, str] = {
    errno.EEXIST: "pass resume=True to resume it",
    errno.ENOENT: "pass the directories that store= had, or omit resume=True to create a store",
    errno.EXDEV: "pass exactly the directories that the store was created with",
    errno.EMEDIUMTYPE: "or pass io=lohan.IO(allow_tmpfs=True), for tests",
    errno.EUCLEAN: "start again from the weights: a store with a single slot keeps no step",
}


def _make(
    table: dict[int, type[LohanError]], hints: dict[int, str], code: int, message: str
) -> LohanError:
    cls = table.get(-code, StoreError)
    hint = hints.get(-code)
    # The core does not know Python's keywords: where it already suggests resuming, name the
    # keyword there instead of repeating it as a hint.
    message = message.replace(
        "; resume it, or choose", "; pass resume=True to resume it, or choose"
    )
    message = re.sub(r"\bresume=(\d+)(?= goes back)", r"resume_step=\1", message)
    text = f"{message}: {hint}" if hint and hint not in message else message
    if issubclass(cls, OSError):
        return cls(-code, text)
    return cls(text)


def store_error(code: int, message: str, is_rule: bool = False) -> LohanError:
    """Make the exception for an error of a store.

    Args:
        code: -errno.
        message: the core's message, with the numbers.
        is_rule: whether the error comes from the binding.

    Returns:
        The exception, which the caller raises.
    """
    if -code == errno.EBUSY:
        message = message.replace(
            f"is in use by process {os.getpid()}; end it",
            "is in use by this process: model.lohan.close() of the model that has it",
        )
    # The hints concern a store's contents; they do not apply if its directory cannot be created.
    is_made = "cannot make directory" in message
    return _make(_BY_CODE, {} if is_made else _HINTS, code, message)


def reader_error(code: int, message: str, is_rule: bool = False) -> LohanError:
    """Make the same exception as store_error(), without hints that only apply to wrap().

    Args:
        code: -errno.
        message: the core's message, with the numbers.
        is_rule: whether the error comes from the binding.
    """
    if code == -errno.ENOENT:
        return StoreError(errno.ENOENT, f"{message}: pass the directories that store= had")
    return store_error(code, message, is_rule)


def _is_disk_full(code: int, message: str) -> bool:
    """Return whether a disk is full, rather than a budget too small.

    Only the message of a full disk contains the system's text for ENOSPC.
    """
    return code == -errno.ENOSPC and os.strerror(errno.ENOSPC) in message


def engine_raiser(
    unit_names: Sequence[str], param_names: Sequence[str], made: set[type[LohanError]]
) -> Callable[[int, str, bool], LohanError]:
    """Make a function that converts the engine's errors to exceptions, and numbers to names.

    Args:
        unit_names: the name of each unit.
        param_names: the name of each parameter.
        made: gets the class of each exception that the function makes.

    Returns:
        A function of (-errno, message, is_rule) that returns the exception. If is_rule is true,
        the program broke a rule of the training step, and errno identifies the rule.
    """

    def named(match: re.Match[str]) -> str:
        names = unit_names if match[1] == "unit" else param_names
        index = int(match[2])
        label = "block" if match[1] == "unit" else "parameter"
        return f"{label} {names[index]!r}" if index < len(names) else match[0]

    def error_of(code: int, message: str, is_rule: bool) -> LohanError:
        text = re.sub(r"\b(unit|param) (\d+)\b", named, message)
        if is_rule:
            return _make(_RULE_BY_CODE, _RULE_HINTS, code, text)
        if _is_disk_full(code, text):
            return _make({}, {errno.ENOSPC: "free space there, then resume the store"}, code, text)
        return _make(_ENGINE_BY_CODE, _ENGINE_HINTS, code, text)

    def raiser(code: int, message: str, is_rule: bool) -> LohanError:
        error = error_of(code, message, is_rule)
        made.add(type(error))
        return error

    return raiser


def reason_of(error: BaseException) -> str:
    """Return an error of torch or gloo in one line, without the place in gloo's sources."""
    text = str(error).partition("\n")[0]
    return re.sub(r"^(\[[^\]]*:\d+\] *)+", "", text) or type(error).__name__
