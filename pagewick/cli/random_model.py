"""Models of real shapes with random weights, to measure speed without a download.

A model is a Hugging Face directory (safetensors, config.json, tokenizer.json) in the cache directory. Its tokenizer is
a byte-level BPE trained on the source files of Python's standard library, padded to the shape's vocabulary, so that
every id the model can produce is text.
"""

from __future__ import annotations

import json
import os
import shutil
import sysconfig
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path

from pagewick.errors import ConfigError

# Part of the directory's name. Increase it when the written files change, so that old ones are not used.
VERSION = 1
WEIGHT_STD = 0.02
CONV_STD = 0.3
PARTIAL_ROTARY_FACTOR = 0.25  # of Qwen3.5
NUM_TRAINED_TOKENS = 6000
NUM_TRAINING_FILES = 150
SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
# How Qwen2 and Qwen3 split text into words.
WORD_PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)


@dataclass(frozen=True, slots=True)
class DeltaSizes:
    """The sizes of Qwen3.5's layers with linear attention, as config.json names them.

    Every layer has it but each `full_attention_interval`-th one, whose heads have gates.
    """

    linear_num_key_heads: int
    linear_num_value_heads: int
    linear_key_head_dim: int
    linear_value_head_dim: int
    linear_conv_kernel_dim: int
    full_attention_interval: int

    @property
    def value_size(self) -> int:
        return self.linear_num_value_heads * self.linear_value_head_dim

    @property
    def num_channels(self) -> int:
        return 2 * self.linear_num_key_heads * self.linear_key_head_dim + self.value_size

    @property
    def num_state_floats(self) -> int:
        """Numbers of the state of a sequence in one layer."""
        inputs = (self.linear_conv_kernel_dim - 1) * self.num_channels
        return inputs + self.value_size * self.linear_key_head_dim

    def num_parameters(self, hidden_size: int) -> int:
        """Number of weights in the matrices of one layer."""
        return hidden_size * (self.num_channels + 2 * self.value_size + 2 * self.linear_num_value_heads)


@dataclass(frozen=True, slots=True)
class Shape:
    """The sizes of a decoder, as config.json names them. Input and output embedding are one matrix.

    If num_experts is not 0, every layer has that many experts, gated MLPs of moe_intermediate_size, instead of an MLP.
    delta: most layers have linear attention.
    """

    architecture: str
    model_type: str
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    vocab_size: int
    rope_theta: float
    rms_norm_eps: float
    num_experts: int = 0
    num_experts_per_tok: int = 0
    moe_intermediate_size: int = 0
    delta: DeltaSizes | None = None

    @property
    def num_block_parameters(self) -> int:
        """Number of weights in the matrices of all layers."""
        return self.num_shared_parameters + self.num_expert_parameters

    @property
    def num_active_parameters(self) -> int:
        """Number of these weights that are used for one token."""
        if not self.num_experts:
            return self.num_shared_parameters
        return self.num_shared_parameters + self.num_expert_parameters * self.num_experts_per_tok // self.num_experts

    @property
    def num_expert_parameters(self) -> int:
        """Number of weights in experts."""
        return self.num_hidden_layers * self.num_experts * 3 * self.hidden_size * self.moe_intermediate_size

    @property
    def num_shared_parameters(self) -> int:
        """Number of weights in layers that are used for every token."""
        q_size, kv_size = self.num_attention_heads * self.head_dim, self.num_key_value_heads * self.head_dim
        gates = q_size if self.delta else 0
        attention = self.num_attention_layers * self.hidden_size * (2 * q_size + gates + 2 * kv_size)
        linear = self.num_linear_layers * self.delta.num_parameters(self.hidden_size) if self.delta else 0
        rest = self.num_experts if self.num_experts else 3 * self.intermediate_size
        return attention + linear + self.num_hidden_layers * self.hidden_size * rest

    @property
    def num_attention_layers(self) -> int:
        """Number of layers with keys and values."""
        return sum(map(self.has_keys, range(self.num_hidden_layers)))

    @property
    def num_linear_layers(self) -> int:
        """Number of layers with a state."""
        return self.num_hidden_layers - self.num_attention_layers

    def has_keys(self, layer_idx: int) -> bool:
        return self.delta is None or (layer_idx + 1) % self.delta.full_attention_interval == 0

    @property
    def num_head_parameters(self) -> int:
        """Number of weights in the embedding."""
        return self.vocab_size * self.hidden_size


SHAPES = {
    "qwen3-tiny": Shape("Qwen3ForCausalLM", "qwen3", 256, 512, 4, 4, 2, 64, 8192, 1e6, 1e-6),
    "qwen3-0.6b": Shape("Qwen3ForCausalLM", "qwen3", 1024, 3072, 28, 16, 8, 128, 151936, 1e6, 1e-6),
    # A small Qwen3-30B-A3B: 128 experts, 8 of which a token uses; 8 of 9 weights are in experts; 1e9 weights in all.
    "qwen3-moe-1b": Shape("Qwen3MoeForCausalLM", "qwen3_moe", 1024, 3072, 12, 16, 4, 64, 32768, 1e6, 1e-6, 128, 8, 192),
    # A similar model whose experts have 256 columns, the width of a block in ggml's K formats.
    "qwen3-moe-1b-256": Shape(
        "Qwen3MoeForCausalLM", "qwen3_moe", 1024, 3072, 12, 16, 4, 64, 32768, 1e6, 1e-6, 96, 8, 256
    ),
    "llama-3.2-1b": Shape("LlamaForCausalLM", "llama", 2048, 8192, 16, 32, 8, 64, 128256, 5e5, 1e-5),
    # The text part of Qwen3.5 0.8B. The sizes of linear attention are assumed: no published config.json was at hand.
    "qwen3.5-0.8b": Shape(
        "Qwen3_5ForCausalLM",
        "qwen3_5_text",
        1024,
        3584,
        24,
        8,
        2,
        256,
        248320,
        1e7,
        1e-6,
        delta=DeltaSizes(16, 16, 128, 128, 4, 4),
    ),
}


def cached_random_model(name: str) -> Path:
    """Return the directory of the shape's model, and write it if needed. Raises ConfigError for an unknown name."""
    if name not in SHAPES:
        raise ConfigError(f"--shape must be one of {', '.join(SHAPES)}; got {name!r}")
    directory = bench_cache_dir() / f"{name}-{VERSION}"
    if directory.is_dir():
        return directory
    directory.parent.mkdir(parents=True, exist_ok=True)
    # It is written beside its place and then renamed, so that an interrupted run leaves no incomplete model.
    unfinished = Path(tempfile.mkdtemp(prefix=f"{name}-", suffix=".unfinished", dir=directory.parent))
    try:
        write_random_model(SHAPES[name], unfinished)
        unfinished.rename(directory)
    except BaseException:
        shutil.rmtree(unfinished, ignore_errors=True)
        raise
    return directory


def bench_cache_dir() -> Path:
    """Return the directory of benchmark models and results: $XDG_CACHE_HOME/pagewick/bench."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "pagewick" / "bench"


def write_random_model(shape: Shape, directory: Path, *, seed: int = 0) -> None:
    """Write a model of this shape, bf16, into an existing directory; one seed always gives the same bytes."""
    import torch
    from safetensors.torch import save_file

    eos_token_id = write_tokenizer(shape.vocab_size, directory)
    generator = torch.Generator().manual_seed(seed)
    tensors = {
        name: torch.ones(size, dtype=torch.bfloat16)  # a norm's vector
        if len(size) == 1
        else torch.empty(size)
        .normal_(0, WEIGHT_STD if len(size) == 2 else CONV_STD, generator=generator)
        .to(torch.bfloat16)
        for name, size in tensor_shapes(shape).items()
    }
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    config = asdict(shape)
    del config["delta"]
    if shape.delta:
        rope = {"rope_type": "default", "rope_theta": shape.rope_theta, "partial_rotary_factor": PARTIAL_ROTARY_FACTOR}
        config |= {**asdict(shape.delta), "attn_output_gate": True, "rope_parameters": rope}
        del config["rope_theta"]
    config |= {
        "architectures": [config.pop("architecture")],
        "torch_dtype": "bfloat16",
        "hidden_act": "silu",
        "attention_bias": False,
        "tie_word_embeddings": True,
        "max_position_embeddings": 32768,
        "initializer_range": WEIGHT_STD,
        "eos_token_id": eos_token_id,
    }
    if shape.num_experts:
        config |= {"norm_topk_prob": True, "decoder_sparse_step": 1, "mlp_only_layers": []}
    else:
        for name in ("num_experts", "num_experts_per_tok", "moe_intermediate_size"):
            del config[name]
    _write_json(directory / "config.json", config)
    _write_json(directory / "generation_config.json", {"eos_token_id": eos_token_id, "do_sample": False})


def tensor_shapes(shape: Shape) -> dict[str, tuple[int, ...]]:
    """Return the shapes of the checkpoint's tensors by their Hugging Face names."""
    hidden, inner = shape.hidden_size, shape.moe_intermediate_size or shape.intermediate_size
    mlps: dict[str, tuple[int, ...]] = {"post_attention_layernorm.weight": (hidden,)}
    if shape.num_experts:
        mlps["mlp.gate.weight"] = (shape.num_experts, hidden)
    for mlp in [f"mlp.experts.{expert}" for expert in range(shape.num_experts)] or ["mlp"]:
        mlps |= {f"{mlp}.gate_proj.weight": (inner, hidden), f"{mlp}.up_proj.weight": (inner, hidden)}
        mlps[f"{mlp}.down_proj.weight"] = (hidden, inner)
    tensors: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (shape.vocab_size, hidden)}
    for layer_idx in range(shape.num_hidden_layers):
        if shape.delta is None or shape.has_keys(layer_idx):
            mixer = _attention_shapes(shape)
        else:
            mixer = _linear_attention_shapes(shape.delta, hidden)
        block = {"input_layernorm.weight": (hidden,), **mixer, **mlps}
        if shape.model_type.startswith("qwen3") and shape.has_keys(layer_idx):
            block |= {f"self_attn.{name}_norm.weight": (shape.head_dim,) for name in "qk"}
        tensors |= {f"model.layers.{layer_idx}.{name}": size for name, size in block.items()}
    return tensors | {"model.norm.weight": (hidden,)}


def _attention_shapes(shape: Shape) -> dict[str, tuple[int, ...]]:
    q_size, kv_size = shape.num_attention_heads * shape.head_dim, shape.num_key_value_heads * shape.head_dim
    return {
        "self_attn.q_proj.weight": (2 * q_size if shape.delta else q_size, shape.hidden_size),
        "self_attn.k_proj.weight": (kv_size, shape.hidden_size),
        "self_attn.v_proj.weight": (kv_size, shape.hidden_size),
        "self_attn.o_proj.weight": (shape.hidden_size, q_size),
    }


def _linear_attention_shapes(delta: DeltaSizes, hidden_size: int) -> dict[str, tuple[int, ...]]:
    heads, channels = delta.linear_num_value_heads, delta.num_channels
    return {
        "linear_attn.in_proj_qkv.weight": (channels, hidden_size),
        "linear_attn.in_proj_z.weight": (delta.value_size, hidden_size),
        "linear_attn.in_proj_b.weight": (heads, hidden_size),
        "linear_attn.in_proj_a.weight": (heads, hidden_size),
        "linear_attn.out_proj.weight": (hidden_size, delta.value_size),
        "linear_attn.conv1d.weight": (channels, 1, delta.linear_conv_kernel_dim),
        "linear_attn.A_log": (heads,),
        "linear_attn.dt_bias": (heads,),
        "linear_attn.norm.weight": (delta.linear_value_head_dim,),
    }


def write_tokenizer(vocab_size: int, directory: Path) -> int:
    """Write tokenizer.json and tokenizer_config.json; return the id of the end-of-sequence token, the last one."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(WORD_PATTERN), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=min(NUM_TRAINED_TOKENS, vocab_size - len(SPECIAL_TOKENS)),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    sources = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))[:NUM_TRAINING_FILES]
    tokenizer.train([str(path) for path in sources], trainer)
    description = json.loads(tokenizer.to_str())
    vocabulary = description["model"]["vocab"]
    # No merge can produce these words, so that text never encodes to them. Byte-level BPE writes a space as "Ġ".
    for index in range(vocab_size - len(SPECIAL_TOKENS) - len(vocabulary)):
        vocabulary[f"word{index}Ġ"] = len(vocabulary)
    tokenizer = Tokenizer.from_str(json.dumps(description))
    tokenizer.add_special_tokens(list(SPECIAL_TOKENS))
    tokenizer.save(str(directory / "tokenizer.json"))
    _write_json(
        directory / "tokenizer_config.json",
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "eos_token": SPECIAL_TOKENS[2],
            "pad_token": SPECIAL_TOKENS[0],
            "clean_up_tokenization_spaces": False,
            "chat_template": CHAT_TEMPLATE,
        },
    )
    return vocab_size - 1


def _write_json(path: Path, content: dict[str, object]) -> None:
    path.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
