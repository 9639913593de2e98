"""Each method of peft trains as with torch alone, on every kind of base, or is refused.

OUTCOMES is the table of docs/peft-methods.md, which `python tests/py/test_peft_methods.py` writes.
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
from lohan.errors import ModelError, UnsupportedError
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
# Other methods, which test_merge_files.py does not merge.
MORE: dict[str, Callable[[], Any]] = {
    "gaussian LoRA": linear("Lora", r=4, init_lora_weights="gaussian"),
    "orthogonal LoRA": linear("Lora", r=4, init_lora_weights="orthogonal"),
    "LoRA with bias": linear("Lora", r=4, lora_bias=True),
    "PiSSA by niter": linear("Lora", r=4, init_lora_weights="pissa_niter_4"),
    "prompt tuning from tokens": of(
        "PromptTuning", num_virtual_tokens=4, prompt_tuning_init="SAMPLE_VOCAB"
    ),
    "AdaMSS": linear("Adamss"),
    "LLaMA-Adapter": of("AdaptionPrompt", adapter_len=4, adapter_layers=2),
    "BEFT": linear("Beft"),
    "C3A": linear("C3A", block_size=8),
    "Cartridge": of("Cartridge", num_virtual_tokens=4),
    "CPT": of("CPT", cpt_token_ids=[3, 4, 5, 6], cpt_tokens_type_mask=[1, 2, 3, 4]),
    "DEFT": linear("Deft", r=4),
    "DeLoRA": linear("Delora", r=4),
    "FourierFT": linear("FourierFT", n_frequency=16),
    "FRoD": linear("Frod"),
    "GLoRA": linear("Glora", r=4),
    "GraLoRA": linear("Gralora", r=4, gralora_k=2),
    "HiRA": linear("Hira", r=4),
    "Lily": linear("Lily", r=4),
    "OSF": linear("OSF"),
    "PEANuT": linear("Peanut", r=4),
    "PSOFT": linear("Psoft", r=4),
    "PVeRA": of("Pvera", target_modules=["q_proj", "o_proj"], r=4),
    "RandLoRA": of("RandLora", target_modules=["q_proj", "o_proj"], r=4),
    "RoAd": linear("Road", group_size=8),
    "Shadow": of("Shadow", r=4),
    "SHiRA": linear("Shira", r=4),
    "SuperTuning": linear("Supertuning"),
    "TinyLoRA": linear("TinyLora"),
    "Uni-LoRA": linear("UniLora", r=4),
    "WaveFT": linear("WaveFT", n_frequency=16),
}
ALL = {**METHODS, **MORE}
# Their initialisation needs the base, which an empty model does not have.
DECOMPOSES = {"PiSSA", "OLoRA"}


# All methods are slow tests; these are quick ones, too.
QUICK = {"LoRA", "DoRA", "modules_to_save", "LoRA and tokens", "LN tuning", "prompt tuning"}
EACH = [
    pytest.param(name, marks=[] if name in QUICK else pytest.mark.slow, id=name) for name in ALL
]
KINDS = ("in memory", "empty", "quantized", "continued")
# A method is trained with the first loss bit for bit, and the others up to AdamW's rounding ...
TRAINED = "trained"
# ... or peft computes it from the base, so an empty one is refused, and one in memory is trained.
# Some methods also change the base, which then cannot be read from its files.
NEEDS, CHANGES = "needs the base", "needs and changes the base"
OUTCOMES: dict[str, tuple[str, str, str, str]] = {
    **dict.fromkeys(ALL, (TRAINED, TRAINED, TRAINED, TRAINED)),
    **dict.fromkeys(("PiSSA", "PiSSA by niter", "OLoRA"), (TRAINED, CHANGES, CHANGES, CHANGES)),
    **dict.fromkeys(("AdaMSS", "FRoD", "OSF", "PSOFT", "TinyLoRA"), (TRAINED, NEEDS, NEEDS, NEEDS)),
    **dict.fromkeys(
        ("CPT", "prompt tuning from tokens", "DEFT", "DeLoRA", "SuperTuning"),
        (TRAINED, NEEDS, NEEDS, TRAINED),
    ),
}
# What peft's other methods need that this test does not have.
NOT_TRIED = {
    "MULTITASK_PROMPT_TUNING": "`task_ids` in each forward",
    "POLY": "`task_ids` in each forward",
    "XLORA": "trained adapters",
}


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
        return get_peft_model(base, ALL[method]())


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


def continued(base: Any, method: str, folder: Path) -> Any:
    torch.manual_seed(11)
    is_prompt = ALL[method]().is_prompt_learning  # peft loads these only as frozen
    model = PeftModel.from_pretrained(base, folder, is_trainable=not is_prompt)
    if is_prompt:
        model.prompt_encoder.requires_grad_(True)
    return model


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("method", EACH)
def test_a_method_trains_as_with_torch_alone_or_is_refused_by_name(
    method: str, kind: str, bases: dict[str, Path], tmp_path: Path
) -> None:
    plain_base = bases["decoded" if kind == "quantized" else "plain"]
    weights = bases["fp8" if kind == "quantized" else "plain"]

    def build(base: Any) -> Any:
        if kind == "continued":
            return continued(base, method, tmp_path / "adapter")
        return adapted(base, method)

    if kind == "continued":
        first = adapted(in_memory(plain_base), method)
        plain(first)
        first.save_pretrained(tmp_path / "adapter")
    want = plain(build(in_memory(plain_base)))
    if kind == "in memory":
        assert same(wrapped(build(in_memory(plain_base)), tmp_path / "store"), want)
        return
    outcome = OUTCOMES[method][KINDS.index(kind)]
    if outcome == TRAINED:
        assert same(wrapped(build(empty(plain_base)), tmp_path / "store", weights=weights), want)
        return
    error = RuntimeError if method == "AdaMSS" else ModelError  # peft raises its own, with the text
    with pytest.raises(error, match="get_peft_model on a base that is in memory"):
        wrapped(build(empty(plain_base)), tmp_path / "empty", weights=weights)
    if kind == "continued":  # a converted adapter of PiSSA is one of LoRA
        assert same(wrapped(build(in_memory(plain_base)), tmp_path / "store"), want)
    elif outcome == CHANGES:
        with pytest.raises(UnsupportedError, match="without weights="):
            wrapped(build(in_memory(plain_base)), tmp_path / "store", weights=weights)
    else:
        found = wrapped(build(in_memory(plain_base)), tmp_path / "store", weights=weights)
        assert same(found, want)


def test_every_method_of_peft_has_a_row_or_a_reason() -> None:
    tried = {make().peft_type.value for make in ALL.values()}
    assert tried.isdisjoint(NOT_TRIED)
    assert tried | NOT_TRIED.keys() == {kind.value for kind in peft.PeftType}


def table() -> str:
    lines = [
        f"| method | {' | '.join(KINDS)} |",
        "|---|---|---|---|---|",
        *(f"| {name} | {' | '.join(OUTCOMES[name])} |" for name in ALL),
        "",
        "Not tried:",
        "",
        *(f"* {name}: it needs {what}." for name, what in NOT_TRIED.items()),
    ]
    return "\n".join([*lines, ""])


PAGE = Path(__file__).parents[2] / "docs" / "peft-methods.md"
BEGIN, END = "<!-- table of tests/py/test_peft_methods.py -->\n", "<!-- end of the table -->\n"


def page(text: str) -> str:
    before, _, rest = text.partition(BEGIN)
    return before + BEGIN + "\n" + table() + "\n" + END + rest.partition(END)[2]


def test_the_page_has_the_table_of_outcomes() -> None:
    text = PAGE.read_text()
    assert page(text) == text, "run python tests/py/test_peft_methods.py"


if __name__ == "__main__":
    PAGE.write_text(page(PAGE.read_text()))
