"""Shared parts of the formats tar, WebDataset and TFRecord: archives, links, ranges of files."""
