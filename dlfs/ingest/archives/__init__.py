"""Archives read member by member: what the formats tar, WebDataset and TFRecord share."""
