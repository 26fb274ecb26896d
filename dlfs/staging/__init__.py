"""The staging area that ``incoming`` of a mount leads to: directories until they are sealed."""
