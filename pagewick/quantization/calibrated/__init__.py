"""Quantization by calibration: weights become whole numbers so that the products with a text's activations stay close.

Knows neither models nor files: pagewick/calibration runs the model, pagewick/weights writes checkpoints.
"""
