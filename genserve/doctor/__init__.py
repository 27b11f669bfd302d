"""`genserve doctor`: checks a machine, and a daemon on it that takes pushes.

Facts and their interpretation are separate: the modules of verdicts and `room` are pure, the others measure.
"""
