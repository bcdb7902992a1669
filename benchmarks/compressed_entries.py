"""`python -m benchmarks.compressed_entries`: steps of a small DeepSeek V4 with native operations and by definition.

Windows, entries, streams and the size of a head are those of DeepSeek-V4-Flash. Heads, experts and layers are fewer;
weights are random and in bfloat16. Two engines decode in turns on one thread each. Times are those of the processor,
which other programs disturb least; medians of all steps.
"""

from __future__ import annotations

import json
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import click

from pagewick.cli.random_model import write_tokenizer
from pagewick.config import EngineConfig
from pagewick.engine.engine import Engine
from pagewick.engine.messages import EngineRequest
from pagewick.kernels import TABLE, cpu, set_num_threads
from pagewick.models.registry import read_config
from pagewick.models.tensor_sizes import ModelTensor
from pagewick.models.tensors import model_tensors
from pagewick.sampling_params import SamplingParams

import torch  # isort: skip  # after Pagewick, which sets how OpenMP's threads wait
from safetensors.torch import save_file  # isort: skip

CONFIG: dict[str, Any] = {
    "architectures": ["DeepseekV4ForCausalLM"], "model_type": "deepseek_v4", "vocab_size": 8192, "hidden_size": 2048,
    "num_hidden_layers": 4, "compress_ratios": [0, 4, 128, 4], "num_attention_heads": 16, "head_dim": 512,
    "q_lora_rank": 512, "o_groups": 4, "o_lora_rank": 512, "index_n_heads": 16, "index_head_dim": 128,
    "index_topk": 512, "sliding_window": 128, "qk_rope_head_dim": 64, "n_routed_experts": 16, "num_experts_per_tok": 6,
    "moe_intermediate_size": 512, "num_hash_layers": 1, "max_position_embeddings": 65536, "torch_dtype": "bfloat16",
}  # fmt: skip
# The operations that such models brought.
NEW = (
    "collapse_streams", "compress_rows", "expand_streams", "root_logits", "rotate_heads", "select_keys",
    "stream_weights", "widen", "window_attention",
)  # fmt: skip


def write_model(directory: Path, config: dict[str, Any]) -> None:
    generator = torch.Generator().manual_seed(0)

    def numbers(tensor: ModelTensor) -> Any:
        if tensor.name.endswith("tid2eid"):
            return torch.randint(config["n_routed_experts"], tensor.shape, generator=generator)
        if len(tensor.shape) == 1:
            return torch.ones(tensor.shape)
        return torch.empty(tensor.shape).normal_(0, 0.02, generator=generator).to(torch.bfloat16)

    tensors = {tensor.name: numbers(tensor) for tensor in model_tensors(read_config(config))}
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    text = config.get("text_config", config)
    end = write_tokenizer(text["vocab_size"], directory)
    written = {**text, "eos_token_id": end}
    (directory / "config.json").write_text(
        json.dumps(written if text is config else {**config, "text_config": written})
    )


@contextmanager
def by_definition(names: Sequence[str]) -> Iterator[None]:
    """Until the end of the block, the native library lacks some operations."""
    kept = {name: cpu._OPERATIONS.pop(name) for name in names}
    TABLE.choose_again()
    yield
    cpu._OPERATIONS.update(kept)
    TABLE.choose_again()


def start(directory: Path, streams: int, context: int, num_tokens: int) -> Engine:
    """Return an engine with requests whose prompts are computed."""
    engine = Engine(
        EngineConfig.from_options(
            model=str(directory), dtype="bfloat16", device="cpu", max_model_len=context + num_tokens + 1,
            max_num_seqs=streams, num_kv_blocks=streams * 4 * (-(-(context + num_tokens) // 128) + 4),
            enable_prefix_caching=False,
        )
    )  # fmt: skip
    params = SamplingParams(temperature=0, max_tokens=num_tokens, ignore_eos=True)
    for index in range(streams):
        prompt = [(index * 977 + 31 * place) % 8000 + 3 for place in range(context)]
        engine.add(EngineRequest(request_id=str(index), prompt_token_ids=prompt, params=params, seed=index))
    return engine


def milliseconds(step: Callable[[], Any], number: int) -> list[float]:
    found = []
    for _ in range(number):
        begin = time.process_time()
        step()
        found.append((time.process_time() - begin) * 1e3)
    return found


@click.command()
@click.option("--streams", default=1, show_default=True)
@click.option("--context", default=1024, show_default=True, help="tokens of each prompt")
@click.option("--rounds", default=5, show_default=True)
@click.option("--steps", default=8, show_default=True, help="steps of an engine in a round")
def main(streams: int, context: int, rounds: int, steps: int) -> None:
    """Print milliseconds of a prompt and of a step."""
    compare(CONFIG, NEW, streams, context, rounds, steps)


def compare(config: dict[str, Any], names: Sequence[str], streams: int, context: int, rounds: int, steps: int) -> None:
    """Print what main does, for a model by its config.json, with and without some native operations."""
    # The first requests get tokens while the prompts of others are computed.
    num_tokens = (rounds + 2) * steps + 64
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        write_model(directory, config)
        native = start(directory, streams, context, num_tokens)
        with by_definition(names):
            defined = start(directory, streams, context, num_tokens)
    torch.set_num_threads(1)
    set_num_threads(1)
    times: dict[str, list[float]] = {"native": [], "by definition": []}

    def prefill(engine: Engine) -> float:
        begin, answered = time.process_time(), set[str]()
        while len(answered) < streams:
            answered.update(delta.request_id for delta in engine.step())
        return (time.process_time() - begin) * 1e3

    prompt = prefill(native)
    with by_definition(names):
        prompt_defined = prefill(defined)
        milliseconds(defined.step, 3)
    milliseconds(native.step, 3)
    for _ in range(rounds):
        times["native"] += milliseconds(native.step, steps)
        with by_definition(names):
            times["by definition"] += milliseconds(defined.step, steps)
    print(f"{streams} streams, {context} tokens of context")
    print(f"prompts: {prompt:.0f} ms native, {prompt_defined:.0f} ms by definition")
    for kind, found in times.items():
        print(f"step {kind}: median {statistics.median(found):.2f} ms, least {min(found):.2f} ms")


if __name__ == "__main__":
    main()
