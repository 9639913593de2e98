"""The `lohan` commands for stores and models, from convert to watch.

cli.py adds them to its group.
"""

from __future__ import annotations

import contextlib
import json
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import click
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn

SHOW_AFTER_S = 2.0

JSON = click.option("--json", "json_wanted", is_flag=True, help="Write JSON.")
_SHARDS = click.option(
    "--max-shard-size", default="5GB", show_default=True, help="Maximum size of a file."
)
_OVERWRITE = click.option(
    "--overwrite", is_flag=True, help="Replace a model that is already in OUT."
)


@contextlib.contextmanager
def _progress(what: str) -> Iterator[Callable[[int, int], None]]:
    """Show a progress bar on stderr once the command has run for two seconds."""
    begin = time.monotonic()
    console = Console(stderr=True)
    with contextlib.ExitStack() as stack:
        bar: Progress | None = None
        task: Any = None

        def advance(done: int, total: int) -> None:
            nonlocal bar, task
            if bar is None and (time.monotonic() - begin < SHOW_AFTER_S or not console.is_terminal):
                return
            if bar is None:
                columns = (
                    TextColumn(what),
                    BarColumn(),
                    DownloadColumn(),
                    TransferSpeedColumn(),
                )
                bar = stack.enter_context(Progress(*columns, console=console, transient=True))
                task = bar.add_task(what, total=total)
            bar.update(task, completed=done, total=total)

        yield advance


def _say(value: dict[str, Any], json_wanted: bool, text: str) -> None:
    if json_wanted:
        sys.stdout.write(json.dumps(value, indent=2) + "\n")
    else:
        Console(soft_wrap=True).print(text, highlight=False, markup=False)


def _say_store(made: Any, places: list[str], json_wanted: bool) -> None:
    """Print the step and the size of new stores, and their directories."""
    said = {"step": made.step, "directories": made.directories, "bytes": made.total_bytes}
    text = f"step {made.step}: {made.total_bytes:,} bytes in {', '.join(places)}"
    _say(said, json_wanted, text)


@click.command()
@click.argument("store", metavar="STORE...", nargs=-1, required=True)
@click.argument("out", metavar="OUT")
@click.option(
    "--dtype",
    type=click.Choice(["float32"]),
    help="float32: export the fp32 master weights. [default: the dtype used in training]",
)
@click.option("--max-shard-size", default="50GB", show_default=True, help="Maximum size of a file.")
@_OVERWRITE
@click.option("--ema", is_flag=True, help="Export the averages of wrap(ema=).")
@JSON
def export(
    store: tuple[str, ...],
    out: str,
    dtype: str | None,
    max_shard_size: str,
    overwrite: bool,
    ema: bool,
    json_wanted: bool,
) -> None:
    """Write a store's parameters as safetensors, for from_pretrained, without the model's code.

    STORE: the directories it was created with. OUT: the output folder.
    """
    from lohan.store import _export

    with _progress("export") as progress:
        files = _export.export(
            list(store),
            out,
            dtype=dtype,
            max_shard_size=max_shard_size,
            overwrite=overwrite,
            ema=ema,
            progress=progress,
        )
    nbytes = sum(file.stat().st_size for file in files)
    said = {"files": [str(file) for file in files], "bytes": nbytes}
    _say(said, json_wanted, f"{out}: {len(files)} files, {nbytes:,} bytes")


@click.command()
@click.argument("base", metavar="BASE", type=click.Path(path_type=Path))
@click.argument("adapter", metavar="ADAPTER", type=click.Path(path_type=Path, file_okay=False))
@click.argument("out", metavar="OUT", type=click.Path(path_type=Path, file_okay=False))
@_SHARDS
@_OVERWRITE
@JSON
def merge(
    base: Path,
    adapter: Path,
    out: Path,
    max_shard_size: str,
    overwrite: bool,
    json_wanted: bool,
) -> None:
    """Write a model with an adapter of peft merged into it, for from_pretrained without peft.

    BASE: the model, with config.json and safetensors files, quantized or not, or a GGUF file in a
    folder with the model's config.json. ADAPTER: a folder that peft's save_pretrained has written.
    OUT: the output folder, which is not quantized. Memory holds the adapter and one module at a
    time.
    """
    from lohan.hf import _merge

    with _progress("merge") as progress:
        made = _merge.merge(
            base,
            adapter,
            out,
            max_shard_size=max_shard_size,
            overwrite=overwrite,
            progress=progress,
        )
    said = {
        "files": [str(file) for file in made.files],
        "bytes": made.nbytes,
        "merged": made.merged,
        "untied": made.untied,
    }
    text = f"{out}: {len(made.merged)} modules merged, {made.nbytes:,} bytes"
    _say(said, json_wanted, text)


@click.command()
@click.argument("folder", metavar="FOLDER", type=click.Path(path_type=Path, file_okay=False))
@click.argument("out", metavar="OUT", type=click.Path(path_type=Path, file_okay=False))
@click.option(
    "--to",
    required=True,
    type=click.Choice(["nf4", "fp8"]),
    help="nf4: bitsandbytes' NF4, 0.52 bytes per value. fp8: transformers' FP8, 1 byte.",
)
@click.option(
    "--keep",
    multiple=True,
    metavar="PATTERN",
    help="Modules that stay as they are, for example '*.down_proj', in addition to embeddings,"
    " heads, norms and routers.",
)
@_SHARDS
@_OVERWRITE
@JSON
def quantize(
    folder: Path,
    out: Path,
    to: str,
    keep: tuple[str, ...],
    max_shard_size: str,
    overwrite: bool,
    json_wanted: bool,
) -> None:
    """Write a model with the weights of its linear layers quantized, for lohan.wrap(weights=OUT).

    FOLDER: the model, with config.json and safetensors files. OUT: the output folder. Only a few
    pieces of a tensor are in memory at once.
    """
    from lohan.commands import _quantize

    with _progress("quantize") as progress:
        made = _quantize.quantize(
            folder,
            out,
            to=to,
            keep=keep,
            max_shard_size=max_shard_size,
            overwrite=overwrite,
            progress=progress,
        )
    said = {
        "files": [str(file) for file in made.files],
        "bytes": made.nbytes,
        "source_bytes": made.source_nbytes,
        "quantized": made.quantized,
    }
    share = made.nbytes / made.source_nbytes
    text = (
        f"{out}: {len(made.quantized)} weights in {to}, {made.nbytes:,} bytes"
        f" ({share:.2f} of {folder})"
    )
    _say(said, json_wanted, text)


@click.command()
@click.argument("store", metavar="STORE...", nargs=-1, required=True)
@click.argument("out", metavar="OUT")
@click.option(
    "--and",
    "others",
    multiple=True,
    metavar="OUT",
    help="Another output directory; the copy is striped over all of them.",
)
@click.option(
    "--wait",
    "wait_s",
    default=600.0,
    show_default=True,
    help="Seconds to wait for a training process to finish its step.",
)
@JSON
def snapshot(
    store: tuple[str, ...], out: str, others: tuple[str, ...], wait_s: float, json_wanted: bool
) -> None:
    """Copy a store's last committed step to other directories, even while a process trains.

    STORE: the directories it was created with. OUT: a directory for the copy; the copy may use
    fewer or more directories than the store (--and).
    """
    from lohan.store import _snapshot

    with _progress("snapshot") as progress:
        made = _snapshot.snapshot(list(store), [out, *others], wait_s=wait_s, progress=progress)
    _say_store(made, made.directories, json_wanted)


@click.command()
@click.argument("store", metavar="STORE...", nargs=-1, required=True)
@click.argument("out", metavar="OUT")
@click.option(
    "--and",
    "others",
    multiple=True,
    metavar="OUT",
    help="Another output directory; each new store is striped over all of them.",
)
@click.option(
    "--parts",
    required=True,
    type=click.IntRange(1),
    help="The number of new stores; 1: one store with all states.",
)
@JSON
def reshard(
    store: tuple[str, ...], out: str, others: tuple[str, ...], parts: int, json_wanted: bool
) -> None:
    """Divide the optimizer's states of a run among another number of processes, in new stores.

    STORE: store= of the run, which was wrapped with replicas="parameters" or has one store with all
    states. OUT: store= for resuming it with as many processes as there are parts.
    """
    from lohan.replicas import _reshard

    with _progress("reshard") as progress:
        made = _reshard.reshard(list(store), [out, *others], parts=parts, progress=progress)
    _say_store(made, [each[0] for each in made.directories], json_wanted)


@click.command()
@click.argument("store", metavar="STORE...", nargs=-1, required=True)
@click.argument("out", metavar="OUT")
@click.option(
    "--and",
    "others",
    multiple=True,
    metavar="OUT",
    help="Another output directory; the new store is striped over all of them.",
)
@click.option(
    "--states",
    required=True,
    type=click.Choice(["fp32", "bf16", "8bit", "4bit"]),
    help="The format of the new store's moments.",
)
@JSON
def convert(
    store: tuple[str, ...], out: str, others: tuple[str, ...], states: str, json_wanted: bool
) -> None:
    """Write a store again with its moments in another format, for wrap(resume=True, moments=).

    STORE: the directories it was created with; it is not changed. OUT: a directory for the new
    store.
    """
    from lohan.store import _convert

    with _progress("convert") as progress:
        made = _convert.convert(list(store), [out, *others], states=states, progress=progress)
    _say_store(made, made.directories, json_wanted)


@click.command()
@click.argument("store", metavar="STORE...", nargs=-1, required=True)
@JSON
def verify(store: tuple[str, ...], json_wanted: bool) -> None:
    """Read every byte of a store's committed step and compare it with its checksum.

    STORE: the directories it was created with. The exit status is 0 if every byte is as written,
    otherwise 1.
    """
    from lohan.store import _verify

    with _progress("verify") as progress:
        found = _verify.verify(list(store), progress=progress)
    lines = [
        f"step {found.step}: {found.read_bytes:,} bytes in {found.seconds:.1f} s,"
        f" {'as written' if found.is_whole else f'{len(found.bad)} places are not as written'}"
    ]
    lines += [note for note in [found.note] if note]
    lines += [
        f"{one.param} ({one.array}): {one.path} at offset {one.offset}: {one.message}"
        for one in found.bad[:10]
    ]
    if found.bad:
        lines.append(
            "The drive returned different bytes than were written: restore from a snapshot"
        )
    _say(found.as_dict(), json_wanted, "\n".join(lines))
    sys.exit(0 if found.is_whole else 1)


@click.command()
@click.argument("store", metavar="STORE...", nargs=-1, required=True)
@click.option("--once", is_flag=True, help="Show what there is, and end.")
@click.option(
    "--html",
    metavar="FILE",
    type=click.Path(path_type=Path, dir_okay=False),
    help="Write a page with charts instead, and again whenever something is new.",
)
@click.option("--json", "json_wanted", is_flag=True, help="Write a line of JSON for each step.")
def watch(store: tuple[str, ...], once: bool, html: Path | None, json_wanted: bool) -> None:
    """Show the steps of a run in a line each, while it trains and after it has ended.

    STORE: the directories it was created with. Each line has the time, the loss and the tokens that
    the program has passed to model.lohan.note(), what bounds the step, and the bytes read and
    written. The command ends when the run ends, and shows the last steps of a run that was killed.
    """
    from lohan.commands import _watch

    if html is not None and json_wanted:
        raise click.UsageError("--html cannot be combined with --json")
    _watch.watch(list(store), once=once, is_json=json_wanted, html=html)
