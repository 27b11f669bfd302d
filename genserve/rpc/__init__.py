"""The gRPC side: servicers that convert, call and convert back. It makes no decisions.

There is one file per proto service. `convert` translates messages, `frames` translates frames of weights, `status`
translates errors. `interceptor` applies `status` to every method, and `server` composes all of this.
"""
