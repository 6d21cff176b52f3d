"""Kernels by family. A family's main file has the protocol as its docstring, device functions by
role, the kernel, its launcher.

``all_gather/`` | ``reduce_scatter/`` | ``all_reduce/`` | ``all_to_all/`` | ``experts/`` |
``embedding/``; ``runtime/`` launches all of them.
"""
