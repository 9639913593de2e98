"""Plans for models that are named as on the Hugging Face Hub, without a network."""

from __future__ import annotations

import json
import os
import pathlib
import subprocess
import sys

import pytest
from lohan.planning import _hub, _quick, _shapes

COMMIT = "0" * 40
CONFIG = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "vocab_size": 1000,
}
PROGRAM = """
import sys
from lohan.errors import LohanError
from lohan.planning import _models, _quick
name = sys.argv[1]
try:
    print(_quick.sketch(name, 1, 64).param_count, _models.load(name, 1, 64).param_count)
except LohanError as error:
    print(f"{type(error).__name__}: {error}")
"""


def planned(name: str, cache: pathlib.Path) -> str:
    """Return what a process prints that plans a model, with this cache and no network."""
    environment = {**os.environ, "HF_HUB_CACHE": str(cache), "HF_HUB_OFFLINE": "1"}
    command = [sys.executable, "-c", PROGRAM, name]
    return subprocess.run(
        command, env=environment, capture_output=True, text=True, check=True
    ).stdout


@pytest.mark.parametrize(
    ("name", "own"),
    [
        ("Qwen/Qwen3-8B", "qwen3-8b"),
        ("Qwen/Qwen3-30B-A3B-Instruct-2507", "qwen3-30b-a3b"),
        ("meta-llama/Meta-Llama-3.1-8B-Instruct", "llama-8b"),
        ("meta-llama/Llama-3.2-1B", "llama-1b"),
        ("mistralai/Mistral-7B-Instruct-v0.3", "mistral-7b"),
        ("mistralai/Mixtral-8x7B-v0.1", "mixtral-8x7b"),
        ("openai/gpt-oss-20b", "gpt-oss-20b"),
        ("google-bert/bert-large-uncased", "bert-large"),
        ("FacebookAI/xlm-roberta-large", "xlm-roberta-large"),
        ("google/vit-huge-patch14-224-in21k", "vit-huge"),
        ("black-forest-labs/FLUX.1-dev", "flux-dev"),
        ("stabilityai/stable-diffusion-xl-base-1.0", "sdxl"),
    ],
)
def test_the_hubs_names_of_known_models_need_no_network(name: str, own: str) -> None:
    assert _hub.own_name(name) == own
    assert _hub.config_path(name) is None
    assert _quick.config_of(name) == _shapes.ALL[own]


@pytest.mark.parametrize(
    "name", ["Qwen/Qwen3-8B-AWQ", "someone/llama-3-8b-pruned", "gpt-13b", "opt-1.3b", "vit-base-x"]
)
def test_a_name_with_more_than_a_variant_is_another_model(name: str) -> None:
    assert _hub.own_name(name) == name


@pytest.mark.parametrize("name", ["./llama-8b", "/data/llama-8b", "my/models/llama-8b"])
def test_a_folder_that_does_not_exist_is_no_name_of_the_hub(name: str) -> None:
    assert _hub.own_name(name) == name
    assert _hub.config_path(name) is None
    assert _quick.config_of(name) is None


def test_the_config_of_the_hub_is_read_for_other_models(tmp_path: pathlib.Path) -> None:
    pytest.importorskip("huggingface_hub")
    repository = tmp_path / "models--someone--tiny"
    (repository / "refs").mkdir(parents=True)
    (repository / "refs" / "main").write_text(COMMIT)
    snapshot = repository / "snapshots" / COMMIT
    snapshot.mkdir(parents=True)
    (snapshot / "config.json").write_text(json.dumps(CONFIG))
    sketched, counted = map(int, planned("someone/tiny", tmp_path).split())
    matrices = 2 * 1000 * 256 + 3 * (4 * 256**2 + 3 * 256 * 512)
    assert sketched == pytest.approx(matrices, rel=0.01)
    assert counted == pytest.approx(matrices, rel=0.01)


def test_a_model_that_the_hub_does_not_give_is_an_error_with_a_way_out(
    tmp_path: pathlib.Path,
) -> None:
    pytest.importorskip("huggingface_hub")
    said = planned("someone/absent", tmp_path)
    assert said.startswith("MachineError: the config.json of someone/absent cannot be read from")
    assert "pass the path of a config.json, or one of llama-1b" in said
