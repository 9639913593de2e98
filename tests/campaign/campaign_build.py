"""Builds what the campaigns run: the worker that is killed, and the recorder of file calls."""

from __future__ import annotations

import pathlib
import sys

HERE = pathlib.Path(__file__).resolve().parent
ROOT = HERE.parent.parent
sys.path.insert(0, str(ROOT / "tools"))

import cbuild  # noqa: E402  (its folder has just been named)

FOLDER = cbuild.BUILD / "campaign"


def kill_worker() -> pathlib.Path:
    """The program that kills lives of engine and store."""
    fixtures = ROOT / "tests" / "c"
    include = [f"-I{fixtures}", f"-I{HERE}"]
    builder = cbuild.Builder("release")
    core = builder.archive(builder.compile(cbuild.core_sources(with_binding=False)), "core")
    shared = [p for p in sorted(fixtures.glob("*.c")) if not p.name.startswith("test_")]
    objects = builder.compile([*sorted(HERE.glob("*.c")), *shared], include)
    target = FOLDER / "kill_worker"
    builder.link([*objects, core], target)
    return target


def recorder() -> pathlib.Path:
    """The shared object that is preloaded into Python."""
    builder = cbuild.Builder("release")
    objects = builder.compile([HERE / "calls.c"], [f"-I{ROOT / 'tests' / 'c'}", f"-I{HERE}"])
    target = FOLDER / "calls.so"
    builder.link(objects, target, ["-shared"])
    return target
