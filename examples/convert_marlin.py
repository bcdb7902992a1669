"""Convert an unquantized model to 4-bit GPTQ weights. Pagewick cannot do this yet, and says so."""

from __future__ import annotations

import argparse
import sys


def main() -> None:
    parser = argparse.ArgumentParser(description="Convert a model to 4-bit weights.")
    parser.add_argument("--src", required=True, help="directory of the model")
    parser.add_argument("--dst", required=True, help="directory to write")
    parser.add_argument("--bits", type=int, default=4)
    parser.add_argument("--method", choices=["awq", "gptq"], default="gptq")
    parser.add_argument("--group", type=int, default=128)
    parser.add_argument("--nk", help="whether the source's weights are stored as [n, k]")
    arguments = parser.parse_args()
    fix = f"serve the unquantized model: pagewick serve {arguments.src}"
    sys.exit(f"error: checkpoints cannot be quantized yet; {fix}")


if __name__ == "__main__":
    main()
