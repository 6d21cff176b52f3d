"""Schedule exploration: every rank of a world in one process, one step at a time, in any order that
memory allows.

The real Triton kernels run in Triton's interpreter, each program of each rank as a task of its own.
Every signal, wait, store to and load from memory that others see is a *scheduling point*: there a
strategy says who goes next. Stores wait in a buffer of their writer and arrive late and out of
order, until a release of that writer forces what precedes it. Each cell of memory remembers who
wrote and who read it, in vector clocks, so that an access that nothing orders is found even where
the numbers happen to be right.

``memory`` is the model, ``tasks`` the scheduler, ``ranks`` makes ranks out of tasks (host,
programs, copy engine), ``interpreter`` puts all that under Triton, ``strategies`` decide,
``scenarios`` say what to run, ``search`` runs, shrinks and prints.
"""
