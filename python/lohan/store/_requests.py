"""Requests to a training process for a copy of its store, through two small files.

Another process writes `lohan.request` to a directory of the store. The training process checks for
it at the end of each step (a lookup of a file that usually does not exist), removes it, and updates
its reply in `lohan.answer-ID` until the copy is done. Both files are renamed into place, so that a
reader never sees a partial one.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import re
import secrets
import stat
import time
import uuid
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from lohan import errors
from lohan.common import _log
from lohan.errors import LohanError, StoreError, StoreLockedError
from lohan.store._directories import REQUEST

if TYPE_CHECKING:
    from lohan.layout._safetensors import Progress
    from lohan.session._training import Training
    from lohan.store._snapshot import Snapshot

ANSWER = "lohan.answer-"
_LOOK_S = 0.1
# Sixteen paths of 4 KiB take 400 KiB if JSON escapes every character.
_BYTES_MAX = 1 << 20


def _put(path: str, value: dict[str, Any]) -> None:
    temporary = f"{path}.{secrets.token_hex(16)}.new"  # unguessable, so it cannot be a planted link
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    descriptor = os.open(temporary, flags, 0o600)
    try:
        with os.fdopen(descriptor, "w", encoding="utf-8") as file:
            json.dump(value, file)
        os.replace(temporary, path)
    except OSError:
        with contextlib.suppress(OSError):
            os.unlink(temporary)
        raise


class _BadFileError(Exception):
    """A file is not a valid request or reply; the message says why."""


def _read(path: str) -> dict[str, Any]:
    """Read an untrusted file.

    Opening it does not block (as a FIFO would) and does not follow a link. Only a regular file that
    belongs to this user or root, and is not too large for a request, is read.

    Raises:
        _BadFileError: the file is not such a file, or does not contain a JSON object.
        OSError: the file cannot be opened or read.
    """
    flags = os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_NOCTTY | os.O_CLOEXEC
    try:
        descriptor = os.open(path, flags)
    except OSError as error:
        if error.errno in (errno.ELOOP, errno.ENXIO):  # a link; a socket
            raise _BadFileError("it is not a regular file") from error
        raise
    with os.fdopen(descriptor, "rb") as file:
        about = os.fstat(descriptor)
        if not stat.S_ISREG(about.st_mode):
            raise _BadFileError("it is not a regular file")
        if about.st_uid not in (os.getuid(), 0):
            raise _BadFileError(f"it belongs to user {about.st_uid}")
        data = file.read(_BYTES_MAX + 1)
    if len(data) > _BYTES_MAX:
        raise _BadFileError(f"it has more than {_BYTES_MAX} bytes")
    try:
        value = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise _BadFileError("it is not JSON") from error
    if not isinstance(value, dict):
        raise _BadFileError("it is not a JSON object")
    return value


def _get(path: str) -> dict[str, Any] | None:
    try:
        return _read(path)
    except (OSError, _BadFileError):
        return None


def _is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except (ProcessLookupError, OverflowError):  # OverflowError: too large for a process number
        return False
    except PermissionError:
        return True
    return True


# --- The requesting process -------------------------------------------------------------------


def ask(
    directories: Sequence[str],
    out: Sequence[str],
    locked: StoreLockedError,
    wait_s: float,
    progress: Progress | None,
) -> dict[str, Any]:
    """Ask the process that has a store open to copy it, and wait for the copy.

    Args:
        directories: the store's directories.
        out: the directories of the copy, absolute.
        locked: the error from opening the store, which names the process.
        wait_s: the timeout for the end of the process's step.
        progress: called with the bytes copied so far and the total.

    Returns:
        The other process's last reply, which contains "step" and "total_bytes", among others.

    Raises:
        StoreLockedError: no step ended in time, or another copy has already been requested.
        StoreError: the request cannot be written, the other process ended, or its copy failed.
    """
    found = re.findall(r"in use by process (\d+)", str(locked))
    if not found:
        raise locked
    pid = int(found[-1])  # the last match: a directory's name may contain the same text
    request = os.path.join(directories[0], REQUEST)
    number = uuid.uuid4().hex
    answer = os.path.join(directories[0], ANSWER + number)
    if os.path.lexists(request):
        raise StoreLockedError(
            errno.EBUSY,
            f"{request} exists: another copy was already requested; wait, or delete the file",
        )
    try:
        _put(request, {"id": number, "pid": os.getpid(), "out": list(out)})
    except OSError as error:
        raise StoreError(
            error.errno,
            f"process {pid} has the store open, and cannot be asked for a copy: cannot write"
            f" {request}: {error.strerror}. Call model.lohan.snapshot(OUT) in its script, which"
            " needs no file there",
        ) from error
    try:
        return _await(answer, pid, wait_s, progress)
    finally:
        asked = _get(request)
        for path in (request if asked and asked.get("id") == number else None, answer):
            if path is not None:
                with contextlib.suppress(FileNotFoundError):
                    os.unlink(path)


def _await(answer: str, pid: int, wait_s: float, progress: Progress | None) -> dict[str, Any]:
    until = time.monotonic() + wait_s
    while True:
        said = _get(answer)
        if said is not None:
            _check_answer(said, answer)
        if said is not None and said["state"] != "copying":
            return _result(said)
        if said is not None and progress is not None:
            progress(said["done_bytes"], said["total_bytes"])
        if not _is_alive(pid):
            if _get(answer) == said:
                raise StoreError(
                    errno.ESRCH,
                    f"process {pid}, which was asked to copy its store, has ended: try again, now"
                    " that the store is no longer in use",
                )
        elif said is None and time.monotonic() > until:
            raise StoreLockedError(
                errno.EBUSY,
                f"process {pid} has the store open and finished no step in {wait_s:g} seconds:"
                " wait longer (--wait), or call model.lohan.snapshot(OUT) in its script",
            )
        time.sleep(_LOOK_S)


def _check_answer(said: dict[str, Any], path: str) -> None:
    """Reject a reply that lohan cannot have written.

    Raises:
        StoreError: a value is missing or has the wrong type.
    """
    numbers = [said.get(key) for key in ("step", "done_bytes", "total_bytes", "pid")]
    is_whole = said.get("state") in ("copying", "done", "failed")
    is_whole &= all(type(number) is int and number >= 0 for number in numbers)
    is_whole &= isinstance(said.get("error"), str) and isinstance(said.get("message"), str)
    code = said.get("errno")
    if not is_whole or not (code is None or type(code) is int):
        raise StoreError(
            errno.EBADMSG,
            f"{path} is not a valid reply to a request for a copy: it was not written by lohan;"
            " delete it, and try again",
        )


def _result(said: dict[str, Any]) -> dict[str, Any]:
    if said["state"] == "done":
        return said
    kind = getattr(errors, said["error"], LohanError)
    if not isinstance(kind, type) or not issubclass(kind, LohanError):
        kind = LohanError
    text = f"process {said['pid']}: {said['message']}"
    if issubclass(kind, OSError):
        raise kind(said.get("errno") or errno.EIO, text)
    raise kind(text)


# --- The training process ---------------------------------------------------------------------


def answer(session: Training, directory: str) -> None:
    """Start the copy that is requested in a directory; errors never affect the session."""
    _take(session, directory, os.path.join(directory, REQUEST))


_told: set[tuple[str, int, int]] = set()  # files that were reported and cannot be removed


def _refuse(path: str, why: object) -> None:
    """Report once that a request is ignored, and remove it if it belongs to this user or root."""
    try:
        about = os.lstat(path)
    except OSError:
        return  # the file no longer exists
    is_removed = not stat.S_ISDIR(about.st_mode) and about.st_uid in (os.getuid(), 0)
    if is_removed:
        try:
            os.unlink(path)  # removes a link, not its target
        except OSError:
            is_removed = False
    key = path, about.st_dev, about.st_ino
    if not is_removed and key in _told:
        return
    _told.add(key)
    _log.note(
        f"{path} is not a valid request for a copy, and was"
        f" {'removed' if is_removed else 'ignored'}: {why}"
    )


def _taken(path: str) -> dict[str, Any] | None:
    """Read and remove a request; return None if it is invalid or no longer exists."""
    try:
        wish = _read(path)
    except FileNotFoundError:
        return None  # the requesting process gave up
    except (OSError, _BadFileError) as error:
        _refuse(path, error)
        return None
    number = wish.get("id")
    if not isinstance(number, str) or not re.fullmatch(r"[0-9a-f]{32}", number):
        _refuse(path, "it has no id")
        return None
    try:
        os.unlink(path)
    except OSError as error:
        _refuse(path, f"it cannot be removed ({error.strerror}), and would be found again")
        return None
    return wish


def _take(session: Training, directory: str, path: str) -> None:
    wish = _taken(path)
    if wish is None:
        return
    number = wish["id"]
    asker = wish.get("pid")
    answer = os.path.join(directory, ANSWER + number)

    def say(state: str, handle: Snapshot | None, error: BaseException | None = None) -> None:
        said = {
            "state": state,
            "pid": os.getpid(),
            "step": handle.step if handle is not None else 0,
            "done_bytes": handle.done_bytes if handle is not None else 0,
            "total_bytes": handle.total_bytes if handle is not None else 0,
            "error": type(error).__name__ if error is not None else "",
            "message": getattr(error, "strerror", None) or str(error or ""),
            "errno": getattr(error, "errno", None),
        }
        if isinstance(asker, int) and not _is_alive(asker):
            return  # the requesting process has ended and would not remove the reply
        with contextlib.suppress(OSError):  # a full disk must not end the run
            _put(answer, said)

    try:
        out = [os.fspath(directory) for directory in wish["out"]]
        if not all(os.path.isabs(directory) for directory in out):
            raise StoreError(errno.EINVAL, f"the directories of a copy must be absolute: {out}")
        session.copy_begin(out, _teller(say), is_behind_step=True)
    except Exception as error:  # training continues, whatever was requested
        say("failed", None, error)


def _teller(
    say: Callable[[str, Snapshot | None, BaseException | None], None],
) -> Callable[[Snapshot, BaseException | None], None]:
    """Return a callback that reports the copy's progress twice a second, and its end."""
    last = [0.0]

    def tell(handle: Snapshot, error: BaseException | None) -> None:
        if error is not None:
            say("failed", handle, error)
        elif handle.is_whole:
            say("done", handle, None)
        elif time.monotonic() - last[0] > 0.5:
            last[0] = time.monotonic()
            say("copying", handle, None)

    return tell
