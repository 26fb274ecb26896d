"""Ingest: samples from where they are (folders, tar archives) into a dataset, and out again.

A source lists and reads samples; ``import_dataset`` runs one into a dataset writer;
``export_folder`` and ``export_tar`` go the other way.
"""
