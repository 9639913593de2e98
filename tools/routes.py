"""Count the files that a call of `lohan.wrap` passes through, and the hooks of a gradient.

    routes.py            print the figures for a small GPT-2 on the CPU, with the defaults
    routes.py --files    also print each file, its functions that ran, and how often
    routes.py --route    also print the route

A second `wrap` is traced, so that no import counts, and within it the functions of python/lohan.
Comprehensions belong to the function that they are in. C functions and torch do not count: what
they call belongs to the function that called them. The figures are:

* files: how many files have a function that ran.
* The route is what a reader follows who steps into each function where it is first called, and over
  it later. A stay is a part of the route in one file. A return is a stay in a file in which there
  was one before, be it that a function has returned to it or that one of it is called: A -> B -> A
  -> C has four stays and one return.
* line: the same three figures for wrap.py and the packages opening and session alone, to which all
  other packages are libraries.
* moves: how often control moves from one file to another, counting each call and each return.
* hooks: how many hooks torch calls for the gradients of all trained parameters, and how many of
  them are Python functions.
* backward: how many Python functions of lohan run in a whole backward.
"""

from __future__ import annotations

import argparse
import collections
import itertools
import pathlib
import sys
import tempfile
import types
from collections.abc import Callable
from typing import Any

import lohan
import torch
import transformers
from torch import nn

FOLDER = pathlib.Path(lohan.__file__).resolve().parent
LINE = ("wrap.py", "opening/", "session/")
INNER = {"<listcomp>", "<setcomp>", "<dictcomp>", "<genexpr>"}


class Trace:
    """The functions of lohan that run while this is entered.

    Attributes:
        counts: how often each function was called, by its file and name.
        route: the stays, as files.
        moves: how often control moved from one file to another.
    """

    def __init__(self) -> None:
        self.counts: collections.Counter[tuple[str, str]] = collections.Counter()
        self.route: list[str] = []
        self.moves = 0
        self._stack: list[tuple[str, bool]] = []  # a file, and whether a reader is in the function

    def __enter__(self) -> Trace:
        sys.setprofile(self._event)
        return self

    def __exit__(self, *exc: object) -> None:
        sys.setprofile(None)

    def _event(self, frame: types.FrameType, event: str, arg: Any) -> None:
        path = pathlib.Path(frame.f_code.co_filename)
        if frame.f_code.co_name in INNER or event not in ("call", "return"):
            return
        if not path.is_relative_to(FOLDER):
            return
        before = self._stack[-1] if self._stack else None
        if event == "call":
            name = (str(path.relative_to(FOLDER)), frame.f_code.co_qualname)
            is_read = self.counts[name] == 0 and (before is None or before[1])
            self.counts[name] += 1
            self._stack.append((name[0], is_read))
        elif self._stack:
            self._stack.pop()
        after = self._stack[-1] if self._stack else None
        if before is not None and after is not None:
            self.moves += before[0] != after[0]
        if after is not None and after[1] and self.route[-1:] != [after[0]]:
            self.route.append(after[0])


def model() -> nn.Module:
    """Return a small GPT-2."""
    config = transformers.GPT2Config(
        vocab_size=64, n_positions=32, n_embd=32, n_layer=3, n_head=2, use_cache=False
    )
    made: nn.Module = transformers.GPT2LMHeadModel(config)
    return made


def hooks_of(parameter: nn.Parameter) -> list[Callable[..., Any]]:
    """Return the hooks that torch calls for a gradient of a parameter."""
    found: list[Callable[..., Any]] = []
    for name in ("_backward_hooks", "_post_accumulate_grad_hooks"):
        found += (getattr(parameter, name) or {}).values()
    return found


def stays_and_returns(route: list[str]) -> str:
    """Return the figures of a route, for people."""
    return f"{len(route)} stays, {len(route) - len(set(route))} returns"


def main() -> None:
    """Trace a wrap and the backward of a second step, and print the figures."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--files", action="store_true")
    parser.add_argument("--route", action="store_true")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        lohan.wrap(model(), store=f"{folder}/first").lohan.close()
        plain = model()
        with Trace() as opened:
            wrapped = lohan.wrap(plain, store=f"{folder}/second")
        trained = [each for each in wrapped.parameters() if each.requires_grad]
        tokens = torch.zeros((1, 8), dtype=torch.long)
        for _ in range(2):
            loss = wrapped(input_ids=tokens, labels=tokens).loss
            with Trace() as backward:
                loss.backward()
            wrapped.optimizer.step()
        hooks = [hook for each in trained for hook in hooks_of(each)]
        wrapped.lohan.close()
    files = {file for file, _ in opened.counts}
    print(f"files     {len(files)}, with {len(opened.counts)} functions")
    print(f"route     {stays_and_returns(opened.route)}")
    line = [file for file, _ in itertools.groupby(f for f in opened.route if f.startswith(LINE))]
    print(f"line      {len(set(line))} files, {stays_and_returns(line)}")
    print(f"moves     {opened.moves}")
    python = sum(isinstance(hook, types.FunctionType | types.MethodType) for hook in hooks)
    print(f"hooks     {len(hooks)} of {len(trained)} parameters, {python} in Python")
    print(f"backward  {sum(backward.counts.values())} functions of lohan ran")
    if options.files:
        for file in sorted(files):
            print(file)
            for (other, name), count in opened.counts.items():
                if other == file:
                    print(f"    {count:6} {name}")
    if options.route:
        print("\n".join(opened.route))


if __name__ == "__main__":
    main()
