"""Runs a model layer by layer over a text, and quantizes each layer by the inputs that its weights get there."""
