"""Arrays as samples: what the formats HDF5, NetCDF, Zarr, ADIOS2, NPY and NPZ share."""
