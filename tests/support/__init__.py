"""Devices that record, stop or fail on purpose, the scripted NVMe/TCP target, and test datasets."""
