"""The services that a test scripts, and a client of them."""

from tests.support.scripted_services import client as client
from tests.support.scripted_services import daemon as daemon
