"""Models for plans from the sizes in a config.json alone, without torch and transformers.

A sketch takes milliseconds; `_models.load()` runs the model itself on fake tensors, which takes
seconds. Sketches are the first answer of `lohan plan`, and the only one for mixtures of experts and
diffusion models. Products are exact. What layers save for backward is what transformers' own layers
save: the input of each norm and of each product, queries, keys and values, and the results of
activation functions.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from lohan.errors import MachineError, UnsupportedError
from lohan.planning import _plan, _shapes
from lohan.planning._plan import HALF_BYTES, Block, Layer, Model

if TYPE_CHECKING:
    from pathlib import Path

_CLASSES = 1000  # of an image classifier


def _first(config: dict[str, Any], *names: str, default: int | None = None) -> int:
    """Return the first of some keys that a config has, as models name the same size differently."""
    for name in names:
        if isinstance(config.get(name), int):
            return int(config[name])
    if default is None:
        raise MachineError(f"the model's config has none of {', '.join(names)}")
    return default


class _Sizes:
    """The sizes of a transformer's blocks, by whatever names its config has them."""

    def __init__(self, config: dict[str, Any]) -> None:
        self.kind = str(config.get("model_type", ""))
        self.hidden = _first(config, "hidden_size", "n_embd", "d_model", "dim")
        self.layers = _first(config, "num_hidden_layers", "n_layer", "num_layers", "n_layers")
        heads = _first(config, "num_attention_heads", "n_head", "num_heads", "n_heads")
        width = _first(config, "head_dim", "d_kv", default=self.hidden // heads)
        self.queries = heads * width
        self.keys = _first(config, "num_key_value_heads", default=heads) * width
        default = 4 * self.hidden
        self.inside = _first(
            config, "intermediate_size", "n_inner", "d_ff", "hidden_dim", default=default
        )
        self.experts = _first(
            config, "num_experts", "num_local_experts", "n_routed_experts", default=0
        )
        self.chosen = _first(config, "num_experts_per_tok", "experts_per_token", default=1)
        self.inside_expert = _first(config, "moe_intermediate_size", default=self.inside)
        self.vocab = _first(config, "vocab_size", default=0)
        self.positions = 0
        if not (config.get("rope_theta") or config.get("rope_parameters") or self.is_gated):
            self.positions = _first(config, "max_position_embeddings", "n_positions", default=0)
        self.is_tied = bool(config.get("tie_word_embeddings", not self.is_gated))

    @property
    def normed(self) -> int:
        """The values of a token that a norm saves; RMSNorm computes in fp32."""
        return (4 if self.is_gated else 1) * self.hidden

    @property
    def is_gated(self) -> bool:
        """Whether the MLP has two products on the way in, as most decoders since Llama have."""
        return self.kind not in _shapes.PLAIN_MLP


def _mlp(sizes: _Sizes, tokens: int) -> list[Layer]:
    hidden, ways = sizes.hidden, 2 if sizes.is_gated else 1
    saved = 2 * ways  # the products, the function of the first, and what is multiplied
    if not sizes.experts:
        inside, unit = sizes.inside, tokens * HALF_BYTES
        up, down = ways * hidden * inside, inside * hidden
        ins, out = ((inside, hidden),) * ways, ((hidden, inside),)
        return [
            Layer(
                "up",
                up + hidden,
                2 * tokens * up,
                unit * (sizes.normed + saved * inside),
                matrices=ins,
            ),
            Layer(
                "down", down, 2 * tokens * down, unit * hidden, is_inter_block=True, matrices=out
            ),
        ]
    inside, routed = sizes.inside_expert, tokens * sizes.chosen
    unit = routed * HALF_BYTES
    up, down = ways * hidden * inside, inside * hidden
    router = hidden * sizes.experts
    return [
        Layer(
            "router",
            router + hidden,
            2 * tokens * router,
            tokens * (HALF_BYTES * sizes.normed + 4 * sizes.experts),
            matrices=((sizes.experts, hidden),),
        ),
        Layer("up", sizes.experts * up, 2 * routed * up, unit * (2 * hidden + saved * inside)),
        Layer(
            "down",
            sizes.experts * down,
            2 * routed * down,
            tokens * HALF_BYTES * hidden,
            is_inter_block=True,
        ),
    ]


def _block(sizes: _Sizes, tokens: int, seq: int, *, crosses: bool = False) -> Block:
    """Return a block: attention (twice, if it also sees an encoder's output) and an MLP."""
    hidden, unit = sizes.hidden, tokens * HALF_BYTES
    qkv = hidden * (sizes.queries + 2 * sizes.keys)
    out = sizes.queries * hidden
    attention = [
        Layer(
            "qkv",
            qkv + hidden,
            2 * tokens * qkv,
            unit * (sizes.normed + 2 * sizes.queries + 4 * sizes.keys),
            matrices=((sizes.queries, hidden), *[(sizes.keys, hidden)] * 2),
        ),
        Layer("attention", 0, 4 * tokens * seq * sizes.queries, unit * sizes.queries),
        Layer("out", out, 2 * tokens * out, unit * hidden, matrices=((hidden, sizes.queries),)),
    ]
    return Block((*attention, *(attention if crosses else ()), *_mlp(sizes, tokens)))


def _head(sizes: _Sizes, tokens: int, loss: str) -> Block:
    own = 0 if sizes.is_tied else sizes.vocab * sizes.hidden
    working = _plan.head_bytes(loss, tokens, sizes.hidden, sizes.vocab)
    flop = 2 * tokens * sizes.vocab * sizes.hidden
    shared = 0 if sizes.is_tied else None
    tables = () if sizes.is_tied else ((sizes.vocab, sizes.hidden),)
    count = own + sizes.hidden
    made = Layer("head", count, flop, 0, working, matrices=tables, is_outer=True)
    return Block((made,), shared)


def _language(config: dict[str, Any], name: str, batch: int, seq: int, loss: str) -> Model:
    sizes = _Sizes(config)
    tokens = batch * seq
    table = (sizes.vocab + sizes.positions) * sizes.hidden
    blocks = [_block(sizes, tokens, seq)] * sizes.layers
    if config.get("is_encoder_decoder"):
        count = _first(config, "num_decoder_layers", default=sizes.layers)
        blocks += [_block(sizes, tokens, seq, crosses=True)] * count
    tables = [(rows, sizes.hidden) for rows in (sizes.vocab, sizes.positions) if rows]
    made = Layer("embedding", table, 0, 0, matrices=tuple(tables), is_outer=True)
    embedding = Block((made,))
    return Model(name, (embedding, *blocks, _head(sizes, tokens, loss)), tokens)


def _vision(config: dict[str, Any], name: str, batch: int) -> Model:
    sizes = _Sizes(config)
    patch = _first(config, "patch_size")
    seq = (_first(config, "image_size") // patch) ** 2
    tokens = batch * seq
    pixels = patch * patch * _first(config, "num_channels", default=3) * sizes.hidden
    first = Layer("patches", pixels + seq * sizes.hidden, 2 * tokens * pixels, 0)
    blocks = [_block(sizes, tokens, seq)] * sizes.layers
    last = Layer("head", _CLASSES * sizes.hidden, 2 * batch * _CLASSES * sizes.hidden, 0)
    return Model(name, (Block((first,)), *blocks, Block((last,))), tokens)


def _diffusion(config: dict[str, Any], name: str, batch: int) -> Model:
    """Return a diffusion transformer: blocks of one or two streams, each with a modulation."""
    hidden, seq = config["hidden_size"], config["image_tokens"] + config["text_tokens"]
    tokens, square = batch * seq, hidden * hidden
    ends = Layer("ends", 4 * square, 2 * tokens * 64 * hidden, 0)
    unit = tokens * hidden * HALF_BYTES

    def block(weights: int, modulation: int) -> Block:
        # Each token passes one stream's weights; both streams have their own.
        streams = 2 if weights == _shapes.TWO_STREAMS else 1
        products = weights // streams * square
        each, wide = (hidden, hidden), (4 * hidden, hidden)
        # One stream has a product of what attention and the MLP return together.
        inside = [each, wide, wide[::-1]] * 2 if streams == 2 else [wide, (hidden, 5 * hidden)]
        modulated = (modulation // streams * hidden, hidden)
        return Block(
            (
                Layer(
                    "modulation",
                    modulation * square,
                    2 * batch * modulation * square,
                    0,
                    matrices=(modulated,) * streams,
                ),
                Layer(
                    "qkv",
                    3 * streams * square,
                    6 * tokens * square,
                    7 * unit,
                    matrices=(each,) * 3 * streams,
                ),
                Layer("attention", 0, 4 * tokens * seq * hidden, unit),
                Layer(
                    "mlp",
                    weights * square - 3 * streams * square,
                    2 * tokens * (products - 3 * square),
                    10 * unit,
                    matrices=tuple(inside),
                ),
                Layer("output", 0, 0, unit, is_inter_block=True),
            )
        )

    made = [block(*shape) for shape, count in config["streams"] for _ in range(count)]
    return Model(name, (Block((ends,)), *made, Block((ends,))), tokens)


def _unet(config: dict[str, Any], name: str, batch: int) -> Model:
    """Return a U-Net as equal parts, whose sums are the figures of the whole."""
    parts, tokens = config["parts"], batch * config["image_tokens"]
    count, flop = config["param_count"] // parts, batch * config["forward_flop"] // parts
    saved = batch * config["saved_bytes"] // parts
    layers = (
        Layer("inside", count - count // 8, flop - flop // 8, saved - saved // 8),
        Layer("output", count // 8, flop // 8, saved // 8, is_inter_block=True),
    )
    ends = Block((Layer("ends", 1 << 20, 0, 0),))
    return Model(name, (ends, *[Block(layers)] * parts, ends), tokens)


def of_config(config: dict[str, Any], name: str, batch: int, seq: int, loss: str) -> Model:
    """Return a model of these sizes.

    Args:
        config: what a config.json has, or one of _shapes.
        name: the name that is shown to the user.
        batch: the number of sequences or images.
        seq: the number of tokens in a sequence; of images, their patches count.
        loss: how the head and the loss are computed: one of _plan.LOSSES.

    Raises:
        MachineError: a size is missing; the message names its keys.
    """
    if "param_count" in config:
        return _unet(config, name, batch)
    if "streams" in config:
        return _diffusion(config, name, batch)
    text = config.get("text_config")
    if isinstance(text, dict):
        config = {**config, **text}
    if isinstance(config.get("image_size"), int) and "vocab_size" not in config:
        return _vision(config, name, batch)
    return _language(config, name, batch, seq, loss)


def has_head(config: dict[str, Any]) -> bool:
    """Return whether a model predicts entries of a vocabulary, so that its loss has logits."""
    return "vocab_size" in config or "vocab_size" in (config.get("text_config") or {})


def check_loss(name: str, config: dict[str, Any], loss: str) -> None:
    """Reject a loss of a head that a model does not have.

    Raises:
        UnsupportedError: the loss is that of a head with logits, and the model has none.
    """
    if loss != "logits" and not has_head(config):
        raise UnsupportedError(f"{name} has no head with logits: leave loss= out")


def longest(config: dict[str, Any]) -> int | None:
    """Return the longest sequence of a model with a table of positions; None: it has no table."""
    kind = config.get("model_type")
    count = config.get("max_position_embeddings", config.get("max_target_positions"))
    if kind not in _shapes.PLAIN_MLP or not isinstance(count, int):
        return None
    return count - _shapes.UNUSED_POSITIONS.get(kind, 0)


def config_of(name: str, path: Path | None) -> dict[str, Any] | None:
    """Return the config of a model: its own, by name, or from a file; None if it has none.

    Raises:
        MachineError: the file is not a config.json.
    """
    if path is None:
        return _shapes.ALL.get(name)
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise MachineError(f"{path} is not a config.json: {error}") from error
    if not isinstance(found, dict):
        raise MachineError(f"{path} is not a config.json: it has no keys")
    return found
