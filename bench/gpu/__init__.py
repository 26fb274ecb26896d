"""Samples into the memory of a GPU, and the time that a training waits for them."""
