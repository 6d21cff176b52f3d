"""Device functions under Triton's interpreter.

``words.py`` has bodies in plain Python; ``speedups.py`` and ``operators.py`` make Triton's
interpreter faster.
"""
