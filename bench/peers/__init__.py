"""DLFS and its peers: other formats and file systems that a trainer could use, side by side."""
