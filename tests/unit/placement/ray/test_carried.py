"""Which variables daemons on other nodes get."""

from genserve.placement.ray.carried import carried


def test_settings_of_the_engine_and_of_the_hub_are_carried_to_other_nodes() -> None:
    """What is of one host, or of the system, is not."""
    environ = {
        "VLLM_LOGGING_LEVEL": "INFO",
        "HF_TOKEN": "x",
        "NCCL_DEBUG": "INFO",
        "OMP_NUM_THREADS": "4",
        "VLLM_HOST_IP": "10.0.0.1",
        "PATH": "/bin",
        "CUDA_VISIBLE_DEVICES": "0",
        "RAY_ADDRESS": "auto",
    }
    assert sorted(carried(environ)) == ["HF_TOKEN", "NCCL_DEBUG", "OMP_NUM_THREADS", "VLLM_LOGGING_LEVEL"]
    assert carried(environ)["OMP_NUM_THREADS"] == "4"
