"""Draws docs/step.svg: one training step over time, and what each resource does in it.

    step_picture.py            write docs/step.svg
    step_picture.py --check    exit status 1 if docs/step.svg differs from what would be written

The picture shows four blocks and is a sketch, not a measurement: the times below are chosen so that
every order that the engine guarantees can be seen. A block's parameters are read before it runs;
its optimizer states are read before its gradient arrives; its update begins after its backward; its
write begins after its update; the next forward of a block begins after its update; the commit comes
last.
"""

from __future__ import annotations

import argparse
import pathlib
import sys

TARGET = pathlib.Path(__file__).resolve().parent.parent / "docs" / "step.svg"

WIDTH, HEIGHT = 1000, 400
LEFT = 178  # where time 0 is drawn
SCALE = 1.12  # pixels per unit of time
COLORS = {1: "#4e79a7", 2: "#59a14f", 3: "#e08214", 4: "#b3446c"}
INK, GRAY, PALE = "#24292f", "#57606a", "#eef1f4"

# Spans are (block, begin, end).
FORWARD = [(1, 60, 100), (2, 100, 140), (3, 140, 180), (4, 180, 220)]
BACKWARD = [(4, 220, 300), (3, 300, 380), (2, 380, 460), (1, 460, 540)]
NEXT_FORWARD = [(1, 596, 636), (2, 636, 676), (3, 676, 716)]
RESIDENT = [
    (1, 20, 104),
    (2, 60, 144),
    (3, 100, 508),
    (4, 140, 424),
    (2, 340, 680),
    (1, 436, 640),
    (3, 600, 716),
    (4, 640, 716),
]
UPDATES = [(4, 304, 350), (3, 384, 430), (2, 464, 510), (1, 544, 590)]
PARAMETER_READS = [
    (1, 20, 36),
    (2, 60, 76),
    (3, 100, 116),
    (4, 140, 156),
    (2, 340, 356),
    (1, 436, 452),
    (3, 600, 616),
    (4, 640, 656),
]
STATE_READS = [(4, 200, 262), (3, 270, 332), (2, 364, 426), (1, 460, 522)]
WRITES = [(4, 354, 424), (3, 434, 508), (2, 514, 588), (1, 594, 668)]
COMMIT = (672, 716)
STEP_CALL = 540

# The top of each lane, in pixels.
COMPUTE_Y, RESIDENT_Y, ADAM_Y, READ_Y, WRITE_Y = 64, 140, 204, 274, 318


def x_of(time: float) -> float:
    """The horizontal position of a time, in pixels."""
    return round(LEFT + SCALE * time, 1)


def text(
    x: float, y: float, words: str, *, size: int = 13, anchor: str = "start", **more: str
) -> str:
    """A line of text; `more` has further attributes, `fill` among them."""
    fill = more.pop("fill", INK)
    rest = "".join(f' {name.replace("_", "-")}="{value}"' for name, value in more.items())
    where = f'x="{x}" y="{y}" font-size="{size}" text-anchor="{anchor}"'
    return f'<text {where} fill="{fill}"{rest}>{words}</text>'


def box(
    begin: float, end: float, y: float, height: float, color: str, label: str = ""
) -> list[str]:
    """A filled span of time, with a label in its middle."""
    x, width = x_of(begin), round(SCALE * (end - begin) - 1.5, 1)
    made = [f'<rect x="{x}" y="{y}" width="{width}" height="{height}" rx="2" fill="{color}"/>']
    if label:
        middle = round(x + width / 2, 1)
        made.append(
            text(middle, y + height / 2 + 4, label, size=11, anchor="middle", fill="#ffffff")
        )
    return made


def lane(y: float, height: float, title: str, note: str) -> list[str]:
    """The background of a lane, and its two lines of description at the left."""
    x, width = LEFT - 4, round(x_of(720) - LEFT + 8, 1)
    return [
        f'<rect x="{x}" y="{y}" width="{width}" height="{height}" fill="{PALE}"/>',
        text(14, y + height / 2 - 2, title, font_weight="bold"),
        text(14, y + height / 2 + 13, note, size=11, fill=GRAY),
    ]


def lanes() -> list[str]:
    """Every lane with its spans."""
    made = lane(COMPUTE_Y, 34, "GPU or CPU", "computes")
    for spans, prefix in ((FORWARD, "f"), (BACKWARD, "b"), (NEXT_FORWARD, "f")):
        for block, begin, end in spans:
            made += box(begin, end, COMPUTE_Y + 4, 26, COLORS[block], f"{prefix}{block}")
    made += lane(RESIDENT_Y, 52, "Main memory", "parameters held now")
    for block, begin, end in RESIDENT:
        made += box(begin, end, RESIDENT_Y + 4 + 11.5 * (block - 1), 9.5, COLORS[block])
    made += lane(ADAM_Y, 34, "Main memory", "AdamW on the CPU")
    for block, begin, end in UPDATES:
        made += box(begin, end, ADAM_Y + 4, 26, COLORS[block], f"u{block}")
    made += lane(READ_Y, 34, "SSDs", "reads")
    for block, begin, end in PARAMETER_READS:
        made += box(begin, end, READ_Y + 4, 26, COLORS[block], f"P{block}")
    for block, begin, end in STATE_READS:
        made += box(begin, end, READ_Y + 4, 26, COLORS[block], f"states {block}")
    made += lane(WRITE_Y, 34, "SSDs", "writes")
    for block, begin, end in WRITES:
        made += box(begin, end, WRITE_Y + 4, 26, COLORS[block], f"P, states {block}")
    made += box(*COMMIT, WRITE_Y + 4, 26, INK, "commit")
    return made


def arrows() -> list[str]:
    """Gradients from backward to the optimizer, and the moment of step()."""
    made = []
    for block, _, end in BACKWARD:
        x = x_of(end + 2)
        made.append(
            f'<line x1="{x}" y1="{COMPUTE_Y + 31}" x2="{x}" y2="{ADAM_Y}" stroke="{COLORS[block]}" '
            'stroke-width="1.5" stroke-dasharray="3 2" marker-end="url(#tip)"/>'
        )
    made.append(text(x_of(312), (COMPUTE_Y + RESIDENT_Y) / 2 + 22, "gradients", size=11, fill=GRAY))
    x = x_of(STEP_CALL)
    made.append(text(x + 4, COMPUTE_Y - 8, "step() returns at once", size=11, fill=GRAY))
    made.append(
        f'<line x1="{x}" y1="{COMPUTE_Y - 18}" x2="{x}" y2="{COMPUTE_Y + 4}" stroke="{GRAY}"/>'
    )
    return made


def picture() -> str:
    """The whole SVG."""
    title = "One training step of lohan: reads, computation, AdamW and writes overlap"
    phases = [
        text(x_of((a + b) / 2), COMPUTE_Y - 26, words, anchor="middle", font_weight="bold")
        for a, b, words in (
            (60, 220, "forward"),
            (220, 540, "backward"),
            (596, 716, "next forward"),
        )
    ]
    legend = (
        "A color is a block of the model. f: forward, b: backward, P: parameters, "
        "states: rest of the fp32 master and both moments, u: AdamW update. A sketch, not to scale."
    )
    body = [
        f'<rect x="0.5" y="0.5" width="{WIDTH - 1}" height="{HEIGHT - 1}" rx="6" fill="#ffffff" '
        'stroke="#d0d7de"/>',
        *phases,
        *lanes(),
        *arrows(),
        text(14, HEIGHT - 18, legend, size=11, fill=GRAY),
    ]
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" width="{WIDTH}" '
        f'height="{HEIGHT}" role="img" font-family="Helvetica, Arial, sans-serif">\n'
        f"<title>{title}</title>\n"
        '<defs><marker id="tip" markerWidth="7" markerHeight="7" refX="5" refY="3" orient="auto">'
        f'<path d="M0,0 L6,3 L0,6 z" fill="{GRAY}"/></marker></defs>\n'
    )
    return head + "\n".join(body) + "\n</svg>\n"


def main() -> int:
    """Write the picture, or compare it with the file."""
    parser = argparse.ArgumentParser(description="Draws docs/step.svg.")
    parser.add_argument("--check", action="store_true", help="write nothing; 1 if it would change")
    if parser.parse_args().check:
        return int(TARGET.read_text(encoding="utf-8") != picture())
    TARGET.write_text(picture(), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
