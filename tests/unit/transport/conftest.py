"""The scripted daemon of the client's tests, and a client of it."""

from tests.unit.client.conftest import client as client
from tests.unit.client.conftest import daemon as daemon
