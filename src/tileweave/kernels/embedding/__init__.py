"""embedding_bag_all_to_all: pooled lookups stored at the owners of the samples. Read
``bag_all_to_all.py`` first.

``lookup.py``: the same lookup on one rank. ``gradient.py`` and ``table_sums.py``: the backward.
``jagged.py``: redistribution of jagged indices.
"""
