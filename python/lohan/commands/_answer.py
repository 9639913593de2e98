"""`lohan plan` for a machine of parts: does a model fit, how long does it take, and what helps."""

from __future__ import annotations

import contextlib
import dataclasses
import os
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import click
from rich.console import Console
from rich.table import Table

from lohan.activations import _swap
from lohan.commands._simulate_show import load_of, options_of
from lohan.common import _console
from lohan.common._keywords import written
from lohan.common._rules import ADAMW, RULES
from lohan.common._shown import RESOURCES, of_number
from lohan.common._shown import of_bytes as size
from lohan.common._states import BLOCK_ELEMENTS, SCALED, STATES
from lohan.config import POLICIES, Config
from lohan.errors import BudgetError, LohanError, MachineError, UnsupportedError
from lohan.planning import _models, _quick, _wear
from lohan.simulate import Options, Step, simulate

if TYPE_CHECKING:
    from lohan.planning import _plan
    from lohan.planning._machines import Machine

_LOSS = "linear_cross_entropy"
_MICRO_BATCHES = 4
_BATCHES = (1, 2, 4, 8, 16, 32, 64, 128)
_BEST_SHARE = 0.97
_BEST = "best: "
_DAYS_PER_YEAR = 365
_YEARS_SHOWN_MAX = 20


@dataclasses.dataclass(frozen=True)
class Question:
    """A run that somebody thinks of.

    Attributes:
        model: the model's name, config.json or class.
        batch: the number of sequences of a micro-batch.
        seq: the number of tokens of a sequence.
        machine: the machine.
        options: the settings of `lohan.wrap`.
        load: further arguments of _models.load().
        tokens: the tokens of the whole run.
    """

    model: str
    batch: int
    seq: int
    machine: Machine
    options: Options
    load: dict[str, Any]
    tokens: int


def _changes(question: Question) -> dict[str, Question]:
    """Return the question with one thing changed, by what is changed."""
    machine, options = question.machine, question.options
    made: dict[str, Question] = {}

    def put(name: str, **fields: Any) -> None:
        made[name] = dataclasses.replace(question, **fields)

    if options.states not in SCALED and "8bit" in RULES[options.rule].formats:
        put('moments="8bit"', options=dataclasses.replace(options, states="8bit"))
    for rule, states in _other_rules(options):
        changed = dataclasses.replace(options, method=rule, states=states)
        put(_wear.kind_call(rule, states), options=changed)
    if options.commit_every == 1 and options.policy == "auto":
        put('commit_every="auto"', options=dataclasses.replace(options, commit_every=None))
    if options.accumulate == 1:
        several = dataclasses.replace(options, accumulate=_MICRO_BATCHES)
        put(f"gradient_accumulation_steps={_MICRO_BATCHES}", options=several)
    if question.load.get("loss", "logits") == "logits":
        put("lohan.losses.linear_cross_entropy", load={**question.load, "loss": _LOSS})
    put(f"batch {2 * question.batch}", batch=2 * question.batch)
    if "adapter_params" in question.load and question.load.get("base", "bf16") == "bf16":
        put("a base in NF4", load={**question.load, "base": "nf4"})
    more = dataclasses.replace(machine, host_bytes=2 * machine.host_bytes)
    put(f"{size(more.host_bytes)} of main memory", machine=more)
    drives = machine.ssd_count + 1
    put(f"{drives} drives", machine=dataclasses.replace(machine, ssd_count=drives))
    return made


def _other_rules(options: Options) -> list[tuple[str, str]]:
    """Return rules with fewer bytes, in the same format, and then those with the fewest.

    Of several rules with the same bytes, it is the first: they have the same step. A rule without
    moments has no format: fp32.
    """
    now = RULES[options.rule].moment_bytes(BLOCK_ELEMENTS, options.states)
    kinds: dict[int, tuple[str, str]] = {}
    for name, row in RULES.items():
        states = options.states if options.states in row.formats else "fp32"
        nbytes = row.moment_bytes(BLOCK_ELEMENTS, states)
        if nbytes < now:
            kinds.setdefault(nbytes, (name, states))
    fewest = _wear.fewest_kinds(options.rule, options.states)
    return list(dict.fromkeys([*kinds.values(), *fewest]))


def _best(question: Question) -> dict[str, Question]:
    """Return the batch, states and accumulate= that train fastest, as the timeline has it.

    Micro-batches help where the drives bound a step, so the same is tried with several of them.
    """
    if question.options.policy != "auto" or question.options.accumulate > 1:
        return {}
    found: list[tuple[float, int, str]] = []
    rule = question.options.rule
    for states in RULES[rule].proposed:
        for batch in _BATCHES:
            try:
                model = _quick.sketch(question.model, batch, question.seq, **question.load)
                if model is None:
                    return {}
                step = _quick.step(model, question.machine, states, rule)
            except LohanError:
                break
            found.append((step.tokens_per_s, batch, states))
    if not found:
        return {}
    # What gains less than that is not worth its memory.
    most = max(found)[0] * _BEST_SHARE
    _, batch, states = min(
        (each for each in found if each[0] >= most), key=lambda each: (each[1], -STATES[each[2]])
    )
    made = {}
    for count in (1, _MICRO_BATCHES):
        options = dataclasses.replace(question.options, states=states, accumulate=count)
        name = f'{_BEST}batch {batch}, moments="{states}", gradient_accumulation_steps={count}'
        made[name] = dataclasses.replace(question, batch=batch, options=options)
    return made


class _Steps:
    """Simulates steps at the same time on all cores, and loads each model once."""

    def __init__(self, pool: ThreadPoolExecutor) -> None:
        self.models: dict[Any, _plan.Model] = {}
        self._pool = pool
        self._steps: dict[Any, Future[Step]] = {}

    def begin(self, question: Question) -> Future[Step]:
        """Begin to simulate a question's step."""
        key = (question.batch, *sorted(question.load.items()))
        if key not in self.models:
            self.models[key] = _models.load(
                question.model, question.batch, question.seq, **question.load
            )
        model, options = self.models[key], question.options
        arrays = RULES[options.rule].moment_arrays(BLOCK_ELEMENTS, options.states)
        same = (key, question.machine, dataclasses.replace(options, method=""), arrays)
        if same not in self._steps:  # rules with the same moments have the same step
            self._steps[same] = self._pool.submit(simulate, model, question.machine, options)
        return self._steps[same]


def _swap_settings(step: Step) -> dict[str, Any]:
    """Return the sizes that give activations the room which they have in the simulated step.

    wrap's defaults are a quarter of main memory and room on SSD, whatever a step needs of them.
    """
    room = step.saved_bytes
    if not any(room.values()):
        return {"swap_bytes": 0}
    if room["ssd"] == 0:
        return {"swap_bytes": _rounded_up(room["host"]), "swap_ssd_bytes": 0}
    memory = _swap.least_bytes(room["host"], room["transit"])
    return {"swap_bytes": _rounded_up(memory), "swap_ssd_bytes": _rounded_up(room["ssd"])}


def _rounded_up(nbytes: int) -> str:
    return f"{-(-nbytes // 10**8) / 10:g}GB"


def _rounded_down(nbytes: int, least: int) -> str:
    """Return a budget in whole GB, or in more digits if the step needs more than these."""
    unit = 10**9 if nbytes // 10**9 * 10**9 >= least else 10**6
    return f"{nbytes // unit * unit / 10**9:.12g}GB"


def wrap_line(question: Question, step: Step) -> str:
    """Return the call of lohan.wrap() that makes the simulated step."""
    options = question.options
    stores = [f"/ssd{i}/run" for i in range(question.machine.ssd_count)]
    settings: dict[str, Any] = {"store": stores, "device": "cuda"}
    settings["host_bytes"] = _rounded_down(question.machine.host_bytes, step.peak_bytes["host"])
    settings["activations"] = options.policy
    if "adapter_params" in question.load:
        settings["weights"] = "FOLDER"
    settings |= _swap_settings(step)
    if options.states != "fp32":
        settings["states"] = options.states
    # With gradient_accumulation_steps=, wrap itself makes all updates wait for the end of the step.
    if step.schedule != ("deferred" if options.accumulate > 1 else Config().schedule):
        settings["schedule"] = step.schedule
    if options.commit_every is not None or options.policy != "auto":
        settings["commit_every"] = step.commit_every
    if options.accumulate > 1:
        settings["accumulate"] = options.accumulate
    rule = "" if options.rule == ADAMW.name else f"{_wear.kind_call(options.rule, 'fp32')}, "
    return f"lohan.wrap(model, lr=..., {rule}{written(settings)})".replace("'", '"')


def _hours(question: Question, step: Step) -> float:
    return question.tokens / step.tokens_per_s / 3600


def _figures(question: Question, step: Step) -> dict[str, Any]:
    return {
        "step_s": step.step_ns / 1e9,
        "tokens_per_s": step.tokens_per_s,
        "hours": _hours(question, step),
        "bound_by": step.bound_by,
        "commit_every": step.commit_every,
        "ssd_life_days": step.ssd_life_days,
        "wrap": wrap_line(question, step),
    }


def answer(question: Question, tell: Callable[[str], None]) -> dict[str, Any]:
    """Simulate the run, and the same with one thing changed.

    Args:
        question: the run.
        tell: receives what is being done.

    Returns:
        "fits", "why_not" (None if it fits), "model", "param_count", the figures of the step
        ("step_s", "tokens_per_s", "hours", "bound_by", "commit_every", "ssd_life_days", "wrap")
        and "step" (all of them, as `lohan simulate --json` has them), and "changes": what is
        changed, whether the run then fits, and the same figures. Without a fit, figures are absent.

    Raises:
        MachineError, ModelError: the model or a setting is invalid.
    """
    pool = ThreadPoolExecutor(len(os.sched_getaffinity(0)))
    try:
        return _answered(question, _Steps(pool), tell)
    finally:  # an interrupt does not wait for simulations that have not begun
        pool.shutdown(cancel_futures=True)


def _answered(question: Question, steps: _Steps, tell: Callable[[str], None]) -> dict[str, Any]:
    tell(f"a step of {question.model}")
    first = steps.begin(question)
    (model,) = steps.models.values()
    changed = {**_best(question), **_changes(question)}
    running: dict[str, Future[Step]] = {}
    for name, each in changed.items():
        with contextlib.suppress(UnsupportedError, MachineError):  # some heads cannot change
            running[name] = steps.begin(each)
    found: dict[str, Any] = {"fits": True, "why_not": None, "model": question.model}
    found["tokens"] = question.tokens
    try:
        step = first.result()
        found |= {"param_count": model.param_count + model.frozen_count}
        found |= {**_figures(question, step), "step": step.as_dict()}
    except BudgetError as error:
        found |= {"fits": False, "why_not": str(error)}
    changes: list[dict[str, Any]] = []
    for name, each in changed.items():
        if name not in running:
            continue
        tell(name)
        try:
            step = running[name].result()
        except BudgetError:
            changes.append({"change": name, "fits": False})
            continue
        changes.append({"change": name, "fits": True, **_figures(each, step)})
    tried = {name: each for name, each in changed.items() if each.machine is question.machine}
    tried = {name: each for name, each in tried.items() if each.load == question.load}
    rule = question.options.rule
    tried = {name: each for name, each in tried.items() if each.options.rule == rule}
    changes = _with_best(found, changes, question, tried)
    return {**found, "changes": changes}


def _with_best(
    found: dict[str, Any],
    changes: list[dict[str, Any]],
    question: Question,
    tried: dict[str, Question],
) -> list[dict[str, Any]]:
    """Return the changes, first the fastest one that only changes batch, states or accumulate=."""
    candidates = [row for row in changes if row["change"] in tried and row["fits"]]
    others = [row for row in changes if not row["change"].startswith(_BEST)]
    if not candidates:
        return others
    best = max(candidates, key=lambda row: float(row["tokens_per_s"]))
    if found["fits"] and best["tokens_per_s"] * _BEST_SHARE <= found["tokens_per_s"]:
        return others
    asked = tried[best["change"]]
    name = f"{_BEST}batch {asked.batch}, {asked.options.states}"
    if asked.options.accumulate > 1:
        name += f", accumulate {asked.options.accumulate}"
    return [{**best, "change": name}, *others]


def _life(days: float | None) -> str:
    if days is None:
        return ""
    years = days / _DAYS_PER_YEAR
    if years > _YEARS_SHOWN_MAX:
        return f"over {_YEARS_SHOWN_MAX} years"
    return f"{years:.1f} years" if years >= 1 else f"{days:,.0f} days"


def _show_rules(found: dict[str, Any], options: Options, say: Callable[[str], None]) -> None:
    """Print how long the drives last with the update rules that have the fewest bytes.

    Where the drives bound a step, fewer bytes make it faster instead of writing less in a day.
    """

    def tokens(row: dict[str, Any]) -> float:
        return float(row["ssd_life_days"] * row["tokens_per_s"])

    rows = {row["change"]: row for row in found["changes"] if row["fits"]}
    calls = [_wear.kind_call(*kind) for kind in _wear.fewest_kinds(options.rule, options.states)]
    lives = [
        f"{call}: {_life(rows[call]['ssd_life_days'])}, for"
        f" {of_number(tokens(rows[call]) / tokens(found))} times as many tokens"
        for call in calls
        if call in rows
    ]
    if lives:
        say(f"with update rules of fewer bytes: {'; '.join(lives)}")


def show(found: dict[str, Any], question: Question, console: Console) -> None:
    """Print the answer on one screen."""

    def say(text: str) -> None:
        console.print(text, highlight=False, soft_wrap=True, markup=False)

    machine = question.machine
    if found["fits"]:
        step = found["step"]
        peak = step["peak_bytes"]
        busy = step["resources"][found["bound_by"]]["busy_share"]
        say(
            f"{found['model']} fits: {size(peak['gpu'])} of the GPU's {size(machine.gpu_bytes)},"
            f" {size(peak['host'])} of {size(machine.host_bytes)} of main memory that programs can"
            f" use, {size(peak['ssd'])} of SSD"
        )
        count = question.options.accumulate * question.batch
        of = f"{count} x {question.seq:,} tokens"
        tokens = round(found["tokens_per_s"] * found["step_s"])
        if tokens != count * question.seq:  # of images, patches count
            of = f"{count} images ({tokens:,} tokens)"
        say(
            f"a step of {of}"
            f" takes {of_number(found['step_s'])} s: {found['tokens_per_s']:,.0f} tokens/s,"
            f" {of_number(found['hours'])} hours for"
            f" {of_number(question.tokens / 1e6)} million tokens; bound by:"
            f" {RESOURCES[found['bound_by']]} ({busy:.0%} busy)"
        )
        written = step["written_bytes_per_day"]
        life = _life(found["ssd_life_days"])
        lasts = f": the drives last {life}" if life else "; pass their endurance, as 1200TBW"
        say(f"{size(written)} written a day{lasts}")
        if found["ssd_life_days"] is not None and found["ssd_life_days"] < _DAYS_PER_YEAR:
            _show_rules(found, question.options, say)
        say(f"\n    {found['wrap']}\n")
    else:
        say(f"{found['model']} does not fit: {found['why_not']}\n")
    table = Table("with one change", box=None)
    for column in ("s a step", "tokens/s", "hours", "drives last"):
        table.add_column(column, justify="right")
    for row in found["changes"]:
        cells = ["does not fit", "", "", ""]
        if row["fits"]:
            cells = [of_number(row["step_s"]), f"{row['tokens_per_s']:,.0f}"]
            cells += [of_number(row["hours"]), _life(row["ssd_life_days"])]
        table.add_row(row["change"], *cells)
    console.print(table, highlight=False)
    say(
        f"assumed, not measured: {machine.gpu_flop_per_s / 1e12:.0f} TFLOP/s, links of"
        f" {size(machine.link_in_bytes_per_s)}/s, drives that write"
        f" {size(machine.ssd_write_bytes_per_s)}/s without pause, AdamW with"
        f" {machine.adam_params_per_s / 1e9:.1f} billion parameters/s; --set changes them"
    )


def run(question: Question, console: Console | None) -> dict[str, Any]:
    """Answer, print if there is a console, and return what `--json` writes."""
    with _console.spinner() as tell:
        found = answer(question, tell)
    if console is not None:
        show(found, question, console)
    return found


def question_of(asked: dict[str, Any], machine: Machine, words: dict[str, Any]) -> Question:
    """Return the question of a command line.

    Args:
        asked: "model", "batch" and "tokens".
        machine: the PC.
        words: the options of a step.

    Raises:
        UsageError: an option cannot be combined with the name of a GPU.
    """
    for name in ("sweep", "plot"):
        if words[name]:
            raise click.UsageError(f"--{name} cannot be combined with the name of a GPU")
    if words["order"] == "vertical":
        raise click.UsageError(
            "--order vertical cannot be combined with the name of a GPU: lohan.wrap has no plans of"
            " activations in this order; use lohan simulate"
        )
    options = options_of(words)
    if options.policy not in POLICIES:
        raise click.UsageError(
            f"--policy {options.policy} cannot be combined with the name of a GPU: lohan.wrap has"
            f" only {', '.join(POLICIES)}; use lohan simulate"
        )
    return Question(
        model=asked["model"],
        batch=asked["batch"],
        seq=words["seq"],
        machine=machine,
        options=options,
        load=load_of(words),
        tokens=round(asked["tokens"]),
    )
