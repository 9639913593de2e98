"""LoRA of a model of 8 billion parameters writes little: its adapters, when they are committed."""

from __future__ import annotations

import pytest
from lohan.planning import _models, _parts, _placement
from lohan.planning._machines import Machine
from lohan.planning._plan import Model
from lohan.simulate import simulate

pytest.importorskip("transformers")

PCS = {
    "rtx-3060": ("32GiB", "1TB,5GB/s,600TBW"),
    "rtx-4070-ti-super": ("32GiB", "2TB,7GB/s,1200TBW"),
    "rtx-4090": ("64GiB", "2TB,7GB/s,1200TBW"),
}


def machine_of(gpu: str) -> Machine:
    return _parts.machine(gpu, *PCS[gpu])


def tuned() -> Model:
    """Return Llama 8B with adapters of rank 16 on all matrices, and 16 rows of 1,024 tokens."""
    return _models.load(
        "llama-8b", 16, 1024, loss="linear_cross_entropy", adapter_params=41_943_040
    )


def test_without_activations_on_ssd_the_inputs_of_blocks_stay_and_others_are_recomputed() -> None:
    model, machine = tuned(), machine_of("rtx-3060")
    plain = _placement.place(model, machine, "auto")
    moved = _placement.place(model, machine, "auto", without=("ssd_activations",))
    assert plain.ssd_bytes > 10**10 and moved.ssd_bytes == moved.transit_bytes == 0
    assert moved.engine_bytes + moved.saved_bytes == machine.host_bytes
    for layer, fate in zip(model.layers, moved.fates, strict=True):
        assert fate != "ssd" and (fate != "recompute" or not layer.is_inter_block)


@pytest.mark.slow
@pytest.mark.parametrize("gpu", PCS)
def test_lora_does_not_wear_a_drive_out_within_two_years(gpu: str) -> None:
    step = simulate(tuned(), machine_of(gpu))
    states = ("state_read", "state_write", "saved_read", "saved_write")
    assert all(step.link_bytes[name] == 0 for name in states)
    assert step.commit_every > 1 and step.ssd_life_days is not None
    assert step.ssd_life_days > 730
