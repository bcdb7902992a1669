"""Describes this machine, and how a model would run on it, without loading the model."""
