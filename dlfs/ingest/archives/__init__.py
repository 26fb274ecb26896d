"""Shared parts of the formats tar, ZIP, WebDataset and TFRecord: archives, links, file ranges."""
