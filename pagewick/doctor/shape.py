"""The numbers of a model that memory depends on, whether Pagewick runs it or not. Imports no torch.

Read more leniently than models.config does, which knows the architectures that run: a model that does not run is to be
described, too.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from pagewick.attention.cache_spec import CacheSpec, Kept, KeptHeads, KeptLatents, native_spec
from pagewick.errors import ModelLoadError
from pagewick.models.config import AttentionConfig
from pagewick.models.registry import read_config
from pagewick.parallel.sharding import kv_heads_of_rank
from pagewick.weights.files import CONFIG_NAME
from pagewick.weights.gguf_header import GgufArray

DTYPE_BYTES: Final = {"float32": 4, "bfloat16": 2, "float16": 2}

_MAX_SIZE: Final = 2**24
_MAX_LAYERS: Final = 4096
# Their config.json need not say that the head is the embedding.
_TIED_UNLESS_SAID: Final = (
    "GemmaForCausalLM",
    "Gemma2ForCausalLM",
    "Gemma3ForCausalLM",
    "Gemma3ForConditionalGeneration",
    "GPTBigCodeForCausalLM",
    "Starcoder2ForCausalLM",
)
# Theirs need not say either how many layers see a window before one sees everything.
_WINDOW_PATTERNS: Final = {"Gemma2ForCausalLM": 2, "Gemma3ForCausalLM": 6, "Gemma3ForConditionalGeneration": 6}
# What general.architecture of a GGUF file is called in a config.json.
GGUF_ARCHITECTURES: Final = {
    "llama": "LlamaForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen2moe": "Qwen2MoeForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "qwen3moe": "Qwen3MoeForCausalLM",
    "gemma": "GemmaForCausalLM",
    "gemma2": "Gemma2ForCausalLM",
    "gemma3": "Gemma3ForCausalLM",
    "phi3": "Phi3ForCausalLM",
    "mistral3": "MistralForCausalLM",
    "glm4": "Glm4ForCausalLM",
    "deepseek2": "DeepseekV2ForCausalLM",
    "gpt-oss": "GptOssForCausalLM",
}


@dataclass(frozen=True, slots=True)
class LayerGroup:
    """Layers of a rank that keep the same of a sequence."""

    spec: CacheSpec
    num_layers: int

    @property
    def bytes_per_token(self) -> float:
        return self.spec.block_bytes * self.num_layers / self.spec.block_size


@dataclass(frozen=True, slots=True)
class ModelShape:
    """Names are Hugging Face's, some shortened as in ModelConfig.

    windows: for each layer, how many tokens its attention sees, the new one included; None is all.
    kv_lora_rank, qk_rope_head_dim: of latent attention (MLA), whose layers keep one latent of so many elements and one
        rotated key per token; 0 where they keep keys and values per head. head_dim is a query's then.
    other_cache: why neither is what the layers keep; empty if one is.
    """

    architecture: str
    num_layers: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    max_position_embeddings: int
    dtype: str
    is_tied: bool
    windows: tuple[int | None, ...]
    kv_lora_rank: int = 0
    qk_rope_head_dim: int = 0
    other_cache: str = ""

    def cache_groups(self, *, block_size: int, cache_dtype: str, tensor_parallel_size: int = 1) -> list[LayerGroup]:
        """What the layers of one rank keep, as the engine plans it; the rank with the most KV heads counts.

        cache_dtype: a name in CACHE_DTYPES.
        """
        num_kv_heads = self.kv_heads_per_rank(tensor_parallel_size)
        groups: dict[Kept, int] = {}
        for window in self.windows:
            kept: Kept = KeptHeads(num_kv_heads, self.head_dim, window)
            if self.kv_lora_rank:
                kept = KeptLatents(self.kv_lora_rank, self.qk_rope_head_dim)
            groups[kept] = groups.get(kept, 0) + 1
        return [LayerGroup(native_spec(kept, block_size, cache_dtype), count) for kept, count in groups.items()]

    def kv_heads_per_rank(self, tensor_parallel_size: int) -> int:
        """KV heads that a rank stores, the one with the most; some may be stored more than once."""
        return max(
            len(kv_heads_of_rank(self.num_heads, self.num_kv_heads, rank, tensor_parallel_size))
            for rank in range(tensor_parallel_size)
        )

    def tensor_parallel_sizes(self, most: int) -> list[int]:
        """Numbers of ranks, up to `most`, that divide the attention heads."""
        return [size for size in range(1, most + 1) if self.num_heads % size == 0]


def text_part(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Of a model for several media, what describes its language model; else the whole config.json."""
    return next((config[name] for name in ("text_config", "llm_config") if isinstance(config.get(name), dict)), config)


def from_config(config: Mapping[str, Any]) -> ModelShape:
    """From a config.json; of a model for several media, its part for text. Raises ModelLoadError if a size is wrong."""
    return _as_the_engine_reads_it(config) or _as_most_write_it(config)


def _as_the_engine_reads_it(config: Mapping[str, Any]) -> ModelShape | None:
    """Of a model that runs, what it has with its family's defaults, where files leave sizes out; else None."""
    try:
        model = read_config(config)
    except ModelLoadError:
        return None
    attention, mlp = model.layers[0].attention, model.layers[0].mlp
    heads: dict[str, Any]
    if isinstance(attention, AttentionConfig):
        heads = {"num_kv_heads": attention.num_kv_heads, "head_dim": attention.head_dim}
    else:
        ranks = {"kv_lora_rank": attention.kv_lora_rank, "qk_rope_head_dim": attention.qk_rope_head_dim}
        heads = {"num_kv_heads": attention.num_heads, "head_dim": attention.qk_head_dim, **ranks}
    return ModelShape(
        architecture=model.architecture,
        num_layers=model.num_layers,
        hidden_size=model.hidden_size,
        intermediate_size=read_size(text_part(config), "intermediate_size", "n_inner", default=mlp.intermediate_size),
        num_heads=model.num_heads,
        vocab_size=model.vocab_size,
        max_position_embeddings=model.max_position_embeddings,
        dtype=model.dtype,
        is_tied=model.tie_word_embeddings,
        windows=tuple(layer.window for layer in model.layers),
        **heads,
    )


def _as_most_write_it(config: Mapping[str, Any]) -> ModelShape:
    text = text_part(config)
    names = config.get("architectures") or text.get("architectures")
    architecture = names[0] if isinstance(names, list) and names and isinstance(names[0], str) else "unknown"
    num_layers = read_size(text, "num_hidden_layers", "n_layer", most=_MAX_LAYERS)
    num_heads = read_size(text, "num_attention_heads", "n_head")
    hidden_size = read_size(text, "hidden_size", "n_embd", "d_model")
    is_multi_query = architecture == "GPTBigCodeForCausalLM" and text.get("multi_query", True)
    num_kv_heads = read_size(text, "num_key_value_heads", default=1 if is_multi_query else num_heads)
    if num_heads % num_kv_heads:
        raise ModelLoadError(f"config.json: {num_heads} attention heads cannot share {num_kv_heads} KV heads")
    kv_lora_rank, rope_dim = _latent(text)
    dtype = str(text.get("dtype") or text.get("torch_dtype") or config.get("torch_dtype") or "bfloat16")
    dtype = dtype.removeprefix("torch.")
    return ModelShape(
        architecture=architecture,
        num_layers=num_layers,
        hidden_size=hidden_size,
        intermediate_size=read_size(text, "intermediate_size", "n_inner", default=4 * hidden_size),
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=_head_dim(text, hidden_size, num_heads),
        vocab_size=read_size(text, "vocab_size", default=1),
        max_position_embeddings=read_size(text, "max_position_embeddings", "n_positions", "max_seq_len", default=2048),
        dtype=dtype if dtype in DTYPE_BYTES else "bfloat16",
        is_tied=_is_tied(text, config, architecture),
        windows=_windows(text, num_layers, _WINDOW_PATTERNS.get(architecture)),
        kv_lora_rank=kv_lora_rank,
        qk_rope_head_dim=rope_dim,
        other_cache=_other_cache(text),
    )


def from_gguf(values: Mapping[str, Any], vocab_size: int, *, has_output: bool) -> ModelShape:
    """From a GGUF file's key-values; vocab_size is the embedding's rows. Raises ModelLoadError."""
    kind = values.get("general.architecture")
    if not isinstance(kind, str):
        raise ModelLoadError("the GGUF file does not say general.architecture\n  use one that holds a language model")
    prefix = f"{kind}."
    own = {name.removeprefix(prefix): value for name, value in values.items() if name.startswith(prefix)}
    num_heads = _gguf_size(own, "attention.head_count")
    hidden_size = _gguf_size(own, "embedding_length")
    num_layers = _gguf_size(own, "block_count", most=_MAX_LAYERS)
    window = own.get("attention.sliding_window")
    is_windowed = isinstance(window, int) and not isinstance(window, bool) and 0 < window <= _MAX_SIZE
    other = ""
    is_latent = "attention.kv_lora_rank" in own
    if "ssm.state_size" in own:
        other = "some layers keep a state"
    elif is_windowed:
        other = "some layers see a window, and the file does not say which"
    return ModelShape(
        architecture=GGUF_ARCHITECTURES.get(kind, kind),
        num_layers=num_layers,
        hidden_size=hidden_size,
        intermediate_size=_gguf_size(own, "feed_forward_length", default=4 * hidden_size),
        num_heads=num_heads,
        num_kv_heads=_gguf_size(own, "attention.head_count_kv", default=num_heads),
        head_dim=_gguf_size(own, "attention.key_length", default=max(1, hidden_size // num_heads)),
        vocab_size=vocab_size,
        max_position_embeddings=_gguf_size(own, "context_length", default=2048),
        dtype="bfloat16",
        is_tied=not has_output,
        windows=(None,) * num_layers,
        kv_lora_rank=_gguf_size(own, "attention.kv_lora_rank") if is_latent else 0,
        qk_rope_head_dim=_gguf_size(own, "rope.dimension_count") if is_latent else 0,
        other_cache=other,
    )


def _latent(config: Mapping[str, Any]) -> tuple[int, int]:
    """Elements of the latent and of the rotated key of latent attention; zeros if it is of another kind."""
    if not config.get("kv_lora_rank"):
        return 0, 0
    return read_size(config, "kv_lora_rank"), read_size(config, "qk_rope_head_dim")


def _is_tied(text: Mapping[str, Any], config: Mapping[str, Any], architecture: str) -> bool:
    default = architecture in _TIED_UNLESS_SAID
    return bool(text.get("tie_word_embeddings", config.get("tie_word_embeddings", default)))


def _head_dim(config: Mapping[str, Any], hidden_size: int, num_heads: int) -> int:
    if config.get("kv_lora_rank"):  # what some call head_dim there is the rotated part alone
        return read_size(config, "qk_nope_head_dim") + read_size(config, "qk_rope_head_dim")
    return read_size(config, "head_dim", default=max(1, hidden_size // num_heads))


def _windows(config: Mapping[str, Any], num_layers: int, usual_pattern: int | None) -> tuple[int | None, ...]:
    """usual_pattern: the family's sliding_window_pattern, where config.json need not say it."""
    window = config.get("sliding_window")
    is_window = isinstance(window, int) and not isinstance(window, bool) and 0 < window <= _MAX_SIZE
    if not is_window or config.get("use_sliding_window") is False:
        return (None,) * num_layers
    kinds = config.get("layer_types")
    if isinstance(kinds, list) and len(kinds) == num_layers:
        return tuple(window if kind == "sliding_attention" else None for kind in kinds)
    first = config.get("max_window_layers")
    if isinstance(first, int):  # Qwen's: the layers before it see everything, and all do unless it is asked for
        first = first if config.get("use_sliding_window") else num_layers
        return tuple(None if layer < first else window for layer in range(num_layers))
    pattern = config.get("sliding_window_pattern", usual_pattern)
    if isinstance(pattern, int) and pattern > 0:  # every so many layers, one sees everything
        return tuple(None if (layer + 1) % pattern == 0 else window for layer in range(num_layers))
    return (window,) * num_layers


def _other_cache(config: Mapping[str, Any]) -> str:
    kinds = config.get("layer_types")
    others = {str(kind) for kind in kinds} - {"full_attention", "sliding_attention"} if isinstance(kinds, list) else ()
    if others:
        return f"some layers are {', '.join(sorted(others))}"
    if any(name in config for name in ("ssm_cfg", "state_size", "mamba_d_state", "linear_num_value_heads")):
        return "some layers keep a state"
    return ""


def _gguf_size(values: Mapping[str, Any], name: str, *, default: int | None = None, most: int = _MAX_SIZE) -> int:
    """An entry of a GGUF file. Raises ModelLoadError, also for what the file says of each layer apart."""
    if isinstance(values.get(name), GgufArray | list):
        raise ModelLoadError(
            f"{name} is a list with a number for each layer: its layers differ, which cannot be described\n"
            "  use the model's original repository, with *.safetensors"
        )
    return read_size(values, name, default=default, most=most, source="the GGUF file")


def read_size(
    config: Mapping[str, Any],
    *names: str,
    default: int | None = None,
    most: int = _MAX_SIZE,
    source: str = CONFIG_NAME,
) -> int:
    """The first of these entries that is there. source: what to check if it is wrong. Raises ModelLoadError."""
    name, value = next(((name, config[name]) for name in names if config.get(name) is not None), (names[0], default))
    if not isinstance(value, int) or isinstance(value, bool) or not 0 < value <= most:
        shown = "missing" if value is None else f"{value!r}"[:60]
        raise ModelLoadError(
            f"{name} is {shown}, and must be a whole number from 1 to {most}\n"
            f"  is this a language model? check {source}"
        )
    return value
