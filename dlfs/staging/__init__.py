"""The staging area behind ``incoming/`` of a mount: files until they are sealed as a dataset."""
