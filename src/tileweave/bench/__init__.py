"""The benches: named cases x operators x rivals, correctness first, then time.

Needs ``tileweave[cli]``, and ``tileweave[plot]`` for plots.
"""
