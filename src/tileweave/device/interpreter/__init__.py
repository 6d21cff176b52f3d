"""Device functions under Triton's interpreter.

``words.py`` has bodies in plain Python; ``speedups.py`` makes Triton's interpreter faster.
"""
