"""Each method of peft trains as with torch alone, on every kind of base, or is refused.

The base is in fp32, because lohan trains a copy of a module in bf16 with an fp32 master, and torch
without one. The first loss has the bits of torch's; those after updates are compared with a
tolerance of a few units in the last place, because lohan's AdamW and torch's round differently.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lohan
import peft
import pytest
import torch
from lohan.commands._quantize import quantize
from lohan.errors import LohanError, ModelError, UnsupportedError
from peft import PeftModel, get_peft_model
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

TOKENS = (torch.arange(48).reshape(4, 12) * 7) % 64
CONFIG = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "vocab_size": 64,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "use_cache": False,
}
LINEAR = ["q_proj", "v_proj"]


def of(kind: str, **settings: Any) -> Callable[[], Any]:
    return lambda: getattr(peft, f"{kind}Config")(task_type="CAUSAL_LM", **settings)


def linear(kind: str, **settings: Any) -> Callable[[], Any]:
    return of(kind, target_modules=LINEAR, **settings)


METHODS: dict[str, Callable[[], Any]] = {
    "LoRA": linear("Lora", r=4),
    "rsLoRA": linear("Lora", r=4, use_rslora=True),
    "DoRA": linear("Lora", r=4, use_dora=True),
    "PiSSA": linear("Lora", r=4, init_lora_weights="pissa"),
    "OLoRA": linear("Lora", r=4, init_lora_weights="olora"),
    "modules_to_save": linear("Lora", r=4, modules_to_save=["lm_head"]),
    "LoRA of embeddings": of("Lora", r=4, target_modules=["embed_tokens", "q_proj"]),
    "LoRA and tokens": linear("Lora", r=4, trainable_token_indices=[3, 5]),
    "AdaLoRA": linear("AdaLora", init_r=4, target_r=2, total_step=10),
    "IA3": of("IA3", target_modules=["v_proj", "down_proj"], feedforward_modules=["down_proj"]),
    "LoHa": linear("LoHa", r=4),
    "LoKr": linear("LoKr", r=4),
    "OFT": linear("OFT", r=0, oft_block_size=8),
    "BOFT": linear("BOFT", boft_block_size=8),
    "VeRA": of("Vera", target_modules=["q_proj", "o_proj"], r=4),
    "VB-LoRA": linear("VBLoRA", r=4, num_vectors=16, vector_length=16),
    "HRA": linear("HRA", r=4),
    "MiSS": linear("Miss", r=4),
    "LN tuning": of("LNTuning", target_modules=["input_layernorm"]),
    "trainable tokens": of(
        "TrainableTokens", token_indices=[3, 5], target_modules=["embed_tokens"]
    ),
    "prompt tuning": of("PromptTuning", num_virtual_tokens=4),
    "prefix tuning": of("PrefixTuning", num_virtual_tokens=4),
    "p-tuning": of("PromptEncoder", num_virtual_tokens=4, encoder_hidden_size=16),
}
# Their initialisation needs the base, which an empty model does not have.
DECOMPOSES = {"PiSSA", "OLoRA"}


# All methods are slow tests; these are quick ones, too.
QUICK = {"LoRA", "DoRA", "modules_to_save", "LoRA and tokens", "LN tuning", "prompt tuning"}
EACH = [
    pytest.param(name, marks=[] if name in QUICK else pytest.mark.slow, id=name) for name in METHODS
]


def same(found: list[float], wanted: list[float]) -> bool:
    return found[0] == wanted[0] and found == pytest.approx(wanted, rel=1e-6)


@pytest.fixture(scope="module")
def bases(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A base in fp32, one in FP8, and that one decoded."""
    folder = tmp_path_factory.mktemp("bases")
    torch.manual_seed(5)
    LlamaForCausalLM(LlamaConfig(**CONFIG)).save_pretrained(folder / "plain")
    quantize(folder / "plain", folder / "fp8", to="fp8")
    with lohan.empty():
        model = AutoModelForCausalLM.from_config(config(folder / "plain"))
    model.requires_grad_(False)
    model = lohan.wrap(model, weights=folder / "fp8", store=folder / "store")
    model.save_pretrained(folder / "decoded")
    model.lohan.close()
    return {name: folder / name for name in ("plain", "fp8", "decoded")}


def config(folder: Path) -> Any:
    return LlamaConfig.from_pretrained(folder)


def in_memory(folder: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(folder)


def empty(folder: Path) -> Any:
    with lohan.empty():
        return AutoModelForCausalLM.from_config(config(folder))


def adapted(base: Any, method: str) -> Any:
    torch.manual_seed(7)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return get_peft_model(base, METHODS[method]())


def train(model: Any, optimizer: Any, steps: int = 2) -> list[float]:
    losses = []
    model.train()
    torch.manual_seed(9)
    for _ in range(steps):
        loss = model(input_ids=TOKENS, labels=TOKENS).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def plain(model: Any, steps: int = 2) -> list[float]:
    params = [param for param in model.parameters() if param.requires_grad]
    return train(model, torch.optim.AdamW(params, lr=1e-2), steps)


def wrapped(model: Any, store: Path, **settings: Any) -> list[float]:
    model = lohan.wrap(model, store=store, lr=1e-2, **settings)
    try:
        return train(model, model.optimizer)
    finally:
        model.lohan.close()


@pytest.mark.parametrize("method", EACH)
def test_a_method_trains_on_a_base_in_memory(
    method: str, bases: dict[str, Path], tmp_path: Path
) -> None:
    want = plain(adapted(in_memory(bases["plain"]), method))
    assert same(wrapped(adapted(in_memory(bases["plain"]), method), tmp_path / "store"), want)


@pytest.mark.parametrize("method", EACH)
def test_a_method_trains_on_an_empty_base(
    method: str, bases: dict[str, Path], tmp_path: Path
) -> None:
    if method in DECOMPOSES:
        with pytest.raises(ModelError, match="get_peft_model on a base that is in memory"):
            adapted(empty(bases["plain"]), method)
        return
    want = plain(adapted(in_memory(bases["plain"]), method))
    model = adapted(empty(bases["plain"]), method)
    assert same(wrapped(model, tmp_path / "store", weights=bases["plain"]), want)


@pytest.mark.parametrize("method", EACH)
def test_a_method_trains_on_a_quantized_base(
    method: str, bases: dict[str, Path], tmp_path: Path
) -> None:
    if method in DECOMPOSES:  # the way out: the decoded base in memory
        model = adapted(in_memory(bases["decoded"]), method)
        with pytest.raises(UnsupportedError, match="without weights="):
            lohan.wrap(model, weights=bases["fp8"], store=tmp_path / "store")
        return
    want = plain(adapted(in_memory(bases["decoded"]), method))
    model = adapted(empty(bases["plain"]), method)
    assert same(wrapped(model, tmp_path / "store", weights=bases["fp8"]), want)


@pytest.mark.parametrize("method", EACH)
def test_a_saved_adapter_is_continued_on_an_empty_base(
    method: str, bases: dict[str, Path], tmp_path: Path
) -> None:
    model = adapted(in_memory(bases["plain"]), method)
    plain(model)
    model.save_pretrained(tmp_path / "adapter")

    def continued(base: Any) -> Any:
        torch.manual_seed(11)
        is_prompt = METHODS[method]().is_prompt_learning  # peft loads these only as frozen
        model = PeftModel.from_pretrained(base, tmp_path / "adapter", is_trainable=not is_prompt)
        if is_prompt:
            model.prompt_encoder.requires_grad_(True)
        return model

    want = plain(continued(in_memory(bases["plain"])))
    settings: dict[str, Any] = {"weights": bases["plain"]}
    try:
        model = continued(empty(bases["plain"]))
    except LohanError as error:
        assert method in DECOMPOSES and "on a base that is in memory" in str(error)
        model, settings = continued(in_memory(bases["plain"])), {}
    assert same(wrapped(model, tmp_path / "store", **settings), want)
