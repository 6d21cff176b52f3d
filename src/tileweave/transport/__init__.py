"""Memory that every rank can see, and the state an operator keeps between calls.

``base`` is the contract, ``workspace`` the bookkeeping, ``cuda`` and ``cpu`` the two kinds of memory.
"""
