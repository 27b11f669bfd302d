"""Small parts for asyncio that the standard library lacks."""
