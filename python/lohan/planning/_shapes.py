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


def _encoder(
    kind: str, hidden: int, layers: int, heads: int, vocab: int, **more: Any
) -> dict[str, Any]:
    return {
        "model_type": kind,
        "architectures": [more.pop("architecture")],
        "hidden_size": hidden,
        "intermediate_size": 4 * hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "vocab_size": vocab,
        "max_position_embeddings": 514,
        "tie_word_embeddings": True,
        **more,
    }


def _vit(hidden: int, layers: int, heads: int, patch: int, size: int = 224) -> dict[str, Any]:
    return {
        "model_type": "vit",
        "architectures": ["ViTForImageClassification"],
        "hidden_size": hidden,
        "intermediate_size": 4 * hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "image_size": size,
        "patch_size": patch,
        "num_channels": 3,
    }


_BERT = {"architecture": "BertForMaskedLM", "max_position_embeddings": 512}
_ROBERTA = {"architecture": "RobertaForMaskedLM", "type_vocab_size": 1}
_XLMR = {"architecture": "XLMRobertaForMaskedLM", "type_vocab_size": 1}
# Encoders and ViTs, as the config.json on each publisher's page has them in November 2026.
ENCODERS = {
    "bert-base": _encoder("bert", 768, 12, 12, 30522, **_BERT),
    "bert-large": _encoder("bert", 1024, 24, 16, 30522, **_BERT),
    "roberta-base": _encoder("roberta", 768, 12, 12, 50265, **_ROBERTA),
    "roberta-large": _encoder("roberta", 1024, 24, 16, 50265, **_ROBERTA),
    "xlm-roberta-large": _encoder("xlm-roberta", 1024, 24, 16, 250002, **_XLMR),
    "vit-base": _vit(768, 12, 12, 16),
    "vit-large": _vit(1024, 24, 16, 16),
    "vit-huge": _vit(1280, 32, 16, 14),
}
# Positions that a model type does not use: those up to the padding token's.
UNUSED_POSITIONS = {"roberta": 2, "xlm-roberta": 2}
# Model types whose MLP has one product on the way in.
PLAIN_MLP = {
    *("bert", "roberta", "xlm-roberta", "distilbert", "electra", "deberta", "deberta-v2"),
    *("vit", "deit", "beit", "dinov2", "clip_vision_model", "siglip_vision_model"),
    *("gpt2", "gpt_neo", "gpt_neox", "opt", "bloom", "falcon", "mpt", "phi", "t5", "bart"),
    *("whisper", "starcoder2", "gpt_bigcode"),
}
# Mixtures of experts, from the same places.
MIXTURES = {
    "qwen3-30b-a3b": _decoder(
        *("qwen3_moe", 2048, 6144, 48, 32, 151936),
        num_key_value_heads=4,
        num_experts=128,
        num_experts_per_tok=8,
        moe_intermediate_size=768,
    ),
    "gpt-oss-20b": _decoder(
        *("gpt_oss", 2880, 2880, 24, 64, 201088),
        head_dim=64,
        num_local_experts=32,
        num_experts_per_tok=4,
    ),
    "gpt-oss-120b": _decoder(
        *("gpt_oss", 2880, 2880, 36, 64, 201088),
        head_dim=64,
        num_local_experts=128,
        num_experts_per_tok=4,
    ),
    "mixtral-8x7b": _decoder(
        *("mixtral", 4096, 14336, 32, 32, 32000),
        num_local_experts=8,
        num_experts_per_tok=2,
    ),
}
# Of a block of two streams (image and text), and of one: the weights in units of hidden^2, each
# token passing one stream, and those of its modulation. They are those of
# transformer_flux.py and transformer_sd3.py of diffusers; sizes are those of each
# transformer/config.json in November 2026.
TWO_STREAMS, _ONE_STREAM = 24, 12
_TWO, _ONE = (TWO_STREAMS, 12), (_ONE_STREAM, 3)


def _streams(hidden: int, two: int, one: int, text: int) -> dict[str, Any]:
    return {
        "hidden_size": hidden,
        "streams": [(_TWO, two), (_ONE, one)],
        "image_tokens": 4096,  # 1024 x 1024 pixels: latents of 128 x 128 in patches of 2 x 2
        "text_tokens": text,
    }


# A U-Net: FLOP of a forward, and bytes in 16 bits that are saved for backward, of an image of
# 1024 x 1024 (sdxl) or 512 x 512 pixels. Parameters and sizes are those of each
# unet/config.json in November 2026; FLOP as published for one step of denoising; bytes are assumed
# from the sizes of its feature maps.
DIFFUSION: dict[str, dict[str, Any]] = {
    "flux-dev": _streams(3072, 19, 38, 512),
    "sd3.5-large": _streams(2432, 38, 0, 333),
    "sd3-medium": _streams(1536, 24, 0, 333),
    "sdxl": {
        "param_count": 2_567_000_000,
        "forward_flop": 5_960_000_000_000,
        "saved_bytes": 20_000_000_000,
        "image_tokens": 4096,
        "parts": 24,
    },
    "sd-1.5": {
        "param_count": 860_000_000,
        "forward_flop": 680_000_000_000,
        "saved_bytes": 5_000_000_000,
        "image_tokens": 4096,
        "parts": 16,
    },
}
ALL = {**MODELS, **ENCODERS, **MIXTURES, **DIFFUSION}
