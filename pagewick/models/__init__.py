"""Architectures. They never mention a file format, a quantization or a device."""
