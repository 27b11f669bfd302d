"""Policies on the recorded loads, as tables: `python -m tests.unit.routing.compare`, from the repository's root.

One sender is a router. Many senders are clients that call replicas themselves, each with its own policies; they hear
of each other's requests in the reports of the replicas alone.
"""

import argparse

from tests.unit.routing.compared import COMPARED
from tests.unit.routing.fleet_model import replay
from tests.unit.routing.recorded_loads import LOADS

HEADER = f"{'':36}{'hit rate':>9}{'p99 wait':>10}{'imbalance':>11}{'total':>9}   decided by"


def main() -> None:
    """Prints a table for each load and number of senders."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--replicas", type=int, default=8, metavar="N", help="default: 8")
    parser.add_argument("--senders", type=int, nargs="+", default=[1, 16], metavar="N", help="default: 1 16")
    parser.add_argument("--report", type=float, default=1.0, metavar="S", help="between two reports; default: 1 s")
    arguments = parser.parse_args()
    for load in (make() for make in LOADS):
        num_requests = sum(len(conversation.turns) for conversation in load.conversations)
        for num_senders in arguments.senders:
            print(f"\n{load.name}: {num_requests} requests, {arguments.replicas} replicas, {num_senders} senders")
            print(HEADER)
            for name, make_chain in COMPARED.items():
                found = replay(load, make_chain, arguments.replicas, num_senders, arguments.report)
                decided = ", ".join(f"{policy} {number}" for policy, number in found.num_decided.items() if number)
                print(
                    f"{name:36}{found.hit_rate:9.3f}{found.p99_wait_s:8.2f} s{found.imbalance:11.2f}"
                    f"{found.total_s:7.1f} s   {decided}"
                )


if __name__ == "__main__":
    main()
