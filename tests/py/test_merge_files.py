"""`lohan merge`: the files that peft's merge_and_unload writes, from a base that is read once."""

from __future__ import annotations

import json
import shutil
import signal
import subprocess
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf_helper
import integers_helper
import kit
import lohan
import pytest
import quantize_helper
import test_gpt_oss
import test_loader_names
import test_peft_methods as methods
import torch
from click.testing import CliRunner
from lohan import cli
from lohan.errors import ModelError, StoreExistsError, UnsupportedError
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import (
    AutoModelForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    LlamaForSequenceClassification,
    MixtralConfig,
    MixtralForCausalLM,
    PreTrainedModel,
    ResNetConfig,
    ResNetForImageClassification,
    T5Config,
    T5ForConditionalGeneration,
)

CONFIG: dict[str, Any] = methods.CONFIG
SMALL: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 64,
}


def llama(*, is_tied: bool = False) -> Any:
    torch.manual_seed(5)
    return LlamaForCausalLM(LlamaConfig(**CONFIG, tie_word_embeddings=is_tied))


def trained(model: Any, config: Any, folder: Path) -> Path:
    """Save an adapter all of whose values are random."""
    torch.manual_seed(7)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = get_peft_model(model, config)
        with torch.no_grad():
            for param in model.parameters():
                if param.requires_grad:
                    param.add_(torch.randn_like(param) * 0.05)
        model.save_pretrained(folder)
    return folder


def values(folder: Path) -> dict[str, torch.Tensor]:
    found: dict[str, torch.Tensor] = {}
    for path in folder.glob("*.safetensors"):
        found |= load_file(path)
    return found


def by_peft(base: Path, adapter: Path, out: Path, kind: Any = AutoModelForCausalLM) -> Any:
    """Merge in memory, and save."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = PeftModel.from_pretrained(kind.from_pretrained(base), str(adapter))
        merged: Any = model.merge_and_unload()
    merged.save_pretrained(out)
    return merged


def check(found: Path, wanted: Path, base: Path | None = None) -> None:
    """Compare the tensors of two folders, bit for bit."""
    left, right = values(found), values(wanted)
    assert left.keys() == right.keys()
    for name, value in right.items():
        assert left[name].dtype == value.dtype, name
        assert torch.equal(left[name], value), name
    if base is not None:
        before = values(base)
        assert any(not torch.equal(before[name], v) for name, v in right.items() if name in before)


UNLIKE = {"PiSSA", "OLoRA", "prompt tuning", "prefix tuning", "p-tuning"}
EACH = [
    pytest.param(name, marks=[] if name in methods.QUICK else pytest.mark.slow, id=name)
    for name in methods.METHODS
]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("method", EACH)
def test_each_method_has_the_bits_of_merge_and_unload(
    method: str, dtype: torch.dtype, tmp_path: Path
) -> None:
    base = tmp_path / "base"
    llama().to(dtype).save_pretrained(base)
    if method in UNLIKE:
        with pytest.raises(UnsupportedError, match=r"converted? it|init_lora|no weights to merge"):
            lohan.merge(base, adapter_of(method, base, tmp_path), tmp_path / "out")
        assert not (tmp_path / "out").exists()
        return
    adapter = adapter_of(method, base, tmp_path)
    by_peft(base, adapter, tmp_path / "wanted")
    made = lohan.merge(base, adapter, tmp_path / "out")
    check(tmp_path / "out", tmp_path / "wanted", base)
    assert len(made.merged) > 0 and made.untied == []
    assert made.nbytes == sum(v.nbytes for v in values(tmp_path / "out").values())


def adapter_of(method: str, base: Path, folder: Path) -> Path:
    model = AutoModelForCausalLM.from_pretrained(base)
    return trained(model, methods.METHODS[method](), folder / "adapter")


def gpt2() -> Any:
    return GPT2LMHeadModel(GPT2Config(n_embd=32, n_layer=2, n_head=2, vocab_size=64))


def mixtral() -> Any:
    return MixtralForCausalLM(MixtralConfig(**SMALL, num_local_experts=4))


def t5() -> Any:
    sizes = {"d_model": 32, "d_ff": 48, "d_kv": 8, "num_layers": 2, "num_heads": 4}
    config = T5Config(**sizes, vocab_size=64, dtype=torch.float16, decoder_start_token_id=0)
    return T5ForConditionalGeneration(config).half()


def resnet() -> Any:
    """A model without embeddings."""
    sizes = {"embedding_size": 8, "hidden_sizes": [32, 64], "depths": [1, 1], "num_labels": 3}
    return ResNetForImageClassification(ResNetConfig(**sizes))


EXPERTS = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]


@pytest.mark.parametrize(
    ("make", "settings"),
    [
        (gpt2, {"target_modules": ["c_attn"], "fan_in_fan_out": True}),
        (mixtral, {"target_modules": ["q_proj"], "target_parameters": EXPERTS}),
        (t5, {"target_modules": ["q", "wo"]}),
        (test_loader_names.llava, {"target_modules": ["q_proj", "v_proj"]}),
        (llama, {"target_modules": ["q_proj"], "bias": "all", "lora_bias": False}),
        (resnet, {"target_modules": ["convolution"], "modules_to_save": ["classifier"]}),
    ],
    ids=[
        *("Conv1D", "fused experts that files have apart", "fp32 beside fp16", "renamed"),
        *("biases", "images"),
    ],
)
def test_layers_of_every_kind_are_merged(
    make: Callable[[], Any], settings: dict[str, Any], tmp_path: Path
) -> None:
    torch.manual_seed(5)
    model = make()
    base, kind = tmp_path / "base", type(model)
    model.save_pretrained(base)
    config = LoraConfig(r=4, **settings)
    adapter = trained(kind.from_pretrained(base), config, tmp_path / "adapter")
    by_peft(base, adapter, tmp_path / "wanted", kind)
    lohan.merge(base, adapter, tmp_path / "out", max_shard_size="30KB")
    assert (tmp_path / "out" / "model.safetensors.index.json").is_file()
    check(tmp_path / "out", tmp_path / "wanted", base)
    one, other = (kind.from_pretrained(tmp_path / name) for name in ("out", "wanted"))
    assert one.state_dict().keys() == other.state_dict().keys()


def test_a_classifier_of_a_language_model_is_merged_with_its_head(tmp_path: Path) -> None:
    base = tmp_path / "base"
    llama().save_pretrained(base)
    model = LlamaForSequenceClassification.from_pretrained(base, num_labels=5)
    config = LoraConfig(task_type="SEQ_CLS", target_modules=["q_proj"], r=4)
    adapter = trained(model, config, tmp_path / "adapter")
    lohan.merge(base, adapter, tmp_path / "out")
    merged = LlamaForSequenceClassification.from_pretrained(tmp_path / "out")
    assert merged.score.weight.shape == (5, 32) and "lm_head.weight" not in values(tmp_path / "out")
    kind = LlamaForSequenceClassification
    model = PeftModel.from_pretrained(kind.from_pretrained(base, num_labels=5), str(adapter))
    for name, value in model.merge_and_unload().state_dict().items():
        assert torch.equal(value, merged.state_dict()[name]), name


def forms() -> dict[str, Any]:
    integers = integers_helper.Integers
    found = {name: quantize_helper.FORMS[name] for name in ("fp8", "nf4", "mxfp4", "nvfp4")}
    found |= {"int8": quantize_helper.FORMS["int8 of channels"]}
    return found | {"gptq": integers(), "awq": integers("awq", version="gemm")}


@pytest.mark.parametrize("name", ["fp8", "nf4", "mxfp4", "nvfp4", "int8", "gptq", "awq"])
def test_a_quantized_base_gives_what_its_decoded_one_gives(name: str, tmp_path: Path) -> None:
    packed, plain = quantize_helper.save(tmp_path / "bases", forms()[name], layers=1)
    config = LoraConfig(r=4, target_modules=["q_proj", "down_proj", "lm_head"])
    adapter = trained(AutoModelForCausalLM.from_pretrained(plain), config, tmp_path / "adapter")
    by_peft(plain, adapter, tmp_path / "wanted", LlamaForCausalLM)
    said = json.loads((packed / "config.json").read_text())
    said |= {"architectures": ["LlamaForCausalLM"], "dtype": "bfloat16"}
    (packed / "config.json").write_text(json.dumps(said))
    (packed / "quantize_config.json").write_text("{}")
    lohan.merge(packed, adapter, tmp_path / "out")
    check(tmp_path / "out", tmp_path / "wanted")
    said = json.loads((tmp_path / "out" / "config.json").read_text())
    assert "quantization_config" not in said and said["dtype"] == "bfloat16"
    assert not (tmp_path / "out" / "quantize_config.json").exists()
    AutoModelForCausalLM.from_pretrained(tmp_path / "out")  # needs no other library


@pytest.mark.parametrize("kind", gguf_helper.CONFIGS)
def test_a_base_in_gguf_gives_what_its_decoded_one_gives(kind: str, tmp_path: Path) -> None:
    file, plain = gguf_helper.save(tmp_path, kind)
    made = gguf_helper.CONFIGS[kind].to_dict() | {"dtype": "bfloat16"}
    made["architectures"] = [
        type(AutoModelForCausalLM.from_config(gguf_helper.CONFIGS[kind])).__name__
    ]
    for folder in (tmp_path, plain):
        (folder / "config.json").write_text(json.dumps(made))
    config = LoraConfig(r=4, target_modules=["q_proj", "k_proj", "down_proj", "lm_head"])
    adapter = trained(AutoModelForCausalLM.from_pretrained(plain), config, tmp_path / "adapter")
    by_peft(plain, adapter, tmp_path / "wanted")
    lohan.merge(file, adapter, tmp_path / "out")
    check(tmp_path / "out", tmp_path / "wanted", plain)
    AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    (tmp_path / "config.json").unlink()
    with pytest.raises(ModelError, match=r"no config\.json.*a GGUF file in a folder with"):
        lohan.merge(file, adapter, tmp_path / "again")


@pytest.mark.parametrize("parameters", [None, EXPERTS])
def test_packed_experts_are_merged_with_adapters_beside_and_on_them(
    parameters: Any, tmp_path: Path
) -> None:
    packed, plain = test_gpt_oss.save(tmp_path / "bases")
    for folder in (packed, plain):
        said = json.loads((folder / "config.json").read_text())
        said |= {"architectures": ["GptOssForCausalLM"], "dtype": "bfloat16"}
        (folder / "config.json").write_text(json.dumps(said))
    config = LoraConfig(r=4, target_modules=["q_proj"], target_parameters=parameters)
    adapter = trained(AutoModelForCausalLM.from_pretrained(plain), config, tmp_path / "adapter")
    by_peft(plain, adapter, tmp_path / "wanted")
    lohan.merge(packed, adapter, tmp_path / "out")
    check(tmp_path / "out", tmp_path / "wanted")


@pytest.mark.parametrize("targets", [["embed_tokens"], ["lm_head"], ["embed_tokens", "lm_head"]])
def test_tied_layers_that_an_adapter_makes_differ_are_untied(
    targets: list[str], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    base = tmp_path / "base"
    llama(is_tied=True).save_pretrained(base)
    config = LoraConfig(task_type="CAUSAL_LM", r=4, target_modules=targets)
    adapter = trained(AutoModelForCausalLM.from_pretrained(base), config, tmp_path / "adapter")
    adapted = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), str(adapter))
    want = adapted.eval()(input_ids=methods.TOKENS).logits
    made = lohan.merge(base, adapter, tmp_path / "out")
    assert made.untied == ["lm_head.weight"]
    assert "the adapter makes tied parameters differ" in capfd.readouterr().err
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "out").eval()
    assert torch.allclose(merged(input_ids=methods.TOKENS).logits, want, rtol=1e-4, atol=1e-4)


def test_tied_layers_that_stay_equal_stay_tied(tmp_path: Path) -> None:
    base = tmp_path / "base"
    llama(is_tied=True).save_pretrained(base)
    settings: dict[str, Any] = {"modules_to_save": ["embed_tokens"], "ensure_weight_tying": True}
    config = LoraConfig(task_type="CAUSAL_LM", r=4, target_modules=["q_proj"], **settings)
    adapter = trained(AutoModelForCausalLM.from_pretrained(base), config, tmp_path / "adapter")
    by_peft(base, adapter, tmp_path / "wanted")
    assert lohan.merge(base, adapter, tmp_path / "out").untied == []
    check(tmp_path / "out", tmp_path / "wanted", base)


@pytest.mark.parametrize("is_given", [False, True])
def test_embeddings_of_new_tokens_are_written(is_given: bool, tmp_path: Path) -> None:
    base = tmp_path / "base"
    llama().save_pretrained(base)
    model = AutoModelForCausalLM.from_pretrained(base)
    model.resize_token_embeddings(70)
    config = LoraConfig(task_type="CAUSAL_LM", r=4, target_modules=["q_proj"])
    adapter = trained(model, config, tmp_path / "adapter")
    with lohan.empty():
        model = AutoModelForCausalLM.from_config(LlamaConfig.from_pretrained(base))
        model.resize_token_embeddings(70)
    lohan.merge(base, adapter, tmp_path / "out", model=model if is_given else None)
    saved = load_file(adapter / "adapter_model.safetensors")
    found = values(tmp_path / "out")
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        assert torch.equal(found[name], saved[f"base_model.model.{name}"])
    assert json.loads((tmp_path / "out" / "config.json").read_text())["vocab_size"] == 70
    if is_given:
        del saved["base_model.model.lm_head.weight"]
        save_file(saved, adapter / "adapter_model.safetensors", {"format": "pt"})
        with pytest.raises(ModelError, match=r"has 64 of 70 rows of 'lm_head\.weight'"):
            lohan.merge(base, adapter, tmp_path / "lacks", model=model)


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A base, and an adapter of it with a tokenizer of its own."""
    folder = tmp_path_factory.mktemp("pair")
    llama().save_pretrained(folder / "base")
    (folder / "base" / "tokenizer.json").write_text("old")
    (folder / "base" / "README.md").write_text("about")
    config = LoraConfig(task_type="CAUSAL_LM", r=4, target_modules=["q_proj"])
    adapter = trained(llama(), config, folder / "adapter")
    (adapter / "tokenizer.json").write_text("new")
    return folder / "base", adapter


def test_the_command_copies_the_other_files_and_replaces_a_model_only_if_told(
    pair: tuple[Path, Path], tmp_path: Path
) -> None:
    words = ["merge", str(pair[0]), str(pair[1]), str(tmp_path / "out")]
    done = CliRunner().invoke(cli.main, [*words, "--json"])
    assert done.exit_code == 0
    said = json.loads(done.stdout)
    assert len(said["merged"]) == 2 and said["untied"] == []
    names = {path.name for path in (tmp_path / "out").iterdir()}
    assert names == {
        *("config.json", "generation_config.json", "model.safetensors"),
        *("tokenizer.json", "README.md"),
    }
    assert (tmp_path / "out" / "tokenizer.json").read_text() == "new"
    before = (tmp_path / "out" / "model.safetensors").stat()
    again = CliRunner().invoke(cli.main, words)
    assert again.exit_code == 1 and "--overwrite" in str(again.output)
    assert (tmp_path / "out" / "model.safetensors").stat() == before
    assert CliRunner().invoke(cli.main, [*words, "--overwrite"]).exit_code == 0
    for read in pair:
        with pytest.raises(StoreExistsError, match="is read"):
            lohan.merge(*pair, read, overwrite=True)
    frozen = LlamaForCausalLM(LlamaConfig(**CONFIG)).requires_grad_(False)
    model = lohan.wrap(frozen, weights=tmp_path / "out", store=tmp_path / "store")
    with pytest.raises(StoreExistsError, match="read in place"):
        lohan.merge(*pair, tmp_path / "out", overwrite=True)
    model.lohan.close()


def test_a_merge_that_fails_leaves_nothing_and_one_that_replaces_leaves_the_earlier_model(
    pair: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "out"

    def fail(done: int, total: int) -> None:
        if done > total // 2:
            raise OSError(28, "No space left on device")

    with pytest.raises(lohan.errors.StoreError, match="full"):
        lohan.merge(*pair, out, progress=fail)
    assert not out.exists()
    lohan.merge(*pair, out)
    before = {path.name: path.read_bytes() for path in out.iterdir()}
    with pytest.raises(lohan.errors.StoreError, match="full"):
        lohan.merge(*pair, out, overwrite=True, progress=fail)
    assert {path.name: path.read_bytes() for path in out.iterdir()} == before


class Odd(PreTrainedModel):
    """A model that config.json does not name."""

    config_class = LlamaConfig

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.layer, self.norm = nn.Linear(8, 8), nn.BatchNorm1d(8)
        self.post_init()


def test_what_does_not_fit_is_refused_by_name(pair: tuple[Path, Path], tmp_path: Path) -> None:
    base, adapter = pair
    for folder, other, match in (
        (tmp_path, adapter, "has no config.json"),
        (base, base, "has no adapter_config.json"),
    ):
        with pytest.raises(ModelError, match=match):
            lohan.merge(folder, other, tmp_path / "out")
    for cut, match in ((9, "peft cannot|transformers cannot"), (0, "has no weights: neither")):
        shutil.copytree(adapter, tmp_path / f"cut{cut}")
        path = tmp_path / f"cut{cut}" / "adapter_model.safetensors"
        path.write_bytes(path.read_bytes()[:-9]) if cut else path.unlink()
        with pytest.raises(ModelError, match=match):
            lohan.merge(base, path.parent, tmp_path / "out")
    with pytest.raises(ModelError, match=r"written, such as .*cut"):
        lohan.merge(base, tmp_path, tmp_path / "out")
    fewer = tmp_path / "fewer"
    LlamaForCausalLM(LlamaConfig(**{**CONFIG, "num_hidden_layers": 1})).save_pretrained(fewer)
    with pytest.raises(ModelError, match=r"does not fit the base.*2 others .*layers\.1\."):
        lohan.merge(fewer, adapter, tmp_path / "out")
    more = tmp_path / "more"
    LlamaForCausalLM(LlamaConfig(**{**CONFIG, "num_hidden_layers": 3})).save_pretrained(more)
    with pytest.raises(ModelError, match=r"does not fit the base.*layers\.2\."):
        lohan.merge(more, adapter, tmp_path / "out")
    shutil.copytree(base, tmp_path / "less")
    found = load_file(base / "model.safetensors")
    del found["model.norm.weight"]
    save_file(found, tmp_path / "less" / "model.safetensors", {"format": "pt"})
    with pytest.raises(ModelError, match=r"has a value for 'model\.norm\.weight'"):
        lohan.merge(tmp_path / "less", adapter, tmp_path / "out")
    with pytest.raises(ModelError, match=r"model= of lohan\.merge\(\) has values"):
        lohan.merge(base, adapter, tmp_path / "out", model=llama())
    said = json.loads((base / "config.json").read_text())
    (tmp_path / "less" / "config.json").write_text(json.dumps({**said, "architectures": ["Odd"]}))
    with pytest.raises(ModelError, match=r"names no class of transformers \(\['Odd'\]\)"):
        lohan.merge(tmp_path / "less", adapter, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_buffers_of_the_base_and_of_saved_modules_are_written(tmp_path: Path) -> None:
    base = tmp_path / "base"
    model: Any = Odd(LlamaConfig(**CONFIG))
    model.norm.running_mean += 3
    model.save_pretrained(base)
    config = LoraConfig(r=2, target_modules=["layer"])
    for name, settings in (("plain", {}), ("saved", {"modules_to_save": ["norm"]})):
        config = LoraConfig(r=2, target_modules=["layer"], **settings)
        adapted = get_peft_model(Odd.from_pretrained(base), config)
        with torch.no_grad():
            for key, buffer in adapted.named_buffers():
                if "modules_to_save" in key and "mean" in key:
                    buffer += 4
        adapted.save_pretrained(tmp_path / name)
        with lohan.empty():
            empty = Odd(LlamaConfig(**CONFIG))
        lohan.merge(base, tmp_path / name, tmp_path / f"out-{name}", model=empty)
        mean = values(tmp_path / f"out-{name}")["norm.running_mean"]
        assert (mean == (7 if settings else 3)).all()


WORKER = Path(__file__).with_name("merge_worker.py")


@pytest.mark.slow
def test_memory_does_not_grow_with_the_base(tmp_path: Path) -> None:
    peaks = []
    for layers in (2, 40):
        sizes = {"hidden_size": 512, "intermediate_size": 1024, "num_hidden_layers": layers}
        with torch.device("meta"):
            model: Any = LlamaForCausalLM(LlamaConfig(**{**CONFIG, **sizes}))
        model.to_empty(device="cpu")
        with torch.no_grad():
            for param in model.parameters():
                param.fill_(1.0)
        folder = tmp_path / str(layers)
        model.save_pretrained(folder / "base", max_shard_size="100MB")
        config = LoraConfig(task_type="CAUSAL_LM", r=2, target_modules=["down_proj"])
        trained(model, config, folder / "adapter")
        words = [str(folder / name) for name in ("base", "adapter", "out")]
        peaks.append(kit.run_worker(WORKER, *words)["peak_bytes"])
        nbytes = sum(path.stat().st_size for path in (folder / "out").glob("*.safetensors"))
        shutil.rmtree(folder)
    assert nbytes > 400e6
    assert peaks[1] - peaks[0] < 40e6


@pytest.mark.slow
def test_a_merge_that_is_killed_leaves_no_model_and_the_next_one_cleans_up(
    pair: tuple[Path, Path], tmp_path: Path
) -> None:
    out = tmp_path / "out"
    words = [str(path) for path in (*pair, out)]
    done = subprocess.run([sys.executable, str(WORKER), *words, "kill"], check=False)
    assert done.returncode == -signal.SIGKILL
    assert not [path for path in out.iterdir() if not path.name.startswith(".lohan-writing-")]
    lohan.merge(*pair, out)
    assert not list(out.glob(".lohan-writing-*")) and (out / "model.safetensors").is_file()
