"""A worker extension whose steps fail as ordered: `--worker-extension-cls tests.faults.faulty_worker.FaultyExtension`.

An order is a file in the directory named by GENSERVE_FAULTS, written by `order` and read by every worker at every step.
It runs in vLLM's worker processes; nothing of the daemon knows of it.
"""

import json
import os
import signal
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

FAULTY_EXTENSION = "tests.faults.faulty_worker.FaultyExtension"
FAULTS_VARIABLE = "GENSERVE_FAULTS"


@dataclass(frozen=True)
class Fault:
    """What shall happen.

    `step`: attach, prepare, load, commit, rollback, discard or digests. `load` is the preparation in its thread, where
    `after` counts the tensors that were loaded before; in `commit` and `rollback` it counts the entries that were put
    in place; -1 is the end of the step, when all is done. `kind`: raise, hang (until `release`), kill (SIGKILL), stop
    (SIGSTOP) or slow (`seconds`, then goes on). `rank` is a part of the rank's name ("tp1", "dp0"), "" = every rank.
    `times`: how often, by rank, until the order is spent; -1 = always.
    """

    step: str
    kind: str = "raise"
    after: int = 0
    rank: str = ""
    times: int = 1
    seconds: float = 0.5


def order(directory: Path, *faults: Fault) -> None:
    """Orders these faults and no others; spent ones count anew."""
    for spent in directory.glob("spent.*"):
        spent.unlink()
    written = directory / "orders.new"
    written.write_text(json.dumps([asdict(fault) for fault in faults]))
    written.rename(directory / "orders")


def release(directory: Path) -> None:
    """Nothing fails any more, and what hangs goes on."""
    order(directory)


def fired(directory: Path) -> int:
    """How many faults have happened since the last order, all ranks together: a test without one proves nothing."""
    return sum(len(spent.read_bytes()) for spent in directory.glob("spent.*"))


def _orders() -> list[Fault]:
    path = Path(os.environ[FAULTS_VARIABLE]) / "orders"
    return [Fault(**fields) for fields in json.loads(path.read_text())] if path.exists() else []


def strike(step: str, rank: str, done: int) -> None:
    """Does what is ordered for this step after `done` parts of it."""
    for number, fault in enumerate(_orders()):
        if (fault.step, fault.after) != (step, done) or fault.rank not in rank:
            continue
        spent = Path(os.environ[FAULTS_VARIABLE]) / f"spent.{number}.{rank.replace(':', '-')}"
        count = spent.stat().st_size if spent.exists() else 0
        if 0 <= fault.times <= count:
            continue
        with spent.open("ab") as file:
            file.write(b"x")
        _strike(fault, f"ordered to fail in {step} after {done}")


def _strike(fault: Fault, message: str) -> None:
    match fault.kind:
        case "raise":
            raise RuntimeError(message)
        case "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        case "stop":
            os.kill(os.getpid(), signal.SIGSTOP)
        case "slow":
            time.sleep(fault.seconds)
        case "hang":
            while fault in _orders():
                time.sleep(0.02)
        case _:
            raise AssertionError(f"{fault.kind} is no kind of fault")


if FAULTS_VARIABLE in os.environ:  # tests import this module too, where no worker is
    from genserve.worker import extension
    from genserve.worker.exchange import Exchange
    from genserve.worker.shadow import Shadow

    class FaultyExtension(extension.WeightExchangeExtension):
        """The extension, with the calls of the contract that can fail."""

        def genserve_prepare(self, wire: dict[str, Any]) -> dict[str, Any]:
            _step.begin("load", self._genserve.rank)
            return self._struck("prepare", wire, super().genserve_prepare)

        def genserve_commit(self, wire: dict[str, Any]) -> dict[str, Any]:
            _step.begin("commit", self._genserve.rank)
            return self._struck("commit", wire, super().genserve_commit, entries=True)

        def genserve_rollback(self, wire: dict[str, Any]) -> dict[str, Any]:
            _step.begin("rollback", self._genserve.rank)
            return self._struck("rollback", wire, super().genserve_rollback, entries=True)

        def genserve_discard(self, wire: dict[str, Any]) -> dict[str, Any]:
            return self._struck("discard", wire, super().genserve_discard)

        def _struck(self, step: str, wire: dict[str, Any], call: Any, *, entries: bool = False) -> dict[str, Any]:
            try:
                if not entries:  # those count from the first entry that is put in place
                    strike(step, self._genserve.rank, 0)
                answer: dict[str, Any] = call(wire)
                strike(step, self._genserve.rank, -1)
            except RuntimeError as error:
                return {"rank": self._genserve.rank, "nonce": wire.get("nonce", ""), "error": f"RuntimeError: {error}"}
            return answer

    class _Step:
        """Which step a worker is at, and how many parts of it are done."""

        def __init__(self) -> None:
            self.rank, self.name, self.done = "", "", 0

        def begin(self, name: str, rank: str) -> None:
            if name != "load":
                self.name, self.done = name, 0
            self.rank = rank

    _step = _Step()
    _put, _load = Exchange._put, Shadow.load

    def _faulty_put(self: Exchange, entry: Any, value: Any) -> None:
        strike(_step.name, _step.rank, _step.done)
        _put(self, entry, value)
        _step.done += 1

    def _faulty_load(self: Shadow, tensors: Any) -> Any:
        def counted() -> Any:
            for done, item in enumerate(tensors):
                strike("load", _step.rank, done)
                yield item
            strike("load", _step.rank, -1)

        return _load(self, counted())

    Exchange._put = _faulty_put  # type: ignore[method-assign]
    Shadow.load = _faulty_load  # type: ignore[method-assign]
