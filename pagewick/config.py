"""EngineConfig: all engine options."""

from __future__ import annotations

import json
import os
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any

from pagewick.errors import ConfigError
from pagewick.foreign_names import ENGINE_ARGUMENTS, check_argument, note, unknown_argument
from pagewick.number_formats import (
    CHECKPOINT_FORMATS,
    DTYPE_ALIASES,
    DTYPES,
    KV_CACHE_DTYPE_ALIASES,
    KV_CACHE_DTYPES,
    MARLIN,
    quantization_named,
)
from pagewick.option_checks import (
    check_batch_invariance,
    check_choice,
    check_disk,
    check_only_one,
    check_share,
    check_speculation,
    check_threads,
    check_type,
    flag_of,
    named_paths,
    parse_bytes,
)
from pagewick.other_names import ALIASES, NO_ID_NEEDED, spare_id

BUILTIN_MODEL = "pagewick-demo"
DEVICES = ("auto", "cpu", "cuda", "mps")
# Attention of other packages, and all values of --attention-backend.
ATTENTION_PACKAGES = ("FLASH_ATTN", "FLASHINFER", "TORCH_VARLEN")
ATTENTION_BACKENDS = ("auto", "TRITON_ATTN", "CPU_ATTN", *ATTENTION_PACKAGES)
HUBS = ("huggingface", "modelscope")
SPECULATIVE_METHODS = ("none", "ngram", "draft", "mtp")
# A model's own layer was trained to predict one token (docs/decisions/0076).
DEFAULT_DRAFT_TOKENS = {"none": 4, "ngram": 4, "draft": 4, "mtp": 2}
# Fields in bytes.
SIZES = (
    "kv_cache_memory",
    "memory_reserve",
    "swap_space",
    "kv_cache_disk_size",
    "quantized_cache_size",
    "max_grammar_size",
)
# Those of them that take a number without a unit: the one of vLLM, which is in GiB there.
SIZES_WITHOUT_UNIT = ("swap_space",)
DEFAULT_MAX_NUM_BATCHED_TOKENS = 2048
# On a CPU a step of 2,048 tokens takes seconds, during which running streams wait.
DEFAULT_MAX_NUM_PREFILL_TOKENS = {"cpu": 512, "cuda": 2048, "mps": 1024}
# On a CPU, scheduling would compete with the running step for cores. A GPU would wait for the host between two steps.
DEFAULT_STEPS_IN_FLIGHT = {"cpu": 1, "cuda": 2, "mps": 1}
DEFAULT_SWAP_SPACE = {"cpu": 0, "cuda": 4 * 2**30, "mps": 0}


def _option(default: Any, description: str) -> Any:
    return field(default=default, metadata={"help": description})


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """Immutable options of an engine, with vLLM's names. Raises ConfigError if a value is out of range.

    For `None` and "auto", `resolve` chooses a value at start-up from the model and the machine.
    """

    model: str = _option(BUILTIN_MODEL, "Directory, GGUF file, id on a hub (owner/name:Q8_0), or the built-in model.")
    weight_file: str | None = _option(None, "GGUF file in the model's directory or repository.")
    tokenizer: str | None = _option(None, "Tokenizer instead of the model's: a directory, a file, or an id on a hub.")
    revision: str | None = _option(None, "Branch, tag or commit of a model on a hub.")
    hub: str = _option("huggingface", "Hub to download models from: huggingface or modelscope.")
    dtype: str = _option("auto", "Data type of the weights: auto (the checkpoint's), float32, bfloat16 or float16.")
    quantization: str | None = _option(
        None, "Quantize the weights at load: q8_0, q6_k, q5_k_m, q4_k_m, q3_k_m, ... or auto (the best that fits)."
    )
    quantized_cache: bool = _option(True, "Keep weights that were quantized at load on disk, for further starts.")
    quantized_cache_size: int | None = _option(None, "Largest size of this cache (default: a fifth of the free disk).")
    mmproj: str | None = _option(None, "File with the part of a GGUF model that sees (default: one beside the model).")
    language_model_only: bool = _option(False, "Load only the part of the model that reads text, not its images.")
    rerank: bool = _option(False, "The model is a Qwen3-Reranker, which its files do not say: score with its prompt.")
    max_image_pixels: int | None = _option(None, "Scale larger images down to this number of pixels (the model's).")
    lora: str | None = _option(None, "LoRA adapter for all requests that name no other: a directory, a file, or an id.")
    enable_lora: bool = _option(False, "Make room for LoRA adapters, which requests or programs name later.")
    lora_modules: tuple[str, ...] = _option((), "LoRA adapter that requests may name, as NAME=PATH; may be repeated.")
    max_loras: int | None = _option(None, "Largest number of adapters that are loaded (at least 4).")
    max_lora_rank: int | None = _option(None, "Largest rank of an adapter (that of the adapters given, at least 16).")
    device: str = _option("auto", "Device to run on: auto (a GPU if there is one), cpu, cuda or mps.")
    batch_invariant: bool = _option(False, "Compute a response with the same bits alone and beside others on a GPU.")
    fp8_activations: bool = _option(False, "Round activations in large products with FP8 weights to FP8, on a GPU.")
    attention_backend: str = _option(
        "auto",
        "Attention kernels: auto, TRITON_ATTN and CPU_ATTN are Pagewick's; FLASH_ATTN, FLASHINFER and TORCH_VARLEN "
        "are other packages'.",
    )
    num_experts_offload_per_rank: int = _option(0, "Experts of each layer to keep in host memory, times the ranks.")
    max_model_len: int | None = _option(None, "Longest sequence, prompt and output together, in tokens.")
    rope_scaling: str | None = _option(None, "Replace the model's rope scaling; JSON, as in config.json.")
    rope_theta: float | None = _option(None, "Replace the model's base of the rotary frequencies.")
    max_num_seqs: int = _option(32, "Largest number of sequences that run at the same time.")
    max_num_batched_tokens: int = _option(DEFAULT_MAX_NUM_BATCHED_TOKENS, "Largest number of tokens in one step.")
    max_num_prefill_tokens: int | None = _option(
        None, "Prompt tokens in a step beside running sequences (512 on a CPU)."
    )
    max_steps_in_flight: int | None = _option(
        None, "Steps scheduled or computed at the same time (2 on a GPU, else 1)."
    )
    enforce_eager: bool = _option(False, "Start every kernel of a step on a GPU by itself, without CUDA graphs.")
    block_size: int | None = _option(None, "Tokens in a block of the KV cache.")
    kv_cache_memory: int | None = _option(None, "Memory for the KV cache, for example 4GiB.")
    gpu_memory_utilization: float | None = _option(
        None, "Largest share of the device's memory, from 0 to 1 (0.9 on a GPU; instead of --kv-cache-memory)."
    )
    num_kv_blocks: int | None = _option(None, "Number of KV cache blocks (instead of --kv-cache-memory).")
    memory_reserve: int = _option(0, "Main memory that the KV cache leaves to other programs on a CPU.")
    kv_cache_dtype: str = _option(
        "auto", "Data type of the KV cache: auto (the model's), float32, bfloat16, float16, int8, fp8_e4m3/5m2 or int4."
    )
    enable_prefix_caching: bool = _option(True, "Reuse the KV cache of prompt prefixes that requests have in common.")
    swap_space: int | None = _option(None, "Host memory for KV blocks that do not fit (4GiB on a GPU, else 0).")
    kv_cache_disk: str | None = _option(None, "Directory that keeps KV blocks of prefixes, also over restarts.")
    kv_cache_disk_size: int = _option(16 * 2**30, "Largest size of --kv-cache-disk.")
    kv_cache_disk_shared: bool = _option(False, "Write each KV block to --kv-cache-disk at once, and find others'.")
    session_ttl: float = _option(600.0, "Seconds to keep a session's KV blocks after its last request.")
    max_waiting_requests: int | None = _option(None, "Requests that may wait (1024 in a server, else no limit).")
    max_waiting_tokens: int | None = _option(None, "Prompt tokens of the requests that may wait.")
    request_timeout: float | None = _option(
        None, "Seconds after which a request that sets no timeout is ended (else no limit)."
    )
    speculative_method: str | None = _option(
        None, "Source of draft tokens: none, ngram (the text), mtp (the model's own layer) or draft (a model)."
    )
    speculative_model: str | None = _option(None, "Directory or id of the draft model, for --speculative-method draft.")
    num_speculative_tokens: int | None = _option(None, "Draft tokens of a sequence in each step (2 with mtp, else 4).")
    ngram_prompt_lookup_min: int = _option(2, "Shortest run of tokens that ngram looks up.")
    ngram_prompt_lookup_max: int = _option(4, "Longest run of tokens that ngram looks up.")
    speculative_max_batch: int = _option(8, "Steps with more sequences than this use no draft tokens.")
    max_grammar_size: int = _option(256 * 2**10, "Largest JSON schema or grammar of a request.")
    max_grammar_depth: int = _option(64, "Deepest nesting of a JSON schema or grammar.")
    grammar_timeout: float = _option(0.5, "Seconds of processor time that compiling a grammar may take.")
    grammar_cache_size: int = _option(128, "Compiled grammars to keep for further requests.")
    tensor_parallel_size: int = _option(1, "Processes that share each layer; must divide the attention heads.")
    pipeline_parallel_size: int = _option(1, "Groups of such processes, each of which holds some of the layers.")
    rank_timeout: float = _option(15.0, "Seconds of silence after which a rank on another machine is lost; 0: never.")
    num_threads: int | None = _option(None, "Number of CPU threads (default: the machine's cores).")
    seed: int | None = _option(None, "Draw the seeds of requests that set none from this seed.")

    def __post_init__(self) -> None:
        self._put_in_form()
        for option in fields(self):
            check_type(option.name, option.type, getattr(self, option.name))
        check_choice("hub", self.hub, HUBS)
        check_choice("dtype", self.dtype, DTYPES)
        check_choice("attention_backend", self.attention_backend, ATTENTION_BACKENDS)
        if self.batch_invariant:
            package = self.attention_backend if self.attention_backend in ATTENTION_PACKAGES else None
            check_batch_invariance(package, rounds_activations=self.fp8_activations)
        check_choice("kv_cache_dtype", self.kv_cache_dtype, KV_CACHE_DTYPES)
        if self.device.partition(":")[0] not in DEVICES:
            check_choice("device", self.device, DEVICES)
        check_threads(self.num_threads)
        limits = ("kv_cache_memory", "num_kv_blocks", "gpu_memory_utilization")
        check_only_one({name: getattr(self, name) for name in limits})
        check_share("gpu_memory_utilization", self.gpu_memory_utilization)
        check_disk(self.kv_cache_disk, is_used=self.enable_prefix_caching, is_shared=self.kv_cache_disk_shared)
        self._check_adapters()
        self._check_speculation()

    @property
    def adapter_paths(self) -> dict[str, str]:
        """The paths of the adapters to load at the start, by name; that of requests without one has an empty name."""
        named = dict(one.split("=", 1) for one in self.lora_modules)
        return named if self.lora is None else {"": self.lora, **named}

    @property
    def num_ranks(self) -> int:
        """Number of processes that have a part of the model, unless a launcher has started others."""
        return self.tensor_parallel_size * self.pipeline_parallel_size

    @property
    def most_draft_tokens(self) -> int:
        """The most draft tokens of a sequence in a step, if something proposes some."""
        return self.num_speculative_tokens or DEFAULT_DRAFT_TOKENS[self.speculative_method or "none"]

    @property
    def num_adapters(self) -> int:
        """Number of adapters for which layers have room; `max_loras` must be resolved if there are any."""
        return (self.max_loras or 0) if self.enable_lora else 0

    def _put_in_form(self) -> None:
        """Convert the other forms of a value: paths, sizes with a unit, short names of data types."""

        def change(name: str, value: Any) -> None:
            object.__setattr__(self, name, value)

        if isinstance(self.rope_scaling, Mapping):
            change("rope_scaling", json.dumps(self.rope_scaling))
        for name in ("model", "weight_file", "mmproj", "tokenizer", "lora", "speculative_model", "kv_cache_disk"):
            if isinstance(value := getattr(self, name), os.PathLike):
                change(name, os.fspath(value))
        if self.tokenizer == self.model:  # vLLM's users may give both
            change("tokenizer", None)
        if isinstance(self.weight_file, str) and self.model == BUILTIN_MODEL:
            change("model", self.weight_file)
            change("weight_file", None)
        for name in SIZES:
            if isinstance(value := getattr(self, name), str):
                change(name, parse_bytes(value, needs_unit=name not in SIZES_WITHOUT_UNIT))
        change("lora_modules", named_paths("lora_modules", self.lora_modules or ()))
        if self.lora_modules or self.lora is not None:
            change("enable_lora", True)
        # vLLM gives swap_space in GiB; as bytes it would be too small for one block.
        if isinstance(self.swap_space, int | float) and self.swap_space is not True and 0 < self.swap_space < 2**20:
            change("swap_space", int(self.swap_space * 2**30))
        if isinstance(self.attention_backend, str) and self.attention_backend.upper() in ATTENTION_BACKENDS:
            change("attention_backend", self.attention_backend.upper())
        if isinstance(self.quantization, str):
            change("quantization", quantization_named(self.quantization))
        for name, aliases in (("dtype", DTYPE_ALIASES), ("kv_cache_dtype", KV_CACHE_DTYPE_ALIASES)):
            # str(torch.bfloat16) is torch.bfloat16.
            value = str(getattr(self, name)).removeprefix("torch.")
            change(name, aliases.get(value, value))

    def _check_adapters(self) -> None:
        if self.max_loras is not None and self.max_loras < (number := len(self.adapter_paths)):
            raise ConfigError(f"--max-loras {self.max_loras} is less than the number of adapters given, {number}")

    def _check_speculation(self) -> None:
        if self.speculative_method is None:
            object.__setattr__(self, "speculative_method", "none" if self.speculative_model is None else "draft")
        check_choice("speculative_method", self.speculative_method or "", SPECULATIVE_METHODS)
        lookups = self.ngram_prompt_lookup_min, self.ngram_prompt_lookup_max
        check_speculation(self.speculative_method, self.speculative_model, *lookups)

    @classmethod
    def from_options(cls, **options: Any) -> EngineConfig:
        """Make a config from keyword options, under any of the names in other_names.py and foreign_names.py.

        None leaves an option open. Raises ConfigError for an option that is refused, for an unknown one, naming the
        nearest known one, and for two different values of one option.
        """
        values: dict[str, Any] = {}
        spare = spare_id(name for name, value in options.items() if value is not None)
        if spare is not None:
            note(spare, NO_ID_NEEDED)
        for name, value in options.items():
            if name == spare:
                continue
            if name in ENGINE_ARGUMENTS:
                if reason := check_argument(ENGINE_ARGUMENTS[name], value, _DEFAULTS):
                    raise ConfigError(reason)
                continue
            target, convert = ALIASES.get(name, (name, None))
            if target not in _DEFAULTS:
                hint = unknown_argument(name, _DEFAULTS, {**ALIASES, **ENGINE_ARGUMENTS})
                raise ConfigError(f"unknown option {name}; {hint}")
            if value is None:
                continue
            value = value if convert is None else convert(value)
            for field_name, part in (value if isinstance(value, dict) and convert else {target: value}).items():
                if values.setdefault(field_name, part) != part:
                    raise ConfigError(f"{flag_of(field_name)} is given twice (once as {flag_of(name)})")
        return cls(**values)

    def for_weights(self, kind: str, stored: Collection[str] = ()) -> EngineConfig:
        """Return a config without a quantization of CHECKPOINT_FORMATS, which only demands a kind of model.

        MARLIN becomes int4, or None if the checkpoint has weights in int4, which stay as they are.
        kind: what the model is, as weights_kind returns it. stored: the formats in which its weights are kept. Raises
        ConfigError if the model is of another kind than the quantization demands.
        """
        if self.quantization == MARLIN:
            has_int4 = any(name.startswith("int4_") for name in stored)
            return replace(self, quantization=None if has_int4 else "int4")
        wanted = CHECKPOINT_FORMATS.get(self.quantization or "")
        if wanted is None:
            return self
        if kind in wanted:
            return replace(self, quantization=None)
        safetensors = f"safetensors in {kind}" if kind else "safetensors that are not quantized"
        held = "a GGUF file" if kind == "gguf" else "safetensors" if self.quantization == "gguf" else safetensors
        ways = "name a GGUF file (owner/name:Q4_K_M)" if self.quantization == "gguf" else "give another checkpoint"
        missing = " and no GGUF file" if self.quantization == "gguf" else ""
        raise ConfigError(
            f"--quantization {self.quantization}: {self.model} holds {held}{missing}\n"
            f"  leave the flag out, {ways}, or quantize at load: --quantization q4_k_m"
        )

    def check_max_model_len(self, longest_context: int) -> None:
        """Raises ConfigError if max_model_len exceeds the model's context."""
        if self.max_model_len is not None and self.max_model_len > longest_context:
            raise ConfigError(
                f"--max-model-len {self.max_model_len} is longer than the model's context of {longest_context} "
                f"tokens; use at most {longest_context}"
            )

    def resolve(
        self,
        *,
        max_position_embeddings: int,
        checkpoint_dtype: str,
        device: str,
        block_size: int,
        num_cores: int,
        longest_context: int | None = None,
    ) -> EngineConfig:
        """Choose a value for every field that is None or "auto", except those for the size of the KV cache.

        max_position_embeddings, checkpoint_dtype: from the model; device, block_size, num_cores: from the machine.
        longest_context: the longest context that the model supports, if more than max_position_embeddings.
        """
        self.check_max_model_len(longest_context or max_position_embeddings)
        max_model_len = self.max_model_len or max_position_embeddings
        dtype = checkpoint_dtype if self.dtype == "auto" else self.dtype
        kind = device.partition(":")[0]
        return replace(
            self,
            max_num_prefill_tokens=self.max_num_prefill_tokens or DEFAULT_MAX_NUM_PREFILL_TOKENS[kind],
            max_steps_in_flight=self.max_steps_in_flight or DEFAULT_STEPS_IN_FLIGHT[kind],
            swap_space=DEFAULT_SWAP_SPACE[kind] if self.swap_space is None else self.swap_space,
            device=device,
            dtype=dtype,
            kv_cache_dtype=dtype if self.kv_cache_dtype == "auto" else self.kv_cache_dtype,
            max_model_len=max_model_len,
            block_size=self.block_size or block_size,
            num_threads=self.num_threads or num_cores,
        )


# Sections of the help, each with its first field; the following fields belong to the same section.
SECTIONS = {
    "Model": "model",
    "Sequences": "max_model_len",
    "KV cache": "block_size",
    "Queue": "max_waiting_requests",
    "Speculative decoding": "speculative_method",
    "Structured output": "max_grammar_size",
    "Processes": "tensor_parallel_size",
}


_DEFAULTS = {option.name: option.default for option in fields(EngineConfig)}
