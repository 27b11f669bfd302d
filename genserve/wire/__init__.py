"""What both ends of the wire share beside the generated stubs: literals, bounds, conversions."""
