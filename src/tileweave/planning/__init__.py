"""Which path, kernel and tiles a call gets: integers only, no torch, no triton.

``problem.py`` defines problems, configs and plans. ``matmul.py`` plans the matmul operators,
``combine.py`` and ``schedules/grouped.py`` the expert operators, ``sharding.py`` the embedding
operators. ``candidates.py`` lists what can run a matmul, ``planner.py`` chooses by the times in
``measured/``; ``stored.py`` checks configs in files. ``schedules/`` has the integer maps that host,
kernels, tests and simulator share. Read ``problem.py`` and ``matmul.py`` first, then
``schedules/gather.py``.
"""
