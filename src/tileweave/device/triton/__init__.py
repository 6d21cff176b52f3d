"""Device functions in Triton: signals, remote memory, tiles, the matmul main loop. Read
``signal.py`` first."""
