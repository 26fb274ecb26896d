"""Opens volumes and datasets for reading, from devices or from a node service.

``connection`` holds what is open. ``segment_loading`` loads directories and attributes,
``placement`` has the chunks of an open dataset while they are moved, ``identity`` says which
version of which dataset is meant, and ``previous_version`` loads the samples that an appended
version takes over.
"""
