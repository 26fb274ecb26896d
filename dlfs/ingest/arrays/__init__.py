"""Shared parts of the array formats HDF5, NetCDF, Zarr, ADIOS2, NPY and NPZ."""
