"""Batches on JAX's devices, with JAX itself; ``test_isolated`` runs them."""

from __future__ import annotations

import jax
import numpy as np

import dlfs


def test_jax_takes_stacked_batches(make_volume):
    arrays = {f"{n:03}": np.full((4, 8), n, np.float32) for n in range(64)}
    path = make_volume(arrays={name: array.tobytes() for name, array in arrays.items()})
    with dlfs.open(str(path)) as volume, volume["arrays"] as opened:
        with opened.read([3, 60, 7]) as batch:
            on_device = jax.device_put(batch.stack(np.float32, (4, 8)))
        opened.read(range(64))
        assert on_device.shape == (3, 4, 8)
        assert on_device.sum(axis=(1, 2)).tolist() == [3 * 32, 60 * 32, 7 * 32]
