"""The quality of orders: measures, and a small model that is trained by them."""
