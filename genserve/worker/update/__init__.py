"""The ways in which a new version takes the place of the live one: beside, on the CPU, in place."""
