"""Other people's trainers on genserve's client: TRL, and vLLM's weight transfer."""
