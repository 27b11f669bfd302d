"""Simulates pushes to fleets of 1 to 1,024 replicas: `python -m bench.fleet.model`.

Prints tables as markdown and draws docs/benchmarks/fleet_model.png. With --write, puts the tables between the marks of
docs/benchmarks/fleet.md. Takes less than a minute on one core.
"""

import argparse
import re
from pathlib import Path
from typing import Final

from bench.fleet.model.figures import draw, page
from bench.results.page import BEGIN, END

DIRECTORY: Final = Path(__file__).parents[3] / "docs" / "benchmarks"


def main() -> None:
    """Prints and draws."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help="write the tables to docs/benchmarks/fleet.md too")
    args = parser.parse_args()
    text = "\n".join(page())
    print(text)
    if args.write:
        path = DIRECTORY / "fleet.md"
        marked = f"{BEGIN}\n{text}\n{END}"
        path.write_text(re.sub(f"{BEGIN}.*{END}", lambda _: marked, path.read_text(), flags=re.DOTALL))
    draw(DIRECTORY / "fleet_model.png")


if __name__ == "__main__":
    main()
