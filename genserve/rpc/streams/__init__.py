"""Streams of tokens: the requests of a GenerateMany call, and the turns in which the calls of Generate write."""
