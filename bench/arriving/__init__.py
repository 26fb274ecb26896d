"""Training from a bucket at once: while DLFS imports it, and as peers stream it."""
