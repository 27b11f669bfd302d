"""README, CONTRIBUTING and docs agree with the code and the measurements."""

import ast
import os
import re
import shutil
import tomllib
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from bench.__main__ import MEASUREMENTS
from bench.results.page import BEGIN, END, FIGURES, update_goals, update_page, update_readme
from bench.results.result import Result
from genserve.rpc.status import CODES
from tests.support.documented_series import documented

ROOT = Path(__file__).parents[2]
PAGES = [
    page
    for page in (*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("clients/**/*.md"))
    if "node_modules" not in page.parts  # packages that npm has installed
]
BENCHMARKS = ROOT / "docs" / "benchmarks"


def section(page: Path, heading: str) -> str:
    """What stands under a heading."""
    return re.split(r"\n## ", page.read_text().split(f"\n## {heading}\n")[1])[0]


def rows(text: str) -> Iterator[list[str]]:
    """The cells of a table's rows, its header and the line below it apart."""
    lines = [line for line in text.splitlines() if line.startswith("|")]
    for line in lines[2:]:
        yield [cell.strip() for cell in line.strip("|").split("|")]


def test_the_page_of_errors_has_every_error() -> None:
    """Its reason, class and status code, and its meaning in the words of the class."""
    listed = [tuple(row) for row in rows(section(ROOT / "docs" / "errors.md", "Reasons"))]
    assert listed == [
        (error.reason, f"`{error.__name__}`", code.name, " ".join((error.__doc__ or "").partition("\n\n")[0].split()))
        for error, code in CODES.items()
    ]


def test_the_page_of_errors_has_the_reasons_that_only_commands_give() -> None:
    """Every reason that the command line writes itself: none is in the table."""
    source = (ROOT / "genserve" / "cli" / "__init__.py").read_text()
    own = set(re.findall(r'_print_error\("([A-Z_]+)"', source))
    told = section(ROOT / "docs" / "errors.md", "In a terminal")
    assert own and set(re.findall(r"`([A-Z]+_[A-Z]+)`", told)) == own
    for status in ("1", "2", *re.findall(r"^_[A-Z_]+: Final = (\d+)$", source, re.MULTILINE)):
        assert re.search(rf"\b{status}\b", told), status


@pytest.mark.parametrize("name", ["README.md", "docs/benchmarks/README.md", "docs/internals/goals.md"])
def test_the_figures_are_those_of_the_measurements(tmp_path: Path, name: str) -> None:
    """README.md quotes some, the benchmarks page has all, and one more page says which goals they reach: as
    `scripts/bench table` writes them."""
    shutil.copytree(BENCHMARKS, tmp_path / "docs" / "benchmarks")
    shutil.copytree(ROOT / "docs" / "internals", tmp_path / "docs" / "internals")
    shutil.copy(ROOT / "README.md", tmp_path)
    update_goals(tmp_path / "docs" / "benchmarks", tmp_path / "docs" / "internals" / "goals.md")
    update_page(tmp_path / "docs" / "benchmarks", tmp_path / "docs" / "benchmarks" / "README.md")
    update_readme(tmp_path / "docs" / "benchmarks", tmp_path / "README.md")
    assert (tmp_path / name).read_text() == (ROOT / name).read_text()


@pytest.mark.parametrize("name", FIGURES)
def test_the_figures_of_the_readme_change_with_the_measurements(tmp_path: Path, name: str) -> None:
    """Each of the results it is made from reaches it."""
    shutil.copytree(BENCHMARKS, tmp_path / "results")
    shutil.copy(ROOT / "README.md", tmp_path)
    measured = Result.load(BENCHMARKS, name)
    replace(measured, medians=doubled(measured.medians), ratios=doubled(measured.ratios)).save(tmp_path / "results")
    update_readme(tmp_path / "results", tmp_path / "README.md")
    before, after = ((each / "README.md").read_text().splitlines() for each in (ROOT, tmp_path))
    assert sum(old != new for old, new in zip(before, after, strict=True)) == 1


def doubled(figures: Any) -> Any:
    """The same tree with all numbers doubled."""
    return {key: doubled(each) for key, each in figures.items()} if isinstance(figures, dict) else 2 * figures


def test_the_benchmarks_page_describes_every_peer_of_its_tables() -> None:
    """By its name, or by the part of it that the text says several share."""
    page = BENCHMARKS / "README.md"
    described = set(re.findall(r"`([a-z0-9_…]+)`", section(page, "Names in the tables")))
    for peer in set(re.findall(r"^\| `([a-z0-9_]+)` \|", page.read_text().split(BEGIN)[1], re.MULTILINE)):
        assert peer in described or any(re.fullmatch(each.replace("…", ".+"), peer) for each in described), peer


def test_the_benchmarks_page_names_every_measurement() -> None:
    """Beside the command that runs it."""
    (line,) = re.findall(r"^scripts/bench all .*: (.*)$", (BENCHMARKS / "README.md").read_text(), re.MULTILINE)
    assert line.split(", ") == list(MEASUREMENTS)


def test_benchmarks_page_names_the_first_in_every_training_run() -> None:
    """Also where it is not genserve: in each number of streams and interval that was measured."""
    asked = [row[0] for row in rows(section(BENCHMARKS / "README.md", "Who is first"))]
    for key in Result.load(BENCHMARKS, "cycle").medians:
        streams, interval = key.split(", ")
        for figure in ("generation lost a push, s", "to the first token of a new version, s"):
            assert f"{figure}, {streams}, a push every {interval}" in asked


def test_the_text_of_the_benchmarks_page_quotes_no_figure_of_its_tables() -> None:
    """The next run would contradict it. What was profiled once is under a heading of its own."""
    text = (BENCHMARKS / "README.md").read_text()
    written = re.sub(f"{BEGIN}.*?{END}", "", text, flags=re.DOTALL).split("\n## Shared memory\n")[0]
    assert re.findall(r"\b\d+\.\d+\b(?! GB)|\b\d+ (?:ms|tok/s)\b", written) == []


def test_the_index_lists_every_page() -> None:
    """docs/README.md leads to each page of docs/ and clients/."""
    index = (ROOT / "docs" / "README.md").read_text()
    for page in PAGES:
        if page.parent != ROOT and page != ROOT / "docs" / "README.md":
            relative = os.path.relpath(page, ROOT / "docs")
            assert f"]({relative})" in index, relative


def test_lines_of_the_pages_are_short() -> None:
    """At most 120 columns, apart from tables, which cannot be wrapped, and what `scripts/bench table` writes."""
    for page in PAGES:
        text = re.sub(f"{BEGIN}.*?{END}", "", page.read_text(), flags=re.DOTALL)
        for line in text.splitlines():
            assert len(line) <= 120 or line.startswith("|"), f"{page.relative_to(ROOT)}: {line}"


def test_the_tree_of_contributing_is_the_tree() -> None:
    """What it names is there, and it names every package and every module beside them."""
    tree = section(ROOT / "CONTRIBUTING.md", "The tree").split("```")[1]
    packages = set(re.findall(r"^  (\w+)/ ", tree, re.MULTILINE))
    assert packages == {each.parent.name for each in (ROOT / "genserve").glob("*/__init__.py")}
    modules = set(re.findall(r"^  (\w+\.py) ", tree, re.MULTILINE))
    assert modules == {each.name for each in (ROOT / "genserve").glob("[!_]*.py")}
    (tests,) = re.findall(r"^tests/ (.*(?:\n {10}.*)*)", tree, re.MULTILINE)
    kinds = re.findall(r"(\w+)/", tests)
    assert set(kinds) == {each.name for each in (ROOT / "tests").iterdir() if each.is_dir() and list(each.glob("*.py"))}
    for name in re.findall(r"^(?:  )?([\w./]+)/? ", tree, re.MULTILINE):
        assert any((base / name).exists() for base in (ROOT, ROOT / "genserve")), name


def named(pattern: str) -> Iterator[tuple[Path, str]]:
    """What the pages have of a pattern: the page, and the part in brackets."""
    return ((page, each) for page in PAGES for each in re.findall(pattern, page.read_text()))


def leads_somewhere(page: Path, link: str) -> bool:
    """To a file of the repository, and to a heading of it."""
    path, _, anchor = link.partition("#")
    target = (page.parent / path).resolve() if path else page
    if not target.exists() or not anchor:
        return target.exists()
    headings = re.findall(r"^#+ (.*)$", target.read_text(), re.MULTILINE)
    return anchor in [re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings]


def test_links_lead_somewhere() -> None:
    """To files of the repository, and to headings of its pages."""
    links = [(page, link) for page, link in named(r"\]\(([^)\s]+)\)") if "://" not in link]
    assert links
    assert [f"{page.relative_to(ROOT)}: {link}" for page, link in links if not leads_somewhere(page, link)] == []


def test_examples_that_claim_to_be_executed_are() -> None:
    """The test that is named reads the page."""
    claims = list(named(r"<!-- executed by (\S+) -->"))
    assert claims
    assert [f"{page.name}: {name}" for page, name in claims if page.name not in (ROOT / name).read_text()] == []


def test_tests_that_a_page_names_are_there() -> None:
    """Whatever they show."""
    tests = list(named(r"`(tests/[\w/]+\.py)[`:]"))
    assert tests
    assert [f"{page.name}: {name}" for page, name in tests if not (ROOT / name).is_file()] == []


def test_series_to_watch_are_in_the_list_of_all() -> None:
    """The page for users names some; docs/internals/series.md has each of them, as tests of a real daemon check."""
    watched = section(ROOT / "docs" / "observability.md", "Which series to watch")
    names = re.findall(r"`((?:genserve_|grpc_server_|process_|vllm:)[a-z_]+)`", watched)
    assert names and [name for name in names if name not in documented()] == []


def test_nothing_that_is_not_published_is_told_as_if_it_were() -> None:
    """genserve has no release, so pip has it from a checkout or a wheel; messages have commands from extras.py."""
    told = re.compile(r"pip install[^`\n&;#]*[ \"']genserve\b(?!\[[a-z,]+\] @)")
    sources = [*ROOT.glob("genserve/**/*.py"), *ROOT.glob("clients/python/**/*.py"), *ROOT.glob("deploy/**/*")]
    texts = {path: path.read_text() for path in (*PAGES, *sources) if path.is_file()}
    assert [(path.name, found[0]) for path, text in texts.items() for found in told.finditer(text)] == []


def test_every_extra_is_in_an_install_line_of_the_docs() -> None:
    """Who has a GPU, a CPU or a trainer finds what to install."""
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    lines = [
        line for page in PAGES for line in page.read_text().splitlines() if re.search(r"genserve\[|pip install", line)
    ]
    installed = {
        extra
        for line in lines
        for group in re.findall(r"(?:genserve|\.)\[([a-z,]+)\]", line)
        for extra in group.split(",")
    }
    assert installed == set(extras)


def test_every_invariant_names_tests_that_are_there() -> None:
    """docs/internals/reliability.md says what holds, and which tests hold it."""
    page = ROOT / "docs" / "internals" / "reliability.md"
    for heading in ("Weights", "Service", "Fleet", "Client"):
        for invariant, held_by in rows(section(page, heading)):
            tests = re.findall(r"`(tests/[^`]+)`", held_by)
            assert tests and all((ROOT / test).is_file() for test in tests), invariant


def names_of_tests(path: Path) -> set[str]:
    """What pytest collects from a file: functions, and state machines of hypothesis, which are assigned."""
    names = set()
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            names.add(node.name)
        elif isinstance(node, ast.Assign):
            names |= {target.id for target in node.targets if isinstance(target, ast.Name)}
    return {name for name in names if name.startswith(("test_", "Test"))}


def test_every_fault_names_tests_that_are_there_or_says_that_there_is_none() -> None:
    """docs/internals/reliability.md has every row of the table of faults, in order."""
    listed = list(rows(section(ROOT / "docs" / "internals" / "reliability.md", "Faults")))
    assert [row[0] for row in listed] == [str(number) for number in range(1, 50)]
    for number, _, _, shown_by, result in listed:
        tests = re.findall(r"`(tests/[^`]+)::([^`]+)`", shown_by)
        assert (shown_by == "none yet") == (result in ("no test yet", "in work")), number
        assert bool(tests) == (shown_by != "none yet") and len(tests) == shown_by.count("`") // 2, number
        for path, name in tests:
            assert (ROOT / path).is_file() and name in names_of_tests(ROOT / path), f"{number}: {path}::{name}"
