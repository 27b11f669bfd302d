"""Keys and values of old weights in a KV connector: a push has them dropped, however it comes to stand still."""

import json
from pathlib import Path

import pytest

from genserve.client import AsyncClient
from genserve.errors import GenserveError
from tests.engine.outputs import next_version
from tests.support.daemon_process import SMALL_ENGINE, DaemonProcess


async def test_a_push_has_a_connector_drop_what_it_holds(checkpoints: dict[str, Path], tmp_path: Path) -> None:
    """By itself, and under a lease that has kept all; one that refuses fails the push, and nothing changes. A connector
    that is not known to do it is warned of at the start."""
    resets, keep = tmp_path / "resets", tmp_path / "keep"
    transfer = {
        "kv_connector": "ResettingConnector",
        "kv_role": "kv_both",
        "kv_connector_module_path": "tests.engine.resetting_connector",
        "kv_connector_extra_config": {"path": str(resets)},
    }
    flags = ["--model", str(checkpoints["a"]), *SMALL_ENGINE, "--kv-transfer-config", json.dumps(transfer)]
    process = DaemonProcess(flags, tmp_path / "stderr")
    try:
        process.wait_serving()
        assert "genserve: warning: --kv-transfer-config " in process.stderr
        assert "[kv-connector-without-reset]" in process.stderr
        async with AsyncClient(process.address) as client:
            await client.push_weights(checkpoints["b"], version=1)
            assert resets.read_text().split() == ["reset"]
            async with client.paused() as lease:
                assert resets.read_text().split() == ["reset"]  # a pause alone changes no weights
                await client.push_weights(checkpoints["a"], version=2, pause_lease_id=lease.lease_id)
                assert resets.read_text().split() == ["reset"] * 2
                keep.touch()
                with pytest.raises(GenserveError, match="connector"):
                    await client.push_weights(checkpoints["b"], version=3, pause_lease_id=lease.lease_id)
                assert (await client.status()).state.weight_version == 2
                keep.unlink()
            await client.push_weights(checkpoints["b"], version=await next_version(client))
    finally:
        process.end()
