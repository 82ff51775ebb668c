"""Quantised checkpoints. In: config.json, packed tensors. Out: formats that read and write them. Never builds a model."""
