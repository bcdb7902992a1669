"""Quantize a model to weights of 4 bits that Marlin kernels can read: GPTQ, symmetric, in groups, without act-order.

python3 examples/convert_marlin.py --src ./Qwen3-0.6B --dst ./Qwen3-0.6B-GPTQ
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from pagewick.cli.convert import write_checkpoint
from pagewick.cli.converting.conversion import Conversion
from pagewick.errors import PagewickError


def main() -> None:
    parser = argparse.ArgumentParser(description="Quantize a model to 4-bit weights.")
    parser.add_argument("--src", required=True, help="the unquantized model: a directory, or an id on a hub")
    parser.add_argument("--dst", type=Path, required=True, help="the directory to write")
    parser.add_argument("--bits", type=int, help="size of a weight: 4 for Marlin kernels")
    parser.add_argument("--method", choices=["gptq", "awq"], default="gptq", help="the format to write")
    parser.add_argument("--group", type=int, help="columns that share a scale: 128, or -1 for all")
    parser.add_argument("--nk", help="without effect: a format has one order of weights")
    parser.add_argument("--text", type=Path, help="a text to calibrate on, instead of the built-in one")
    given = parser.parse_args()
    typed = {name: f"--{name}" for name in ("bits", "group", "text") if getattr(given, name) is not None}
    wanted = Conversion(to=given.method, bits=given.bits, group_size=given.group, text=given.text, typed=typed)
    try:
        write_checkpoint(given.src, given.dst, wanted)
    except PagewickError as error:
        sys.exit(f"error: {error}")


if __name__ == "__main__":
    main()
