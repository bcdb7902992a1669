"""`python -m benchmarks.mtp`: what draft tokens of a model's own layer (--speculative-method mtp) gain and cost.

One greedy stream on a random-weight model with the tensors of GLM-4.5 at a smaller size. Its layers add nothing to
the hidden states, although all of their weights are multiplied, so the next token depends on the last one alone. The
predicting layer then is always right if it passes on the embedding of the next token, and always wrong if it passes on
its opposite. Engines with and without the layer run in turn, in one process.
"""

from __future__ import annotations

import json
import statistics
from pathlib import Path
from random import Random
from typing import Any, Final

import click
import torch
from safetensors.torch import save_file

from benchmarks.speculation import NUM_PROMPT_TOKENS, generate
from pagewick.cli.random_model import bench_cache_dir
from pagewick.config import EngineConfig
from pagewick.devices import num_cores
from pagewick.engine.engine import Engine
from pagewick.models.mtp_offers import with_mtp
from pagewick.models.registry import read_config
from pagewick.models.tensors import model_tensors

_CONFIG: Final[dict[str, Any]] = {
    "architectures": ["Glm4MoeForCausalLM"], "model_type": "glm4_moe", "torch_dtype": "bfloat16", "vocab_size": 32768,
    "hidden_size": 1024, "intermediate_size": 4096, "moe_intermediate_size": 512, "num_hidden_layers": 24,
    "num_attention_heads": 16, "num_key_value_heads": 4, "head_dim": 64, "n_routed_experts": 16,
    "num_experts_per_tok": 2, "n_shared_experts": 1, "first_k_dense_replace": 1, "num_nextn_predict_layers": 1,
    "max_position_embeddings": 4096, "eos_token_id": 0,
}  # fmt: skip
_FC: Final = f"model.layers.{_CONFIG['num_hidden_layers']}.eh_proj.weight"


def checkpoint(*, is_right: bool) -> Path:
    """Return the directory of the model whose layer is always right, or always wrong; write it if it is missing."""
    directory = bench_cache_dir() / f"mtp-{'right' if is_right else 'wrong'}"
    if (directory / "config.json").exists():
        return directory
    directory.mkdir(parents=True, exist_ok=True)
    random = torch.Generator().manual_seed(3)
    tensors = {}
    for tensor in model_tensors(with_mtp(read_config(_CONFIG), [_FC])):
        if tensor.role == "norm":
            made = torch.ones(tensor.shape)
        elif tensor.name.endswith(("o_proj.weight", "down_proj.weight", "e_score_correction_bias")):
            made = torch.zeros(tensor.shape)
        elif tensor.name == _FC:
            made = torch.zeros(tensor.shape)
            made[:, : tensor.shape[0]] = torch.eye(tensor.shape[0]) * (1 if is_right else -1)
        else:
            made = torch.randn(tensor.shape, generator=random) * 0.02
        tensors[tensor.name] = made.to(torch.bfloat16)
    save_file(tensors, directory / "model.safetensors", {"format": "pt"})
    (directory / "config.json").write_text(json.dumps(_CONFIG), encoding="utf-8")
    return directory


@click.command()
@click.option("--tokens", type=click.IntRange(8), default=192, show_default=True)
@click.option("--repeats", type=click.IntRange(1), default=5, show_default=True)
@click.option("--threads", type=click.IntRange(1), default=num_cores())
def main(tokens: int, repeats: int, threads: int) -> None:
    """Measure a stream without the layer, beside one to three draft tokens that are right, and some that are wrong."""
    prompt = [Random(7).randrange(_CONFIG["vocab_size"]) for _ in range(NUM_PROMPT_TOKENS)]
    for is_right, num_drafts in ((True, 1), (True, 2), (True, 3), (False, 2)):
        config: dict[str, Any] = {
            "model": str(checkpoint(is_right=is_right)), "device": "cpu", "dtype": "bfloat16", "num_threads": threads,
            "max_model_len": 2048, "max_num_seqs": 4, "num_speculative_tokens": num_drafts,
            "enable_prefix_caching": False, "kv_cache_memory": 2**28,
        }  # fmt: skip
        plain = Engine(EngineConfig(**config))
        predicting = Engine(EngineConfig(**config, speculative_method="mtp"))
        pairs = [(generate(plain, prompt, tokens), generate(predicting, prompt, tokens)) for _ in range(repeats + 1)][
            1:
        ]
        plain.close()
        predicting.close()
        ratios = [without.seconds / drafted.seconds for without, drafted in pairs]
        before, after = (statistics.median(pair[place].step_ms for pair in pairs) for place in (0, 1))
        last = pairs[-1][1]
        assert last.token_ids == pairs[-1][0].token_ids, "draft tokens have changed the text"
        click.echo(
            f"{num_drafts} draft tokens, always {'right' if is_right else 'wrong'}: {statistics.median(ratios):.2f} x "
            f"tokens/s (from {min(ratios):.2f} to {max(ratios):.2f}); step {before:.1f} -> {after:.1f} ms, "
            f"{last.num_accepted} of {last.num_drafted} draft tokens accepted"
        )


if __name__ == "__main__":
    main()
