"""Small configurations of any class of transformers, from names of fields alone.

A class's default configuration is consistent, but large. Several ways make it small, and the first
with which the class can be built and computed is used:

* "ratio16": all widths are divided by the same number. What a class requires of widths (a multiple
  of the heads, equal widths of two parts) usually stays true.
* "fixed": widths, heads and the like get one value each, by the name of the field.

"deep" is the first with more layers, for classes whose layers of one kind are far apart.

Classes with which none of these works are tried with words in front of the number:

* "heads": the number of heads is divided as well, by the greatest factor of all of them, so that a
  head keeps its width, and with it what is made of parts of a head.
* "whole": all layers are kept, for lists and numbers that refer to them.
* "norms": widths stay multiples of 32, for group norms whose number of groups is no field.
* "as it is": nothing but the vocabulary is made small.
"""

from __future__ import annotations

import math
import re
from typing import Any

VOCABULARY = 256
WAYS = ("ratio16", "ratio8", "deep16", "fixed", "ratio4", "deep8", "ratio2")
MORE_WAYS = ("heads16", "whole16", "whole heads16", "norms16", "norms heads32", "as it is")
# Fields with these names count something that may be small, whatever the widths are.
COUNTS = (
    (r"(^|_)(num_)?(hidden_|encoder_|decoder_|text_|vision_)?(n_)?layers?$", 2),
    (r"layers$|_layers_|(^|_)depth$|^n_layer$|num_blocks$", 2),
    (r"experts_per_tok|top_k_experts|moe_topk|moe_top_k|moe_k$|num_selected|num_experts_per", 2),
    (r"(n_routed|num_local|num_|n_|num_routed)_?experts$|moe_num_experts|num_experts$", 4),
    (r"shared_experts$", 1),
    (r"num_queries$|num_object_queries$", 10),
    (r"n_group$|num_expert_group|topk_group", 1),
)
_WIDTH = re.compile(
    r"(hidden|intermediate|embed|embedding|ffn|model|head|inner|state|channel|proj|kv|q|v|mlp|dim"
    r"|rank|feature|key|value|latent|conv|width|filter|expert|codebook|window|d)"
)
_IS_WIDTH = re.compile(
    r"(_size|_dim|_dims|_width|_channels|_rank|_features|^d_|^dim$|^n_embd$|^n_inner$|channels$"
    r"|hidden_sizes|embed_dims?|_sizes|^width$|_inner|d_model|d_ff|d_kv|ffn_dim|_units|^emb_dim$"
    r"|out_dim|latents$|_proj$)"
)
_NOT_WIDTH = re.compile(
    r"vocab|image_size|patch|kernel|stride|window|max_|position|num_mel|token_id|sample|crop|chunk"
    r"|buckets|batch|pool|block_size|context|input_size|tile|codebook_size|feature_size|beam"
    r"|group|spatial|temporal|label|num_channels|in_channels|in_chans|n_mels|input_channels|length"
)
_VOCABULARY = re.compile(
    r"(^|_)vocab_size$|^vocabulary_size$|(^|_)n_vocab$|_vocab_size_|codebook_size$"
)
_LENGTH = re.compile(r"max_position_embeddings|n_positions|max_sequence_length|max_seq_len|n_ctx")
_PICTURE = re.compile(r"^(image_size|img_size|input_image_size|crop_size)$")


def shrink(config: Any, way: str, depth: int = 0) -> Any:
    """Make a configuration small, and those inside it; return it."""
    layers = vars(config).pop("_heterogeneity_spec", None)
    values = {k: v for k, v in vars(config).items() if not k.startswith("_")}
    _complete(config, values)
    if "heads" in way and not depth:
        way = _of_all_heads(way, _heads(values))
    counts: dict[int, int] = {}  # the old and the new number of layers
    for name, value in values.items():
        if hasattr(value, "to_dict") and hasattr(value, "model_type"):
            shrink(value, way, depth + 1)
            continue
        made = _shrunk(name, value, way, values)
        if made is not value:
            if type(value) is int and "layers" in name:
                counts[value] = made
            _set(config, name, made)
    for name, value in values.items():
        if isinstance(value, list | tuple) and len(value) in counts:
            _set(config, name, _kinds([*value], counts[len(value)]))
        elif isinstance(value, dict) and value and all(isinstance(key, int) for key in value):
            most = max(counts.values(), default=2)
            _set(config, name, {key: each for key, each in value.items() if key < most})
    _fit(config)
    if layers is not None:
        _set(config, "per_layer_config", _of_layers(config, values, layers, way))
    return config


def _of_layers(config: Any, old: dict[str, Any], layers: Any, way: str) -> dict[int, Any]:
    """Return what single layers have instead of the configuration's values, made small."""
    kinds, before = getattr(config, "layer_types", None), old.get("layer_types")
    made = {}
    for index in range(config.num_hidden_layers):
        place = before.index(kinds[index]) if kinds and before else index
        instead = layers.per_layer_overrides.get(place, {})
        if instead:
            made[index] = {k: _shrunk(k, v, way, {**old, **instead}) for k, v in instead.items()}
    return made


_HEADS = re.compile(r"heads$|(^|_)n_head$|_heads_")
_FEWER_HEADS = re.compile(r"key_value|kv|groups")


def _heads(values: dict[str, Any]) -> list[int]:
    """Return all numbers of heads of a configuration, and of those inside it."""
    made = []
    for name, value in values.items():
        if hasattr(value, "to_dict") and hasattr(value, "model_type"):
            made += _heads({k: v for k, v in vars(value).items() if not k.startswith("_")})
        elif _HEADS.search(name) and not _FEWER_HEADS.search(name):
            made += [
                n
                for n in (value if isinstance(value, list | tuple) else [value])
                if type(n) is int and n > 0
            ]
    return made


def _of_all_heads(way: str, heads: list[int]) -> str:
    """Return the way with the greatest number by which heads can be divided, up to its own."""
    most, common = _ratio(way), math.gcd(*heads) if heads else 1
    factor = max(n for n in range(1, most + 1) if common % n == 0)
    return re.sub("[0-9]+", str(factor), way)


def _ratio(way: str) -> int:
    return int(re.sub("[^0-9]", "", way) or 16)


def shrunk(arguments: dict[str, Any], way: str) -> dict[str, Any]:
    """Return arguments of a model of diffusers, made small."""
    if "heads" in way:
        way = _of_all_heads(way, _heads(arguments))
    left = {key: value for key, value in TYPICAL.items() if arguments.get(key, 0) is None}
    if arguments.get("attention_head_dim") is not None:
        left.pop("num_attention_heads", None)  # UNets follow the other, and reject this
    if {"z_dim", "latent_channels"} & arguments.keys():
        left.pop("patch_size", None)  # an autoencoder with patches has other channels, too
    arguments = {**arguments, **left}
    made = {name: _shrunk(name, value, way, arguments) for name, value in arguments.items()}
    if isinstance(made.get("norm_num_groups"), int):
        made["norm_num_groups"] = 4 if way != "as it is" else made["norm_num_groups"]
    if way == "fixed":
        made |= {k: 16 for k in ("attention_head_dim",) if isinstance(made.get(k), int)}
    for name in ("sample_size", "sample_height", "sample_width"):
        if isinstance(made.get(name), int):
            made[name] = min(made[name], 16)
    return made


def _set(config: Any, name: str, value: Any) -> None:
    try:
        setattr(config, name, value)
    except Exception:  # a field that is computed, or validated alone
        return


def _kinds(values: list[Any], count: int) -> list[Any]:
    """Return as many of a list's values, of each kind at least one if there is room."""
    try:
        order = list(dict.fromkeys(values))
    except TypeError:
        return values[:count]
    return (order + values)[:count] if 1 < len(order) <= count else values[:count]


# What models of diffusers leave open, by the name of the argument.
TYPICAL = {
    "in_channels": 4,
    "cross_attention_dim": 64,
    "num_attention_heads": 4,
    "attention_head_dim": 16,
    "caption_channels": 64,
    "sample_size": 16,
    "patch_size": 2,
    "num_layers": 2,
    "max_text_seq_length": 16,
}
# What some classes' default configurations leave open, by the name of the field.
_OPEN = (
    (r"^pad_token_id$", 0),
    (r"^vocab_size$", VOCABULARY),
    (r"experts_per_tok$|^moe_topk$|^moe_top_k$|^top_k$", 2),
    (r"^(n_routed|num_local|num|moe_num)_experts$", 4),
    (r"^n_group$|^topk_group$|^n_shared_experts$", 1),
    (r"^rope_parameters$", {"rope_type": "default", "rope_theta": 10000.0}),
    (r"^default_language$", "en_XX"),
    (r"^(image|video|audio|speech)_token_(id|index)$", 9),
    (r"^head_dim$", 16),
)


def _complete(config: Any, values: dict[str, Any]) -> None:
    """Set what a configuration leaves open, and turn caches off."""
    for name, value in values.items():
        for pattern, made in _OPEN if value is None else ():
            if re.search(pattern, name):
                _set(config, name, made)
    if hasattr(config, "use_cache"):
        _set(config, "use_cache", False)
    if getattr(config, "model_type", "") in ("reformer",):
        _set(config, "is_decoder", True)


def _shrunk(name: str, value: Any, way: str, values: dict[str, Any]) -> Any:
    if way == "as it is" and not (_VOCABULARY.search(name) or "queries" in name):
        return value
    if isinstance(value, bool) or value is None or isinstance(value, str | float):
        return value
    if isinstance(value, list | tuple):
        if value and all(type(each) is int for each in value):
            if name in ("depths", "layer_depths", "num_layers", "encoder_depths"):
                if "whole" in way:
                    return value
                return [min(each, 2) for each in value]
            if _IS_WIDTH.search(name) and not _NOT_WIDTH.search(name):
                return [_width(each, way) for each in value]
        return value
    if type(value) is not int or "feat_extract" in name:
        return value
    if _VOCABULARY.search(name):
        return min(value, VOCABULARY)
    if name.endswith(("_token_id", "_token_index", "_token")) or name in ("image_token_index",):
        return value if value < VOCABULARY else VOCABULARY - 1 - sum(map(ord, name)) % 32
    if _LENGTH.search(name):
        return min(value, 128)
    for pattern, count in COUNTS:
        if re.search(pattern, name):
            if "whole" in way and count == 2 and "experts" not in pattern:
                return value
            return min(
                value, 8 if way.startswith("deep") and count == 2 and "layer" in name else count
            )
    if "heads" in way and _HEADS.search(name):
        return max(1, value // _ratio(way))
    if _IS_WIDTH.search(name) and not _NOT_WIDTH.search(name):
        if way == "fixed":
            return _fixed(name, value)
        if "heads" in way and _OF_A_HEAD.search(name):
            return value
        return _width(value, way)
    if way == "fixed" and re.search(r"key_value_heads|kv_heads", name):
        return min(value, 2) if value != values.get("num_attention_heads") else min(value, 4)
    if way == "fixed" and re.search(r"heads$|n_head$", name):
        return min(value, 4)
    return value


_OF_A_HEAD = re.compile(r"head_dim|head_size|^d_kv$|_d_head$|kv_channels|rope_dim|axes_dim")


def _width(value: int, way: str) -> int:
    factor = _ratio(way)
    if "norms" in way:
        if value % 32 or value <= 32:
            return value
        while factor > 1 and value // 32 % factor:
            factor //= 2
        return value // factor
    if "heads" in way:
        return value // factor if value % factor == 0 and value >= 2 * factor else value
    while factor > 1 and (value % factor or value // factor < 2 or value < 48):
        factor //= 2
    return value // factor


def _fixed(name: str, value: int) -> int:
    if value < 64 and not re.search("head_dim", name):
        return value
    if re.search(r"head_dim|d_kv|_head_size", name):
        return min(value, 16)
    if re.search(r"intermediate|ffn|mlp|inner|d_ff|feed", name):
        return min(value, 96)
    if re.search(r"rank", name):
        return min(value, 16)
    return min(value, 64)


def _fit(config: Any) -> None:
    """Repair what is known to depend on widths and counts."""
    heads = getattr(config, "num_attention_heads", None)
    width = getattr(config, "hidden_size", None)
    head = getattr(config, "head_dim", None)
    if not head and isinstance(heads, int) and isinstance(width, int):
        head = width // heads
    layers = getattr(config, "num_hidden_layers", None)
    if isinstance(layers, int) and len(getattr(config, "stage_names", None) or ()) > layers + 1:
        depth = len(getattr(config, "depths", None) or range(layers))
        config.stage_names = ["stem", *(f"stage{i + 1}" for i in range(depth))]
        config._out_features, config._out_indices = [config.stage_names[-1]], [depth]
    for holder in ("rope_parameters", "rope_scaling"):
        rope = getattr(config, holder, None)
        if isinstance(rope, dict) and isinstance(head, int):
            _fit_sections(rope, head)


def _fit_sections(rope: dict[str, Any], head: int) -> None:
    """Set the parts of a head that rotate by different positions, which some classes default to."""
    for value in rope.values():
        if isinstance(value, dict):
            _fit_sections(value, head)
    if "rope_theta" in rope:
        sections = rope.get("mrope_section") or [16, 24, 24]
        half = int(head * rope.get("partial_rotary_factor", 1.0)) // 2
        parts = [max(1, half * each // sum(sections)) for each in sections]
        parts[-1] += half - sum(parts)
        rope["mrope_section"] = parts
