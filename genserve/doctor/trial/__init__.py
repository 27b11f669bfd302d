"""A daemon that is started, pushed to and compared with a cold start."""
