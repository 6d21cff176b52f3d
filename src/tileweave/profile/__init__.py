"""Measuring and tracing operators: the timer, the decoder of traces, the metrics and the plots."""
