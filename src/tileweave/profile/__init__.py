"""Looking at what operators do: one timer, one trace decoder, the metrics."""
