"""How well orders shuffle: measures of orders, and a small model trained by them."""
