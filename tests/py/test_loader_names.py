"""Files whose tensors transformers' loader renames and converts, read as from_pretrained does."""

from __future__ import annotations

import copy
import pathlib
import re
from collections.abc import Callable
from typing import Any

import kit as helper
import lohan
import peft
import pytest
import torch
from lohan.common._inside import inside
from lohan.errors import ModelError
from lohan.layout import _conversion, _cut, _files, _packed
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import (
    BertConfig,
    BertForMaskedLM,
    LlamaConfig,
    LlavaConfig,
    LlavaForConditionalGeneration,
    MixtralConfig,
    MixtralForCausalLM,
    PreTrainedModel,
    ViTConfig,
    ViTForImageClassification,
    Wav2Vec2Config,
    Wav2Vec2ForCTC,
)
from transformers import conversion_mapping as mapping
from transformers.core_model_loading import (
    Chunk,
    Concatenate,
    Interleave,
    MergeModulelist,
    Transpose,
    WeightConverter,
    WeightRenaming,
)

SIZES: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
}
TEXT = {**SIZES, "num_key_value_heads": 2, "vocab_size": 128, "max_position_embeddings": 64}
VISION = {**SIZES, "image_size": 16, "patch_size": 8}
Make = Callable[[], Any]


def mixtral() -> Any:
    return MixtralForCausalLM(MixtralConfig(**TEXT, num_local_experts=4))


def llava() -> Any:
    config = LlavaConfig(
        vision_config=VISION,
        text_config=LlamaConfig(**TEXT),
        image_token_index=127,
        vision_feature_layer=-1,
    )
    return LlavaForConditionalGeneration(config)


def vit() -> Any:
    return ViTForImageClassification(ViTConfig(**VISION))


def bert() -> Any:
    return BertForMaskedLM(BertConfig(**SIZES, vocab_size=128))


def wav2vec() -> Any:
    layers: dict[str, Any] = {"conv_dim": (16,), "conv_stride": (5,), "conv_kernel": (10,)}
    return Wav2Vec2ForCTC(Wav2Vec2Config(**SIZES, **layers, num_feat_extract_layers=1))


def disturbed(make: Make) -> Any:
    """Return a model without any value of its initialisation."""
    model = helper.seeded(make)
    with torch.no_grad():
        for param in model.parameters():
            param.add_(torch.randn_like(param) * 0.02)
    return model


def check(make: Make, folder: pathlib.Path, stores: pathlib.Path) -> list[str]:
    """Compare empty models with what from_pretrained loads; return what is copied if frozen."""
    right = dict(type(make()).from_pretrained(folder).state_dict())
    copied = []
    for is_frozen in (False, True):
        with lohan.empty():
            model = make().requires_grad_(not is_frozen)
        model = lohan.wrap(model, store=stores / f"store-{is_frozen}", weights=folder)
        helper.assert_same_state(dict(model.state_dict()), right)
        if is_frozen:
            layout = inside(model).layout
            copied = [param.name for param in layout.params if not layout.units[param.unit].runs]
        model.lohan.close()
        # the files as the store recorded them
        with lohan.empty():
            again = make().requires_grad_(not is_frozen)
        again = lohan.wrap(again, store=stores / f"store-{is_frozen}", resume=True)
        helper.assert_same_state(dict(again.state_dict()), right)
        again.lohan.close()
    return copied


@pytest.mark.parametrize("make", [mixtral, llava, vit], ids=lambda make: make.__name__)
def test_renamed_and_merged_tensors_are_read_in_place(
    make: Make, tmp_path: pathlib.Path, store_dir: pathlib.Path
) -> None:
    model = disturbed(make)
    model.save_pretrained(store_dir / "files", max_shard_size="200KB")
    assert check(make, store_dir / "files", store_dir) == []


@pytest.mark.parametrize(
    ("make", "old", "new"),
    [
        (bert, r"LayerNorm\.weight", "LayerNorm.gamma"),
        (bert, r"LayerNorm\.bias", "LayerNorm.beta"),
        (bert, r"^bert\.", ""),  # a base model's file, without the prefix
        (wav2vec, r"\.parametrizations\.weight\.original0", ".weight_g"),
    ],
)
def test_legacy_names_and_prefixes_are_found(
    make: Make, old: str, new: str, store_dir: pathlib.Path
) -> None:
    disturbed(make).save_pretrained(store_dir / "files")
    path = store_dir / "files" / "model.safetensors"
    values = load_file(path)
    renamed = {re.sub(old, new, name): value for name, value in values.items()}
    assert renamed.keys() != values.keys()
    save_file(renamed, path, {"format": "pt"})
    assert check(make, store_dir / "files", store_dir) == []


@pytest.mark.parametrize(
    "peft_config",
    [
        peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=2),
        peft.LoraConfig(task_type="CAUSAL_LM", target_modules=["q_proj"]),
    ],
    ids=["prompt", "lora"],
)
def test_a_base_below_either_prefix_of_peft_is_converted(
    peft_config: Any, store_dir: pathlib.Path
) -> None:
    disturbed(mixtral).save_pretrained(store_dir / "files")
    right = MixtralForCausalLM.from_pretrained(store_dir / "files")
    with lohan.empty():
        model = mixtral()
    model = peft.get_peft_model(model, copy.deepcopy(peft_config))
    model = lohan.wrap(model, store=store_dir / "store", weights=store_dir / "files")
    tuned = peft.get_peft_model(right, copy.deepcopy(peft_config))
    tuned.load_state_dict({**model.state_dict(), **_base_of(tuned)})
    helper.assert_same_state(dict(model.state_dict()), dict(tuned.state_dict()))
    model.lohan.close()


def _base_of(tuned: nn.Module) -> dict[str, torch.Tensor]:
    frozen = {name for name, param in tuned.named_parameters() if not param.requires_grad}
    return {name: value for name, value in tuned.state_dict().items() if name in frozen}


class Parts(PreTrainedModel):
    """A model with a parameter for each kind of conversion."""

    config_class = BertConfig
    base_model_prefix = "parts"

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        for name in ("query", "key", "turned", "mixed", "wide", "plain"):
            self.register_parameter(name, nn.Parameter(torch.zeros(32, 32)))
        self.experts = nn.Parameter(torch.zeros(3, 64, 32))
        self.register_buffer("table", torch.zeros(32))
        self.post_init()

    def _init_weights(self, module: nn.Module) -> None:
        pass


CONVERSIONS = [
    WeightRenaming("^old_", "plain"),
    WeightRenaming("^a_table", "table"),
    WeightConverter("qk", ["query", "key"], [Chunk(dim=0)]),
    WeightConverter("across", "turned", [Transpose(0, 1)]),
    WeightConverter("woven", "mixed", [Interleave(dim=0)]),
    WeightConverter(["left", "right"], "wide", [Concatenate(dim=1)]),
    WeightConverter(
        ["each.*.gate", "each.*.up"], "experts", [MergeModulelist(dim=0), Concatenate(dim=1)]
    ),
]
COMPUTED = ["turned", "mixed", "wide"]


@pytest.fixture
def parts(store_dir: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> pathlib.Path:
    """Return a folder with the files of Parts, whose conversions are registered."""
    monkeypatch.setattr(mapping, "USER_REGISTERED_MAPPINGS", {"Parts"})
    mapping.get_checkpoint_conversion_mapping("llama")  # makes the table
    table = mapping._checkpoint_conversion_mapping_cache
    monkeypatch.setitem(table, "Parts", CONVERSIONS)
    shapes = {"old_": (32, 32), "a_table": (32,), "qk": (64, 32), "across": (32, 32)}
    shapes |= {"woven": (32, 32), "left": (32, 20), "right": (32, 12)}
    shapes |= {f"each.{i}.{part}": (32, 32) for i in range(3) for part in ("gate", "up")}
    torch.manual_seed(1)
    values = {name: torch.randn(shape) for name, shape in shapes.items()}
    (store_dir / "files").mkdir()
    save_file(values, store_dir / "files" / "model.safetensors", {"format": "pt"})
    BertConfig(**SIZES).save_pretrained(store_dir / "files")
    return store_dir / "files"


def part_model() -> Any:
    return Parts(BertConfig(**SIZES))


def test_each_operation_is_read_in_place_or_computed_once(
    parts: pathlib.Path, store_dir: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert check(part_model, parts, store_dir) == COMPUTED
    said = capsys.readouterr().err
    for what in ("Transpose", "Interleave", "Concatenate"):
        assert re.search(
            rf"1 parameters \(0\.0 MB\) are copied .*: they are converted by {what} ", said
        )


def test_a_slice_a_stack_and_a_rename_name_their_places_in_the_files(parts: pathlib.Path) -> None:
    folder = _files.read_folder(parts)
    before = dict(folder.entries)
    _conversion.apply(part_model(), folder)
    query, key, experts = (folder.entries[name] for name in ("query", "key", "experts"))
    assert (query.offset, query.nbytes) == (before["qk"].offset, 32 * 32 * 4)
    assert key.offset == query.offset + query.nbytes
    assert [place.offset for place in experts.places] == [
        before[f"each.{number}.{part}"].offset for number in range(3) for part in ("gate", "up")
    ] or len(experts.places) < 6  # neighbours in the file are one place
    assert folder.entries["plain"] == before["old_"] and folder.names["plain"] == "old_"
    turned = folder.entries["turned"].made
    assert turned is not None and turned.sources == (("across", before["across"]),)


def test_a_conversion_that_fails_names_the_parameter_and_the_operation(
    parts: pathlib.Path, store_dir: pathlib.Path
) -> None:
    path = parts / "model.safetensors"
    values = load_file(path)
    del values["each.1.up"]
    save_file(values, path, {"format": "pt"})
    with lohan.empty():
        model = part_model()
    with pytest.raises(ModelError, match=r"MergeModulelist, Concatenate .*'experts' of 5 tensors"):
        lohan.wrap(model, store=store_dir / "store", weights=parts)


def test_computed_values_that_a_model_in_memory_has_already_are_not_reported(
    parts: pathlib.Path, store_dir: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = Parts.from_pretrained(parts)
    right = {name: value.clone() for name, value in model.state_dict().items()}
    model = lohan.wrap(model, store=store_dir / "store", weights=parts)
    helper.assert_same_state(dict(model.state_dict()), right)
    model.lohan.close()
    assert "other values" not in capsys.readouterr().err


@pytest.mark.parametrize("name", ["old_", "left", "each.1.up"])
def test_two_values_of_one_tensor_are_refused_whatever_uses_it(
    name: str, parts: pathlib.Path, store_dir: pathlib.Path
) -> None:
    value = load_file(parts / "model.safetensors")[name]
    (parts / "model.safetensors").rename(parts / "a.safetensors")
    save_file({name: value + 1}, parts / "b.safetensors", {"format": "pt"})
    with lohan.empty():
        model = part_model()
    with pytest.raises(ModelError, match=r"a\.safetensors and .*b\.safetensors"):
        lohan.wrap(model, store=store_dir / "store", weights=parts)


def test_a_part_of_a_tensor_of_half_bytes_is_refused_by_name(
    parts: pathlib.Path, store_dir: pathlib.Path
) -> None:
    path = parts / "model.safetensors"
    values = load_file(path)
    values["qk"] = torch.zeros(64, 16, dtype=torch.uint8)
    save_file(values, path, {"format": "pt"})
    raw = path.read_bytes()
    # what safetensors writes for torch.float4_e2m1fn_x2
    old, new = b'"qk":{"dtype":"U8","shape":[64,16]', b'"qk":{"dtype":"F4","shape":[64,32]'
    assert old in raw
    path.write_bytes(raw.replace(old, new))
    with lohan.empty():
        model = part_model()
    with pytest.raises(ModelError, match=r"query has dtype F4, which is not supported"):
        lohan.wrap(model, store=store_dir / "store", weights=parts)


def test_a_part_of_half_bytes_has_its_place_in_the_file_or_is_refused() -> None:
    entry = _packed.Entry(0, 100, 64, "F4", (8, 16), name="fours")
    part = _cut.cut(entry, 32, (2, 16))
    assert (part.offset, part.nbytes, part.shape) == (116, 16, (2, 16))
    with pytest.raises(ModelError, match=r"fours has elements of 4 bits \(F4\)"):
        _cut.cut(entry, 1, (2, 16))


def test_a_packed_tensor_that_the_loader_converts_is_refused_by_name(
    parts: pathlib.Path, store_dir: pathlib.Path
) -> None:
    path = parts / "model.safetensors"
    values = load_file(path)
    values["across"] = values["across"].to(torch.float8_e4m3fn)  # transposed by the loader
    save_file(values, path, {"format": "pt"})
    with lohan.empty():
        model = part_model()
    with pytest.raises(ModelError, match=r"turned is quantized .*in another order"):
        lohan.wrap(model, store=store_dir / "store", weights=parts)
