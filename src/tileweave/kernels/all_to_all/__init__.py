"""matmul_all_to_all and all_to_all_matmul. Read ``scatter_triton.py`` first.

``scatter_*.py``: a matmul whose output parts go to their ranks. ``gather_triton.py``: a matmul
whose input parts come from all ranks; the kernels of ``kernels/all_gather`` run it.
``exchange.py``: the all-to-all alone, before or after cuBLAS.
"""
