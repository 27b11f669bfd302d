"""README, CONTRIBUTING and docs say what the code and the measurements say."""

import json
import re
import shutil
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

from genserve.errors import GenserveError, all_errors
from genserve.rpc.status import code_of
from tests.bench.report import update_readme

ROOT = Path(__file__).parents[2]
PAGES = [*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("clients/**/*.md")]
BENCHMARKS = ROOT / "docs" / "benchmarks"


def section(page: Path, heading: str) -> str:
    """What stands under a heading."""
    return re.split(r"\n## ", page.read_text().split(f"\n## {heading}\n")[1])[0]


def rows(text: str) -> Iterator[list[str]]:
    """The cells of a table's rows, its header and the line below it apart."""
    lines = [line for line in text.splitlines() if line.startswith("|")]
    for line in lines[2:]:
        yield [cell.strip() for cell in line.strip("|").split("|")]


def test_the_readme_has_every_error_under_its_status_code() -> None:
    """Each reason once, in the row of the code that the status table gives it."""
    listed = {
        reason: code
        for code, reasons in rows(section(ROOT / "README.md", "Errors"))
        for reason in re.findall(r"\b[A-Z]+(?:_[A-Z]+)*\b", re.sub(r"\(.*?\)", "", reasons))
    }
    assert listed == {error.reason: code_of(error("")).name for error in (GenserveError, *all_errors())}


def test_the_readme_s_tables_are_those_of_the_measurements(tmp_path: Path) -> None:
    """As `scripts/bench table` writes them."""
    for name in ("README.md", "docs/benchmarks"):
        source, target = ROOT / name, tmp_path / name
        target.parent.mkdir(exist_ok=True)
        shutil.copytree(source, target) if source.is_dir() else shutil.copy(source, target)
    update_readme(tmp_path / "docs" / "benchmarks", tmp_path / "README.md")
    assert (tmp_path / "README.md").read_text() == (ROOT / "README.md").read_text()


def test_the_readme_describes_every_peer_of_its_tables() -> None:
    """By its name, or by the part of it that the text says several share."""
    text, tables = section(ROOT / "README.md", "Benchmarks").split("<!-- bench -->")
    described = set(re.findall(r"`([a-z0-9_…]+)`", text))
    for peer in set(re.findall(r"^\| `([a-z0-9_]+)` \|", tables, re.MULTILINE)):
        assert peer in described or any(re.fullmatch(each.replace("…", ".+"), peer) for each in described), peer


def test_the_figures_of_the_weights_page_are_those_of_the_measurements() -> None:
    """The whole table of pauses, and the latencies below it."""
    text = section(ROOT / "docs" / "weights.md", "Compared")
    pauses, latencies = text.split("| meanwhile |")
    measured = json.loads((BENCHMARKS / "pause.json").read_text())["medians"]["smollm2"]
    peers = {"genserve, `--weight-update=inplace`": "genserve_inplace"}
    columns = ["receive_s", "save_s", "prepare_s", "pause_s", "commit_s", "resume_s", "paused_s", None, "total_s"]
    for way, *cells in rows(pauses):
        figures = measured[peers.get(way, way)]
        for name, cell in zip(columns, (cell.strip("*") for cell in cells), strict=True):
            if name is None:
                assert float(cell) == pytest.approx(figures["paused_s"] / measured["genserve"]["paused_s"], abs=0.51)
            elif cell:
                assert float(cell) == pytest.approx(1000 * figures[name], abs=0.51)
    relative = json.loads((BENCHMARKS / "interference.json").read_text())["ratios"]["smollm2"]
    for what, p50, p99 in rows("| meanwhile |" + latencies):
        figures = relative[re.findall(r"`(\w+)`", what)[0]]
        assert (p50, p99) == (f"{figures['inter_token_p50_ms']:.1f}", f"{figures['inter_token_p99_ms']:.1f}")


def test_the_tree_of_contributing_is_the_tree() -> None:
    """Every directory that it names is there, and every package is named."""
    tree = section(ROOT / "CONTRIBUTING.md", "The tree").split("```")[1]
    packages = set(re.findall(r"^  (\w+)/ ", tree, re.MULTILINE))
    assert packages == {each.parent.name for each in (ROOT / "genserve").glob("*/__init__.py")}
    kinds = re.findall(r"(\w+)/", re.findall(r"^tests/ (.*)", tree, re.MULTILINE)[0].replace("genserve/", ""))
    assert set(kinds) == {each.name for each in (ROOT / "tests").iterdir() if each.is_dir() and list(each.glob("*.py"))}
    for name in re.findall(r"^(?:  )?([\w./]+)/? ", tree, re.MULTILINE):
        assert any((base / name).exists() for base in (ROOT, ROOT / "genserve")), name


@pytest.mark.parametrize("page", PAGES, ids=[str(page.relative_to(ROOT)) for page in PAGES])
def test_links_lead_somewhere(page: Path) -> None:
    """To files of the repository, and to headings of its pages."""
    for link in re.findall(r"\]\(([^)\s]+)\)", page.read_text()):
        if "://" in link:
            continue
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        assert target.exists(), link
        if anchor:
            headings = re.findall(r"^#+ (.*)$", target.read_text(), re.MULTILINE)
            slugs = [re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings]
            assert anchor in slugs, link


@pytest.mark.parametrize("page", PAGES, ids=[str(page.relative_to(ROOT)) for page in PAGES])
def test_examples_that_claim_to_be_executed_are(page: Path) -> None:
    """The test that is named reads the page."""
    for name in re.findall(r"<!-- executed by (\S+) -->", page.read_text()):
        assert page.name in (ROOT / name).read_text(), name


def test_every_extra_is_in_an_install_line_of_the_docs() -> None:
    """Who has a GPU, a CPU or a trainer finds what to install."""
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    lines = [
        line for page in PAGES for line in page.read_text().splitlines() if re.search(r"genserve\[|pip install", line)
    ]
    named = {
        extra
        for line in lines
        for group in re.findall(r"(?:genserve|\.)\[([a-z,]+)\]", line)
        for extra in group.split(",")
    }
    assert named == set(extras)


def test_every_invariant_names_tests_that_are_there() -> None:
    """docs/reliability.md says what holds, and which tests hold it."""
    page = ROOT / "docs" / "reliability.md"
    for heading in ("Weights", "Service", "Client"):
        for invariant, held_by in rows(section(page, heading)):
            tests = re.findall(r"`(tests/[^`]+)`", held_by)
            assert tests and all((ROOT / test).is_file() for test in tests), invariant
