"""The console of the commands, and their progress: a bar on a terminal, lines elsewhere."""

from __future__ import annotations

import time
from types import TracebackType

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    SpinnerColumn,
    TextColumn,
    TimeElapsedColumn,
)

from tileweave.launcher import is_main_process

_WIDTH_OF_A_FILE = 190
_SILENCE = 10.0  # at most so many seconds between two lines in a file


def console() -> Console:
    """A console on stdout; without a terminal, wide enough that tables keep their columns.

    Silent on other ranks of torchrun, so that output of a command appears once.
    """
    quiet = not is_main_process()
    made = Console(highlight=False, quiet=quiet)
    return (
        made if made.is_terminal else Console(highlight=False, width=_WIDTH_OF_A_FILE, quiet=quiet)
    )


class Steps:
    """Progress over ``total`` steps of a command, on rank 0; silent elsewhere.

    >>> with Steps("bench", 3, show=rank == 0) as steps:
    ...     steps.now("llama70b-qkv"); steps.detail("warms up"); steps.done("124 us")
    """

    def __init__(self, title: str, total: int, show: bool) -> None:
        self.total, self._finished, self._name = total, 0, ""
        self._console = console() if show else None
        self._started = self._said = time.monotonic()
        self._bar: Progress | None = None
        if self._console is not None and self._console.is_terminal:
            self._bar = Progress(
                SpinnerColumn(),
                TextColumn("[bold]{task.fields[title]}"),
                BarColumn(24),
                MofNCompleteColumn(),
                TimeElapsedColumn(),
                TextColumn("{task.description}"),
                console=self._console,
                transient=True,
            )
            self._task = self._bar.add_task("", total=total, title=title)

    def __enter__(self) -> Steps:
        if self._bar is not None:
            self._bar.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._bar is not None:
            self._bar.stop()

    def now(self, name: str) -> None:
        """Begin a step."""
        self._name = name
        self.detail("")

    def detail(self, text: str) -> None:
        """Show what the step is doing."""
        if self._bar is not None:
            self._bar.update(self._task, description=f"{self._name}  [dim]{text}")
        elif text and time.monotonic() - self._said > _SILENCE:
            self._line(self._finished + 1, text)

    def done(self, outcome: str) -> None:
        """End the step with one line about its outcome."""
        self._finished += 1
        self._line(self._finished, outcome)
        if self._bar is not None:
            self._bar.update(self._task, completed=self._finished)

    def _line(self, step: int, text: str) -> None:
        if self._console is None:
            return
        self._said = time.monotonic()
        elapsed, width = self._said - self._started, len(str(self.total))
        self._console.print(
            f"[dim]{elapsed:6.1f} s  {step:{width}}/{self.total}[/]  {self._name}  {text}",
            soft_wrap=True,
        )
