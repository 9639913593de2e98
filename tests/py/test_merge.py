"""Adapters that are merged after lohan.unwrap: what is saved, and ties."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import lohan
import pytest
import torch
from lohan.commands._quantize import quantize
from lohan.errors import ModelError, UnsupportedError
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

TOKENS = (torch.arange(24).reshape(2, 12) * 7) % 64
CONFIG = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "vocab_size": 64,
    "bos_token_id": 0,
    "eos_token_id": 1,
}


def base(*, is_tied: bool = False) -> Any:
    torch.manual_seed(5)
    return LlamaForCausalLM(LlamaConfig(**CONFIG, tie_word_embeddings=is_tied))


def adapted(model: Any, **settings: Any) -> Any:
    torch.manual_seed(7)
    return get_peft_model(model, LoraConfig(r=4, init_lora_weights=False, **settings)).eval()


def test_a_merged_quantized_base_is_saved_as_what_it_is(tmp_path: Path) -> None:
    base().save_pretrained(tmp_path / "plain")
    quantize(tmp_path / "plain", tmp_path / "packed", to="nf4")
    with lohan.empty():
        model = AutoModelForCausalLM.from_config(LlamaConfig.from_pretrained(tmp_path / "packed"))
    model = adapted(model, target_modules=["q_proj"])
    model = lohan.wrap(model, weights=tmp_path / "packed", store=tmp_path / "store")
    want = model(input_ids=TOKENS).logits.detach().clone()
    lohan.unwrap(model).merge_and_unload().save_pretrained(tmp_path / "merged")
    said = json.loads((tmp_path / "merged" / "config.json").read_text())
    assert "quantization_config" not in said
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged").eval()
    # The merged product rounds differently than the sum of two products.
    assert torch.allclose(merged(input_ids=TOKENS).logits, want, atol=1e-5)


@pytest.mark.parametrize("targets", [["embed_tokens"], ["embed_tokens", "lm_head"]])
def test_the_documented_merge_of_a_tied_embedding_keeps_the_outputs(
    targets: list[str], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    model = lohan.wrap(
        adapted(base(is_tied=True), target_modules=targets), store=tmp_path / "store"
    )
    want = model(input_ids=TOKENS).logits.detach().clone()
    capfd.readouterr()
    model = lohan.unwrap(model)
    assert "embed_tokens is an adapter of a tied parameter" in capfd.readouterr().err
    head = model.get_base_model().lm_head
    getattr(head, "base_layer", head).weight = torch.nn.Parameter(head.weight.detach().clone())
    model.get_base_model().config.tie_word_embeddings = False
    merged = model.merge_and_unload()
    assert torch.allclose(merged(input_ids=TOKENS).logits, want, rtol=1e-4, atol=1e-3)


def test_tied_adapters_are_refused_with_a_way_that_keeps_the_tie(tmp_path: Path) -> None:
    settings: dict[str, Any] = {"ensure_weight_tying": True}
    model = adapted(base(is_tied=True), target_modules=["embed_tokens"], **settings)
    with pytest.raises(ModelError, match=r"ensure_weight_tying.*modules_to_save"):
        lohan.wrap(model, store=tmp_path / "a")
    settings |= {"modules_to_save": ["embed_tokens"], "target_modules": ["q_proj"]}
    model = lohan.wrap(adapted(base(is_tied=True), **settings), store=tmp_path / "b")
    model(input_ids=TOKENS, labels=TOKENS).loss.backward()
    model.optimizer.step()
    merged = lohan.unwrap(model).merge_and_unload()
    assert merged.lm_head.weight is merged.model.embed_tokens.weight


def test_merging_a_wrapped_model_is_refused_and_both_ways_out_work(tmp_path: Path) -> None:
    def tuned() -> Any:
        torch.manual_seed(1)
        return get_peft_model(base(), LoraConfig(target_modules=["q_proj"], r=4))

    model = lohan.wrap(tuned(), store=tmp_path / "s", lr=1e-2)
    for _ in range(2):
        model(input_ids=TOKENS, labels=TOKENS).loss.backward()
        model.optimizer.step()
    for merge in (model.merge_adapter, model.merge_and_unload):
        with pytest.raises(UnsupportedError, match="Evaluation and generation need no merge"):
            merge()
    model.eval()
    expected = model(input_ids=TOKENS).logits
    model.save_pretrained(tmp_path / "adapter")
    saved = PeftModel.from_pretrained(base(), tmp_path / "adapter").eval()
    assert torch.equal(saved(input_ids=TOKENS).logits, expected)
    merged = saved.merge_and_unload()(input_ids=TOKENS).logits
    unwrapped = lohan.unwrap(model)
    unwrapped.merge_adapter()
    assert torch.equal(unwrapped(input_ids=TOKENS).logits, merged)
