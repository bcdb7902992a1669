"""Repack an AWQ model, or a GPTQ model, for Marlin kernels. Its numbers stay the same.

    python3 examples/convert_awq_marlin.py --src ./Llama-AWQ --dst ./Llama-AWQ-Marlin --bits 4 --method awq --group 128

Pagewick itself runs AWQ models as they are: this is for candle-vllm, which reads zero points in the kernels' order.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from pagewick.cli.convert import write_checkpoint
from pagewick.cli.converting.conversion import Conversion
from pagewick.errors import ConfigError, PagewickError
from pagewick.weights.hub import resolve_model
from pagewick.weights.packed.config import quant_method, read_config


def main() -> None:
    parser = argparse.ArgumentParser(description="Repack an AWQ or GPTQ model for Marlin kernels.")
    parser.add_argument("--src", required=True, help="the AWQ or GPTQ model: a directory, or an id on a hub")
    parser.add_argument("--dst", type=Path, required=True, help="the directory to write")
    parser.add_argument("--bits", type=int, help="size of a weight; the model must have it")
    parser.add_argument("--method", choices=["awq", "gptq"], default="awq", help="the model's format")
    parser.add_argument("--group", type=int, help="columns that share a scale; the model must have it")
    parser.add_argument("--nk", help="without effect: a format has one order of weights")
    given = parser.parse_args()
    try:
        check_method(given.src, given.method)
        typed = {name: f"--{name}" for name in ("bits", "group") if getattr(given, name) is not None}
        wanted = Conversion(to="marlin", bits=given.bits, group_size=given.group, typed=typed)
        write_checkpoint(given.src, given.dst, wanted)
    except PagewickError as error:
        sys.exit(f"error: {error}")


def check_method(model: str, method: str) -> None:
    """Raise ConfigError unless a model is quantized with this method."""
    path = resolve_model(model)
    found = quant_method(read_config(path)) if path.is_dir() else ""
    if found != method:
        fix = f"give --method {found}" if found else f"quantize it first: pagewick convert {model} DST --to {method}"
        raise ConfigError(f"{model} is {found.upper() or 'not quantized'}, and --method is {method}\n  {fix}")


if __name__ == "__main__":
    main()
