"""Where vLLM's loaders put weights."""

# Their loaders make the tensors of the model themselves, and copy what they read into them.
LOAD_FORMATS_OF_OWN_MEMORY = {
    "auto", "hf", "dummy", "fastsafetensors", "instanttensor", "mistral", "npcache", "pt", "runai_streamer",
    "runai_streamer_sharded", "safetensors", "sharded_state", "tensorizer",
}  # fmt: skip
