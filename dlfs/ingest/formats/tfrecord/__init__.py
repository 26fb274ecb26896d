"""The format ``tfrecord``: ``source`` reads the records, ``example`` their tf.train.Examples."""
