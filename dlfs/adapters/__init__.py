"""Adapters to training frameworks and file interfaces, on top of the public API."""
