"""What a push to a fleet would take on more hosts than there are here."""
