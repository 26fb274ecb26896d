"""Ingest: samples from where they are (``formats`` lists it) into a dataset, and out again.

A source lists and reads samples; ``import_dataset`` runs one into a dataset writer;
``export_folder``, ``export_tar`` and ``export_arrow`` go the other way.
"""
