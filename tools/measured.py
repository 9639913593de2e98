"""Writes the figures of benchmarks/history.jsonl, and what ran on a GPU, into the pages.

    measured.py            rewrite README.md and the pages of docs/
    measured.py --check    exit status 1 if a page differs from what would be written

A page shows the newest line of each measurement, for each vendor of processors: a table between
"<!-- measured -->" and "<!-- end -->", or a figure in a sentence, as

    <!-- ratio world_disk Intel -->0.52<!-- end -->

where the first word is a field of the line: a ratio has two decimals, another number one. The
beginning of the peer's name may follow the vendor, with underscores instead of spaces.

Between "<!-- gpu sentence -->" or "<!-- gpu table -->" and "<!-- end -->" is what
tests/cuda/ran.json records (gpu_record.py).
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import pathlib
import re
import sys
from collections.abc import Iterable
from typing import Any

import gpu_record

ROOT = pathlib.Path(__file__).resolve().parent.parent
HISTORY = ROOT / "benchmarks" / "history.jsonl"
VENDORS = ("AMD", "Intel")

# Lines whose names were given to other settings, too, by commit and name.
RENAMED = {
    ("f518174", "step"): "step_1x32_disk_400mb_per_s",
    ("f518174", "step_serial"): "step_1x32_disk_400mb_per_s_serial",
    ("1351e42", "world_overlap"): "world_overlap_16_rows",
}
NOT_MEASURED = "\u2013"
Line = dict[str, Any]


@dataclasses.dataclass(frozen=True)
class Row:
    """A row of a table.

    Args:
        quantity: what was measured.
        compared: with what.
        name: the name of the measurement.
        command: the make target that measures it.
        peer: how the name of the peer begins, where a measurement has several.
    """

    quantity: str
    compared: str
    name: str
    command: str
    peer: str = ""


MASTERS = "torch bf16 with fp32 masters"
STEP = "seconds of a step, GPT-2 124M in bf16, states on SSD, `host_bytes` of 300 MB"
SPEED = "steps a second, the same model and budget"
FITTED = "steps a second in no more memory than the other"
ADAM = "AdamW, parameters a second, {}, checksums included"
ADAM_8BIT = ADAM.format("8-bit moments, fp32 parameters")
DISK_BOUND = "seconds of a step that the drive bounds (400 MB/s), {}, {}"
TRAINING = "with requests as in training"
PEERS, STEPS = "bench-peers", "bench-step"
IN_MEMORY = [
    Row(STEP, "torch in memory: bf16 with fp32 masters, fused AdamW", "step", STEPS, MASTERS),
    Row("the same", "torch in memory: autocast over fp32", "step", STEPS, "torch autocast"),
]
DEEPSPEED = [
    Row(SPEED, "DeepSpeed ZeRO-3 on NVMe", "ssd_zero3", PEERS),
    Row(FITTED, "DeepSpeed ZeRO-3 on NVMe", "same_memory_zero3", PEERS),
    Row("the same", "DeepSpeed ZeRO-2, optimizer in main memory", "same_memory_zero2", PEERS),
]
LORA = Row(
    "seconds of a LoRA step, base of 2.6 GB read in place, `host_bytes` of 1 GB",
    "peft, all in memory",
    "lora_step",
    "bench-lora",
)
LOADED = "from_pretrained, all of it in memory"


def load_rows() -> list[Row]:
    """Return the rows about reading a base."""
    return [
        Row(
            "seconds of `wrap(weights=)`, a base of 2.5 GB read in place, least `host_bytes`",
            LOADED,
            "load_dense_in_place",
            "bench-load",
        ),
        Row("memory that this takes", LOADED, "load_dense_memory", "bench-load"),
        Row(
            'seconds of `wrap(weights=, io=lohan.IO(frozen="copy"))` of this base',
            "reading the files and writing as many bytes",
            "load_dense_copied",
            "bench-load",
        ),
    ]


EMULATED = Row(
    "seconds of a step on an **emulated** accelerator",
    "lohan with updates after backward",
    "emu_optimized",
    "bench-step DEVICE=emu",
)


def io_rows() -> list[Row]:
    """Return the rows of I/O, compared with fio and with DeepSpeed's."""
    rows = []
    for mode, words in (("read", "reads"), ("write", "writes"), ("mixed", "reads and writes")):
        for peer, told in (("fio", "fio"), ("deepspeed", "DeepSpeed's I/O")):
            best = Row(
                f"{words} of a store, bytes a second",
                f"{told}, each at its best",
                f"io_{mode}",
                "bench-io",
                peer,
            )
            compared = "fio with as much in flight" if peer == "fio" else f"{told} at its best"
            training = Row(
                f"{words}, {TRAINING}", compared, f"io_training_{mode}", "bench-io", peer
            )
            rows += [best, training]
    return rows


def adam_rows() -> list[Row]:
    """Return the rows of AdamW with all peers."""
    rows = [
        Row(ADAM.format(words), told, f"adam_py/{mode}/checksums", "bench-adam", peer)
        for mode, words in (("bf16_residual", "bf16"), ("fp32", "fp32"))
        for peer, told in (
            ("torch_fused", "torch's fused AdamW"),
            ("deepspeed", "DeepSpeed's CPU Adam"),
        )
    ]
    name = "adam_py/fp32/checksums/8bit_moments"
    return [
        *rows,
        Row(ADAM_8BIT, "torchao's 8-bit AdamW, compiled", name, "bench-adam", "torchao"),
        Row("the same", "bitsandbytes' 8-bit AdamW", name, "bench-adam", "bitsandbytes"),
    ]


def states_rows() -> list[Row]:
    """Return the rows of moments in fewer bits."""
    return [
        Row(
            DISK_BOUND.format(model, f"{words} moments"),
            "moments in fp32",
            f"states_{kind}{suffix}",
            "bench-states",
        )
        for suffix, model in (("", "GPT-2 124M"), ("_350m", "349 million parameters"))
        for kind, words in (("8bit", "8-bit"), ("bf16", "bf16"))
    ]


RULES_ON_DISK = [
    Row(
        DISK_BOUND.format("GPT-2 124M", title),
        "AdamW, moments in fp32",
        f"rule_{kind}_disk_400mb_per_s",
        'bench-step ARGS="--rules ... --disk-rate ..."',
    )
    for kind, title in (
        ("lion_8bit", "Lion, 8-bit moments"),
        ("sgd", "SGD without momentum"),
        ("adam_mini", "Adam-mini"),
        ("adafactor", "Adafactor"),
    )
]
RULES_ALONE = [
    Row(
        f"{title}, parameters a second, {words}, checksums included",
        f"torch's {form} form",
        f"rules_py/{rule}/{mode}/checksums",
        "bench-rules",
        f"torch_{form}",
    )
    for rule, title, form in (
        ("adam", "Adam", "fused"),
        ("lion", "Lion", "foreach"),
        ("sgd", "SGD", "fused"),
        ("sgd_momentum", "SGD with momentum", "fused"),
        ("adagrad", "Adagrad", "fused"),
        ("rmsprop", "RMSprop", "foreach"),
        ("rmsprop_momentum", "RMSprop with momentum", "foreach"),
    )
    for mode, words in (("bf16_residual", "bf16"), ("fp32", "fp32"))
]

PERFORMANCE = [
    *IN_MEMORY,
    Row("seconds of such a step, updates after backward", "lohan", "step_serial", STEPS),
    Row(SPEED, "torch in memory: bf16 with fp32 masters", "ssd_torch", PEERS, "torch masters"),
    Row("the same", "torch in memory: autocast over fp32", "ssd_torch", PEERS, "torch autocast"),
    *DEEPSPEED,
    Row(
        "seconds of a step that the drive bounds (400 MB/s), one row of 32 tokens",
        "torch in memory: autocast over fp32",
        "step_1x32_disk_400mb_per_s",
        'bench-step ARGS="--disk-rate ..."',
        "torch autocast",
    ),
    EMULATED,
    *adam_rows(),
    *io_rows(),
    Row(
        "seconds of a step whose parameters all stay in memory: what hooks cost",
        "the model unwrapped",
        "hooks_step",
        "bench-hooks",
    ),
    LORA,
    *load_rows(),
    Row(
        "seconds of a LoRA step on an NF4 base of 1.3 billion parameters, 300 MB, 16 tokens",
        "peft with bitsandbytes, all in memory",
        "lora_nf4_bitsandbytes",
        'bench-lora ARGS="--base nf4 ..."',
    ),
    *states_rows(),
    Row(
        "steps a second, LoRA with 8 micro-batches, one pass for all (200 MB/s)",
        "lohan, a pass for each",
        "accumulate_lora_horizontal",
        "bench-accumulate",
    ),
    Row("the same", "DeepSpeed ZeRO-3 on NVMe", "accumulate_lora_zero3", "bench-accumulate"),
    Row(
        "steps a second, all parameters with 8 micro-batches, one pass for all (200 MB/s)",
        "lohan, a pass for each",
        "accumulate_full_horizontal",
        "bench-accumulate",
    ),
    Row("the same", "DeepSpeed ZeRO-3 on NVMe", "accumulate_full_zero3", "bench-accumulate"),
    Row(
        "seconds of a step, all parameters of a diffusion transformer of 1.01 billion,"
        " emulated accelerator, 1.5 GB of budget",
        "forward and backward in memory, no optimizer",
        "diffusion_step",
        "bench-diffusion",
    ),
    Row(
        "memory with activations, DPO of GPT-2 124M in fp32, `lohan.reference`, 550 MB of budget",
        "TRL with model, states and reference in memory",
        "reference_memory",
        "bench-reference",
    ),
    Row("seconds of such a step", "the same", "reference_step", "bench-reference"),
    Row(
        "seconds of a step with the plan of `auto`",
        "the best of eight amounts to offload",
        "plan_best_gpt2",
        'bench-policies ARGS="--model gpt2"',
    ),
]
CLIPPING = [
    Row(
        f'`IO(clip="{way}")`, seconds of a step, every 20th is clipped, {where}',
        "the same without clipping",
        f"clip_{way}_small_{end}",
        "bench-clip",
    )
    for end, where in (
        ("80mb_cpu", "drive of 400 MB/s, 80 MB of budget"),
        ("200mb_cpu", "drive of 400 MB/s, 200 MB of budget"),
        ("600mb_emu", "emulated accelerator, all states in memory"),
    )
    for way in ("wait", "repeat")
]
TABLES = {
    "README.md": [*IN_MEMORY, *DEEPSPEED, LORA, EMULATED],
    "docs/performance.md": PERFORMANCE,
    "docs/settings.md": CLIPPING,
    "docs/update-rules.md": [*RULES_ON_DISK, *RULES_ALONE],
}


def vendor_of(line: Line) -> str:
    """Return the vendor of the processor that a line was measured on."""
    return next((vendor for vendor in VENDORS if vendor in line["machine"]), "")


def name_of(line: Line) -> str:
    """Return the name of a line's measurement."""
    return RENAMED.get((line["commit"], line["name"]), line["name"])


def read(text: str) -> list[Line]:
    """Return the lines of a history, each with the name of its measurement."""
    lines = [json.loads(line) for line in text.splitlines()]
    return [{**line, "name": name_of(line)} for line in lines]


def newest(lines: Iterable[Line], name: str, vendor: str, peer: str = "") -> Line | None:
    """Return the newest line of a measurement on processors of a vendor; None without one."""
    found = [
        line
        for line in lines
        if line["name"] == name
        and vendor_of(line) == vendor
        and (line["peer"] or "").replace(" ", "_").startswith(peer.replace(" ", "_"))
    ]
    dates = [line["date"] for line in found]
    return found[len(dates) - 1 - dates[::-1].index(max(dates))] if found else None


def cell(line: Line | None) -> str:
    """Return a ratio with its extremes."""
    if line is None:
        return NOT_MEASURED
    return f"{line['ratio']:.2f} ({line['ratio_min']:.2f} to {line['ratio_max']:.2f})"


def memory(shown: list[Line]) -> str:
    """Return lohan's and the peer's memory, if the newest line shown has them."""
    last = max(shown, key=lambda line: str(line["date"]))
    sizes = [last.get(key) for key in ("peak_bytes", "peer_peak_bytes")]
    return (
        " and ".join(f"{size / 1e9:.1f}" for size in sizes) + " GB" if all(sizes) else NOT_MEASURED
    )


def table(rows: list[Row], lines: list[Line], has_memory: bool) -> str:
    """Return the table of a page, and a sentence about the age of its lines."""
    heads = ["measured", "compared with", *VENDORS, "command", "record"]
    if has_memory:
        heads.insert(4, "memory, lohan's and the other's")
    made = [heads, ["---"] * len(heads)]
    dates = []
    for row in rows:
        found = [newest(lines, row.name, vendor, row.peer) for vendor in VENDORS]
        shown = [line for line in found if line is not None]
        if not shown:
            raise SystemExit(f"{HISTORY.name} has no line {row.name} with the peer {row.peer!r}")
        dates += [line["date"] for line in shown]
        cells = [row.quantity, row.compared, *map(cell, found)]
        if has_memory:
            cells.append(memory(shown))
        made.append([*cells, f"`make {row.command}`", f"`{row.name}`"])
    told = f"These lines were recorded from {min(dates)} to {max(dates)}."
    return "\n".join([*(f"| {' | '.join(cells)} |" for cells in made), "", told])


def figure(match: re.Match[str], lines: list[Line]) -> str:
    """Return the figure of a sentence, with its comments."""
    field, name, vendor, peer = match[2], match[3], match[4], match[5] or ""
    line = newest(lines, name, vendor, peer)
    if line is None:
        raise SystemExit(f"{HISTORY.name} has no line {name} of {vendor}")
    value = f"{line[field]:.2f}" if "ratio" in field else f"{line[field]:.1f}"
    return f"{match[1]}{value}<!-- end -->"


def written(page: str, text: str, lines: list[Line], gpu_texts: dict[str, str]) -> str:
    """Return the text of a page with the newest figures.

    Args:
        page: the path of the page in the project.
        text: its text.
        lines: the history.
        gpu_texts: what ran on a GPU (gpu_record.texts).
    """
    if page in TABLES:
        made = table(TABLES[page], lines, has_memory=page == "README.md")
        text, count = re.subn(
            r"(?s)<!-- measured -->\n.*?<!-- end -->",
            lambda _: f"<!-- measured -->\n\n{made}\n\n<!-- end -->",
            text,
        )
        if count != 1:
            raise SystemExit(f"{page} has {count} tables of measurements instead of one")
    for mark, told in gpu_texts.items():
        text = re.sub(
            rf"(?s)(<!-- gpu {mark} -->)(\n?).*?<!-- end -->",
            lambda match, told=told: (
                f"{match[1]}\n\n{told}\n\n<!-- end -->"
                if match[2]
                else f"{match[1]}{told}<!-- end -->"
            ),
            text,
        )
    sentence = r"(<!-- (\w+) (\S+) (AMD|Intel)(?: (\w+))? -->)[^<]*<!-- end -->"
    return re.sub(sentence, lambda match: figure(match, lines), text)


def pages() -> dict[str, str]:
    """Return the text of every page, by its path in the project."""
    found = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
    return {str(page.relative_to(ROOT)): page.read_text(encoding="utf-8") for page in found}


def main() -> int:
    """Write or check the pages."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true")
    options = parser.parse_args()
    lines = read(HISTORY.read_text(encoding="utf-8"))
    gpu_texts = gpu_record.texts()
    stale = False
    for page, text in pages().items():
        made = written(page, text, lines, gpu_texts)
        if made != text:
            stale = True
            print(f"{page} does not show the newest lines" if options.check else f"wrote {page}")
            if not options.check:
                (ROOT / page).write_text(made, encoding="utf-8")
    return int(stale and options.check)


if __name__ == "__main__":
    sys.exit(main())
