"""Integers with the semantics of the device, to run its integer functions on the host."""

from __future__ import annotations


class Int32(int):
    """An int32 of the device: it must not overflow, and must not divide negative numbers, which the
    device rounds the other way."""

    def _make(self, value: int) -> Int32:
        assert -(2**31) <= value < 2**31, "int32 overflows"
        return Int32(value)

    def __add__(self, other: int) -> Int32:
        return self._make(int(self) + int(other))

    def __sub__(self, other: int) -> Int32:
        return self._make(int(self) - int(other))

    def __mul__(self, other: int) -> Int32:
        return self._make(int(self) * int(other))

    def __rsub__(self, other: int) -> Int32:
        return self._make(int(other) - int(self))

    def __floordiv__(self, other: int) -> Int32:
        assert self >= 0, "a negative number is divided"
        assert other > 0, "a number is divided by one that is not positive"
        return self._make(int(self) // int(other))

    def __mod__(self, other: int) -> Int32:
        assert self >= 0, "a negative number is divided"
        assert other > 0, "a number is divided by one that is not positive"
        return self._make(int(self) % int(other))

    __radd__, __rmul__ = __add__, __mul__
