"""Which program computes which tile, and in which order: pure integer maps, tested equal to their
device copies.

``gather.py``: tiles whose input comes from other ranks. ``scatter.py``: tiles whose output goes to
other ranks. ``grouped.py``: the grouped matmuls of experts.
"""
