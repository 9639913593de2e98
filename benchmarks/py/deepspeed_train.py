"""DeepSpeed's ZeRO as a contestant of bench_peers.py; runs in DeepSpeed's interpreter.

    python benchmarks/py/deepspeed_train.py SETTING NVME_DIRECTORY [OPTIMIZER]

SETTING is one of SETTINGS, and OPTIMIZER one of training.HYPERS. All settings use the same AdamW as
the other contestants unless another optimizer is named, bf16 with fp32 masters, and no clipping (by
default, DeepSpeed clips gradients to a norm of 1).
"""

from __future__ import annotations

import copy
import os
import sys
from dataclasses import dataclass
from typing import Any

import served
import torch
import training

# The settings that its documentation recommends for disks, and its defaults.
AIO_TUNED = {"block_size": 8 << 20, "queue_depth": 32, "intra_op_parallelism": 2}
AIO_DEFAULT = {"block_size": 1 << 20, "queue_depth": 8, "intra_op_parallelism": 1}
AIO_BOTH = {"single_submit": False, "overlap_events": True}

# In elements. The largest parameter has 38.6 million, and must fit a buffer and a sub-group.
PARAM_BUFFER_ELEMENTS = 40_000_000
SUB_GROUP_ELEMENTS = 40_000_000
# Parameter, gradient and two moments, for each of what is read, computed and written at once.
PIPELINE_BUFFERS = 12
SERIAL_BUFFERS = 4
BUCKET_ELEMENTS = 50_000_000


@dataclass(frozen=True)
class Setting:
    """A setting of DeepSpeed.

    Attributes:
        config: the config for deepspeed.initialize.
        is_locked: whether pin_memory really locks memory, which needs a variable on the CPU.
    """

    config: dict[str, Any]
    is_locked: bool


def nvme(aio: dict[str, int], is_pipelined: bool, is_locked: bool) -> Setting:
    """Return ZeRO-3: parameters, gradients and optimizer on NVMe, no parameter kept in memory."""
    zero = {
        "stage": 3,
        "contiguous_gradients": True,
        "overlap_comm": False,
        "sub_group_size": SUB_GROUP_ELEMENTS,
        "stage3_max_live_parameters": 40_000_000,
        "stage3_max_reuse_distance": 0,
        "stage3_prefetch_bucket_size": 10_000_000,
        "stage3_param_persistence_threshold": 10_000,
        "offload_param": {
            "device": "nvme",
            "pin_memory": True,
            "buffer_count": 5,
            "buffer_size": PARAM_BUFFER_ELEMENTS,
            "max_in_cpu": 0,
        },
        "offload_optimizer": {
            "device": "nvme",
            "pin_memory": True,
            "buffer_count": PIPELINE_BUFFERS if is_pipelined else SERIAL_BUFFERS,
            "pipeline_read": is_pipelined,
            "pipeline_write": is_pipelined,
        },
    }
    return Setting({"zero_optimization": zero, "aio": {**aio, **AIO_BOTH}}, is_locked)


def cpu(is_locked: bool) -> Setting:
    """Return ZeRO-2 with the optimizer in main memory."""
    zero = {
        "stage": 2,
        "contiguous_gradients": True,
        "overlap_comm": False,
        "reduce_bucket_size": BUCKET_ELEMENTS,
        "allgather_bucket_size": BUCKET_ELEMENTS,
        "offload_optimizer": {"device": "cpu", "pin_memory": True},
    }
    return Setting({"zero_optimization": zero}, is_locked)


SETTINGS = {
    "zero3 nvme, 8 MiB x 32, pipelined, page-locked": nvme(AIO_TUNED, True, True),
    "zero3 nvme, 1 MiB x 8, pipelined": nvme(AIO_DEFAULT, True, False),
    "zero3 nvme, 8 MiB x 32, page-locked": nvme(AIO_TUNED, False, True),
    "zero2 cpu, page-locked": cpu(True),
    "zero2 cpu": cpu(False),
}


def config_of(setting: str, directory: str, optimizer: str) -> dict[str, Any]:
    """Return the config for deepspeed.initialize."""
    hyper = training.HYPERS[optimizer].items()
    params = {key: list(v) if isinstance(v, tuple) else v for key, v in hyper}
    config = {
        "train_micro_batch_size_per_gpu": training.BATCH_SHAPE[0],
        "optimizer": {"type": optimizer, "params": params},
        "bf16": {"enabled": True},
        "gradient_clipping": 0.0,
        "steps_per_print": 1_000_000_000,
        **copy.deepcopy(SETTINGS[setting].config),
    }
    for key in ("offload_param", "offload_optimizer"):
        offload = config["zero_optimization"].get(key, {})
        if offload.get("device") == "nvme":
            offload["nvme_path"] = directory
    return config


def main() -> None:
    pipe = served.answers()
    setting, directory, optimizer = [*sys.argv[1:], "AdamW"][:3]
    if SETTINGS[setting].is_locked:
        os.environ["DS_PIN_MEMORY_BACKEND"] = "native"  # torch's locks nothing without a GPU
    import deepspeed

    model = training.build(torch.bfloat16)
    weights = training.fingerprint(model)
    config = config_of(setting, directory, optimizer)
    if optimizer == "SGD":  # torch's: DeepSpeed has none of its own
        config |= {"zero_allow_untested_optimizer": True, "zero_force_ds_cpu_optimizer": False}
    engine, *_ = deepspeed.initialize(
        model=model, model_parameters=model.parameters(), config=config
    )

    def step(batch: training.Batch) -> torch.Tensor:
        loss = engine(input_ids=batch, labels=batch).loss
        engine.backward(loss)
        engine.step()
        return loss.detach()

    training.serve(pipe, weights, step)


if __name__ == "__main__":
    main()
