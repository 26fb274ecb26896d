"""The checks, by what they read: kernel, mounting, memory, limits, network, identity, targets."""
