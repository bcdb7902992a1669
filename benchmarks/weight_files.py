"""The model of a comparison in the format that is compared: bf16, or quantized as llama.cpp's tools write it."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Final

from benchmarks.limits import StoredWeights
from pagewick.cli.random_model import Shape, bench_cache_dir
from pagewick.errors import ConfigError
from pagewick.weights.gguf.header import read_gguf_header

BF16: Final = "bf16"
# Names of llama-quantize's formats.
QUANTIZED: Final = ("q8_0", "q4_0", "q4_k_m")
FORMATS: Final = (BF16, *QUANTIZED)

# The converter identifies a tokenizer by the ids of a certain text. It does not know ours, which was trained here and
# splits words as Qwen2's does. It also looks for a sentencepiece file first, with a library that may not be installed;
# there is no such file. Our models have no layers that predict further tokens, which it expects in Qwen3.5.
_CONVERT: Final = """
import runpy, sys
from pathlib import Path
tree, model, file = sys.argv[1:4]
sys.path[:0] = [tree, str(Path(tree) / "gguf-py")]
from conversion.base import TextModel

def no_sentencepiece(self):
    raise FileNotFoundError("tokenizer.model")

TextModel.get_vocab_base_pre = lambda self, tokenizer: "qwen2"
TextModel._set_vocab_sentencepiece = no_sentencepiece
TextModel.no_mtp = True
sys.argv = ["convert_hf_to_gguf.py", model, "--outtype", "bf16", "--outfile", file]
runpy.run_path(str(Path(tree) / "convert_hf_to_gguf.py"), run_name="__main__")
"""
_QUANTIZE: Final = "llama-quantize"


def gguf_file(tree: Path, model: Path, name: str) -> Path:
    """Return the GGUF file of a model in a format of FORMATS, written if it is missing.

    tree: llama.cpp's source, with build/bin below it. Raises ConfigError if its tools are missing or fail.
    """
    converted = bench_cache_dir() / f"{model.name}.gguf"
    if name == BF16:
        return _written(converted, lambda file: [sys.executable, "-c", _CONVERT, str(tree), str(model), str(file)])
    program, quantized = tree / "build" / "bin" / _QUANTIZE, bench_cache_dir() / f"{model.name}-{name}.gguf"
    if not program.is_file() and not quantized.is_file():
        raise ConfigError(
            f"there is no {_QUANTIZE} in {program.parent}; build it (benchmarks/README.md has the commands)"
        )
    return _written(
        quantized,
        lambda file: [str(program), str(gguf_file(tree, model, BF16)), str(file), name],
        {**os.environ, "LD_LIBRARY_PATH": str(program.parent)},
    )


def stored_weights(file: Path | None, shape: Shape) -> StoredWeights:
    """Return the sizes of the weights in a GGUF file; None means bf16. One matrix is embedding and head."""
    if file is None:
        return StoredWeights.in_bf16(shape)
    tensors = {tensor.name: tensor.num_bytes for tensor in read_gguf_header(file).tensors}
    head = tensors.pop("output.weight", 0) or tensors["token_embd.weight"]
    del tensors["token_embd.weight"]
    experts = sum(num_bytes for name, num_bytes in tensors.items() if "_exps." in name)
    return StoredWeights(sum(tensors.values()) - experts, experts, head)


def bits_per_weight(num_bytes: int, shape: Shape) -> float:
    """Return the bits that a weight of the matrices takes, all scales included."""
    return 8 * num_bytes / (shape.num_block_parameters + shape.num_head_parameters)


def _written(file: Path, command: Callable[[Path], list[str]], environment: dict[str, str] | None = None) -> Path:
    if file.is_file():
        return file
    unfinished = file.with_suffix(".unfinished")
    done = subprocess.run(command(unfinished), capture_output=True, text=True, env=environment)
    if done.returncode:
        raise ConfigError(f"llama.cpp cannot write {file.name}: {(done.stderr or done.stdout).strip()[-400:]}")
    return unfinished.rename(file)
