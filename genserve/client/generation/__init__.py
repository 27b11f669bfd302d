"""GenerationService for a client."""
