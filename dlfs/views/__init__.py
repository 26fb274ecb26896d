"""Several datasets, or some of their samples, read as one.

- ``sources``: the datasets of a view, and the numbers of their samples in it;
- ``order``: the order of an epoch, computed from a few numbers;
- ``reading``: reads the sources of an epoch ahead and merges their batches;
- ``view``: ``DatasetView``, with the methods of ``Dataset`` that training needs;
- ``making``: the functions that make views;
- ``lists``: reads lists of samples ahead, for epochs that compute their own batches;
- ``lengths``: batches of samples of similar lengths; ``tokens``: documents packed into sequences.
"""

from dlfs.views.lengths import length_batches
from dlfs.views.making import concat, mix, select, split
from dlfs.views.tokens import TokenBatch, TokenSequences, token_batches
from dlfs.views.view import DatasetView

__all__ = [
    "DatasetView",
    "TokenBatch",
    "TokenSequences",
    "concat",
    "length_batches",
    "mix",
    "select",
    "split",
    "token_batches",
]
