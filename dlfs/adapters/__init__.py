"""Adapters to training frameworks: each uses only the public API."""
