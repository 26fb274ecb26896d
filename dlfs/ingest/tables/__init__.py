"""Reads tables as samples or attributes: Arrow and Parquet files, CSV and TSV."""
