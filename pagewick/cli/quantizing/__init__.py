"""The parts of `pagewick quantize` and `pagewick imatrix`."""
