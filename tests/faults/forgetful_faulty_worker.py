"""A worker extension that fails as ordered, and forgets at a sleep what a GPU does."""

import os

from tests.support.faulty_worker import FAULTS_VARIABLE

FORGETFUL_FAULTY_EXTENSION = "tests.faults.forgetful_faulty_worker.ForgetfulFaultyExtension"

if FAULTS_VARIABLE in os.environ:  # tests import this module too, where no worker is
    from tests.support.faulty_worker import FaultyExtension
    from tests.support.forgetful_worker import ForgetfulExtension

    class ForgetfulFaultyExtension(ForgetfulExtension, FaultyExtension):
        """Both."""
