"""Trains the built-in model. Not part of the wheel: `training/README.md` says how to train again."""
