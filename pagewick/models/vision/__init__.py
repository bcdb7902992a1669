"""Encoders that turn an image into inputs of a decoder; config, entries and positions import no torch."""
