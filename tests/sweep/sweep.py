"""Try every class of transformers and diffusers that can be built small: `make sweep`.

Each class runs in a process of its own, a fork of one that has imported the libraries. Results are
one JSON object per class, appended to a file as they come, so that a sweep that was stopped resumes
where it was. record.py adds them to the record from which the tables of docs/supported-models.md
are made.
"""

from __future__ import annotations

import argparse
import datetime
import gc
import hashlib
import json
import os
import pathlib
import resource
import shutil
import signal
import sys
import tempfile
import time
import traceback
import warnings
from typing import Any

HERE = pathlib.Path(__file__).resolve().parent
ROOT = HERE.parent.parent
sys.path.insert(0, str(HERE))
MEMORY_BYTES = 12 << 30


def main(words: list[str]) -> int:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=pathlib.Path, default=ROOT / "build" / "sweep.jsonl")
    parser.add_argument("--only", default="", help="classes, separated by commas")
    parser.add_argument("--left", default="", help="the same, but only those without a result")
    parser.add_argument("--kind", default="", help="part of the name of a kind")
    parser.add_argument("--every", type=int, default=1, help="take each N-th class")
    parser.add_argument("--first", type=int, default=0, help="the first class to take")
    parser.add_argument("--seconds", type=int, default=120, help="time limit of a class")
    parser.add_argument("--count", type=int, default=0, help="stop after that number of classes")
    parser.add_argument("--again", action="store_true", help="try classes that have a result")
    parser.add_argument("--failed", action="store_true", help="try classes that failed once more")
    parser.add_argument("--trace", action="store_true")
    parser.add_argument("--code", action="store_true", help="print the code of this version")
    args = parser.parse_args(words)
    if args.code:
        print(code())
        return 0
    _prepare()
    import names

    kinds = {**names.of_transformers(), **names.of_diffusers()}
    only = {*args.only.split(","), *args.left.split(",")} - {""}
    classes = [
        (kind, name)
        for kind, members in kinds.items()
        for name in members
        if args.kind in kind and (not only or name in only)
    ][args.first :: args.every]
    args.out.parent.mkdir(parents=True, exist_ok=True)
    done = {} if args.again or args.only else _done(args.out)
    left = [(k, n) for k, n in classes if n not in done or (args.failed and _failed(done[n]))]
    of = {"code": code(), "date": datetime.date.today().isoformat()}
    for kind, name in left[: args.count or None]:
        result = {"kind": kind, "class": name, **of, **_isolated(kind, name, args.seconds)}
        if not args.trace:
            result.pop("trace", None)
        with args.out.open("a") as file:
            file.write(json.dumps(result) + "\n")
        print(json.dumps(result), flush=True)
    return 0 if len(left) <= (args.count or len(left)) else 3


def code() -> str:
    """Return a fingerprint of lohan's sources, which are what a row is a result of."""
    digest = hashlib.sha256()
    for folder, suffixes in (("csrc", (".c", ".h")), ("python/lohan", (".py",))):
        for path in sorted((ROOT / folder).rglob("*")):
            if path.suffix in suffixes:
                name = path.relative_to(ROOT).as_posix().encode()
                digest.update(name + b"\0" + hashlib.sha256(path.read_bytes()).digest())
    return digest.hexdigest()[:12]


def _prepare() -> None:
    # Some environments forbid Python to write what it has compiled, which takes longer than a case.
    sys.dont_write_bytecode = False
    sys.pycache_prefix = os.environ["PYTHONPYCACHEPREFIX"] = str(ROOT / "build" / "pycache")
    os.environ["HF_HUB_OFFLINE"] = "1"
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    warnings.simplefilter("ignore")
    import torch

    torch.set_num_threads(1)
    import classes  # noqa: F401  (lohan, too, is imported once for all)
    import diffusers
    import transformers
    from transformers import LlamaForCausalLM, conversion_mapping

    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    diffusers.logging.set_verbosity_error()
    diffusers.logging.disable_progress_bar()
    # These import what most classes need, and build transformers' tables.
    assert (
        LlamaForCausalLM and conversion_mapping.get_checkpoint_conversion_mapping("llama") is None
    )
    gc.collect()
    gc.freeze()


def _done(path: pathlib.Path) -> dict[str, dict[str, Any]]:
    if not path.exists():
        return {}
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    return {row["class"]: row for row in rows}


def _failed(row: dict[str, Any]) -> bool:
    steps = ("read", "frozen", "reference", "train", "saved", "exported")
    return any(row.get(step) != "same" for step in steps)


def _isolated(kind: str, name: str, seconds: int) -> dict[str, Any]:
    """Return the result of one class, from a fork of this process."""
    reader, writer = os.pipe()
    child = os.fork()
    begun = time.monotonic()
    if child == 0:
        os.close(reader)
        _run_child(kind, name, writer)
    os.close(writer)
    text = b""
    deadline = begun + seconds
    import select

    while True:
        left = deadline - time.monotonic()
        if left <= 0 or not select.select([reader], [], [], left)[0]:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
            os.close(reader)
            _clean(child)
            return {"built": f"not within {seconds} s"}
        piece = os.read(reader, 1 << 16)
        if not piece:
            break
        text += piece
    status = os.waitpid(child, 0)[1]
    os.close(reader)
    _clean(child)
    if not text:
        return {"built": f"the process ended with {os.waitstatus_to_exitcode(status)}"}
    made: dict[str, Any] = json.loads(text)
    return {**made, "s": round(time.monotonic() - begun, 1)}


def _place(process: int) -> pathlib.Path:
    return pathlib.Path(tempfile.gettempdir()) / f"lohan-sweep-{process}"


def _clean(process: int) -> None:
    shutil.rmtree(_place(process), ignore_errors=True)


def _run_child(kind: str, name: str, writer: int) -> None:
    try:
        resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, 1)
        os.dup2(null, 2)
        folder = _place(os.getpid())
        folder.mkdir()
        import classes

        made = classes.case(kind, name, folder).run()
    except BaseException as error:
        made = {"built": f"{type(error).__name__}: {str(error)[:200]}"}
        made["trace"] = traceback.format_exc()[-1500:]
    os.write(writer, json.dumps(made).encode())
    os._exit(0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
