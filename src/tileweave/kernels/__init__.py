"""One file for each fused operator: the protocol as a docstring, device functions by role, kernel, launch.

A kernel gets pointers and integers; it allocates nothing and knows no process group.
"""
