"""The parts of `pagewick convert`."""
