#!/usr/bin/env bash
# torch's lerp in fp32 has other bits on a processor without AVX2 than on one with it.
#
# Guess: an operation on single elements with a scalar weight is computed in one way, and sums alone
# depend on the processor.
# Seen with torch 2.13.0 on the CPU: with AVX2, _foreach_lerp_ (which averages of parameters use:
# torch.optim.swa_utils.get_ema_multi_avg_fn) rounds once, with a fused multiply-add, also in the
# last elements that do not fill a vector. With ATEN_CPU_CAPABILITY=default it rounds twice, and 4 of
# 64 elements differ, each in its last bit.
# What follows: an average that is continued on another kind of processor does not have the same bits.
set -euo pipefail
folder="$(mktemp -d)"
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check torch==2.13.0
cd "$folder"
cat >one.py <<'PYTHON'
import torch

generator = torch.Generator().manual_seed(0)
average = torch.rand(64, generator=generator)
value = torch.rand(64, generator=generator)
print(average.view(torch.int32).sum().item() + value.view(torch.int32).sum().item())
torch._foreach_lerp_([average], [value], 0.1)
print(torch.__version__, average.view(torch.int32).tolist())
PYTHON
default="$(ATEN_CPU_CAPABILITY=default venv/bin/python -W ignore one.py)"
avx2="$(ATEN_CPU_CAPABILITY=avx2 venv/bin/python -W ignore one.py)"
venv/bin/python - "$default" "$avx2" <<'PYTHON'
import json
import sys

(given, default), (same, avx2) = (text.splitlines() for text in sys.argv[1:])
assert given == same, "the inputs differ"
(version, default), (_, avx2) = (line.split(" ", 1) for line in (default, avx2))
pairs = zip(json.loads(default), json.loads(avx2), strict=True)
different = [abs(a - b) for a, b in pairs if a != b]
print("torch", version, len(different), "of 64 elements differ, by units of", different)
assert different == [1, 1, 1, 1], different
PYTHON
