"""A worker extension that fails as ordered, and forgets at a sleep what a GPU does."""

import os

from tests.engine.forgetful_worker import ForgetfulExtension
from tests.faults.faulty_worker import FAULTS_VARIABLE

FORGETFUL_EXTENSION = "tests.faults.forgetful_worker.ForgetfulFaultyExtension"

if FAULTS_VARIABLE in os.environ:  # tests import this module too, where no worker is
    from tests.faults.faulty_worker import FaultyExtension

    class ForgetfulFaultyExtension(ForgetfulExtension, FaultyExtension):
        """Both."""
