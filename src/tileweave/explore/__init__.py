"""Schedule exploration: all ranks run in one process, one step at a time, in any order that the
memory model allows.

The real Triton kernels run in Triton's interpreter, each program of each rank as a task. Every
signal, wait, and access to memory that others use is a *scheduling point*, where a strategy chooses
the next task. Stores wait in a buffer of their writer and arrive late and out of order, until a
release of that writer forces the earlier ones. Each cell of memory has vector clocks of its writers
and readers, so accesses without an order are found even if the values happen to be right.

``memory`` is the memory model, ``tasks`` the scheduler, ``ranks`` makes ranks of tasks (host,
programs, copy engines), ``interpreter`` connects them to Triton, ``strategies`` choose tasks,
``scenarios`` define what runs, ``search`` runs, shrinks and prints. ``absent`` runs scenarios whose
ranks are absent, late or paused. ``mutants`` makes faults from the syntax trees of kernels, and
``mutate`` says which of them all this finds.
"""
