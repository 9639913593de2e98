"""gpu.sh memory: Llama's shape of 7 billion parameters in 20 GB of device memory.

Torch's allocator is limited to that. The number of trained blocks depends on the disk's free space:
a store takes 12 bytes per trainable parameter (one slot), and 2 per frozen one.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Mapping
from typing import Any

import gpu_llama
from gpu_llama import SEVEN_B, TINY, Filler, batches, empty, stats_of
from gpu_part import Part, Skip, store_folder

DEVICE_BYTES = 20_000_000_000
# Left free on the disk, and on the device for what device_bytes does not count: cuBLAS's
# workspaces and the temporaries of operations.
DISK_RESERVE = 4_000_000_000
DEVICE_RESERVE = 1_500_000_000
DRY_DEVICE_BYTES = 4_000_000
DRY_BYTES_A_PARAM = 9  # so that some blocks are frozen
STEPS = 3
TRAINED_BYTES, FROZEN_BYTES = 12, 2


def frozen_layers(shape: gpu_llama.Shape, room: int) -> int:
    """Return how many blocks must be frozen for the store to fit."""
    each = shape.param_count // shape.layers
    for count in range(shape.layers + 1):
        trained = shape.param_count - count * each
        if trained * TRAINED_BYTES + count * each * FROZEN_BYTES <= room:
            return count
    raise Skip(f"the disk has room for {room} bytes, but even a frozen model needs more")


class Memory:
    """A wrapped model, used by all cases."""

    def __init__(self, part: Part, folder: Any) -> None:
        self.part, self.place, self.folder = part, part.place, folder
        self.shape = self.place.pick(SEVEN_B, TINY)
        self.device_bytes = self.place.pick(DEVICE_BYTES, DRY_DEVICE_BYTES)
        self.model: Any = None

    def cap(self, is_on: bool) -> None:
        """Limit torch's allocator to device_bytes, or remove the limit."""
        if self.place.is_dry:
            return
        torch = self.place.torch
        total = torch.cuda.get_device_properties(self.place.device).total_memory
        share = self.device_bytes / total if is_on else 1.0
        torch.cuda.set_per_process_memory_fraction(min(share, 1.0), self.place.device)

    def wrapped(self) -> Mapping[str, Any]:
        """Build the model without storage, and fill it block by block."""
        import lohan
        import torch
        from lohan.common._inside import inside

        room = shutil.disk_usage(self.folder).free - DISK_RESERVE
        if self.place.is_dry:
            room = DRY_BYTES_A_PARAM * self.shape.param_count
        model = empty(self.shape, torch.bfloat16)
        frozen = frozen_layers(self.shape, room)
        for block in model.blocks[:frozen]:
            block.requires_grad_(False)
        self.cap(is_on=True)
        self.place.reset_peak()
        begin = time.perf_counter()
        self.model = lohan.wrap(
            model,
            store=self.folder / "store",
            init=Filler(),
            device=self.place.lohan,
            device_bytes=self.device_bytes - self.place.pick(DEVICE_RESERVE, 0),
            commit_every="never",
            activations="recompute",
            allow_tmpfs=True,
            lr=1e-5,
        )
        trained = sum(p.numel() for p in self.model.parameters() if p.requires_grad)
        return {
            "params": self.shape.param_count,
            "trained": trained,
            "frozen_layers": frozen,
            "wrap_seconds": time.perf_counter() - begin,
            "slot_bytes": inside(self.model).device.slot_bytes,
            "device_bytes": self.device_bytes,
        }

    def needed(self) -> Any:
        """Return the model; build it if the previous case did not run."""
        if self.model is None:
            self.wrapped()
        return self.model

    def steps(self) -> Mapping[str, Any]:
        """Take steps within the limit."""
        model = self.needed()
        self.place.reset_peak()
        losses, seconds = [], []
        for tokens in batches(self.shape, self.place, STEPS):
            self.place.synchronize()
            begin = time.perf_counter()
            loss = model(tokens)
            loss.backward()
            model.optimizer.step()
            losses.append(loss.item())
            self.place.synchronize()
            seconds.append(time.perf_counter() - begin)
            self.part.say(step=len(losses), step_seconds=seconds[-1], **self.place.peak_bytes())
        peak = self.place.peak_bytes()
        assert peak["reserved_peak_bytes"] <= self.device_bytes, peak
        return {"losses": losses, **stats_of(model), **peak}

    def too_large(self) -> Mapping[str, Any]:
        """A batch that does not fit fails in its forward; the step after it succeeds."""
        torch, model = self.place.torch, self.needed()
        self.place.reset_peak()
        (tokens,) = batches(self.shape, self.place, 1)
        died = ""
        if self.place.is_dry:
            died = "a dry run has no such limit"
        else:
            try:
                model(tokens.repeat(64, 1))
            except torch.OutOfMemoryError as error:
                died = str(error)
        assert died, "a batch of 64 times the size fitted"
        loss = model(tokens)
        loss.backward()
        model.optimizer.step()
        return {"died": died[:200], "loss": loss.item(), **self.place.peak_bytes()}


def run(part: Part) -> None:
    """Run all cases with one model."""
    with store_folder() as folder:
        memory = Memory(part, folder)
        try:
            part.run({"wrap": memory.wrapped, "steps": memory.steps, "too_large": memory.too_large})
        finally:
            memory.cap(is_on=False)
            if memory.model is not None:
                memory.model.lohan.close()
