"""Compute logits with transformers, and with the package that it asks for to read the checkpoint.

Runs in another environment, which has no Pagewick: python read_with_transformers.py DIRECTORY PROMPTS LOGITS

PROMPTS is a JSON file with lists of token ids, LOGITS a safetensors file that is written: logits [T, vocabulary] of all
tokens. Prints the versions, and the class that multiplies the first packed weight.
"""

from __future__ import annotations

import json
import sys
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch
import transformers
from safetensors.torch import save_file


def version_of(package: str) -> str:
    try:
        return f"{package} {version(package)}"
    except PackageNotFoundError:
        return ""


def main(directory: str, prompts: str, logits: str) -> None:
    torch.set_num_threads(1)
    rules = transformers.AutoConfig.from_pretrained(directory).quantization_config
    # Kernels in PyTorch: gptqmodel would compile others at the first use.
    is_gptq = rules["quant_method"] == "gptq"
    kind: Any = transformers.GPTQConfig if is_gptq else transformers.AwqConfig
    chosen = kind(bits=rules["bits"], backend="torch" if is_gptq else "torch_awq")
    model: Any = transformers.AutoModelForCausalLM.from_pretrained(
        directory, dtype=torch.float32, device_map="cpu", quantization_config=chosen
    )
    model.eval()
    with open(prompts) as file, torch.inference_mode():
        found = [model(torch.tensor([token_ids])).logits[0].float() for token_ids in json.load(file)]
    save_file({"logits": torch.cat(found)}, logits)
    kernel = type(model.model.layers[0].mlp.down_proj)
    packages = ("torch", "transformers", "gptqmodel", "optimum", "auto-round", "autoawq")
    print(f"{kernel.__name__}; {', '.join(filter(None, map(version_of, packages)))}")


if __name__ == "__main__":
    main(*sys.argv[1:])
