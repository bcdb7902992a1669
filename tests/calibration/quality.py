"""Measure what calibration gains on the built-in model: python -m tests.calibration.quality [GROUP ...] [--tokens N]

Prints the table of docs/decisions/0036-calibrated-quantization.md: the mean Kullback-Leibler divergence from the
unquantized model on held-out chats (tests/weights/gguf/quality.py), with the numbers that the levels stand for and
activations in float32. The calibration text is that of `pagewick convert`.
"""

from __future__ import annotations

import argparse
import shutil
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Final

import torch
from safetensors.torch import load_file, save_file

from pagewick.calibration.quantizing import quantize_layers
from pagewick.cli.converting.text import calibration_tokens
from pagewick.demo import MODEL_DIR
from pagewick.quantization.calibrated.results import LayerResult, Recipe
from pagewick.weights.opening import open_source
from tests.weights.gguf.quality import Quality, held_out_chats, predictions, quality, row

NUM_TOKENS: Final = 2500
RECIPES: Final[Mapping[str, Recipe]] = {
    "round to nearest": Recipe(method="rtn", symmetric=False),
    "GPTQ": Recipe(method="gptq", symmetric=False),
    "AWQ": Recipe(method="awq", symmetric=False),
    "AWQ, rounded to nearest": Recipe(method="awq", symmetric=False, compensation=False),
    "round to nearest, symmetric": Recipe(method="rtn"),
    "GPTQ, symmetric": Recipe(method="gptq"),
    "GPTQ, symmetric, act-order": Recipe(method="gptq", act_order=True),
}


def write(recipe: Recipe, directory: Path) -> None:
    """Write the built-in model with the numbers that its levels stand for."""
    tensors = load_file(MODEL_DIR / "model.safetensors")

    def on_layer(layer_idx: int, result: LayerResult) -> None:
        tensors.update(result.tensors)
        tensors.update({f"{linear.name}.weight": linear.dequantize() for linear in result.linears})

    token_ids = calibration_tokens(None, MODEL_DIR, recipe.num_tokens, 2048, seed=0)
    with open_source(MODEL_DIR) as source:
        quantize_layers(source, recipe, token_ids, on_layer=on_layer)
    save_file({name: tensor.float().contiguous() for name, tensor in tensors.items()}, directory / "model.safetensors")
    shutil.copy(MODEL_DIR / "config.json", directory)


def measure(recipes: Iterable[Recipe], num_tokens: int = NUM_TOKENS) -> Iterator[Quality]:
    examples = held_out_chats(num_tokens)
    expected = list(predictions(MODEL_DIR, examples, "float32"))
    for recipe in recipes:
        with tempfile.TemporaryDirectory() as name:
            write(recipe, Path(name))
            yield quality(expected, predictions(Path(name), examples, "float32"), examples)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "groups", nargs="*", type=int, default=[128, 64, 32], metavar="GROUP", help="columns of a group"
    )
    parser.add_argument("--tokens", type=int, default=NUM_TOKENS, help="tokens in the answers")
    given = parser.parse_args()
    recipes = [(name, replace(recipe, group_size=size)) for size in given.groups for name, recipe in RECIPES.items()]
    print(row("group", "recipe", "divergence", "same token"))
    print(row(*["---"] * 4), flush=True)
    for (name, recipe), found in zip(recipes, measure((one for _, one in recipes), given.tokens), strict=True):
        print(row(str(recipe.group_size), name, f"{found.divergence:.2e}", f"{found.agreement:.2%}"), flush=True)


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
