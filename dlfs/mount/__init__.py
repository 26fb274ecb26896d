"""The mount: a volume's datasets as files, for any program (SEMANTICS.md)."""
