"""The format ``hdf5``: ``source`` lists datasets and reads them by h5py.

``parts`` finds what a dataset lacks, and the other files that it names; ``chunks`` decodes chunks
whose filters the library does not check.
"""
