"""Mixtures whose files have each expert's matrices quantized, where the model has one parameter."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import kit
import lohan
import pytest
import torch
from experts_helper import EXPERTS, qwen
from integers_helper import FORMS as INTEGERS
from lohan.common import _meta
from lohan.common._inside import inside
from lohan.errors import ModelError, StoreMismatchError
from quantize_helper import FORMS
from safetensors.torch import load_file, save_file
from transformers import MixtralConfig, MixtralForCausalLM

ALL = {**FORMS, **INTEGERS}
QUICK = ("nvfp4", "gptq, act-order")
CHOSEN = [pytest.param(name, marks=[] if name in QUICK else [pytest.mark.slow]) for name in ALL]


def mixtral() -> Any:
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_local_experts": 4, "vocab_size": 64}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "num_hidden_layers": 2}
    return MixtralForCausalLM(MixtralConfig(**sizes, **heads, experts_implementation="eager"))


def save(folder: Path, form: Any, model: Any, **changed: Any) -> tuple[Path, Path]:
    """Write a model with the experts' matrices quantized one by one, and decoded."""
    model.to(torch.bfloat16).save_pretrained(folder / "plain")
    values = load_file(folder / "plain" / "model.safetensors")
    packed: dict[str, torch.Tensor] = {}
    for name in [*values]:
        if ".experts." in name:
            made, values[name] = form(name, values[name])
            packed |= made
        else:
            packed[name] = values[name]
    packed |= changed
    packed = {name: value for name, value in packed.items() if value is not None}
    save_file(values, folder / "plain" / "model.safetensors", metadata={"format": "pt"})
    config = type(model.config).from_pretrained(folder / "plain")
    config.quantization_config = getattr(form, "quantization", {})
    config.save_pretrained(folder / "packed")
    names = sorted(packed)
    for shard in range(2):
        some = {name: packed[name] for name in names[shard::2]}
        save_file(some, folder / "packed" / f"part{shard}.safetensors")
    return folder / "packed", folder / "plain"


def empty(make: Any, *, is_frozen: bool) -> Any:
    torch.manual_seed(0)
    with lohan.empty():
        made = make().to(torch.bfloat16)
    made.requires_grad_(not is_frozen)
    made.lm_head.weight.requires_grad_(True)
    return made


def train(model: Any) -> tuple[list[float], dict[str, torch.Tensor]]:
    losses = []
    for step in range(2):
        batch = kit.tokens(step) % 64
        loss = model(input_ids=batch, labels=batch).loss
        loss.backward()
        model.optimizer.step()
        losses.append(loss.item())
    return losses, {name: value.clone() for name, value in model.state_dict().items()}


SETTINGS: dict[str, dict[str, Any]] = {
    "in place": {},
    "apart": {"experts": "apart"},
    "kept packed": {"frozen": "packed"},
    "copied": {"frozen": "copy"},
    "trained": {"is_frozen": False},
}


@pytest.mark.parametrize("name", CHOSEN)
def test_experts_that_are_quantized_one_by_one_have_their_decoded_bits(
    name: str, tmp_path: Path, store_dir: Path
) -> None:
    folder, plain = save(tmp_path, ALL[name], qwen(4))
    for number, (what, given) in enumerate(SETTINGS.items()):
        settings = dict(given)
        is_frozen = settings.pop("is_frozen", True)
        found = []
        for weights in (folder, plain):
            made = empty(lambda: qwen(4), is_frozen=is_frozen)
            store = store_dir / f"{number}-{weights.name}"
            if weights is plain and settings.get("frozen") == "packed":
                settings["frozen"] = "in_place"
            model = lohan.wrap(made, store=store, weights=weights, lr=1e-2, **settings)
            if weights is folder and is_frozen and what != "copied":
                packs = [p for unit in inside(model).layout.units for p in unit.packs.values()]
                assert any(pack.rest for pack in packs)  # one of its own for each matrix
            found.append(train(model))
            stats = model.lohan.stats()
            assert stats.bytes == stats.planned_bytes
            model.lohan.close()
        assert found[0][0] == found[1][0], what
        kit.assert_same_state(found[0][1], found[1][1])


def test_experts_of_which_some_are_not_quantized_are_decoded_into_the_store(
    tmp_path: Path, store_dir: Path
) -> None:
    def form(name: str, values: torch.Tensor) -> Any:
        return ({name: values}, values) if ".2." in name else INTEGERS["awq"](name, values)

    form.quantization = INTEGERS["awq"].quantization  # type: ignore[attr-defined]
    folder, plain = save(tmp_path, form, qwen(4))
    states = []
    for weights in (folder, plain):
        made = empty(lambda: qwen(4), is_frozen=True)
        model = lohan.wrap(made, store=store_dir / weights.name, weights=weights, lr=1e-2)
        states.append(train(model))
        model.lohan.close()
    assert states[0][0] == states[1][0]
    kit.assert_same_state(states[0][1], states[1][1])


def test_a_run_is_resumed_verified_and_exported(tmp_path: Path, store_dir: Path) -> None:
    folder, plain = save(tmp_path, FORMS["nvfp4"], mixtral())
    runs = {}
    for weights in (folder, plain):
        store = store_dir / weights.name
        model = lohan.wrap(empty(mixtral, is_frozen=True), store=store, weights=weights, lr=1e-2)
        train(model)
        model.lohan.close()
        made = empty(mixtral, is_frozen=True)
        model = lohan.wrap(made, store=store, resume=True)
        runs[weights.name] = train(model)
        model.lohan.close()
        lohan.export(store, store_dir / f"{weights.name}-out")
    assert runs["packed"][0] == runs["plain"][0]
    kit.assert_same_state(runs["packed"][1], runs["plain"][1])
    out = [load_file(store_dir / f"{n}-out" / "model.safetensors") for n in ("packed", "plain")]
    kit.assert_same_state(out[0], out[1])
    bad = (folder / "part0.safetensors").read_bytes()
    (folder / "part0.safetensors").write_bytes(bad[:-1] + bytes([bad[-1] ^ 1]))
    with pytest.raises(lohan.errors.LohanError, match="changed"):
        lohan.wrap(empty(mixtral, is_frozen=True), store=store_dir / "packed", resume=True)


DAMAGED: dict[str, Any] = {
    "no pieces": lambda said: said.update(pieces=[]),
    "one piece": lambda said: said.update(pieces=said["pieces"][:1]),
    "pieces that are too few": lambda said: said["pieces"].pop(),
    "another first place": lambda said: said["pieces"].reverse(),
    "no form": lambda said: said["pieces"][1].pop(),
    "a form that is no object": lambda said: said["pieces"][1].__setitem__(3, "u4"),
    "a scale of no dtype": lambda said: said["pieces"][1][3].update(scale_dtype={}),
    "packed bytes of another count": lambda said: said["pieces"][1].__setitem__(2, 8),
    "a place after the end of a file": lambda said: said["pieces"][1].__setitem__(1, 1 << 40),
}


def test_a_damaged_description_of_pieces_is_refused(tmp_path: Path, store_dir: Path) -> None:
    folder, _ = save(tmp_path, INTEGERS["words"], qwen(4))
    made = empty(lambda: qwen(4), is_frozen=True)
    model = lohan.wrap(made, store=store_dir / "run", weights=folder, lr=1e-2)
    text = json.dumps(_meta.of(inside(model).store))
    model.lohan.close()
    _meta.parse(text, "here")
    for what, damage in DAMAGED.items():
        meta = json.loads(text)
        rows = [
            row for row in meta["in_place"]["params"] if row and "pieces" in (row[3:] or [{}])[0]
        ]
        damage(rows[0][3])
        with pytest.raises(StoreMismatchError, match=r"in_place\.params"):
            _meta.parse(json.dumps(meta), "here")
            pytest.fail(f"{what} was accepted")


GATE = "model.layers.1.mlp.experts.2.gate_proj.weight"
REFUSED: dict[str, tuple[str, dict[str, Any], str]] = {
    "no scales of an expert": ("fp8", {f"{GATE}_scale_inv": None}, "do not have .*2.gate_proj"),
    "scales of another shape": ("nvfp4", {f"{GATE}_scale": None}, "do not have .*2.gate_proj"),
    "an expert is missing": ("fp8", {GATE: None}, "Are all files of the checkpoint there"),
    "zero points": ("fp8", {f"{GATE}_zero_point": torch.zeros(1)}, "asymmetric"),
}


@pytest.mark.parametrize(("form", "changed", "message"), REFUSED.values(), ids=REFUSED.keys())
def test_what_cannot_be_decoded_is_refused_by_name(
    form: str, changed: dict[str, Any], message: str, tmp_path: Path, store_dir: Path
) -> None:
    folder, _ = save(tmp_path, ALL[form], qwen(EXPERTS), **changed)
    with pytest.raises(ModelError, match=message):
        lohan.wrap(empty(qwen, is_frozen=True), store=store_dir / "run", weights=folder)
    assert not (store_dir / "run").exists()
