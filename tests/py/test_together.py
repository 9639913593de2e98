"""Features together: kinds of states, quantized bases, orders, places, resume, Trainer, processes.

docs/limits.md has a table of these combinations.
"""

from __future__ import annotations

import functools
import shutil
from pathlib import Path
from typing import Any

import lohan
import pytest
import torch
import trainer_helper
import world_lora
from kit import host_bytes_min
from lohan.commands import _quantize
from lohan.common._inside import inside
from lohan.errors import LohanError, ModelError
from lohan.store import _snapshot
from quantize_helper import CONFIG, model
from world_helper import run
from world_lora import build, digest, tokens

STATES = ("fp32", "bf16", "8bit")
BASES = ("plain", "nf4", "fp8")
COUNT = 3  # micro-batches of a step
BLOCKS = CONFIG["num_hidden_layers"]
# How a step runs and where; none of it may change a bit.
WAYS: dict[str, dict[str, Any]] = {
    "vertical": {"order": "vertical"},
    "least memory": {"order": "vertical", "host_bytes": "least"},
    "an accelerator": {"order": "vertical", "device": "emu"},
    "recompute": {"order": "vertical", "activations": "recompute"},
    "swap": {"order": "vertical", "swap_bytes": 1 << 20},
    "deferred": {"schedule": "deferred"},
    "a full accelerator": {"device": "emu", "device_param_bytes": "least"},
    "packed in memory": {"order": "vertical", "frozen": "packed", "host_bytes": "some"},
    "packed beside an accelerator": {"device": "emu", "frozen": "packed", "host_bytes": "some"},
}
SOME_BYTES = 100_000  # for the packed bytes of some blocks


@pytest.fixture(scope="session")
def bases(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with the base in three forms."""
    folder = tmp_path_factory.mktemp("bases")
    model().save_pretrained(folder / "plain")
    for form in BASES[1:]:
        _quantize.quantize(folder / "plain", folder / form, to=form)
    return folder


def wrap(store: Path, base: Path, **settings: Any) -> Any:
    settings = {"accumulate": COUNT, **settings}
    if not settings.get("resume"):
        settings["lr"] = 1e-2
    return lohan.wrap(build(), store=store, weights=base, **settings)


def loss_of(wrapped: Any, batch: torch.Tensor) -> torch.Tensor:
    loss: torch.Tensor = wrapped(input_ids=batch, labels=batch).loss
    return loss


def step(wrapped: Any) -> None:
    number = wrapped.lohan.step
    batches = [tokens(number, index) for index in range(COUNT)]
    wrapped.lohan.accumulate([functools.partial(loss_of, wrapped, batch) for batch in batches])
    wrapped.optimizer.step()


def trained(store: Path, base: Path, steps: int = 3, **settings: Any) -> str:
    wrapped = wrap(store, base, **settings)
    while wrapped.lohan.step < steps:
        step(wrapped)
    found = digest(wrapped)
    wrapped.lohan.flush()
    stats = wrapped.lohan.stats()
    assert stats.bytes == stats.planned_bytes
    wrapped.lohan.close()
    return found


@pytest.fixture(scope="session")
def expected(bases: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, str], str]:
    """Return a hash for each kind of states and base, from plain settings."""
    folder = tmp_path_factory.mktemp("expected")
    return {
        (states, base): trained(folder / states / base, bases / base, states=states)
        for states in STATES
        for base in BASES
    }


def test_states_and_bases_differ(expected: dict[tuple[str, str], str]) -> None:
    assert len(set(expected.values())) == len(STATES) * len(BASES)


@pytest.mark.parametrize(
    "base", ["nf4", *(pytest.param(base, marks=pytest.mark.slow) for base in ("plain", "fp8"))]
)
@pytest.mark.parametrize("states", STATES)
@pytest.mark.parametrize("way", WAYS)
def test_no_way_changes_a_bit(
    way: str, states: str, base: str, bases: Path, expected: Any, store_dir: Path
) -> None:
    settings = {**WAYS[way], "states": states}
    if settings.get("frozen") == "packed" and base == "plain":
        with pytest.raises(ModelError, match="in a quantized form"):
            wrap(store_dir / "s", bases / base, **settings | {"host_bytes": None})
        return
    if "host_bytes" in settings:
        more = SOME_BYTES if settings["host_bytes"] == "some" else 0
        least = host_bytes_min(
            build(), store_dir, weights=bases / base, states=states, accumulate=COUNT
        )
        settings["host_bytes"] = least + more
    if settings.get("device_param_bytes") == "least":
        settings["device_param_bytes"] = 1_600_000
    assert trained(store_dir / "s", bases / base, **settings) == expected[states, base]


@pytest.mark.parametrize("states", STATES)
def test_a_snapshot_and_a_resumed_store_continue(
    states: str, bases: Path, expected: Any, store_dir: Path
) -> None:
    base = bases / "nf4"
    trained(store_dir / "s", base, 2, states=states, order="vertical")
    _snapshot.snapshot([str(store_dir / "s")], [str(store_dir / "copy")])
    for store in ("s", "copy"):
        found = trained(store_dir / store, base, states=states, resume=True)
        assert found == expected[states, "nf4"]


def test_zeroth_order_training_keeps_a_quantized_base(bases: Path, store_dir: Path) -> None:
    losses = []
    for frozen in ("in_place", "copy"):
        wrapped: Any = lohan.wrap(
            build(),
            store=store_dir / frozen,
            weights=bases / "nf4",
            method="mezo",
            lr=1e-4,
            frozen=frozen,
        )
        assert any(unit.packs for unit in inside(wrapped).layout.units) == (frozen == "in_place")
        batch = tokens(0, 0)
        losses.append(
            [float(wrapped.zo_step(functools.partial(loss_of, wrapped, batch))) for _ in range(3)]
        )
        wrapped.lohan.close()
    assert losses[0] == losses[1]


@pytest.mark.parametrize("states", STATES)
def test_a_trainer_has_the_bits_of_both_orders(states: str, bases: Path, store_dir: Path) -> None:
    losses = []
    for order in ("horizontal", "vertical"):
        takes = {
            "store": store_dir / order,
            "weights": bases / "nf4",
            "states": states,
            "order": order,
        }
        trainer = trainer_helper.make(
            store_dir / f"{order}-out",
            takes,
            model=build(),
            cls=lohan.Trainer,
            max_steps=2,
            gradient_accumulation_steps=COUNT,
        )
        trainer.train()
        session = trainer_helper.session_of(trainer)
        assert sum(bool(unit.packs) for unit in session.layout.units) == BLOCKS
        losses.append(trainer_helper.logged(trainer, "loss"))
        session.close()
    assert losses[0] == losses[1]


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "states with zeroth-order training": ({"moments": "8bit", "method": "mezo"}, "moments"),
    "the order with zeroth-order training": ({"order": "vertical", "method": "mezo"}, "order"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_does_not_go_together_is_refused_by_name(
    name: str, bases: Path, store_dir: Path
) -> None:
    settings, message = REFUSED[name]
    accumulate = 1 if settings.get("method") == "mezo" else COUNT
    with pytest.raises(LohanError, match=message):
        wrap(store_dir / "s", bases / "nf4", accumulate=accumulate, **settings)


@pytest.mark.parametrize(
    ("share", "base"),
    [("off", "nf4"), ("on", "nf4"), ("on", "plain"), ("on", "nf4, a copy for each")],
)
def test_processes_read_a_base_in_place(share: str, base: str, bases: Path, tmp_path: Path) -> None:
    form, _, copies = base.partition(", ")
    folder = str(bases / form)
    one = run(tmp_path, 1, world_lora.train, str(tmp_path / "one"), folder, 2, "off")[0]
    if copies:
        for rank in range(2):
            shutil.copytree(folder, tmp_path / f"base-{rank}")
        folder = str(tmp_path / "base-{rank}")
    found = run(tmp_path, 2, world_lora.train, str(tmp_path / share), folder, 2, share)
    assert [each[0] for each in found] == [one[0]] * 2
    packed = BLOCKS if form == "nf4" else 0
    assert [each[1] for each in (one, *found)] == [packed] * 3


def test_processes_that_share_a_machine_keep_a_packed_base(bases: Path, tmp_path: Path) -> None:
    base, store = str(bases / "nf4"), str(tmp_path / "run")
    one = run(tmp_path, 1, world_lora.train, str(tmp_path / "one"), base, 3, "off")[0]
    found = run(tmp_path, 2, world_lora.train, store, base, 3, "on", SOME_BYTES)
    assert found == [one] * 2
    assert _snapshot.is_complete([store]) and lohan.verify(store).is_whole
