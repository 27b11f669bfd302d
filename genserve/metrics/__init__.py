"""The series of a process for Prometheus. The only place that knows prometheus_client.

Everything is measured where it happens, as plain numbers, and read from there once for each exposition. Two things are
counted here: calls, by an interceptor of gRPC, and the lag of the event loop.
"""
