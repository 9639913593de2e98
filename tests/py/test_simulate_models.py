"""Models of transformers that are simulated: counted by one run without storage."""

from __future__ import annotations

import json
import pathlib
from typing import Any

import pytest

transformers = pytest.importorskip("transformers")

import torch  # noqa: E402
from click.testing import CliRunner  # noqa: E402
from lohan.cli import main  # noqa: E402
from lohan.errors import MachineError, ModelError, UnsupportedError  # noqa: E402
from lohan.planning import _models, _plan, _quick  # noqa: E402

BATCH, SEQ = 2, 64
SMALL: dict[str, Any] = {"vocab_size": 256, "bos_token_id": 0, "eos_token_id": 0}
TEXT = {**SMALL, "hidden_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4}


def config_file(folder: pathlib.Path, config: Any, architecture: str) -> str:
    path = folder / "config.json"
    path.write_text(json.dumps({**config.to_dict(), "architectures": [architecture]}))
    return str(path)


def llama(**changes: Any) -> Any:
    given = {**TEXT, "intermediate_size": 160, "num_key_value_heads": 2, **changes}
    return transformers.LlamaConfig(**given)


def test_opt_counts_as_the_papers_shape_of_it(tmp_path: pathlib.Path) -> None:
    config = transformers.OPTConfig(
        hidden_size=2048,
        ffn_dim=8192,
        word_embed_proj_dim=2048,
        num_hidden_layers=24,
        num_attention_heads=32,
    )
    config_file(tmp_path, config, "OPTForCausalLM")
    counted = _models.load(str(tmp_path), 4, 1024)
    named = _plan.named_model("opt-1.3b", batch=4)
    assert counted.forward_flop == named.forward_flop
    assert counted.inter_block_bytes == named.inter_block_bytes
    assert counted.param_count == pytest.approx(named.param_count, rel=0.01)
    assert counted.tokens == named.tokens


def test_parameters_are_counted_once_and_a_tied_head_uses_the_embeddings(
    tmp_path: pathlib.Path,
) -> None:
    for is_tied in (True, False):
        config = llama(tie_word_embeddings=is_tied)
        path = config_file(tmp_path, config, "LlamaForCausalLM")
        counted = _models.load(path, BATCH, SEQ)
        real = transformers.LlamaForCausalLM(config)
        assert counted.param_count == sum(p.numel() for p in real.parameters())
        assert counted.blocks[-1].shared_block == (0 if is_tied else None)


def test_what_a_model_saves_is_what_torch_saves_of_it(tmp_path: pathlib.Path) -> None:
    config = llama(num_key_value_heads=4)
    counted = _models.load(config_file(tmp_path, config, "LlamaForCausalLM"), BATCH, SEQ)
    real = transformers.LlamaForCausalLM(config).to(torch.bfloat16).eval()
    seen = {p.untyped_storage().data_ptr() for p in real.parameters()}
    kept: list[torch.Tensor] = []
    total = 0

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        nonlocal total
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in seen:
            seen.add(storage.data_ptr())
            kept.append(tensor)
            total += storage.nbytes()
        return tensor

    tokens = torch.zeros(BATCH, SEQ, dtype=torch.long)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        real(input_ids=tokens, labels=tokens, use_cache=False)
    working = sum(layer.working_bytes for layer in counted.layers)
    # In addition: a block's output, which only the next one's norm reads, and a causal mask.
    masks = 3 * BATCH * SEQ * SEQ * 2
    found = counted.activation_bytes + working - counted.inter_block_bytes - masks
    assert found == pytest.approx(total, rel=0.01)


def test_layers_come_in_the_order_of_forward(tmp_path: pathlib.Path) -> None:
    counted = _models.load(config_file(tmp_path, llama(), "LlamaForCausalLM"), BATCH, SEQ)
    names = [layer.name for layer in counted.blocks[1].layers]
    # Nothing that o_proj and down_proj return is saved, so they belong to what follows.
    first = ["input_layernorm", "self_attn", "post_attention_layernorm"]
    assert names == [*first, "mlp.gate_proj", "mlp.act_fn", "mlp.up_proj", "mlp", "output"]


def test_experts_are_counted_as_often_as_a_token_meets_them(tmp_path: pathlib.Path) -> None:
    given = {**TEXT, "intermediate_size": 96, "num_local_experts": 4, "num_experts_per_tok": 2}
    given["num_key_value_heads"] = 2
    config = transformers.MixtralConfig(**given)
    counted = _models.load(config_file(tmp_path, config, "MixtralForCausalLM"), BATCH, SEQ)
    experts = [x.forward_flop for x in counted.layers if x.name == "mlp.experts"]
    assert experts == [BATCH * SEQ * 2 * (6 * 64 * 96)] * 3


@pytest.mark.parametrize(
    ("config", "architecture"),
    [
        (transformers.BertConfig(**TEXT, intermediate_size=128), "BertForMaskedLM"),
        (
            transformers.T5Config(
                vocab_size=256, d_model=64, d_ff=128, d_kv=16, num_layers=2, num_heads=4
            ),
            "T5ForConditionalGeneration",
        ),
        (
            transformers.ViTConfig(
                hidden_size=64,
                num_hidden_layers=3,
                num_attention_heads=4,
                intermediate_size=128,
                image_size=64,
            ),
            "ViTForImageClassification",
        ),
    ],
    ids=["bert", "t5", "vit"],
)
def test_other_kinds_of_models_are_simulated(
    tmp_path: pathlib.Path, config: Any, architecture: str
) -> None:
    path = config_file(tmp_path, config, architecture)
    words = ["simulate", "--model", path, "--batch", "2", "--seq", "64", "--json"]
    result = CliRunner().invoke(main, words)
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    assert found["tflops"] > 0 and found["forward_flop"] > 0


@pytest.mark.parametrize(
    ("architecture", "changes"),
    [
        ("CLIPModel", {"text_config": TEXT, "vision_config": {**TEXT, "image_size": 64}}),
        (
            "WhisperForConditionalGeneration",
            {
                **{"d_model": 64, "encoder_layers": 2, "decoder_layers": 2, "num_mel_bins": 8},
                **{"encoder_attention_heads": 4, "decoder_attention_heads": 4},
                **{"max_source_positions": 50, "max_target_positions": 64, "pad_token_id": 0},
                **{**SMALL, "decoder_start_token_id": 0},
            },
        ),
        ("Wav2Vec2ForCTC", {**TEXT, "conv_dim": [16] * 7, "pad_token_id": 0}),
        ("SwinForImageClassification", {"embed_dim": 12, "depths": [1, 1], "num_heads": [2, 2]}),
    ],
    ids=["clip", "whisper", "wav2vec2", "swin"],
)
def test_models_of_speech_and_images_are_counted_whole(
    architecture: str, changes: dict[str, Any], tmp_path: pathlib.Path
) -> None:
    """Also where a config has sizes under names of its own, so that there is no sketch."""
    model_class = getattr(transformers, architecture)
    config = model_class.config_class(**changes)
    path = config_file(tmp_path, config, architecture)
    with torch.device("meta"):
        model = model_class(config)
    model.tie_weights()
    counted = _models.load(path, BATCH, SEQ)
    assert counted.param_count == sum(p.numel() for p in model.parameters())
    assert counted.tokens > 0 and counted.forward_flop > 0
    sketched = _quick.sketch(path, BATCH, SEQ)
    assert (sketched is None) == (architecture != "Wav2Vec2ForCTC")


def test_a_class_of_transformers_is_a_model_with_its_default_configuration() -> None:
    counted = _models.load("GPT2LMHeadModel", BATCH, SEQ)
    assert counted.param_count == pytest.approx(124e6, rel=0.01)
    assert torch.get_default_dtype() is torch.float32, "counting leaves torch as it was"


def test_what_is_no_model_is_refused_by_name(tmp_path: pathlib.Path) -> None:
    with pytest.raises(MachineError, match="NoSuchModel"):
        _models.load("NoSuchModel", BATCH, SEQ)
    with pytest.raises(ModelError, match="gpt-13b"):
        _models.load("nothing.json", BATCH, SEQ)
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(MachineError, match=r"config\.json"):
        _models.load(str(tmp_path), BATCH, SEQ)
    path = config_file(tmp_path, llama(), "LlamaForCausalLM")
    with pytest.raises(ModelError, match="at least 1"):
        _models.load(path, 0, SEQ)


def test_a_layer_has_what_its_module_makes_and_what_it_takes_to_make_it_again(
    tmp_path: pathlib.Path,
) -> None:
    """As in a session, a saved tensor belongs to the module that returned it."""
    unit = BATCH * SEQ * 64
    config = transformers.GPT2Config(
        **SMALL, n_embd=64, n_layer=2, n_head=4, activation_function="gelu_pytorch_tanh"
    )
    layers = {}
    for name, given, architecture in (
        ("gpt2", config, "GPT2LMHeadModel"),
        ("opt", transformers.OPTConfig(**TEXT, ffn_dim=256), "OPTForCausalLM"),
    ):
        model = _models.load(config_file(tmp_path, given, architecture), BATCH, SEQ)
        block = [b for b in model.blocks if any(x.is_inter_block for x in b.layers)][1]
        layers[name] = {x.name: x for x in block.layers}
    gpt2, opt = layers["gpt2"], layers["opt"]
    # c_fc makes what GELU reads, and GELU what c_proj reads: without a product.
    assert gpt2["mlp.c_fc"].activation_bytes == gpt2["mlp.act"].activation_bytes == 8 * unit
    assert gpt2["mlp.c_fc"].forward_flop == 8 * unit * 64 and gpt2["mlp.act"].forward_flop == 0
    # ReLU saves its result alone, which takes the product before it.
    assert opt["activation_fn"].activation_bytes == 8 * unit
    assert opt["activation_fn"].forward_flop == 8 * unit * 64
    assert "fc1" not in opt
    # The last product makes the next block's input.
    assert opt["output"].forward_flop == 8 * unit * 64 and opt["output"].is_inter_block


def test_a_loss_without_logits_replaces_the_head_and_nothing_else(tmp_path: pathlib.Path) -> None:
    for is_tied in (True, False):
        path = config_file(tmp_path, llama(tie_word_embeddings=is_tied), "LlamaForCausalLM")
        logits = _models.load(path, BATCH, SEQ)
        fused = _models.load(path, BATCH, SEQ, "linear_cross_entropy")
        assert fused.param_count == logits.param_count
        assert fused.forward_flop == logits.forward_flop
        assert fused.activation_bytes == logits.activation_bytes
        assert fused.blocks[-1].shared_block == (0 if is_tied else None)
        working = fused.blocks[-1].layers[0].working_bytes
        assert working >= _plan.head_bytes("linear_cross_entropy", BATCH * SEQ, 64, 256)
    with pytest.raises(UnsupportedError, match="no linear head"):
        config = transformers.ViTConfig(hidden_size=64, num_hidden_layers=2, num_attention_heads=4)
        path = config_file(tmp_path, config, "ViTForImageClassification")
        _models.load(path, BATCH, SEQ, "linear_cross_entropy")
