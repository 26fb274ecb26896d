"""The cases of ``python -m bench``: DLFS, plain files and the limits of the machine."""
