"""The parts of `pagewick quantize` and `pagewick imatrix`."""

# Not for this package: torch would import numpy itself, and swallow a Ctrl-C meanwhile, with half of numpy left out.
import numpy as np  # noqa: F401
