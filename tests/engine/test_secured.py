"""A real daemon with TLS, certificates of both ends, roles, a front end, an OpenAI port and a receiving process: our
client, grpcurl and buf, each with the right credentials and with wrong ones, and no secret anywhere."""

import asyncio
import ssl
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from genserve.client import AsyncClient
from genserve.errors import PermissionDeniedError, UnauthenticatedError, UnavailableError
from tests.engine.cookbook import Shell, definitions, recipe
from tests.engine.outputs import next_version
from tests.support.credentials import Authority, Callers, Pair, list_callers
from tests.support.daemon_process import SMALL_ENGINE, DaemonProcess
from tests.support.known_secrets import known_token
from tests.support.models import load_tensors

OF_ENVIRONMENT = known_token()
HTTP_KEY = known_token()


@dataclass(frozen=True)
class Secured:
    """A daemon, certificates of callers by their roles, one that is not listed, and tokens by their roles."""

    process: DaemonProcess
    log: Path
    authority: Authority
    certificates: dict[str, Pair]
    callers: Callers

    def client(self, name: str, **settings: Any) -> AsyncClient:
        pair = self.certificates[name]
        settings.setdefault("token", "")  # and not the one of the environment
        return AsyncClient(
            self.process.address,
            ca_file=self.authority.ca_file,
            cert_file=pair.cert_file,
            key_file=pair.key_file,
            **settings,
        )


@pytest.fixture(scope="module")
def secured(checkpoints: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Secured]:
    directory = tmp_path_factory.mktemp("secured")
    authority = Authority(directory)
    roles = ("generate", "trainer", "operator")
    callers = list_callers(
        directory, {f"{role}.example": [role] for role in roles}, trainer=["trainer"], operator=["operator"]
    )
    names = [*roles, "unlisted"]
    certificates = {name: authority.issue(f"{name}.example") for name in names}
    own = authority.issue("127.0.0.1")
    flags = ["--model", str(checkpoints["a"]), *SMALL_ENGINE, "--frontends", "1", "--ingest-processes", "1"]
    flags += ["--ssl-certfile", own.cert_file, "--ssl-keyfile", own.key_file, "--ssl-ca-certs", authority.ca_file]
    flags += ["--auth-file", callers.auth_file, "--uds", str(directory / "socket")]
    flags += ["--openai-port", "0", "--served-model-name", "policy"]
    log = directory / "stderr"
    env = {"GENSERVE_AUTH_TOKENS": f"generate:{OF_ENVIRONMENT}", "GENSERVE_OPENAI_API_KEY": HTTP_KEY}
    process = DaemonProcess(flags, log, env=env)
    try:
        yield Secured(process.wait_serving(), log, authority, certificates, callers)
    finally:
        process.end()


async def test_each_role_does_its_own(secured: Secured, checkpoints: dict[str, Path]) -> None:
    """Also at the front end and at the receiving process, which have ports of their own."""
    async with secured.client("generate") as worker, secured.client("trainer") as trainer:
        await worker.wait_ready(60)
        assert len((await worker.generate([1, 2, 3], max_tokens=4, ignore_eos=True)).token_ids) == 4
        tensors = load_tensors(checkpoints["b"])
        version = await next_version(trainer)
        assert (await trainer.push_weights(tensors, version=version)).applied is not None
        for _ in range(3):
            with pytest.raises(PermissionDeniedError):
                await worker.push_weights(tensors, version=version + 1)
        with pytest.raises(PermissionDeniedError):
            await worker.pause(ttl_s=1.0)
    async with secured.client("operator") as operator:
        await operator.resume((await operator.pause(ttl_s=30.0)).lease.lease_id)
        with pytest.raises(PermissionDeniedError):
            await operator.generate([1], max_tokens=1)


async def test_caller_without_a_listed_certificate_needs_a_token(secured: Secured) -> None:
    async with secured.client("unlisted") as nobody:
        with pytest.raises(UnauthenticatedError):
            await nobody.status()
    async with secured.client("unlisted", token=OF_ENVIRONMENT) as worker:
        assert (await worker.generate([1, 2], max_tokens=1)).token_ids
        with pytest.raises(PermissionDeniedError):
            await worker.pause(ttl_s=1.0)
    async with AsyncClient(secured.process.address, ca_file=secured.authority.ca_file, token=OF_ENVIRONMENT) as bare:
        with pytest.raises(UnavailableError):
            await bare.status(timeout_s=30.0)


async def test_the_openai_port_asks_for_a_certificate_and_for_its_key(secured: Secured) -> None:
    """With the daemon's certificate. Tokens of callers are no keys."""
    async with secured.client("generate") as worker:
        url = f"https://127.0.0.1:{(await worker.server_info()).openai_port}"
    assert f"openai: {url}" in secured.process.stderr
    trusting = ssl.create_default_context(cafile=secured.authority.ca_file)
    async with httpx.AsyncClient(base_url=url, verify=trusting, timeout=60) as bare:
        with pytest.raises(httpx.TransportError):
            await bare.get("/health")
    pair = secured.certificates["unlisted"]
    trusting.load_cert_chain(pair.cert_file, pair.key_file)
    async with httpx.AsyncClient(base_url=url, verify=trusting, timeout=60) as http:
        for key, status in ((HTTP_KEY, 200), (OF_ENVIRONMENT, 401)):
            headers, body = {"Authorization": f"Bearer {key}"}, {"model": "policy", "prompt": [1, 2], "max_tokens": 1}
            assert (await http.post("/v1/completions", json=body, headers=headers)).status_code == status


Done = subprocess.CompletedProcess[str]


def run(secured: Secured, program: str, name: str, method: str, token: str | None) -> Done:
    """A call of grpcurl or buf with the certificate of a caller."""
    pair, header = secured.certificates[name], [] if token is None else ["-H", f"authorization: Bearer {token}"]
    path = str(Path(sys.executable).with_name(program))
    if program == "grpcurl":
        command = [path, "-cacert", secured.authority.ca_file, "-cert", pair.cert_file, "-key", pair.key_file, *header]
        command += [secured.process.address, method]
    else:
        command = [path, "curl", "--protocol", "grpc", "--cacert", secured.authority.ca_file]
        command += ["--cert", pair.cert_file, "--key", pair.key_file, *header]
        command += ["-d", "{}", f"https://{secured.process.address}/{method}"]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)


@pytest.mark.parametrize("program", ["grpcurl", "buf"])
async def test_other_programs_call_with_certificates_and_tokens(secured: Secured, program: str) -> None:
    status, pause = "genserve.v1.ControlService/GetStatus", "genserve.v1.ControlService/Pause"
    tokens = secured.callers.tokens
    for name, method, token, expected in (
        ("generate", status, None, ""),
        ("unlisted", status, tokens["operator"], ""),
        ("operator", pause, None, ""),
        ("generate", pause, None, "PermissionDenied"),
        ("unlisted", pause, OF_ENVIRONMENT, "PermissionDenied"),
        ("unlisted", status, None, "Unauthenticated"),
        ("unlisted", status, "wrong-token-wrong-token", "Unauthenticated"),
    ):
        done = await asyncio.to_thread(run, secured, program, name, method, token)
        told = (done.stdout + done.stderr).replace("_", "").lower()
        assert (done.returncode == 0) == (expected == ""), told
        assert expected.lower() in told
    async with secured.client("operator") as operator:
        for lease in (await operator.status()).state.pauses:
            await operator.resume(lease.lease_id, force=True)


@pytest.mark.parametrize("program", ["grpcurl", "buf"])
async def test_the_cookbook_tells_how_to_call_with_a_token(program: str, secured: Secured, tmp_path: Path) -> None:
    """docs/cookbook.md: the certificate is needed to connect, and the token says who it is."""
    pair, token = secured.certificates["unlisted"], secured.callers.tokens["operator"]
    for name, path in (("ca.pem", secured.authority.ca_file), ("ops.crt", pair.cert_file), ("ops.key", pair.key_file)):
        (tmp_path / name).symlink_to(path)
    (tmp_path / "ops.token").write_text(token + "\n")
    (tmp_path / "ops.header").write_text(f"authorization: Bearer {token}\n")
    shell = Shell(definitions(Path(__file__).name)[program], secured.process.address, tmp_path)
    assert (await shell.asked(recipe("PAUSE_MODE_WAIT")))["lease"]["holder"] == "ops"
    assert (await shell.asked(recipe("Resume", "force")))["state"]["pauses"] == []
    refused = await shell.run('echo \'{"text": "x"}\' | call genserve.v1.GenerationService/Tokenize')
    assert "permission" in refused.stderr.lower() and refused.returncode != 0


def test_no_secret_is_told_anywhere(secured: Secured) -> None:
    """Neither in the log, nor in the arguments of a process, nor in the environment of one that was started later."""
    secrets = [OF_ENVIRONMENT, *secured.callers.tokens.values()]
    secrets += [Path(pair.key_file).read_text().splitlines()[1] for pair in secured.certificates.values()]
    parent = psutil.Process(secured.process.process.pid)
    texts = {"log": secured.log.read_text(errors="replace")}  # a moment
    for process in [parent, *parent.children(recursive=True)]:
        texts[f"arguments of {process.pid}"] = " ".join(process.cmdline())
        is_started_anew = process.cmdline() != parent.cmdline()  # a fork has the environment of its parent's start
        if is_started_anew:
            texts[f"environment of {process.name()}"] = str(process.environ())
    assert len(texts) > 4
    assert {where for where, text in texts.items() for secret in secrets if secret in text} == set()
