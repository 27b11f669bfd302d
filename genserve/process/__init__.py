"""Processes that genserve starts or is: signals, supervision, and what killed ones leave behind."""
