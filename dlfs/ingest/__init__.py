"""Ingest: imports samples of many formats into a dataset, and exports a dataset.

``registry`` lists the formats. A ``Source`` lists and reads the samples of one format;
``importer.import_dataset`` writes them with a dataset writer. ``export`` goes the other way.
"""
