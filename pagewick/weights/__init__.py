"""Bytes on a disk or a hub -> named tensors -> a loaded model. Knows no concrete model.

Imports nothing here: `hub` must stay usable in a process that never imports torch.
"""
