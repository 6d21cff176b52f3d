"""Memory that every rank can see, and the state an operator keeps between calls.

``base`` is the contract, ``workspace`` the bookkeeping, ``cuda`` and ``cpu`` the two kinds of
memory. What those are made of: ``rendezvous``, how ranks meet on the host; ``host_memory``, what
they share there; ``collectives``, what they agree on; ``copy_engine``, copies beside a kernel;
``ledger``, calls that do not match; ``regions``, slots that are handed out as results.
"""
