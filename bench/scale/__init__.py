"""Imports of very many small samples: memory and time a sample at each size."""
