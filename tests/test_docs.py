"""The documentation runs: every example is executed and prints what the page says, every link leads somewhere.

``pycon`` blocks are doctests and ``console`` blocks are commands (``$ workbench …``), both from the repository's
root; in what they print, ``...`` stands for anything. ``sh`` blocks are for people; only their make targets are
checked. After a change of output: ``python tests/test_docs.py`` writes what is printed now into the pages.
"""

from __future__ import annotations

import contextlib
import doctest
import io
import os
import re
import shlex
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\]\(([^)#\s]+)(?:#[^)]*)?\)")
FLAGS = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE
HELP_OF_THE_PAGES = sys.version_info < (3, 13)  #: later argparse words and wraps its help in another way


def blocks(page: Path, language: str) -> list[str]:
    return [body for kind, body in FENCE.findall(page.read_text()) if kind == language]


def commands(body: str) -> list[tuple[str, str]]:
    """Command and expected output of each ``$`` line."""
    parts = re.split(r"^\$ ", body, flags=re.MULTILINE)
    assert not parts[0].strip(), "a console block begins with its command"
    return [(part.split("\n", 1)[0], part.split("\n", 1)[1]) for part in parts[1:]]


def printed(command: str) -> str:
    """What ``workbench …`` prints, in this process."""
    from workbench.cli import main

    words = shlex.split(command)
    assert words[0] == "workbench", command
    out = io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(out):
        main(words[1:])
    return out.getvalue()


@pytest.fixture(autouse=True)
def as_in_the_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setenv("NO_COLOR", "1")


def names(page: Path) -> str:
    return page.name


@pytest.mark.parametrize("page", PAGES, ids=names)
def test_python_examples_print_what_the_page_says(page: Path) -> None:
    for body in blocks(page, "pycon"):
        test = doctest.DocTestParser().get_doctest(body, {}, page.name, page.name, 0)
        report = io.StringIO()
        result = doctest.DocTestRunner(optionflags=FLAGS).run(test, out=report.write)
        assert result.attempted and not result.failed, report.getvalue()


@pytest.mark.parametrize("page", PAGES, ids=names)
def test_commands_print_what_the_page_says(page: Path) -> None:
    check = doctest.OutputChecker().check_output
    for body in blocks(page, "console"):
        for command, want in commands(body):
            got = printed(command)
            if "--help" in command and not HELP_OF_THE_PAGES:
                assert set(re.findall(r"--[a-z-]+", got)) == set(re.findall(r"--[a-z-]+", want)), command
            else:
                assert check(want, got, FLAGS), f"$ {command}\n{got}"


def test_the_readme_has_examples_of_both_kinds() -> None:
    assert blocks(PAGES[0], "pycon") and blocks(PAGES[0], "console")


@pytest.mark.parametrize("page", PAGES, ids=names)
def test_links_lead_somewhere(page: Path) -> None:
    for target in LINK.findall(page.read_text()):
        if not target.startswith(("http://", "https://")):
            assert (page.parent / target).exists(), target


def test_make_targets_of_the_readme_exist() -> None:
    makefile = (ROOT / "Makefile").read_text()
    wanted = [word for body in blocks(PAGES[0], "sh") for word in re.findall(r"\bmake (\w[\w-]*)", body)]
    assert {"demo", "test"} <= set(wanted)
    for target in wanted:
        assert re.search(rf"^{target}:", makefile, re.MULTILINE), target


def test_the_readme_lists_every_format() -> None:
    from workbench.formats import FORMATS

    rows = re.findall(r"^\| `(\w+)` \| (.+?) \| (.+?) \| (.+?) \|$", PAGES[0].read_text(), re.MULTILINE)
    assert rows == [
        (r.name, r.title, f"`{r.marks}`" if "*" in r.marks else r.marks, r.read_from) for r in FORMATS.values()
    ]


def test_every_command_is_documented() -> None:
    from workbench.cli import parser

    actions = [action for action in parser()._actions if action.dest == "command" or hasattr(action, "choices")]
    there = next(set(action.choices) for action in actions if isinstance(action.choices, dict))
    page = (ROOT / "docs" / "cli.md").read_text()
    assert there == set(re.findall(r"^\$ workbench (\w+) --help$", page, re.MULTILINE))


def test_every_error_is_documented() -> None:
    import workbench as wb

    page = (ROOT / "docs" / "cli.md").read_text()
    errors = [name for name in wb.errors.__all__ if isinstance(getattr(wb.errors, name), type)]
    missing = [name for name in errors if f"`{name}`" not in page]
    assert not missing


# ---- python tests/test_docs.py -------------------------------------------------------------------------------------


def _written(kind: str, body: str) -> str:
    check = doctest.OutputChecker().check_output
    if kind == "console":
        parts = []
        for command, want in commands(body):
            got = printed(command)
            parts.append(f"$ {command}\n{want if check(want, got, FLAGS) and '...' in want else got}")
        return "".join(parts)
    text, scope = "", {}
    for example in doctest.DocTestParser().get_examples(body):
        out = io.StringIO()
        with contextlib.redirect_stdout(out):
            try:
                exec(compile(example.source, "<page>", "single"), scope)
            except BaseException:  # torch's CheckpointException is no Exception
                if example.exc_msg is None:
                    raise
                text += f">>> {example.source.rstrip()}\n{example.want}"  # a traceback: the test compares it
                continue
        kept = example.want if check(example.want, out.getvalue(), FLAGS) and "..." in example.want else out.getvalue()
        source = example.source.rstrip("\n").replace("\n", "\n... ")
        text += f">>> {source}\n{kept}"
    return text


def _rewrite() -> None:
    os.chdir(ROOT)
    os.environ |= {"COLUMNS": "80", "NO_COLOR": "1"}
    for page in PAGES:
        page.write_text(
            FENCE.sub(
                lambda m: f"```{m[1]}\n{_written(m[1], m[2])}```" if m[1] in ("console", "pycon") else m[0],
                page.read_text(),
            )
        )


if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))
    _rewrite()
