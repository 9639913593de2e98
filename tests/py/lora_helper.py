"""What the tests of LoRA share: a base model on disk, adapters on it, and a few steps."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, OPTConfig, OPTForCausalLM

CONFIG = {
    "hidden_size": 64,
    "word_embed_proj_dim": 64,
    "num_hidden_layers": 3,
    "ffn_dim": 96,
    "num_attention_heads": 4,
    "vocab_size": 256,
    "max_position_embeddings": 64,
    "dropout": 0.0,
}
BATCH = (torch.arange(64).reshape(2, 32) * 7) % 256


def save_base(folder: Path, dtype: torch.dtype = torch.bfloat16) -> Path:
    """Save an OPT with random weights in several shards; return the folder."""
    torch.manual_seed(0)
    OPTForCausalLM(OPTConfig(**CONFIG)).to(dtype).save_pretrained(folder, max_shard_size="100KB")
    assert len(list(folder.glob("*.safetensors"))) > 1
    return folder


def shift(path: Path, nbytes: int) -> None:
    """Shift the tensors of a safetensors file by nbytes."""
    raw = path.read_bytes()
    length = struct.unpack("<Q", raw[:8])[0]
    header = json.loads(raw[8 : 8 + length])
    text = json.dumps(header).encode()
    text += b" " * (length + nbytes - len(text))
    assert json.loads(text) == header
    path.write_bytes(struct.pack("<Q", len(text)) + text + raw[8 + length :])


def load(base: Path) -> Any:
    """Return the base model in memory."""
    return AutoModelForCausalLM.from_pretrained(base, dtype=torch.bfloat16)


def lora(model: Any, **settings: Any) -> Any:
    """Add the same adapters each time."""
    torch.manual_seed(1)
    made = {"r": 4, "target_modules": ["q_proj", "v_proj"], "task_type": "CAUSAL_LM", **settings}
    return get_peft_model(model, LoraConfig(**made))


def train(model: Any, steps: int = 3) -> list[float]:
    """Train some steps and return their losses."""
    losses = []
    for _ in range(steps):
        loss = model(input_ids=BATCH, labels=BATCH).loss
        loss.backward()
        model.optimizer.step()
        losses.append(loss.item())
    return losses


def logits(model: Any) -> torch.Tensor:
    """Return the logits of the batch, without dropout."""
    was = model.training
    model.eval()
    with torch.no_grad():
        found: torch.Tensor = model(input_ids=BATCH).logits.clone()
    model.train(was)
    return found


def adapters(model: Any) -> dict[str, torch.Tensor]:
    """Return the parameters that peft added."""
    return {k: v.clone() for k, v in model.state_dict().items() if "lora_" in k}
