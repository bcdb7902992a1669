"""`python -m benchmarks.adapters`: requests with a LoRA adapter beside requests without, in one interleaved run.

One engine of random weights has an adapter of random factors for every linear layer. A round is a prompt, a decode of
one stream and one of 16 streams, each without the adapter and with it. Printed are the medians of the rounds' rates and
ratios, so that other work on the machine changes them little.

An adapter of rank r adds r * (inputs + outputs) multiplications for each token to the inputs * outputs of a weight, in
two products more; a decode reads as many numbers more.
"""

from __future__ import annotations

import json
import statistics
import tempfile
import time
from pathlib import Path
from random import Random
from typing import Any

import click

from pagewick import LLM, LoRARequest, SamplingParams
from pagewick.cli.random_model import SHAPES, Shape, cached_random_model, tensor_shapes

NUM_PROMPT_TOKENS, NUM_STREAMS = 512, 16
NUM_NEW_TOKENS = {1: 64, NUM_STREAMS: 24}


def write_adapter(directory: Path, shape: Shape, rank: int) -> None:
    """Write an adapter of PEFT's form for all projections of attention and MLPs."""
    # Here, so that pagewick is imported before torch and can set up its threads.
    import torch
    from safetensors.torch import save_file

    generator = torch.Generator().manual_seed(0)
    tensors = {}
    for name, size in tensor_shapes(shape).items():
        if name.endswith("_proj.weight") and ".experts." not in name:
            for factor, sizes in (("A", (rank, size[1])), ("B", (size[0], rank))):
                place = f"base_model.model.{name.removesuffix('.weight')}.lora_{factor}.weight"
                tensors[place] = torch.randn(sizes, generator=generator) / 100
    save_file(tensors, directory / "adapter_model.safetensors")
    (directory / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA", "r": rank, "lora_alpha": rank}))


def seconds(llm: LLM, adapter: LoRARequest | None, num_prompts: int, num_tokens: int, max_tokens: int) -> float:
    random = Random(num_tokens)
    prompts = [[random.randrange(5, 1000) for _ in range(num_tokens)] for _ in range(num_prompts)]
    params = SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True)
    started = time.perf_counter()
    llm.generate(prompts, params, lora_request=adapter)
    return time.perf_counter() - started


@click.command()
@click.option("--shape", "name", type=click.Choice(list(SHAPES)), default="qwen3-0.6b", show_default=True)
@click.option("--rank", default=16, show_default=True, help="Rank of the adapter.")
@click.option("--dtype", default="bfloat16", show_default=True)
@click.option("--quantization", default=None, help="Quantize the weights at load, for example q8_0.")
@click.option("--rounds", default=7, show_default=True)
def main(name: str, rank: int, dtype: str, quantization: str | None, rounds: int) -> None:
    """Print tokens per second without and with the adapter, and their ratio."""
    kinds = {f"prompt of {NUM_PROMPT_TOKENS}": (1, NUM_PROMPT_TOKENS, 1), "one stream": (1, 8, NUM_NEW_TOKENS[1])}
    kinds[f"{NUM_STREAMS} streams"] = (NUM_STREAMS, 8, NUM_NEW_TOKENS[NUM_STREAMS])
    with tempfile.TemporaryDirectory() as directory:
        write_adapter(Path(directory), SHAPES[name], rank)
        options: dict[str, Any] = {"dtype": dtype, "quantization": quantization, "enable_prefix_caching": False}
        options |= {"max_model_len": 1024, "max_lora_rank": rank}
        with LLM(cached_random_model(name), **options, lora_modules={"adapter": directory}) as llm:
            adapter = LoRARequest("adapter")
            for one in (None, adapter):
                for sizes in kinds.values():
                    seconds(llm, one, *sizes)
            found = {
                kind: [(seconds(llm, None, *sizes), seconds(llm, adapter, *sizes)) for _ in range(rounds)]
                for kind, sizes in kinds.items()
            }
    print(f"{name} in {quantization or dtype}, rank {rank}    tokens/s   with the adapter   times")
    for kind, pairs in found.items():
        num_streams, num_prompt, num_new = kinds[kind]
        num_tokens = num_prompt if num_new == 1 else num_streams * num_new
        rates = [num_tokens / statistics.median(column) for column in zip(*pairs, strict=True)]
        ratio = statistics.median(without / with_it for without, with_it in pairs)
        print(f"{kind:32}{rates[0]:12.1f}{rates[1]:19.1f}{ratio:8.2f}")


if __name__ == "__main__":
    main()
