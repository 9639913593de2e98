"""Files that contradict a model's ties, or an index: no tensor is dropped silently."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import lohan
import pytest
import torch
from lohan.errors import BudgetError, ModelError
from lohan.layout import _conversion, _cut, _files, _ties
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

TOKENS = (torch.arange(24).reshape(2, 12) * 7) % 96
CONFIG = {
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "vocab_size": 96,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "tie_word_embeddings": True,
}


def save(folder: Path, factor: float) -> Path:
    """Save a tied model, and the head once more, as the embedding times factor."""
    torch.manual_seed(5)
    LlamaForCausalLM(LlamaConfig(**CONFIG)).save_pretrained(folder)
    path = folder / "model.safetensors"
    values = load_file(path)
    values["lm_head.weight"] = values["model.embed_tokens.weight"] * factor
    save_file(values, path, metadata={"format": "pt"})
    return folder


def empty() -> Any:
    with lohan.empty():
        return LlamaForCausalLM(LlamaConfig(**CONFIG))


@pytest.mark.parametrize("factor", [1.0, 3.0])
@pytest.mark.parametrize("is_empty", [True, False])
def test_a_tie_that_the_files_contradict_is_undone_as_transformers_does(
    is_empty: bool, factor: float, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    folder = save(tmp_path / "base", factor)
    plain = AutoModelForCausalLM.from_pretrained(folder).eval()
    want = plain(input_ids=TOKENS).logits
    model = empty() if is_empty else LlamaForCausalLM(LlamaConfig(**CONFIG))
    capfd.readouterr()
    model = lohan.wrap(model, weights=folder, store=tmp_path / "store").eval()
    said = capfd.readouterr().err
    assert ("are not tied, as from_pretrained does" in said) == (factor != 1)
    is_tied = model.lm_head.weight is model.model.embed_tokens.weight
    assert is_tied == (factor == 1) == (plain.lm_head.weight is plain.model.embed_tokens.weight)
    assert model.lohan.origins()["lm_head.weight"].kind == ("tied" if is_tied else "file")
    assert torch.equal(model(input_ids=TOKENS).logits, want)
    model.save_pretrained(tmp_path / "saved")
    model.lohan.close()
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "saved").eval()
    assert torch.equal(again(input_ids=TOKENS).logits, want)
    resumed = lohan.wrap(empty(), store=tmp_path / "store", resume=True).eval()
    assert torch.equal(resumed(input_ids=TOKENS).logits, want)
    resumed.lohan.close()


def test_a_contradicted_tie_of_a_plain_module_is_refused(tmp_path: Path) -> None:
    with lohan.empty():
        model = nn.ModuleList([nn.Linear(4, 4, bias=False) for _ in range(2)])
        model[1].weight = model[0].weight
    save_file(
        {"0.weight": torch.ones(4, 4), "1.weight": torch.zeros(4, 4)}, tmp_path / "m.safetensors"
    )
    with pytest.raises(ModelError, match="two tensors with different values"):
        lohan.wrap(model, weights=tmp_path, store=tmp_path / "store")


def test_of_two_shards_with_a_name_the_index_decides_and_a_note_names_it(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    for name, value in (("a", 1.0), ("b", 2.0)):
        save_file({"weight": torch.full((2, 2), value)}, tmp_path / f"{name}.safetensors")
    index = {"weight_map": {"weight": "a.safetensors", "other": "b.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    with lohan.empty():
        model = nn.Linear(2, 2, bias=False)
    model = lohan.wrap(model, weights=tmp_path, store=tmp_path / "store")
    assert (model.state_dict()["weight"] == 1).all()
    assert "'weight' is in a.safetensors and in b.safetensors" in capfd.readouterr().err
    model.lohan.close()


@pytest.mark.parametrize("is_empty", [True, False])
def test_a_failed_wrap_leaves_the_model_tied(is_empty: bool, tmp_path: Path) -> None:
    folder = save(tmp_path / "base", 3.0)
    model = empty() if is_empty else LlamaForCausalLM(LlamaConfig(**CONFIG))
    noted = dict(model.all_tied_weights_keys)
    with pytest.raises(BudgetError):
        lohan.wrap(model, weights=folder, store=tmp_path / "store", host_bytes=4096)
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert dict(model.all_tied_weights_keys) == noted != {}
    assert list(dict(model.named_parameters())) == list(dict(empty().named_parameters()))


# The ties of entries in several places ([Note: Converted entries] in _conversion.py).
@pytest.mark.parametrize("other", ["last part", "computed"])
def test_tied_tensors_of_several_parts_are_compared_as_a_whole(other: str, tmp_path: Path) -> None:
    parts = {"a": torch.ones(4, 8), "b": torch.ones(4, 8), "c": torch.ones(4, 8)}
    parts["d"] = torch.full((4, 8), 2.0)
    save_file(parts, tmp_path / "m.safetensors")
    folder = _files.read_folder(tmp_path)
    a, b, c, d = (folder.entries[name] for name in "abcd")
    one = _cut.joined([a, c], (8, 8))
    assert len(one.places) == 2
    if other == "last part":
        same, unlike = _cut.joined([b, a], (8, 8)), _cut.joined([a, d], (8, 8))
    else:

        def twice(sources: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
            (value,) = sources.values()
            return {"made": value.repeat(2, 1)}

        same, unlike = (
            dataclasses.replace(
                c, shape=(8, 8), made=_conversion.Made("made", "Repeat", (("x", source),), twice)
            )
            for source in (b, d)
        )
    for dtype in (torch.float32, torch.bfloat16):
        assert _ties.are_equal(folder.files, one, same, dtype)
        assert not _ties.are_equal(folder.files, one, unlike, dtype)
