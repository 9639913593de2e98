"""Types of options that the commands of `lohan` share, and the form of their errors."""

from __future__ import annotations

import contextlib
import importlib
import io
import json
import os
import sys
from typing import Any

import click

from lohan.common import _units
from lohan.errors import LohanError

EXIT_INTERRUPTED = 130


HELP = {"-h", "--help"}


def _has_working_directory() -> bool:
    """Return whether there is one: without it, torch's libraries end the process."""
    try:
        os.getcwd()
    except FileNotFoundError:
        return False
    return True


class Group(click.Group):
    """A command group that prints lohan's errors as sentences, without a traceback.

    With --json, an error is also one JSON object on stdout: {"error": {"type", "message"}}.
    """

    def invoke(self, ctx: click.Context) -> Any:
        """Run the command that the arguments name."""
        words = [*ctx._protected_args, *ctx.args]
        if not _has_working_directory() and not HELP & {*words}:
            raise click.ClickException(
                "the working directory was deleted: change to another directory"
            )
        if isinstance(sys.stdout, io.TextIOWrapper):  # a name may have letters that it lacks
            with contextlib.suppress(OSError):  # its descriptor was replaced by one of a pipe
                sys.stdout.reconfigure(errors="backslashreplace")
        try:
            return super().invoke(ctx)
        except LohanError as error:
            # The message is complete without the "[Errno 2]" prefix, which is for programs.
            said = error.strerror if isinstance(error, OSError) else None
            self._print(ctx, words, type(error).__name__, said or str(error))
            raise click.ClickException(said or str(error)) from error
        except BrokenPipeError:
            raise  # the reader closed the pipe: click exits quietly
        except OSError as error:  # for example: file not writable, disk full
            self._print(ctx, words, type(error).__name__, str(error))
            raise click.ClickException(str(error)) from error
        except click.ClickException as error:  # among them, invalid command lines
            self._print(ctx, words, type(error).__name__, error.format_message())
            raise
        except KeyboardInterrupt:
            click.echo("interrupted", err=True)
            sys.exit(EXIT_INTERRUPTED)

    def _print(self, ctx: click.Context, words: list[str], kind: str, message: str) -> None:
        """Print an error as JSON if the command has the flag --json and the user has given it."""
        command = self.get_command(ctx, words[0]) if words else None
        flags = [param for param in command.params if "--json" in param.opts] if command else []
        if "--json" in words and any(getattr(flag, "is_flag", False) for flag in flags):
            click.echo(json.dumps({"error": {"type": kind, "message": message}}, indent=2))


class Size(click.ParamType[int]):
    """A click parameter for sizes: a number of bytes, "16GB" or "16GiB"."""

    name = "size"

    def convert(self, value: Any, param: Any, ctx: click.Context | None) -> int:
        """Return the number of bytes."""
        if isinstance(value, int):
            return value
        try:
            return _units.size(param.opts[0] if param is not None else "size", value)
        except LohanError as error:
            self.fail(str(error), param, ctx)


class OneOf(click.ParamType[str]):
    """A click parameter for a name from a list of another module, imported when it is needed."""

    name = "text"

    def __init__(self, module: str, names: str) -> None:
        """Set where the list is: an iterable of a module, or a function that returns one."""
        self._module = module
        self._names = names

    def convert(self, value: Any, param: Any, ctx: click.Context | None) -> str:
        """Return the name, if it is in the list."""
        found = getattr(importlib.import_module(self._module), self._names)
        names = [*(found() if callable(found) else found)]
        if value not in names:
            self.fail(f"{value!r} must be one of {', '.join(names)}", param, ctx)
        return str(value)


class Sweep(click.ParamType[str]):
    """A click parameter for a sweep: "ssd_count=1..12" or "batch=8,16,32"."""

    name = "text"

    def convert(self, value: Any, param: Any, ctx: click.Context | None) -> str:
        """Return the text, if it is a sweep over valid values."""
        from lohan.commands import _simulate_show

        try:
            name, values = _simulate_show.values_of(value)
        except LohanError as error:
            self.fail(str(error), param, ctx)
        if name in ("batch", "seq") and min(values) < 1:
            self.fail(f"{name}={min(values)} must be at least 1", param, ctx)
        return str(value)
