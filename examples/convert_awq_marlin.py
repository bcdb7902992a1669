"""Answer to a converter of AWQ models for the Marlin kernels: Pagewick reads AWQ models as they are."""

from __future__ import annotations

import argparse
import sys


def main() -> None:
    parser = argparse.ArgumentParser(description="Say how an AWQ model is served.")
    parser.add_argument("--src", required=True, help="directory of the model")
    parser.add_argument("--dst", required=True, help="not used")
    for flag in ("--bits", "--method", "--group", "--nk"):
        parser.add_argument(flag, help="not used")
    arguments = parser.parse_args()
    sys.exit(f"error: there is nothing to convert, AWQ models run as they are: pagewick serve {arguments.src}")


if __name__ == "__main__":
    main()
