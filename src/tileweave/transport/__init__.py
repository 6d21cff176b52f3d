"""Symmetric memory, and the state that an operator keeps between calls.

``interface`` is the contract, ``cuda`` and ``cpu`` are the two transports, ``workspace`` has the
state. They are built from these: ``rendezvous`` (ranks meet on the host), ``host_memory`` (shared
by the ranks of a host), ``torch_collectives`` (ranks agree before a collective), ``copy_engine``
(copies that run concurrently with a kernel), ``call_ledger`` (finds calls that do not match) and
``regions`` (slots that are lent as results). Read ``interface`` first.
"""
