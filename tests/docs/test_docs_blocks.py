"""What the documents show is what the code does: blocks run, links resolve."""

from __future__ import annotations

import re
import shlex
import sys
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[2]
PAGES = sorted(
    [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")],
    key=lambda path: path.relative_to(ROOT),
)
NOT_RUN = "<!-- not run -->"
#: Blocks that may stay without being run, over all pages.
ALLOWED_NOT_RUN = 4

_FENCE = re.compile(r"^```(\w*)\s*$")
_HEADING = re.compile(r"^#+\s+(.*?)\s*$")
_LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")


@dataclass(frozen=True)
class Block:
    """A fenced block: its language, its text, where it starts, whether it runs."""

    language: str
    text: str
    line: int
    runs: bool


def blocks_of(text: str) -> list[Block]:
    blocks: list[Block] = []
    lines = text.splitlines()
    start: int | None = None
    language, runs = "", True
    for number, line in enumerate(lines):
        fence = _FENCE.match(line)
        if fence is None:
            continue
        if start is None:
            start, language = number, fence.group(1)
            before = [x for x in lines[max(0, number - 2) : number] if x.strip()]
            runs = not before or before[-1].strip() != NOT_RUN
        else:
            body = "\n".join(lines[start + 1 : number]) + "\n"
            blocks.append(Block(language, body, start + 2, runs))
            start = None
    assert start is None, "a fenced block is not closed"
    return blocks


def prose_of(text: str) -> str:
    """The page without its fenced blocks."""
    kept, inside = [], False
    for line in text.splitlines():
        if _FENCE.match(line):
            inside = not inside
        elif not inside:
            kept.append(line)
    return "\n".join(kept)


def anchors_of(text: str) -> set[str]:
    """Anchors of the headings, as GitHub makes them."""
    anchors = set()
    for line in prose_of(text).splitlines():
        heading = _HEADING.match(line)
        if heading:
            kept = re.sub(r"[^\w\- ]", "", heading.group(1).lower())
            anchors.add(kept.replace(" ", "-"))
    return anchors


def name(path: Path) -> str:
    return str(path.relative_to(ROOT))


def runnable(path: Path) -> list[Block]:
    found = blocks_of(path.read_text(encoding="utf-8"))
    return [b for b in found if b.language == "python" and b.runs]


@pytest.mark.parametrize("page", [p for p in PAGES if runnable(p)], ids=name)
def test_python_blocks_run(page, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    module = ModuleType("page")  # dataclasses look their module up
    monkeypatch.setitem(sys.modules, "page", module)
    for block in runnable(page):
        # blank lines in front, so that a traceback shows the page's own line numbers
        source = "\n" * (block.line - 1) + block.text
        exec(compile(source, name(page), "exec"), module.__dict__)


def test_few_blocks_stay_without_being_run():
    left_out = [
        f"{name(page)}:{block.line}"
        for page in PAGES
        for block in blocks_of(page.read_text(encoding="utf-8"))
        if block.language == "python" and not block.runs
    ]
    assert len(left_out) <= ALLOWED_NOT_RUN, left_out


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_links_resolve(page):
    text = page.read_text(encoding="utf-8")
    broken = []
    for link in _LINK.findall(prose_of(text)):
        if re.match(r"[a-z]+:", link):
            continue
        target, _, anchor = link.partition("#")
        path = (page.parent / target).resolve() if target else page
        missing = anchor and anchor not in anchors_of(
            path.read_text(encoding="utf-8") if path.is_file() else ""
        )
        if not path.exists() or missing:
            broken.append(link)
    assert not broken


def test_index_lists_every_page():
    index = (ROOT / "docs" / "index.md").read_text(encoding="utf-8")
    for page in (ROOT / "docs").rglob("*.md"):
        link = page.relative_to(ROOT / "docs").as_posix()
        assert link == "index.md" or f"({link})" in index


def commands() -> list[tuple[str, list[str]]]:
    found = []
    for page in PAGES:
        for block in blocks_of(page.read_text(encoding="utf-8")):
            if block.language == "bash":
                joined = block.text.replace("\\\n", " ")
                found += [
                    (name(page), shlex.split(line, comments=True)[1:])
                    for line in joined.splitlines()
                    if line.startswith("curvedp ")
                ]
    return found


@pytest.mark.parametrize(
    ("page", "words"), commands(), ids=lambda x: x if isinstance(x, str) else x[0]
)
def test_command_lines_name_real_commands_and_options(page, words):
    typer = pytest.importorskip("typer")
    from curvedp.cli.app import app

    command = typer.main.get_command(app)
    words = list(words)
    while hasattr(command, "commands"):
        assert words and words[0] in command.commands, f"no command {words[:1]}"
        command = command.commands[words.pop(0)]
    known = {option for item in command.params for option in item.opts}
    known |= {option for item in command.params for option in item.secondary_opts}
    used = {word.partition("=")[0] for word in words if word.startswith("-")}
    assert used <= known | {"--help"}


def test_the_reader_of_blocks():
    page = f"# A b\n\n```python\nx = 1\n```\n\n{NOT_RUN}\n```python\n1 / 0\n```\n"
    first, second = blocks_of(page)
    assert (first.text, first.line, first.runs) == ("x = 1\n", 4, True)
    assert not second.runs
    assert anchors_of(page) == {"a-b"}
    assert prose_of(page).split() == ["#", "A", "b", "<!--", "not", "run", "-->"]
