"""Measure a calibrated quantization: python -m benchmarks.calibration [METHOD ...] [--layers N] [--threads N]

Prints for each layer the seconds and the processor time, and at the end the most memory. The weights are random, of
the shape of Qwen3-0.6B, and so is the text of 4,096 tokens.
"""

from __future__ import annotations

import argparse
import json
import resource
import tempfile
import time
from pathlib import Path
from typing import Any, Final

import torch
from safetensors.torch import save_file

from pagewick import kernels
from pagewick.calibration.quantizing import quantize_layers
from pagewick.models.registry import read_config
from pagewick.models.tensors import model_tensors
from pagewick.quantization.calibrated.results import LayerResult, Recipe
from pagewick.weights.opening import open_source

# The vocabulary is smaller: no layer depends on it.
CONFIG: Final[dict[str, Any]] = {
    "architectures": ["Qwen3ForCausalLM"], "vocab_size": 4096, "hidden_size": 1024, "intermediate_size": 3072,
    "num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 128, "max_position_embeddings": 2048,
    "tie_word_embeddings": True, "torch_dtype": "bfloat16",
}  # fmt: skip
NUM_SEQUENCES, SEQUENCE_LENGTH = 8, 512


def write(directory: Path, num_layers: int) -> None:
    config = {**CONFIG, "num_hidden_layers": num_layers}
    (directory / "config.json").write_text(json.dumps(config))
    tensors = {
        tensor.name: torch.ones(tensor.shape) if tensor.role == "norm" else torch.randn(tensor.shape) / 32
        for tensor in model_tensors(read_config(config))
    }
    save_file({name: tensor.bfloat16() for name, tensor in tensors.items()}, directory / "model.safetensors")


def measure(directory: Path, method: Any) -> None:
    token_ids = torch.randint(CONFIG["vocab_size"], (NUM_SEQUENCES, SEQUENCE_LENGTH)).tolist()
    began = time.monotonic(), time.process_time()

    def on_layer(layer_idx: int, result: LayerResult) -> None:
        nonlocal began
        ended = time.monotonic(), time.process_time()
        seconds, processor = (end - begin for begin, end in zip(began, ended, strict=True))
        print(f"{method}: layer {layer_idx} took {seconds:.1f} s, {processor:.1f} s of processors", flush=True)
        began = ended

    with open_source(directory) as source:
        quantize_layers(source, Recipe(method=method, symmetric=method != "awq"), token_ids, on_layer=on_layer)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("methods", nargs="*", default=["gptq", "awq"], metavar="METHOD")
    parser.add_argument("--layers", type=int, default=28)
    parser.add_argument("--threads", type=int, default=2)
    given = parser.parse_args()
    torch.manual_seed(1)
    torch.set_num_threads(given.threads)
    kernels.set_num_threads(given.threads)
    with tempfile.TemporaryDirectory() as name:
        write(Path(name), given.layers)
        for method in given.methods:
            measure(Path(name), method)
    print(f"{resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024:.0f} MiB at most")


if __name__ == "__main__":
    main()
