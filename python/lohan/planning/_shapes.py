"""Models by the names that people know them by, with the shapes of their config.json."""

from __future__ import annotations

from typing import Any


def _decoder(
    kind: str, hidden: int, inside: int, layers: int, heads: int, vocab: int, **more: Any
) -> dict[str, Any]:
    return {
        "model_type": kind,
        "hidden_size": hidden,
        "intermediate_size": inside,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "vocab_size": vocab,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "max_position_embeddings": 32768,
        "tie_word_embeddings": False,
        **more,
    }


_TIED: dict[str, Any] = {"tie_word_embeddings": True}
MODELS = {
    "llama-1b": _decoder("llama", 2048, 8192, 16, 32, 128256, head_dim=64, **_TIED),
    "llama-3b": _decoder("llama", 3072, 8192, 28, 24, 128256, **_TIED),
    "llama-8b": _decoder("llama", 4096, 14336, 32, 32, 128256),
    "llama-70b": _decoder("llama", 8192, 28672, 80, 64, 128256),
    "mistral-7b": _decoder("mistral", 4096, 14336, 32, 32, 32768),
    "qwen3-4b": _decoder("qwen3", 2560, 9728, 36, 32, 151936, **_TIED),
    "qwen3-8b": _decoder("qwen3", 4096, 12288, 36, 32, 151936),
    "qwen3-14b": _decoder("qwen3", 5120, 17408, 40, 40, 151936),
    "qwen3-32b": _decoder("qwen3", 5120, 25600, 64, 64, 151936),
}
