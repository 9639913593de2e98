"""`lohan demo`: run a training twice, once with states on SSD, once with everything in memory."""

from __future__ import annotations

import collections
import contextlib
import ctypes
import dataclasses
import json
import os
import resource
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from lohan.common import _timeline
from lohan.errors import LohanError, StoreExistsError, UnsupportedError
from lohan.store import _directories

if TYPE_CHECKING:
    from lohan.commands._demo_worker import Options

REFERENCE_STEPS_MAX = 10
REFERENCE_SECONDS_MAX = 45.0
# The first steps are not typical: step 1 records the order of uses, and has no states to read.
WARMUP_STEPS = 2
# Two speeds are comparable if other programs used less than this share of the processor.
OTHERS_SHARE_MAX = 0.1
# A terminal of this width has room for all details of a step.
WIDE_COLUMNS = 132
_PR_SET_PDEATHSIG = 1
# The displayed name of each kind of worker.
NAMES = {"lohan": "lohan", "reference": "plain torch"}


class WorkerError(LohanError, RuntimeError):
    """A worker of the demo failed; the message contains the end of the worker's output."""


@dataclasses.dataclass
class Result:
    """The reports of one worker."""

    steps: list[dict[str, Any]] = dataclasses.field(default_factory=list)
    ready: dict[str, Any] = dataclasses.field(default_factory=dict)
    done: dict[str, Any] = dataclasses.field(default_factory=dict)
    others_share: float = 0.0

    @property
    def losses(self) -> list[float]:
        """The loss of each step."""
        return [step["loss"] for step in self.steps]

    @property
    def step_ns(self) -> int:
        """The median time of the typical steps."""
        return int(statistics.median(self._times))

    @property
    def timed_count(self) -> int:
        """The number of steps that step_ns is the median of."""
        return len(self._times)

    @property
    def _times(self) -> list[int]:
        times = [step["step_ns"] for step in self.steps]
        return times[WARMUP_STEPS:] or times


def _processor_seconds() -> tuple[float, float]:
    """Return the busy seconds of all processors, and those of this process's ended children.

    Time that a hypervisor gave to another machine counts as busy.
    """
    with open("/proc/stat", encoding="ascii") as file:
        fields = [int(field) for field in file.readline().split()[1:9]]
    busy = sum(fields) - fields[3] - fields[4]  # idle, and idle during I/O
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return busy / os.sysconf("SC_CLK_TCK"), used.ru_utime + used.ru_stime


@contextlib.contextmanager
def _watch_others(result: Result) -> Iterator[None]:
    """Record the share of the processors that other programs use inside the context."""
    busy, ours = _processor_seconds()
    begun = time.monotonic()
    yield
    busy_end, ours_end = _processor_seconds()
    others = (busy_end - busy) - (ours_end - ours)
    seconds = (time.monotonic() - begun) * (os.cpu_count() or 1)
    result.others_share = min(max(others / seconds, 0.0), 1.0)


def _ends_with(parent: int) -> Callable[[], None]:
    """Return a function that makes a new child die with its parent; the child calls it first."""
    prctl = ctypes.CDLL(None).prctl

    def set_signal() -> None:
        prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        if os.getppid() != parent:
            os._exit(1)  # the parent ended in the meantime

    return set_signal


@contextlib.contextmanager
def _worker(kind: str, options: Options, folder: str) -> Iterator[Iterator[dict[str, Any]]]:
    """Start a worker process; return a context with its events, whose end kills the process."""
    environment = {**os.environ, "TMPDIR": folder, "TRANSFORMERS_VERBOSITY": "error"}
    path = [str(Path(__file__).resolve().parents[2]), environment.get("PYTHONPATH", "")]
    environment["PYTHONPATH"] = os.pathsep.join(part for part in path if part)
    asked = json.dumps(dataclasses.asdict(options))
    with tempfile.TemporaryFile(dir=folder) as said:
        # The worker has its own session, so that Ctrl-C reaches only this process, which ends it.
        process = subprocess.Popen(
            [sys.executable, "-m", "lohan.commands._demo_worker", kind, asked],
            stdout=subprocess.PIPE,
            stderr=said,
            stdin=subprocess.DEVNULL,
            env=environment,
            start_new_session=True,
            text=True,
            preexec_fn=_ends_with(os.getpid()),
        )

        def events() -> Iterator[dict[str, Any]]:
            assert process.stdout is not None
            for line in process.stdout:
                yield json.loads(line)
            if process.wait() != 0:
                said.seek(0)
                words = said.read().decode(errors="replace").strip().splitlines()
                why = "\n".join(words[-12:])
                raise WorkerError(f"{kind} worker: exit status {process.returncode}\n{why}")

        try:
            yield events()
        finally:
            process.kill()  # the worker's temporary files are already unlinked
            process.wait()
            if process.stdout is not None:
                process.stdout.close()


def _train(kind: str, options: Options, folder: str, console: Console) -> Result:
    """Run a worker until it ends, with a progress bar that shows each step's loss and speed."""
    result = Result()
    tokens = options.batch * options.sequence
    progress = Progress(
        TextColumn("{task.description:<11}"),
        BarColumn(bar_width=24 if console.width >= WIDE_COLUMNS else 8),
        MofNCompleteColumn(),
        TextColumn("{task.fields[said]}"),
        TimeElapsedColumn(),
        console=console,
    )
    with _watch_others(result), progress, _worker(kind, options, folder) as events:
        task = progress.add_task(NAMES[kind], total=options.steps, said="starting")
        for event in events:
            if event["event"] == "ready":
                result.ready = event
            elif event["event"] == "step":
                result.steps.append(event)
                said = _step_words(event, tokens, console.width >= WIDE_COLUMNS)
                progress.update(task, advance=1, said=said)
                if not console.is_terminal and event["step"] % 5 == 0:
                    step = f"{NAMES[kind]} step {event['step']:>3}"
                    said = _step_words(event, tokens, is_wide=True)
                    console.print(f"{step}: {said}", highlight=False, soft_wrap=True)
            elif event["event"] == "done":
                result.done = event
    return result


def _say_if_cut(who: str, result: Result, options: Options, console: Console) -> None:
    if len(result.steps) < options.steps:
        console.print(
            f"[yellow]{who}: stopped after {len(result.steps)} of {options.steps} steps, at its"
            f" time limit of {options.seconds:.0f} s:[/] this machine is slow or busy. The results"
            " below cover the completed steps.",
            highlight=False,
            soft_wrap=True,
        )


def _step_words(event: dict[str, Any], tokens: int, is_wide: bool) -> str:
    words = f"loss {event['loss']:.4f}  {tokens / event['step_ns'] * 1e9:5.0f} tokens/s"
    stats = event.get("stats")
    if stats and is_wide:
        words += f"  SSD {stats['read'] / 1e9:.2f} GB read, {stats['written'] / 1e9:.2f} GB written"
        words += f"  bound by {stats['bound_by']}"
    elif stats:
        words += f"  {(stats['read'] + stats['written']) / 1e9:.1f} GB  {stats['bound_by']}"
    return words


@contextlib.contextmanager
def _places(store: str | None) -> Iterator[tuple[str, str | None]]:
    """Return a context with a temporary folder, and the path of the store (None: not given).

    The folder is removed at the end, the store only after an error.

    Raises:
        StoreExistsError: store is not empty.
    """
    target = Path(store).expanduser().absolute() if store else None
    was_there = target is not None and target.exists()
    if target is not None and was_there and any(target.iterdir()):
        raise StoreExistsError(f"{target} is not empty: the demo needs a new or empty directory")
    folder = _directories.temporary_directory()
    try:
        yield folder, str(target) if target else None
    except BaseException:
        if target is not None:
            shutil.rmtree(target, ignore_errors=True)
            if was_there:
                target.mkdir(mode=0o700)
        raise
    finally:
        _directories.remove_temporary(folder)


def _on_signal(number: int, frame: FrameType | None) -> None:
    raise SystemExit(128 + number)  # so that the cleanup runs


def run(options: Options, out: Path, console: Console) -> dict[str, Any]:
    """Train with lohan and without, compare the two, and draw a timeline.

    Args:
        options: the options of the training with lohan.
        out: the directory for the timeline.
        console: where to print.

    Returns:
        The dictionary that `--json` writes.

    Raises:
        WorkerError: a worker failed.
        StoreExistsError: options.store is not empty.
    """
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, _on_signal)
    count = min(REFERENCE_STEPS_MAX, options.steps)
    with _places(options.store) as (folder, store):
        options = dataclasses.replace(options, store=store)
        console.print(
            f"{'A tiny model' if options.tiny else 'GPT-2 small'} in bf16, {options.batch} x"
            f" {options.sequence} bytes of Python's standard library per step;"
            f" {options.host_bytes / 1e6:.0f} MB of main memory for parameters, states and"
            f" gradients; store: {store or folder}",
            highlight=False,
            soft_wrap=True,
        )
        with _worker("baseline", options, folder) as events:
            baseline = Result(done=list(events)[-1])
        ours = _train("lohan", options, folder, console)
        _say_if_cut(NAMES["lohan"], ours, options, console)
        plain_options = dataclasses.replace(
            options, steps=count, store=None, seconds=min(options.seconds, REFERENCE_SECONDS_MAX)
        )
        plain = _train("reference", plain_options, folder, console)
        _say_if_cut(NAMES["reference"], plain, plain_options, console)
        answer = _summary(options, ours, plain, baseline)
        _show(answer, ours, console)
        _draw(options, ours, out, console)
    return answer


def _summary(options: Options, ours: Result, plain: Result, baseline: Result) -> dict[str, Any]:
    stats = ours.done["stats"]
    last = stats[-1]
    gradient_bytes = max(s["gradient_bytes_max"] for s in stats)
    typical = stats[WARMUP_STEPS:] or stats
    bounds = collections.Counter(s["bound_by"] for s in typical)
    as_planned = [
        s["read"] == s["planned_read"] and s["written"] == s["planned_written"] for s in stats
    ]
    return {
        "params": ours.ready["params"],
        "losses": ours.losses,
        "reference_losses": plain.losses,
        "host_budget_bytes": options.host_bytes,
        "host_peak_bytes": ours.done["arena_bytes"]
        + gradient_bytes
        + ours.done["bookkeeping_bytes"],
        "process_peak_bytes": ours.done["peak_bytes"],
        "baseline_peak_bytes": baseline.done["peak_bytes"],
        "reference_peak_bytes": plain.done["peak_bytes"],
        "ssd_read_bytes_per_step": last["read"],
        "ssd_written_bytes_per_step": last["written"],
        "planned_ssd_read_bytes_per_step": last["planned_read"],
        "planned_ssd_written_bytes_per_step": last["planned_written"],
        "steps_as_planned": sum(as_planned),
        "steps_measured": len(as_planned),
        "step_ms": ours.step_ns / 1e6,
        "reference_step_ms": plain.step_ns / 1e6,
        "timed_steps": ours.timed_count,
        "reference_timed_steps": plain.timed_count,
        "others_share": ours.others_share,
        "reference_others_share": plain.others_share,
        "tokens_per_s": options.batch * options.sequence / ours.step_ns * 1e9,
        "bound_by": bounds.most_common(1)[0][0],
        "io": ours.ready["io"],
        "pages": ours.ready["pages"],
    }


# --- Output -------------------------------------------------------------------------------------


def _show(answer: dict[str, Any], ours: Result, console: Console) -> None:
    console.print(_loss_table(answer))
    console.print(
        "The last digits differ because lohan and torch round AdamW's fp32 arithmetic in different"
        " places, which bf16 makes visible. lohan's results are bitwise identical with every"
        " budget.",
        highlight=False,
        soft_wrap=True,
    )
    console.print(_memory_table(answer))
    console.print(_traffic_table(answer, ours.done["stats"][-1]["bytes"]))
    budget, plain = answer["host_budget_bytes"], answer["reference_peak_bytes"]
    console.print(
        f"Speed, medians after {WARMUP_STEPS} warm-up steps:\n"
        f"  lohan        {answer['step_ms']:.0f} ms per step"
        f" ({answer['tokens_per_s']:.0f} tokens/s, {answer['timed_steps']} steps): states on SSD,"
        f" {budget / 1e6:.0f} MB of memory for parameters, states and gradients;"
        f" bound by {answer['bound_by']}; I/O by {answer['io']}, {answer['pages']} pages\n"
        f"  plain torch  {answer['reference_step_ms']:.0f} ms per step"
        f" ({answer['reference_timed_steps']} steps): all in memory, {plain / 1e6:.0f} MB; bf16"
        " parameters and compute, fp32 masters, fused AdamW (the faster peer of make bench-step)",
        highlight=False,
        soft_wrap=True,
    )
    others = answer["others_share"], answer["reference_others_share"]
    if max(others) > OTHERS_SHARE_MAX:
        console.print(
            "[yellow]The two speeds are not comparable:[/] other programs used"
            f" {others[0]:.0%} of the processor while lohan trained, and {others[1]:.0%} while"
            " plain torch trained.",
            highlight=False,
            soft_wrap=True,
        )


def _loss_table(answer: dict[str, Any]) -> Table:
    title = "Losses: same initial values, same data, same optimizer"
    losses = Table(title=title, title_justify="left")
    for name in ("step", "lohan", "plain torch", "difference"):
        losses.add_column(name, justify="right")
    pairs = list(zip(answer["losses"], answer["reference_losses"], strict=False))
    for step, (a, b) in enumerate(pairs, 1):
        losses.add_row(str(step), f"{a:.6f}", f"{b:.6f}", f"{a - b:+.1e}")
    if len(answer["losses"]) > len(pairs):
        last = len(answer["losses"])
        losses.add_row(str(last), f"{answer['losses'][-1]:.6f}", f"ends at {len(pairs)}", "")
    return losses


def _memory_table(answer: dict[str, Any]) -> Table:
    table = Table(title="Main memory at its peak", title_justify="left")
    for name in ("MB", "lohan", "plain torch"):
        table.add_column(name, justify="left" if name == "MB" else "right")
    base = answer["baseline_peak_bytes"]
    rows = [
        ("the process", answer["process_peak_bytes"], answer["reference_peak_bytes"]),
        ("  imports and one block, with or without lohan", base, base),
        ("  parameters, states and gradients", answer["host_peak_bytes"], None),
        ("    (budget)", answer["host_budget_bytes"], None),
        (
            "  activations, logits and their gradients",
            answer["process_peak_bytes"] - base - answer["host_peak_bytes"],
            None,
        ),
    ]
    for name, mine, plain in rows:
        table.add_row(name, f"{mine / 1e6:.0f}", "" if plain is None else f"{plain / 1e6:.0f}")
    return table


def _traffic_table(answer: dict[str, Any], links: dict[str, int]) -> Table:
    table = Table(
        title=f"SSD traffic per step (P = {answer['params'] / 1e6:.1f} M parameters)",
        title_justify="left",
    )
    for name in ("", "bytes", "planned", "bytes / P"):
        table.add_column(name, justify="left" if not name else "right")
    for name in ("read", "written"):
        moved = answer[f"ssd_{name}_bytes_per_step"]
        planned = answer[f"planned_ssd_{name}_bytes_per_step"]
        table.add_row(name, f"{moved:,}", f"{planned:,}", f"{moved / answer['params']:.2f}")
        for link, nbytes in links.items():
            if link.endswith("read" if name == "read" else "write"):
                share = f"{nbytes / answer['params']:.2f}"
                table.add_row(f"  {link.replace('_', ' ')}", f"{nbytes:,}", "", share)
    as_planned, measured = answer["steps_as_planned"], answer["steps_measured"]
    table.caption = f"exactly as planned: {as_planned} of {measured} steps"
    table.caption_justify = "left"
    return table


def _draw(options: Options, ours: Result, out: Path, console: Console) -> None:
    """Write the timeline of the last two steps; after an error, remove the files."""
    names: list[str] = ours.done["units"]
    spans = _timeline.spans_of(ours.done["events"], names, ours.done["marks"])
    steps = (max(1, len(ours.steps) - 1), len(ours.steps))
    title = (
        f"Steps {steps[0]} and {steps[1]}: {ours.ready['params'] / 1e6:.1f} M parameters in bf16,"
        f" {options.batch} x {options.sequence} tokens, host_bytes {options.host_bytes / 1e6:.0f}"
        " MB; one color per block"
    )
    picture, trace = out / "timeline.png", out / "timeline.json"
    out.mkdir(parents=True, exist_ok=True)
    try:
        _timeline.write_perfetto(trace, spans)
        said = f"Timeline: {trace} (open it in https://ui.perfetto.dev)"
        try:
            _timeline.write_png(picture, spans, names, steps, title)
            said += f", {picture}"
        except UnsupportedError as error:
            said += f"; {error}"
        console.print(said, highlight=False, soft_wrap=True, markup=False)
    except BaseException:
        trace.unlink(missing_ok=True)
        picture.unlink(missing_ok=True)
        with contextlib.suppress(OSError):
            out.rmdir()
        raise
