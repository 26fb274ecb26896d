"""The format ``netcdf``: ``source`` reads by the library, ``classic`` finds files cut short."""
