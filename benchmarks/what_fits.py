"""Make docs/what-fits.md and docs/what-fits.svg: large models on small machines, in virtual time.

Each row is one simulated step of the training engine. The machines and models are in MACHINES and
MODELS; nothing is fitted here. The targets in TARGETS are marked as missed if a row misses them.

    python benchmarks/what_fits.py [--out docs/what-fits.md] [--jobs N] [--check]

It takes some minutes, and needs transformers and matplotlib. With --check, nothing is written, and
the exit status is 1 if the page would change.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import pathlib
import re
import sys
import tempfile
from concurrent.futures import ProcessPoolExecutor
from typing import Any

from lohan.errors import BudgetError
from lohan.planning import _machines, _models
from lohan.simulate import Options, Step, simulate

ROOT = pathlib.Path(__file__).resolve().parent.parent
SEQ = 1024
LOSS = ("loss", "linear_cross_entropy")
LLAMA = {"model_type": "llama", "architectures": ["LlamaForCausalLM"], "vocab_size": 128256}
LLAMA |= {"max_position_embeddings": 8192, "tie_word_embeddings": False, "num_key_value_heads": 8}
# A name of lohan's, or the configuration of a transformers model.
MODELS: dict[str, str | dict[str, Any]] = {
    "gpt-13b": "gpt-13b",
    "GPT-2 13B": {
        "model_type": "gpt2",
        "architectures": ["GPT2LMHeadModel"],
        "n_layer": 40,
        "n_embd": 5120,
        "n_head": 40,
        "n_positions": SEQ,
        "activation_function": "gelu_pytorch_tanh",
    },
    "Llama 8B": {
        **LLAMA,
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
    },
    "Llama 70B": {
        **LLAMA,
        "hidden_size": 8192,
        "intermediate_size": 28672,
        "num_hidden_layers": 80,
        "num_attention_heads": 64,
    },
}
# Changes of the preset paper-4090. Of installed memory, lohan may use 26 of 32 GB and 56 of 64.
ONE_SSD = ("ssd_count=1", "ssd_read_bytes_per_s=7 GB/s", "ssd_write_bytes_per_s=5 GB/s")
ONE_SSD += ("ssd_total_bytes_per_s=0",)
MACHINES = {
    "server": ("ssd_count=12",),
    "desktop, 64 GB": (*ONE_SSD, "host_bytes=56 GB"),
    "desktop, 32 GB": (*ONE_SSD, "host_bytes=26 GB"),
}
# LoHan fig. 6: TFLOP/s of 13B at batch 128 with 12 SSDs, to be met within a tenth.
MEASURED_TFLOPS = 153.8
TOLERANCE = 0.1
TOKENS_PER_S = 1800
# r = 16 on all seven matrices of each of Llama 70B's blocks.
ADAPTERS = 207_093_760


@dataclasses.dataclass(frozen=True)
class Row:
    """A step to simulate.

    Attributes:
        part: the table that the row is in: a key of PARTS.
        label: what is chosen.
        model: a key of MODELS.
        machine: a key of MACHINES.
        batch: the number of sequences in a micro-batch.
        options: the settings of the run.
        load: further arguments of _models.load().
        is_target: whether the part's target is for this row.
        is_quick: whether the row takes only seconds.
    """

    part: str
    label: str
    model: str
    machine: str
    batch: int
    options: Options
    load: tuple[tuple[str, Any], ...] = ()
    is_target: bool = False
    is_quick: bool = False


LORA = (("adapter_params", ADAPTERS), LOSS)
NF4 = (*LORA, ("base", "nf4"))
NF4_LOGITS = (LORA[0], ("base", "nf4"))
LOHAN = Options("lohan")
AUTO = Options()


def _micro(count: int, order: str, **more: Any) -> Options:
    return Options(accumulate=count, order=order, **more)


ROWS = (
    Row("a", "the papers' layers, logits", "gpt-13b", "server", 128, LOHAN, is_quick=True),
    Row(
        "a",
        "the papers' layers, no logits",
        "gpt-13b",
        "server",
        128,
        LOHAN,
        (LOSS,),
        is_quick=True,
    ),
    Row("a", "modules as layers, logits", "GPT-2 13B", "server", 128, LOHAN),
    Row("a", "modules as layers, no logits", "GPT-2 13B", "server", 128, LOHAN, (LOSS,), True),
    Row(
        "a",
        "the same, moments in 8 bits",
        "GPT-2 13B",
        "server",
        128,
        Options("lohan", states="8bit"),
        (LOSS,),
    ),
    Row("b", "logits", "Llama 8B", "desktop, 64 GB", 64, AUTO),
    Row("b", "no logits", "Llama 8B", "desktop, 64 GB", 64, AUTO, (LOSS,)),
    Row(
        "b",
        "no logits, moments in bf16",
        "Llama 8B",
        "desktop, 64 GB",
        64,
        Options(states="bf16"),
        (LOSS,),
    ),
    Row(
        "b",
        "no logits, moments in 8 bits",
        "Llama 8B",
        "desktop, 64 GB",
        64,
        Options(states="8bit"),
        (LOSS,),
        True,
    ),
    Row(
        "b",
        "a quarter of the batch, moments in fp32",
        "Llama 8B",
        "desktop, 64 GB",
        16,
        AUTO,
        (LOSS,),
    ),
    Row(
        "b",
        "a quarter of the batch, moments in 8 bits",
        "Llama 8B",
        "desktop, 64 GB",
        16,
        Options(states="8bit"),
        (LOSS,),
    ),
    Row(
        "b",
        "micro-batches, horizontal, 8 bits",
        "Llama 8B",
        "desktop, 64 GB",
        16,
        _micro(4, "horizontal", states="8bit"),
        (LOSS,),
    ),
    Row(
        "b",
        "micro-batches, vertical, 8 bits",
        "Llama 8B",
        "desktop, 64 GB",
        16,
        _micro(4, "vertical", states="8bit"),
        (LOSS,),
        is_quick=True,
    ),
    Row("c", "bf16 base, logits", "Llama 70B", "desktop, 32 GB", 4, AUTO, LORA[:1]),
    Row("c", "bf16 base, no logits", "Llama 70B", "desktop, 32 GB", 4, AUTO, LORA),
    Row("c", "NF4 base, no logits", "Llama 70B", "desktop, 32 GB", 4, AUTO, NF4),
    Row("c", "bf16 base, vertical", "Llama 70B", "desktop, 32 GB", 4, _micro(4, "vertical"), LORA),
    Row(
        "c",
        "NF4 base, vertical",
        "Llama 70B",
        "desktop, 32 GB",
        4,
        _micro(4, "vertical"),
        NF4,
        is_quick=True,
    ),
    Row("c", "four times the batch, bf16", "Llama 70B", "desktop, 32 GB", 16, AUTO, LORA),
    Row(
        "c",
        "four times the batch, NF4, logits",
        "Llama 70B",
        "desktop, 32 GB",
        16,
        AUTO,
        NF4_LOGITS,
    ),
    Row("c", "four times the batch, NF4", "Llama 70B", "desktop, 32 GB", 16, AUTO, NF4, True),
)


TEXT = """# What fits

`make what-fits` made this page. Each row is a step of the training engine in virtual time
([the simulator](simulator.md)): bytes are exact, and times follow from the rates of a machine. No
row has been measured. The GPU is an RTX 4090 with 24 GiB and the rates that were fitted on LoHan's
measurements ([machines](machines.md#the-papers-server)); nothing is fitted here.

![The rate of each row of the tables below](what-fits.svg)

Of installed main memory, lohan may use 56 of 64 GB and 26 of 32 GB. A sequence has 1,024 tokens.
"4 x 16" is a step of four micro-batches of 16 sequences. TFLOP/s counts 3x the forward FLOP, which
is more than LoRA computes. The last column has the busiest resource, and its share of the step.

The rows assume, besides what [machines](machines.md) lists:

* `--loss linear_cross_entropy` is [lohan's loss without logits](losses.md).
* A model of transformers has a layer for each module, as
  [a session's policies](larger-than-memory.md#activations) have. FLOP count products alone, so that
  activation functions and norms are recomputed for free.
* Several micro-batches are added in fp32 in main memory, and every update waits for the last one,
  as in a session.
* A frozen base is read packed and decoded on arrival. The link to the GPU carries decoded bytes.
"""
# By part: title, target, text.
PARTS = {
    "a": (
        "13B on LoHan's server",
        f"{MEASURED_TFLOPS} TFLOP/s, LoHan's measurement, within {TOLERANCE:.0%}",
        """
13B, batch 128, 12 SSDs, 768 GB of main memory. With logits, the head alone needs more than the GPU
has. With the papers' five layers a block, GELU cannot be recomputed without the product before it,
and its result takes a quarter of what is offloaded.
""",
    ),
    "b": (
        "Full fine-tuning of 8B with one SSD",
        f"{TOKENS_PER_S:,} tokens/s",
        """
Llama 8B on a desktop with 64 GB of main memory and one drive that reads 7 GB/s and writes 5 GB/s.
Moments in 8 bits are small enough for all states to stay in main memory. Commits, which write them,
are made at an interval that costs half a percent of the time.
""",
    ),
    "c": (
        "LoRA on 70B with 32 GB of main memory",
        "computation is the busiest resource",
        """
Llama 70B on the same desktop with 32 GB of main memory, adapters of rank 16 on all matrices.
""",
    ),
}
AFTER = {
    "a": """\
The drives are idle most of the time, so that moments in 8 bits change little but the bytes written.
""",
    "b": """\
The micro-batches are slower than one batch, in both orders: the sums of gradients take 32 GB of
main memory, which the states then lack, and updates wait for them. The vertical order reads a
quarter of the parameters, but offloads the inputs of all micro-batches' blocks. It is for models
whose activations do not fit otherwise.
""",
    "c": """\
With 4 sequences a packed base moves the bound from the SSD to the link, which carries decoded
parameters. A larger batch, whose logits fit here, makes computation the bound. The vertical order
does the same for both forms of the base: all micro-batches share the reads and copies of a block.
""",
}


def load(name: str, batch: int, more: dict[str, Any]) -> Any:
    """Load a model of MODELS."""
    said = MODELS[name]
    if isinstance(said, str):
        return _models.load(said, batch, SEQ, **more)
    with tempfile.TemporaryDirectory() as folder:
        path = pathlib.Path(folder) / "config.json"
        path.write_text(json.dumps(said), encoding="utf-8")
        return _models.load(str(path), batch, SEQ, **more)


def run(row: Row) -> Step | str:
    """Simulate a row; return the reason if it does not fit."""
    machine = _machines.change(_machines.load("paper-4090"), MACHINES[row.machine])
    model = load(row.model, row.batch, dict(row.load))
    try:
        return simulate(model, machine, row.options)
    except BudgetError as error:
        return str(error)


def number(value: float) -> str:
    """Format a number with three digits or more."""
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def refusal(reason: str) -> str:
    """Shorten the reason why a row does not fit."""
    return "does not fit: " + re.sub(r" \([^)]*\)", "", reason.partition(":")[0])


def cells(row: Row, found: Step | str) -> list[str]:
    """Return a row of the page."""
    label = f"**{row.label}**" if row.is_target else row.label
    count = row.options.accumulate
    batch = f"{row.batch}" if count == 1 else f"{count} x {row.batch}"
    if isinstance(found, str):
        return [label, batch, *["-"] * 6, refusal(found)]
    peak = found.peak_bytes
    memory = [number(peak[tier] / 1e9) for tier in ("gpu", "host", "ssd")]
    times = [f"{found.step_ns / 1e9:.1f}", number(found.tokens_per_s), f"{found.tflops:.1f}"]
    share = found.resources[found.bound_by].busy_share
    return [label, batch, *memory, *times, f"{BOUNDS[found.bound_by]} {share:.0%}"]


BOUNDS = {
    "gpu": "computation",
    "ssd": "SSDs",
    "ssd_bus": "SSDs' bus",
    "link_in": "link in",
    "link_out": "link out",
    "cpu": "CPU",
}
HEAD = "choice | batch | GPU, GB | main memory, GB | SSD, GB"
HEAD += " | s a step | tokens/s | TFLOP/s | bound by"


def line(columns: list[str]) -> str:
    """Format a row of a table in Markdown."""
    return f"| {' | '.join(columns)} |"


def target_met(part: str, found: Step | str) -> tuple[bool, str]:
    """Return whether a part's target is met, and a sentence about it."""
    if isinstance(found, str):
        return False, refusal(found)
    if part == "a":
        error = found.tflops / MEASURED_TFLOPS - 1
        return abs(error) <= TOLERANCE, f"{found.tflops:.1f} TFLOP/s, {error:+.1%}"
    if part == "b":
        return found.tokens_per_s >= TOKENS_PER_S, f"{found.tokens_per_s:,.0f} tokens/s"
    share = found.resources[found.bound_by].busy_share
    return found.bound_by == "gpu", f"{BOUNDS[found.bound_by]} is busy {share:.0%} of the step"


def page(steps: dict[Row, Step | str]) -> str:
    """Write the page."""
    made = [TEXT]
    for part, (title, target, text) in PARTS.items():
        made.append(f"## {title}\n{text}")
        columns = HEAD.split(" | ")
        rows = [line(columns), line(["---"] * len(columns))]
        rows += [line(cells(row, steps[row])) for row in ROWS if row.part == part]
        made.append("\n".join(rows) + "\n")
        best = next(row for row in ROWS if row.part == part and row.is_target)
        is_met, said = target_met(part, steps[best])
        verdict = "met" if is_met else "**missed**"
        made.append(f"Target: {target}. It is {verdict} by the row in bold: {said}.\n")
        made.append(AFTER[part])
    return "\n".join(made)


def draw(steps: dict[Row, Step | str], path: pathlib.Path) -> None:
    """Draw a bar for each row: TFLOP/s of the first part, tokens/s of the others."""
    import matplotlib

    matplotlib.use("agg")
    matplotlib.rcParams.update({"svg.hashsalt": "lohan", "svg.fonttype": "none", "font.size": 10})
    from matplotlib import pyplot

    parts = {part: [row for row in ROWS if row.part == part] for part in PARTS}
    heights = [len(rows) for rows in parts.values()]
    size = (9, 0.36 * sum(heights) + 2.6)
    figure, places = pyplot.subplots(
        len(parts), 1, figsize=size, layout="constrained", height_ratios=heights
    )
    for axes, (part, rows) in zip(places, parts.items(), strict=True):
        values = []
        for row in rows:
            step = steps[row]
            is_first = part == "a"
            known = 0.0 if isinstance(step, str) else step.tflops if is_first else step.tokens_per_s
            values.append(known)
        colors = ["#e08214" if row.is_target else "#4e79a7" for row in rows]
        bars = axes.barh([f"{row.label}" for row in rows], values, color=colors)
        said = [number(value) if value else "does not fit" for value in values]
        axes.bar_label(bars, said, padding=3)
        axes.set_title(PARTS[part][0], loc="left", fontsize=11)
        axes.set_xlabel("TFLOP/s" if part == "a" else "tokens a second")
        axes.invert_yaxis()
        axes.margins(x=0.12)
        axes.spines[["top", "right"]].set_visible(False)
        bar = {"a": MEASURED_TFLOPS, "b": TOKENS_PER_S}.get(part)
        if bar is not None:
            axes.axvline(bar, color="#24292f", linewidth=0.8, linestyle=":")
    figure.savefig(path, metadata={"Date": None})
    pyplot.close(figure)


def main() -> int:
    """Simulate all rows, and write the page and its picture, or compare the page."""
    parser = argparse.ArgumentParser(description="Make docs/what-fits.md and its picture.")
    parser.add_argument("--out", type=pathlib.Path, default=ROOT / "docs" / "what-fits.md")
    parser.add_argument("--jobs", type=int, default=os.cpu_count())
    parser.add_argument("--check", action="store_true", help="write nothing; 1 if it would change")
    asked = parser.parse_args()
    with ProcessPoolExecutor(asked.jobs) as pool:
        steps = dict(zip(ROWS, pool.map(run, ROWS), strict=True))
    text = page(steps)
    if asked.check:
        return int(asked.out.read_text(encoding="utf-8") != text)
    asked.out.write_text(text, encoding="utf-8")
    draw(steps, asked.out.with_suffix(".svg"))
    return 0


if __name__ == "__main__":
    sys.exit(main())
