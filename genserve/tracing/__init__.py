"""Spans of OpenTelemetry for calls and for steps of pushes. The only place of a server that knows opentelemetry.

vLLM's --otlp-traces-endpoint turns it on. vLLM makes the exporter, in each process that has a client of the engine, and
these spans go the same way as its own.
"""
