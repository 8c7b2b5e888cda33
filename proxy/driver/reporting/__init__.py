"""What is told of requests: the log line, the journal, the gauges."""
