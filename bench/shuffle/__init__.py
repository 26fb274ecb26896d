"""How well orders shuffle: ``python -m bench.shuffle`` measures them, and trains by them."""
