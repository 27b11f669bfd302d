"""Settings of all tests."""

from hypothesis import settings

# No property is about time, and a machine that does something else meanwhile is no defect.
settings.register_profile("genserve", deadline=None)
settings.load_profile("genserve")
