"""Tables as samples and as attributes: Arrow and Parquet files, CSV and TSV."""
