#!/usr/bin/env bash
# The sum that all_reduce computes of an element depends on where the element is in its tensor.
#
# Guess: with a fixed number of ranks, all_reduce adds the ranks' values in one order, so equal values
# have equal sums, and gradients of the same numbers have the same bits however they are put in buckets.
# Seen with torch 2.13.0 (CPU, gloo): with three ranks or more, the ring that adds the values begins at
# another rank for each part of the tensor. Of a tensor whose every element is 256 on the first rank
# and 1 on the two others, a third of the sums in bf16 are 258 and the rest 256; in fp32, the same
# occurs with 2**24. Each addition rounds to the dtype of the tensor. All ranks have the same result.
# With two ranks there is one order.
# What follows: sums that are to have the same bits in every layout (other buckets, other shards,
# another number of processes per machine) need an order of their own, by rank.
set -euo pipefail
folder="$(mktemp -d)"
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check torch==2.13.0 numpy
cd "$folder"
cat >sums.py <<'PYTHON'
import sys

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

LARGE = {torch.bfloat16: 256.0, torch.float32: 2.0**24}


def work(rank, ranks, folder):
    dist.init_process_group("gloo", init_method=f"file://{folder}/{ranks}", rank=rank, world_size=ranks)
    for dtype, large in LARGE.items():
        sums = torch.full((1200,), 1.0 if rank else large, dtype=dtype)
        dist.all_reduce(sums)
        of_all = [torch.empty_like(sums) for _ in range(ranks)]
        dist.all_gather(of_all, sums)
        assert all(torch.equal(other, sums) for other in of_all)
        if rank == 0:
            above = {int(value - large) for value in sums.double().unique()}
            print(torch.__version__, ranks, dtype, "above the large value:", above, flush=True)
            assert above == {2: {0}, 3: {0, 2}, 4: {0, 4}}[ranks], above
    dist.destroy_process_group()


if __name__ == "__main__":
    for ranks in (2, 3, 4):
        mp.spawn(work, (ranks, sys.argv[1]), nprocs=ranks)
PYTHON
GLOO_SOCKET_IFNAME=lo venv/bin/python sums.py "$folder" 2>/dev/null
