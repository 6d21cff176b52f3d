"""Which path, kernel and tiles a call gets: integers only, no torch, no triton.

``matmul.py`` has problems, plans and the planners of the matmul operators; ``schedules/`` the
integer maps that hosts, kernels, tests and the simulator share; ``tables/`` the measured
configurations. Read ``matmul.py`` first, then ``schedules/gather.py``.
"""
