"""Mixture of experts: tokens to their experts and a grouped matmul (``dispatch_*``), a grouped
matmul and sums per token (``combine_*``). Read ``dispatch_triton.py`` and ``combine_triton.py``
first.

``routing.py`` and ``sort.py`` make the routing plan; ``tiles.py`` says which tile covers which
rows; ``rows.py`` has local kernels on rows; ``weight_gradient_hopper.py`` the gradient of experts.
"""
