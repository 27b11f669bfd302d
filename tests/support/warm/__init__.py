"""Processes that begin with torch, vLLM and genserve imported: what Python imports for a daemon and its engine is
three times 10 s of a CPU, and the same each time.

`process.WarmPopen` starts a program so. A server (`server`) has imported what it will import, and forks a process for
each program, which from there on is an ordinary one: a child of its own of whoever asked, with its own arguments,
environment, files, group and signals. When it starts further ones through multiprocessing, a server of its own, which
was forked before it did anything, forks those.
"""
