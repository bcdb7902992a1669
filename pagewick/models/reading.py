"""Parts of config.json that most families read in the same way. The module of a family picks those that apply.

Imports no torch. Every function raises ModelLoadError, which names the entry.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

from pagewick.errors import ModelLoadError
from pagewick.expert_routing import Routing
from pagewick.layers.config import MoeConfig
from pagewick.models.config import ModelConfig, architecture_of
from pagewick.models.entries import MAX_LAYERS, MAX_SIZE, Entries
from pagewick.models.parts import AttentionConfig, LayerConfig, MlpConfig
from pagewick.models.rope_entries import read_rope

if TYPE_CHECKING:
    from pagewick.layers.config import MlaConfig, RopeConfig

# Name of an activation in config.json -> its name in the kernels. The tanh approximations differ only in spelling.
ACTIVATIONS: Final = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_python": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "relu": "relu",
    "relu2": "relu2",
    "quick_gelu": "quick_gelu",
}
# In all layers together; far above any existing model.
_MAX_EXPERTS: Final = 2**18
_DTYPES: Final = ("float32", "bfloat16", "float16")
FULL: Final = "full_attention"
LINEAR: Final = "linear_attention"
SLIDING: Final = "sliding_attention"
CHUNKED: Final = "chunked_attention"
INDEXED: Final = "indexed_attention"
_KINDS: Final = (FULL, SLIDING)
# Layers that keep rows: without entries, with those that an indexer selects, and with all of them.
ROW_KINDS: Final = (SLIDING, "compressed_sparse_attention", "heavily_compressed_attention")


def read_activation(entries: Entries, default: str = "silu", name: str = "hidden_act") -> str:
    """Return the kernels' name of the activation."""
    return ACTIVATIONS[entries.choice(name, ACTIVATIONS, default)]


def read_attention(
    entries: Entries, *, num_kv_heads: int | None = None, softmax_scale: float | None = None, **fields: Any
) -> AttentionConfig:
    """Read the heads' numbers and sizes; `fields` are other fields of AttentionConfig.

    num_kv_heads: given by a family that does not read them from their usual entry. softmax_scale: by default
    1 / sqrt(head_dim).
    """
    num_heads = entries.size("num_attention_heads")
    hidden_size = entries.size("hidden_size")
    kv_heads = num_kv_heads or entries.size("num_key_value_heads", num_heads)
    if num_heads % kv_heads:
        raise entries.wrong("num_key_value_heads", f"a divisor of num_attention_heads ({num_heads})")
    if "head_dim" not in entries and hidden_size % num_heads:
        raise entries.wrong("num_attention_heads", f"a divisor of hidden_size ({hidden_size})")
    head_dim = entries.size("head_dim", max(1, hidden_size // num_heads))
    return AttentionConfig(
        num_heads=num_heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        softmax_scale=head_dim**-0.5 if softmax_scale is None else softmax_scale,
        **fields,
    )


def read_mlp(entries: Entries, *, activation: str | None = None, **fields: Any) -> MlpConfig:
    """Read an MLP's size and activation; `fields` are other fields of MlpConfig."""
    size = entries.size("intermediate_size")
    return MlpConfig(intermediate_size=size, activation=activation or read_activation(entries), **fields)


def make_moe(routing: Mapping[str, Any], **fields: Any) -> MoeConfig:
    """Make a MoeConfig with Routing(**routing); contradictions in it are the file's mistakes."""
    try:
        return MoeConfig(routing=Routing(**routing), **fields)
    except ValueError as error:
        raise ModelLoadError(f"config.json: its experts cannot be chosen like this: {error}") from None


def read_rope_of(entries: Entries, attention: AttentionConfig, **options: Any) -> RopeConfig:
    """read_rope for the heads of `attention`."""
    return read_rope(
        entries, head_dim=attention.head_dim, max_position_embeddings=read_max_position(entries), **options
    )


def read_max_position(entries: Entries) -> int:
    return entries.size("max_position_embeddings")


def read_context(entries: Entries, rope: RopeConfig | None) -> tuple[int, int]:
    """Return the longest sequence that the file intends, and the longest that its rotary scaling allows, in tokens.

    Dynamic scaling and YaRN stretch the original length, which may be the only one in the file. With linear scaling the
    file's length may or may not include the factor: the user has to decide.
    """
    length = read_max_position(entries)
    if rope is None or rope.kind not in ("linear", "dynamic", "yarn"):
        return length, length
    start = length if rope.kind == "linear" else rope.original_max_position_embeddings
    longest = max(length, int(min(start * rope.factor, MAX_SIZE)))
    return (length if rope.kind == "linear" else longest), longest


def read_num_layers(entries: Entries) -> int:
    return entries.size("num_hidden_layers", most=MAX_LAYERS)


def read_windows(entries: Entries, default: Sequence[bool]) -> tuple[int | None, ...]:
    """Return each layer's window: layers that layer_types calls sliding have one, or those in `default` without it."""
    kinds = entries.texts("layer_types")
    slides = list(default)
    if kinds is not None:
        if len(kinds) != len(default):
            raise entries.wrong("layer_types", f"a list of num_hidden_layers ({len(default)}) kinds")
        if unknown := set(kinds) - set(_KINDS):
            raise entries.wrong(
                "layer_types", f"a list of {' and '.join(_KINDS)}; {sorted(unknown)[0]} is not supported"
            )
        slides = [kind == SLIDING for kind in kinds]
    if not any(slides):
        return (None,) * len(slides)
    size = entries.size("sliding_window")
    return tuple(size if slide else None for slide in slides)


def read_lenders(entries: Entries, windows: Sequence[int | None]) -> list[int | None]:
    """Return the layer whose keys and values each layer attends to; None: its own.

    The last num_kv_shared_layers borrow from the last layer of their kind before them.
    """
    num_layers = len(windows)
    num_shared = entries.count("num_kv_shared_layers", 0, most=MAX_LAYERS)
    last_of_kind = {window: layer_idx for layer_idx, window in enumerate(windows[: num_layers - num_shared])}
    if num_shared >= num_layers or (num_shared and last_of_kind.keys() != set(windows)):
        raise entries.wrong("num_kv_shared_layers", "so small that a layer of each kind has keys of its own")
    own: list[int | None] = [None] * (num_layers - num_shared)
    return own + [last_of_kind[window] for window in windows[num_layers - num_shared :]]


def borrowers_tensors(lenders: Sequence[int | None]) -> tuple[str, ...]:
    """Return regular expressions of the keys and values of layers that borrow those of others; some files have them."""
    borrowers = "|".join(str(layer_idx) for layer_idx, lender in enumerate(lenders) if lender is not None)
    return (rf"(.*\.)?layers\.({borrowers})\.self_attn\.[kv]_(proj|norm)\..*",) if borrowers else ()


def read_rotating_layers(entries: Entries, num_layers: int, *, may_be_empty: bool = False) -> list[bool]:
    """Return which layers rotate: those with a 1 in no_rope_layers, or all but every fourth without it.

    may_be_empty: an empty list counts as missing.
    """
    flags = entries.sizes("no_rope_layers", least=0)
    if flags is None or (may_be_empty and not flags):
        interval = entries.size("no_rope_layer_interval", 4)
        return [(layer_idx + 1) % interval != 0 for layer_idx in range(num_layers)]
    if len(flags) != num_layers or set(flags) - {0, 1}:
        raise entries.wrong("no_rope_layers", f"a list of num_hidden_layers ({num_layers}) times 0 or 1")
    return [flag == 1 for flag in flags]


def same_layers(
    num_layers: int,
    attention: AttentionConfig | MlaConfig,
    mlps: Sequence[MlpConfig | MoeConfig] | MlpConfig | MoeConfig,
    rope: RopeConfig | None,
    windows: Sequence[int | None] | None = None,
) -> tuple[LayerConfig, ...]:
    """Make layers that differ only in the arguments that are sequences."""
    each = list(mlps) if isinstance(mlps, Sequence) else [mlps] * num_layers
    seen = windows or [None] * num_layers
    return tuple(
        LayerConfig(attention=attention, mlp=mlp, rope=rope, window=window)
        for mlp, window in zip(each, seen, strict=True)
    )


def model_config(entries: Entries, *, tie_word_embeddings: bool = False, **fields: Any) -> ModelConfig:
    """Make the config of a model whose sizes have their usual names; tie_word_embeddings is the family's default."""
    layers = fields["layers"]
    _check_layer_types(entries, layers)
    # Layers with a window never look far; some models rotate them in a way of their own. Some rotate only these.
    rotated = [layer for layer in layers if layer.rope is not None] or layers
    farthest = next((layer for layer in rotated if layer.window is None), rotated[0])
    context, longest = read_context(entries, farthest.rope)
    sizes: dict[str, Any] = {
        "architecture": architecture_of(entries.values),
        "hidden_size": entries.size("hidden_size"),
        "vocab_size": entries.size("vocab_size"),
        "max_position_embeddings": context,
        "longest_context": longest,
        "tie_word_embeddings": entries.flag("tie_word_embeddings", tie_word_embeddings),
        "dtype": read_dtype(entries),
    }
    return ModelConfig(**{**sizes, **fields})


def check_number_of_experts(config: ModelConfig) -> None:
    """Raise ModelLoadError for more experts than any model has: their tensors are listed before any file is read."""
    mixtures = config.mixtures
    if len(mixtures) * max((mixture.num_experts for mixture in mixtures), default=0) > _MAX_EXPERTS:
        layers_with_experts = f"{mixtures[0].num_experts} experts in each of {len(mixtures)} layers"
        raise ModelLoadError(f"config.json: {layers_with_experts}; at most {_MAX_EXPERTS} in all are supported")


def _check_layer_types(entries: Entries, layers: Sequence[LayerConfig]) -> None:
    """Raise ModelLoadError if layer_types, which not every family reads, says something else than `layers`."""
    # Where use_sliding_window is false, transformers knows no window, whatever layer_types says.
    kinds = None if entries.get("use_sliding_window") is False else entries.texts("layer_types")
    found = tuple(_kind(layer) for layer in layers)
    if kinds is not None and kinds != found:
        counts = f"{found.count(_KINDS[0])} of {len(found)} layers see everything"
        raise entries.wrong("layer_types", f"left out or agree with the other entries, by which {counts}")


def _kind(layer: LayerConfig) -> str:
    if layer.state:
        return LINEAR
    if layer.rows is not None:
        compressor = layer.rows.compressor
        return ROW_KINDS[0 if compressor is None else 1 if compressor.indexer is not None else 2]
    if (layer.latent is not None and layer.latent.indexer is not None) or layer.block_index is not None:
        return INDEXED
    return CHUNKED if layer.is_chunked else _KINDS[layer.window is not None]


def read_dtype(entries: Entries, default: str = "bfloat16") -> str:
    """Return the dtype of the weights: `dtype`, or `torch_dtype` in older files; `default` if neither is there."""
    name = "dtype" if "dtype" in entries else "torch_dtype"
    dtype = entries.text(name, default).removeprefix("torch.")
    if dtype not in _DTYPES:
        raise entries.wrong(name, f"one of {', '.join(_DTYPES)}")
    return dtype
