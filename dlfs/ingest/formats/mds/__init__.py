"""The format ``mds``: ``source`` reads the shards, ``values`` decodes their columns."""
