"""DeepSpeed's asynchronous I/O as a contestant of bench_io.py; runs in DeepSpeed's interpreter.

Like DeepSpeed's swapper, it moves whole page-locked tensors from and to ranges of one file. For
reads and writes at once it uses a handle for each, like the pipelined swapper.

    python benchmarks/py/deepspeed_io.py FILE READ_OFFSET WRITE_OFFSET BYTES

A request is "MODE SETTING": read, write or mixed, and an index into SETTINGS.
"""

from __future__ import annotations

import sys
import time

import served

# The settings that its documentation recommends, and its defaults.
SETTINGS = [
    {"block_size": 8 << 20, "queue_depth": 32, "intra_op_parallelism": 2},
    {"block_size": 1 << 20, "queue_depth": 8, "intra_op_parallelism": 1},
]


def main() -> None:
    pipe = served.answers()
    import torch
    from deepspeed.ops.op_builder import AsyncIOBuilder

    path, *numbers = sys.argv[1:]
    read_offset, write_offset, byte_count = map(int, numbers)
    aio = AsyncIOBuilder().load(verbose=False)
    handles = [
        [aio.aio_handle(single_submit=False, overlap_events=True, **setting) for _ in range(2)]
        for setting in SETTINGS
    ]

    def locked(count: int) -> torch.Tensor:
        tensor = handles[0][0].new_cpu_locked_tensor(count, torch.empty(0, dtype=torch.uint8))
        return tensor.random_()

    whole = locked(byte_count)
    halves = [locked(byte_count // 2) for _ in range(2)]

    def seconds(request: str) -> float:
        mode, setting = request.split()
        reader, writer = handles[int(setting)]
        begin = time.perf_counter()
        if mode == "read":
            reader.sync_pread(whole, path, read_offset)
        elif mode == "write":
            writer.sync_pwrite(whole, path, write_offset)
        else:
            reader.async_pread(halves[0], path, read_offset)
            writer.async_pwrite(halves[1], path, write_offset)
            reader.wait()
            writer.wait()
        return time.perf_counter() - begin

    served.answer_all(pipe, {"settings": SETTINGS}, seconds)


if __name__ == "__main__":
    main()
