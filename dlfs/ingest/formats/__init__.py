"""The formats that can be imported, a file or folder each; ``dlfs.ingest.registry`` lists them."""
