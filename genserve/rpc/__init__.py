"""The gRPC side: servicers that convert, call and convert back. It makes no decisions.

A file per proto service; `convert` translates messages, `frames` reads and writes those of weights, `status` translates
errors; `interceptor` applies the latter to every method, `server` puts it together.
"""
