"""`python -m benchmarks.hybrids NAME`: a model with states beside llama.cpp, in the same rounds.

Such models have no Shape, so benchmarks.peers does not know them. NAME is one of SHAPES, the config.json of a published
model; its weights are random and the same for both, in the format that is compared. Both are servers, which get one
request with the ids of a prompt after the other, or 16 at once, and no prompt twice.
"""

from __future__ import annotations

import json
import os
import statistics
import tempfile
import time
import urllib.request
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from random import Random
from typing import Any

import click

from benchmarks.peer_llama_cpp import VARIABLE
from benchmarks.server_process import ServerProcess, free_port
from benchmarks.weight_files import BF16, FORMATS, gguf_file
from pagewick.cli.random_model import bench_cache_dir, write_tokenizer
from pagewick.devices import num_cores
from pagewick.models.registry import read_config
from pagewick.models.tensor_sizes import ModelTensor
from pagewick.models.tensors import model_tensors

_GRANITE: dict[str, Any] = {
    "architectures": ["GraniteMoeHybridForCausalLM"], "attention_multiplier": 0.0078125, "embedding_multiplier": 12,
    "hidden_act": "silu", "hidden_size": 1536, "intermediate_size": 4096, "logits_scaling": 6,
    "layer_types": ["attention" if layer_idx in (5, 15, 25, 35) else "mamba" for layer_idx in range(40)],
    "mamba_conv_bias": True, "mamba_d_conv": 4, "mamba_d_head": 64, "mamba_d_state": 128, "mamba_expand": 2,
    "mamba_n_groups": 1, "mamba_n_heads": 48, "mamba_proj_bias": False, "mamba_chunk_size": 256,
    "max_position_embeddings": 131072, "model_type": "granitemoehybrid", "num_attention_heads": 12,
    "num_experts_per_tok": 0, "num_hidden_layers": 40, "num_key_value_heads": 4, "num_local_experts": 0,
    "position_embedding_type": "nope", "residual_multiplier": 0.22, "rms_norm_eps": 1e-5, "rope_theta": 10000,
    "shared_intermediate_size": 4096, "tie_word_embeddings": True, "torch_dtype": "bfloat16", "vocab_size": 100352,
}  # fmt: skip
_LFM2: dict[str, Any] = {
    "architectures": ["Lfm2ForCausalLM"], "block_auto_adjust_ff_dim": True, "block_ff_dim": 12288,
    "block_ffn_dim_multiplier": 1.0, "block_multiple_of": 256, "conv_L_cache": 3, "conv_bias": False,
    "hidden_size": 2048, "intermediate_size": 12288, "max_position_embeddings": 128000, "model_type": "lfm2",
    "layer_types": ["full_attention" if layer_idx in (2, 5, 8, 10, 12, 14) else "conv" for layer_idx in range(16)],
    "norm_eps": 1e-5, "num_attention_heads": 32, "num_hidden_layers": 16, "num_key_value_heads": 8,
    "rope_theta": 1000000.0, "tie_embedding": True, "torch_dtype": "bfloat16", "vocab_size": 65536,
}  # fmt: skip
SHAPES = {"lfm2-1.2b": _LFM2, "granite-4.0-h-1b": _GRANITE}
# Name -> (tokens of a prompt, tokens of its response, requests at once).
MEASUREMENTS = {
    "prompt of 512": (512, 1, 1),
    "prompt of 2,048": (2048, 1, 1),
    "1 stream": (16, 128, 1),
    "16 streams": (16, 64, 16),
}
Ask = Callable[[list[int], int], None]


def random_checkpoint(name: str) -> Path:
    """Return the directory of a model with random weights, written if it is missing."""
    import torch
    from safetensors.torch import save_file

    directory = bench_cache_dir() / f"{name}-random"
    if (directory / "config.json").is_file():
        return directory
    directory.mkdir(parents=True, exist_ok=True)
    generator = torch.Generator().manual_seed(0)

    def numbers(tensor: ModelTensor) -> Any:
        """States decay as those of trained models do: log_decay is that of Mamba's authors, and steps are small."""
        if tensor.name.endswith("A_log"):
            values = torch.arange(1, tensor.num_elements + 1).log()
        elif tensor.name.endswith("dt_bias"):
            values = torch.full(tensor.shape, -4.0)
        elif len(tensor.shape) == 1:
            values = torch.ones(tensor.shape)
        else:
            values = torch.empty(tensor.shape).normal_(0, 0.02 if len(tensor.shape) == 2 else 0.3, generator=generator)
        return values.to(torch.bfloat16)

    tensors = {tensor.name: numbers(tensor) for tensor in model_tensors(read_config(SHAPES[name]))}
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    end = write_tokenizer(SHAPES[name]["vocab_size"], directory)
    (directory / "config.json").write_text(json.dumps({**SHAPES[name], "eos_token_id": end}, indent=2))
    return directory


def over_http(url: str, fields: Mapping[str, Any]) -> Ask:
    """Return what asks a server for a response of a number of tokens to a prompt of ids."""

    def ask(prompt: list[int], num_tokens: int) -> None:
        wanted = {"prompt": prompt, "max_tokens": num_tokens, "temperature": 0, "ignore_eos": True}
        body = json.dumps({"model": "m", **wanted, **fields}).encode()
        request = urllib.request.Request(f"{url}/completions", body, {"content-type": "application/json"})
        with urllib.request.urlopen(request) as response:
            usage = json.load(response)["usage"]
        if (usage["prompt_tokens"], usage["completion_tokens"]) != (len(prompt), num_tokens):
            raise click.ClickException(f"asked for {len(prompt)} + {num_tokens} tokens, the server counts {usage}")

    return ask


def measure(ask: Ask, name: str, seed: int) -> float:
    """Return tokens per second: of the prompt where the response has one token, else of the responses."""
    length, num_tokens, at_once = MEASUREMENTS[name]
    random = Random(f"{name} {seed}")
    prompts = [[random.randrange(300, 6000) for _ in range(length)] for _ in range(at_once)]
    with ThreadPoolExecutor(at_once) as pool:
        started = time.perf_counter()
        list(pool.map(lambda prompt: ask(prompt, num_tokens), prompts))
        seconds = time.perf_counter() - started
    return at_once * (length if num_tokens == 1 else num_tokens) / seconds


@click.command()
@click.argument("name", type=click.Choice(list(SHAPES)))
@click.option("--weights", type=click.Choice(FORMATS), default=BF16, show_default=True)
@click.option("--rounds", default=7, show_default=True)
def main(name: str, weights: str, rounds: int) -> None:
    """Print tokens per second, median (range) of the rounds, and the median of their ratios."""
    threads, tree, model = str(num_cores()), Path(os.environ[VARIABLE]), random_checkpoint(name)
    gguf = gguf_file(tree, model, weights)
    with ExitStack() as cleanup, tempfile.TemporaryDirectory() as logs:
        port = free_port()
        ours = ["pagewick", "serve", str(model if weights == BF16 else gguf), "--max-model-len", "4096"]
        ours += ["--port", str(port), "--served-model-name", "m", "--no-enable-prefix-caching"]
        server = ServerProcess(ours, port, Path(logs) / "pagewick", model="m")
        cleanup.callback(server.stop)
        program, port = tree / "build" / "bin" / "llama-server", free_port()
        theirs = [str(program), "-m", str(gguf), "-t", threads, "-tb", threads, "-c", str(16 * 2560), "-np", "16"]
        theirs += ["-b", "2048", "-ub", "512", "--port", str(port), "--no-ui"]
        paths = {"LD_LIBRARY_PATH": str(program.parent)}
        peer = ServerProcess(theirs, port, Path(logs) / "llama", model="m", environment=paths)
        cleanup.callback(peer.stop)
        engines = {"Pagewick": over_http(server.url, {}), "llama.cpp": over_http(peer.url, {"cache_prompt": False})}
        rates: dict[tuple[str, str], list[float]] = {}
        for index in range(rounds + 1):
            for measurement in MEASUREMENTS:
                for engine in sorted(engines, reverse=index % 2 == 1):
                    time.sleep(0.5)
                    rate = measure(engines[engine], measurement, index)
                    if index:
                        rates.setdefault((measurement, engine), []).append(rate)
    for measurement in MEASUREMENTS:
        parts = []
        for engine in engines:
            found = rates[measurement, engine]
            parts.append(f"{engine} {statistics.median(found):,.1f} ({min(found):,.1f}-{max(found):,.1f})")
        pairs = zip(rates[measurement, "Pagewick"], rates[measurement, "llama.cpp"], strict=True)
        ratio = statistics.median(one / other for one, other in pairs)
        click.echo(f"{measurement}: {', '.join(parts)} tokens/s, {ratio:.2f} x")


if __name__ == "__main__":
    main()
