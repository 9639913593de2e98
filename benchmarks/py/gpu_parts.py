"""Run a part of benchmarks/gpu.sh, or some of its cases.

    python benchmarks/py/gpu_parts.py PART [CASE...]

PART is facts, tests, asserts, links, overlap, models, memory, mezo, features, sanitize or peers.
Each output line is a JSON object with "part", "case" and figures; it is printed and appended to
$OUT/PART.jsonl, or to benchmarks/gpu-out. Without a GPU, a part prints one line about that, which
is not an error. The exit status is 1 if a case failed.
"""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
import time

from gpu_part import ROOT, Out, Part, is_dry, why_no_gpu

PARTS = (
    "facts",
    "tests",
    "asserts",
    "links",
    "overlap",
    "models",
    "memory",
    "mezo",
    "features",
    "sanitize",
    "peers",
)
# Parts that run without lohan's extension; facts may show why it does not build.
WITHOUT_LOHAN = ("facts",)


def build() -> str:
    """Build the extension in place, unless LOHAN_GPU_BUILD is 0; return an error message, or ""."""
    if os.environ.get("LOHAN_GPU_BUILD") == "0":
        return ""
    command = [sys.executable, "setup.py", "--quiet", "build_ext", "--inplace"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    return "" if done.returncode == 0 else (done.stdout + done.stderr).strip()[-2000:]


def main(arguments: list[str]) -> int:
    """Run a part."""
    if not arguments or arguments[0] not in PARTS:
        print(__doc__, file=sys.stderr)
        return 2
    name, *cases = arguments
    out = Out(name)
    module = importlib.import_module(f"gpu_{name}")
    why = why_no_gpu()
    if why is not None:
        if name == "facts":
            module.without_a_gpu(out)
        out.write(skipped=why)
        return 0
    if name not in WITHOUT_LOHAN and not is_dry():
        wrong = build()
        if wrong:
            out.write(case="build", error=wrong)
            return 1
    sys.path.insert(0, str(ROOT / "python"))
    import torch

    part = Part(name, cases)
    place = part.place
    part.out.write(
        case="begin",
        date=time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        torch=torch.__version__,
        device=str(place.device) if place.is_dry else torch.cuda.get_device_name(place.device),
        is_dry=place.is_dry,
    )
    module.run(part)
    part.out.write(case="end", failed=part.failed)
    return 1 if part.failed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
