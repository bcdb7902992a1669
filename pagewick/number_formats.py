"""The names of data types and of formats for quantized weights, as options have them."""

from __future__ import annotations

import re

from pagewick.errors import ConfigError

DTYPES = ("auto", "float32", "bfloat16", "float16")
# Those of 8 and 4 bits are stored with a scale for each token and KV head.
KV_CACHE_DTYPES = (*DTYPES, "int8", "fp8_e4m3", "fp8_e5m2", "int4")
DTYPE_ALIASES = {
    "bf16": "bfloat16",
    "f16": "float16",
    "fp16": "float16",
    "half": "float16",
    "f32": "float32",
    "fp32": "float32",
    "float": "float32",
}
KV_CACHE_DTYPE_ALIASES = {
    **DTYPE_ALIASES,
    "fp8": "fp8_e4m3",
    "float8_e4m3fn": "fp8_e4m3",
    "float8_e5m2": "fp8_e5m2",
    "int8_per_token_head": "int8",
    "fp8_per_token_head": "fp8_e4m3",
    "turbo4": "int4",
}
# Formats in which weights can be quantized at load, by falling size; quantization/mixes.py says what they are.
QUANTIZATIONS = (
    *("auto", "q8_0", "q6_k", "q5_k_m", "q5_k_s", "q5_k", "q5_1", "q5_0", "q4_k_m", "q4_k_s", "q4_k", "q4_1", "q4_0"),
    *("int4", "q3_k_l", "q3_k_m", "q3_k_s", "q3_k", "q2_k", "q2_k_s"),
)
# Other values of `quantization`, which change nothing: the model must be a GGUF file, or a checkpoint with one of these
# quant_methods in its config.json, and says itself how it is quantized.
CHECKPOINT_FORMATS = {
    "gguf": ("gguf",),
    **dict.fromkeys(("gptq", "gptq_marlin"), ("gptq", "auto-round")),
    **dict.fromkeys(("awq", "awq_marlin"), ("awq", "auto-round")),
    "auto_round": ("auto-round",),
    "fp8": ("fp8", "fbgemm-fp8", "modelopt", "compressed-tensors"),
    **{
        name: (name.replace("_", "-"),)
        for name in ("compressed_tensors", "bitsandbytes", "mxfp4", "modelopt", "hqq", "quark", "torchao")
    },
}

# Weights in 4 bits for Marlin's kernels, which are for CUDA: here, int4.
MARLIN = "marlin"

# Other values that programs take for --quantization, and the answers to them.
_NO_QUANTIZATION = {
    "aqlm bitblas experts_int8": (
        "such checkpoints cannot be loaded yet; give the unquantized one, with --quantization q4_k_m"
    ),
    "ggml": "files in the old ggml format are not read; llama.cpp's convert_llama_ggml_to_gguf.py converts them",
    "int8": "use q8_0, whole numbers of 8 bits with a scale for each 32",
}


def quantization_named(value: str) -> str | None:
    """Return a name of QUANTIZATIONS for any spelling of it, such as q4k, one of CHECKPOINT_FORMATS, or MARLIN.

    Raises ConfigError.
    """
    name = value.lower().replace("-", "_")
    if match := re.fullmatch(r"q(\d)_?([k01])_?([sml]?)", name):
        name = "_".join(filter(None, (f"q{match[1]}", match[2], match[3])))
    if name == "none":
        return None
    if name not in (*QUANTIZATIONS, *CHECKPOINT_FORMATS, MARLIN):
        others = f"must be one of {', '.join(QUANTIZATIONS)}"
        answer = next((text for words, text in _NO_QUANTIZATION.items() if name in words.split()), others)
        raise ConfigError(f"--quantization {value}: {answer}")
    return name
