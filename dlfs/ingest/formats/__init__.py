"""The formats that samples come in, a module each; ``dlfs.ingest.registry`` lists them."""
