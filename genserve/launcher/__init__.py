"""A daemon that a program starts, uses and ends: `genserve.launch`.

Stands on top of the client. A program that only talks to a daemon needs none of this.
"""

from genserve.launcher.daemon_process import DaemonFailedError
from genserve.launcher.server import Launch, LaunchedServer, launch

__all__ = ["DaemonFailedError", "Launch", "LaunchedServer", "launch"]
