"""`genserve doctor`: checks of a machine, and of a daemon on it that is pushed to.

What is found is told apart from what it means: `…_verdicts` and `room` are pure, the others look and measure.
"""
