"""Tokens that are added to a model: rows that the files lack, and adapters that are saved."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lohan
import pytest
import torch
from lohan.errors import ModelError
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

OLD, NEW = 96, 101
TOKENS = (torch.arange(24).reshape(2, 12) * 7) % NEW


def config(*, is_tied: bool) -> LlamaConfig:
    return LlamaConfig(
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        vocab_size=OLD,
        bos_token_id=0,
        eos_token_id=1,
        tie_word_embeddings=is_tied,
    )


@pytest.fixture(scope="module")
def bases(tmp_path_factory: pytest.TempPathFactory) -> dict[bool, Path]:
    """A base with tied embeddings, and one without."""
    made = {}
    for is_tied in (True, False):
        torch.manual_seed(5)
        made[is_tied] = tmp_path_factory.mktemp("base")
        LlamaForCausalLM(config(is_tied=is_tied)).save_pretrained(made[is_tied])
    return made


def resized(base: Path, count: int = NEW, **settings: Any) -> Any:
    with lohan.empty():
        model = AutoModelForCausalLM.from_config(LlamaConfig.from_pretrained(base))
        model.resize_token_embeddings(count, **settings)
    return model


@pytest.mark.parametrize("is_mean", [True, False])
@pytest.mark.parametrize("is_tied", [True, False])
def test_new_rows_are_initialised_as_transformers_does(
    is_tied: bool, is_mean: bool, bases: dict[bool, Path], tmp_path: Path
) -> None:
    base = bases[is_tied]
    model = resized(base, mean_resizing=is_mean)
    model = lohan.wrap(model, weights=base, store=tmp_path / "store")
    origin = model.lohan.origins()["model.embed_tokens.weight"]
    assert (origin.kind, origin.rows) == ("file", OLD) and "fresh" in origin.rest
    state, old = model.state_dict(), load_file(base / "model.safetensors")
    for name in ["model.embed_tokens.weight"] + ["lm_head.weight"] * (not is_tied):
        assert torch.equal(state[name][:OLD], old[name])
        rows = state[name][OLD:]
        if is_mean:  # transformers' covariance is 1e-9 of the old rows'
            assert torch.allclose(rows, old[name].mean(0).expand(NEW - OLD, -1), atol=1e-5)
        else:
            assert 0.01 < rows.std() < 0.04
    loss = model(input_ids=TOKENS, labels=TOKENS).loss
    loss.backward()
    model.optimizer.step()
    model.lohan.close()


def test_fewer_rows_are_the_first_of_the_files(bases: dict[bool, Path], tmp_path: Path) -> None:
    model = lohan.wrap(resized(bases[False], 90), weights=bases[False], store=tmp_path / "store")
    old = load_file(bases[False] / "model.safetensors")
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        assert torch.equal(model.state_dict()[name], old[name][:90])
    model.lohan.close()


def test_a_tie_that_the_files_contradict_is_undone_in_a_resized_model(
    bases: dict[bool, Path], tmp_path: Path
) -> None:
    with lohan.empty():
        model: Any = LlamaForCausalLM(config(is_tied=True))
        model.resize_token_embeddings(NEW)
    model = lohan.wrap(model, weights=bases[False], store=tmp_path / "store")
    state, old = model.state_dict(), load_file(bases[False] / "model.safetensors")
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        assert torch.equal(state[name][:OLD], old[name])
        assert torch.allclose(state[name][OLD:], old[name].mean(0), atol=1e-5)
    model.lohan.close()


def test_rows_in_memory_are_kept_beside_those_of_the_files(
    bases: dict[bool, Path], tmp_path: Path
) -> None:
    plain = LlamaForCausalLM.from_pretrained(bases[False])
    plain.resize_token_embeddings(NEW)
    want = plain.state_dict()["lm_head.weight"].clone()
    model = lohan.wrap(plain, weights=bases[False], store=tmp_path / "store")
    assert torch.equal(model.state_dict()["lm_head.weight"], want)
    assert model.lohan.origins()["lm_head.weight"].rest == "as given"
    model.lohan.close()


def test_trainable_tokens_begin_with_the_new_rows(bases: dict[bool, Path], tmp_path: Path) -> None:
    settings = {"target_modules": ["q_proj"], "trainable_token_indices": [3, NEW - 1]}
    model = get_peft_model(resized(bases[True]), LoraConfig(task_type="CAUSAL_LM", **settings))
    model = lohan.wrap(model, weights=bases[True], store=tmp_path / "store")
    state = model.state_dict()
    embedding = state[next(name for name in state if name.endswith("base_layer.weight"))]
    delta, *_ = (v for n, v in state.items() if "trainable_tokens_delta" in n)
    assert torch.equal(delta, embedding[[3, NEW - 1]])
    original = [b for n, b in model.named_buffers() if "trainable_tokens_original" in n]
    assert torch.equal(original[0], delta)
    model.lohan.close()


def test_a_model_of_another_size_is_refused(bases: dict[bool, Path], tmp_path: Path) -> None:
    said = LlamaConfig.from_pretrained(bases[False], vocab_size=NEW)
    with lohan.empty():
        model = LlamaForCausalLM(said)
    with pytest.raises(ModelError, match=r"is \[96, 16\], but the model has \[101, 16\]"):
        lohan.wrap(model, weights=bases[False], store=tmp_path / "store")
    with pytest.raises(ModelError, match=r"inside lohan\.empty\(\)"):
        model.resize_token_embeddings(NEW + 1)


KINDS = {
    "lora": {},
    "modules_to_save": {"modules_to_save": ["embed_tokens"]},
    "trainable tokens": {"trainable_token_indices": [3, NEW - 1]},
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("is_tied", [True, False])
def test_an_adapter_is_saved_with_what_peft_saves_of_a_resized_model(
    is_tied: bool, kind: str, bases: dict[bool, Path], tmp_path: Path
) -> None:
    files = []
    for is_plain in (True, False):
        torch.manual_seed(1)
        base = LlamaForCausalLM.from_pretrained(bases[is_tied])
        base.resize_token_embeddings(NEW)
        settings = {"task_type": "CAUSAL_LM", "target_modules": ["q_proj"], **KINDS[kind]}
        model = get_peft_model(base, LoraConfig(**settings))
        if not is_plain:
            model = lohan.wrap(model, store=tmp_path / "store")
        model.save_pretrained(tmp_path / f"{is_plain}")
        files.append(load_file(tmp_path / f"{is_plain}" / "adapter_model.safetensors"))
    model.lohan.close()
    assert {*files[0]} == {*files[1]}
    assert all(torch.equal(value, files[1][name]) for name, value in files[0].items())


def test_a_frozen_base_in_memory_keeps_the_rows_that_its_files_lack(
    bases: dict[bool, Path], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    model = AutoModelForCausalLM.from_pretrained(bases[False]).requires_grad_(False)
    model.resize_token_embeddings(NEW)
    want = model.model.embed_tokens.weight.detach().clone()
    model = lohan.wrap(model, weights=bases[False], store=tmp_path / "store")
    assert "the files lack their last rows ('model.embed_tokens.weight'" in capfd.readouterr().err
    assert torch.equal(model.state_dict()["model.embed_tokens.weight"], want)
    model.lohan.close()


def test_resized_rows_that_are_not_in_the_order_of_the_file_are_refused(
    bases: dict[bool, Path], tmp_path: Path
) -> None:
    model = AutoModelForCausalLM.from_pretrained(bases[False])
    model.resize_token_embeddings(NEW)
    weight = model.model.embed_tokens.weight
    weight.data = weight.detach().T.contiguous().T
    with pytest.raises(ModelError, match=rf"embed_tokens.weight is \[{OLD}, 16\].*\[{NEW}, 16\]"):
        lohan.wrap(model, weights=bases[False], store=tmp_path / "store")
