"""Schedules: which program computes which tile, and in which order.

They are pure integer maps and are tested equal to their copies in device code.

``gather.py``: tiles whose input comes from other ranks. ``scatter.py``: tiles whose output goes to
other ranks. ``grouped.py``: the grouped matmuls of experts.
"""
