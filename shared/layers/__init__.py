"""Layers around the kernels: rotary angles, token embedding and output matrix."""
