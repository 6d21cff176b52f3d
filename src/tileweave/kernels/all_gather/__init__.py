"""all_gather_matmul: out[M, N/R] = gather(x)[M, K] @ w[N/R, K].T + bias, in one launch. Read
``triton.py`` first.

``triton.py`` has the protocol and the portable kernel; ``hopper.py`` the same protocol,
warp-specialised, with its partitions in ``hopper_load.py`` and ``hopper_move.py``;
``await_shards.py`` the gather that runs concurrently with other kernels.
"""
