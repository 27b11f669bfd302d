"""Who may stop the engine and for how long: phases, pause leases, sleep. Decides; vLLM carries out."""
