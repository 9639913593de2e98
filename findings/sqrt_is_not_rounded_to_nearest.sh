#!/usr/bin/env bash
# torch's fp32 square root on the CPU is not the nearest fp32 number.
#
# Guess: torch.sqrt() of an fp32 tensor has the bits of the processor's instruction, which IEEE 754
# requires to be the root rounded to nearest, as division and numpy's root are.
# Seen with torch 2.13.0 (CPU, x86-64, with MKL, on an AMD EPYC with AVX-512): of 100,000 numbers
# between 0 and 1, about a fifth have a root that is one unit in the last place away, up to 0.75 units
# from the exact root; pow(0.5) and torch._foreach_sqrt() have the same bits. ATEN_CPU_CAPABILITY does
# not change them: the root is MKL's vector function, which may have other bits on other processors.
# Quotients are rounded to nearest.
# What follows: an implementation of Adam with IEEE roots cannot have the bits of torch.optim.Adam, and
# a reference for it computes roots in fp64 and rounds them: that is exact for fp32.
set -euo pipefail
folder="$(mktemp -d)"
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check torch==2.13.0 numpy
cd "$folder"
venv/bin/python - <<'PYTHON'
import numpy
import torch

values = torch.rand(100_000, generator=torch.Generator().manual_seed(0))
exact = values.double().sqrt()
nearest = exact.float()
roots = {
    "torch.sqrt": values.sqrt(),
    "pow(0.5)": values.pow(0.5),
    "foreach": torch._foreach_sqrt([values])[0],
    "numpy": torch.from_numpy(numpy.sqrt(values.numpy())),
}
found = {name: int((root != nearest).sum()) for name, root in roots.items()}
unit = (torch.nextafter(nearest, torch.tensor(2.0)) - nearest).double()
error = ((roots["torch.sqrt"].double() - exact).abs() / unit).max().item()
quotients = int((values / (values + 1) != (values.double() / (values + 1).double()).float()).sum())
print(torch.__version__, found, f"largest error {error:.2f} units, quotients {quotients}")
assert found["numpy"] == 0 and quotients == 0
assert found["torch.sqrt"] == found["pow(0.5)"] == found["foreach"] > 10_000, found
assert 0.5 < error < 1, error
PYTHON
