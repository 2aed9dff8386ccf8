"""The prose is plain English: none of the phrases that make a native reader stumble occurs in it.

Code is not prose: fenced and indented blocks and inline code are left out, as are the tables that programs write. Of
Python sources, the string literals are prose: messages, labels and docstrings.
"""

from __future__ import annotations

import ast
import json
import re
from bisect import bisect_right
from collections.abc import Iterator
from itertools import accumulate
from pathlib import Path

import pytest

from workbench.core.words import plural

ROOT = Path(__file__).resolve().parents[1]

#: Files that are read, as patterns below the root: Markdown, and the Markdown cells of notebooks.
PATHS = ("README.md", "docs/*.md", "notebooks/*.ipynb")
#: Pages that programs write from their own tables, by the program that holds the words.
GENERATED = {
    "docs/doctor_rules.md": "workbench/doctor/tables.py",
    "docs/faults.md": "tests/test_fault_matrix.py",
}
#: Phrase (a regular expression, any case; in a paragraph, white space is one space) → what to write instead.
BANNED: dict[str, str] = {
    r"(?<!\bthere )\b(?:is|are|was|were) no (?!longer|more\b|less\b|fewer)\w+": "is not a …, are not …, there is no …",
    r"\bwhat is (?:no|not a) tensor": "non-tensor state",
    r"\bways? of lying\b": "sharding pattern(s)",
    r"\b(?:lies?|lay|lying|lain)\b": "is stored, is laid out, is in, is",
    r"(?<!\bcan )(?<!\bcannot )\btell\b|\b(?:tells|told|telling)\b": "is stored, inferred; states, shows; distinguish",
    r"\b(?:is|are|was|were) said\b": "is reported, is listed, the report says so",
    r"\bthe sick\b": "anomalies",
    r"\bgiv(?:e|es|en|ing) (?:the files|it|them) back\b": "close the files; return it",
    r"\bstands? (?:still|in|at|on|below|above|beside)\b": "stops; is in, is at",
    r"\bof which\b": "whose, including; or start a new sentence",
    r"\b(?:which|that) of them\b": "name them: which file, which rank",
    r"\bwhich (?:are|is) the (?:ones?|those)\b": "name them",
    r", so that\b": "…, so …; or start a new sentence",
    r"\bat (?:most|least)[.;)]": "put the limit first: up to N, N or more",
    r"\bwhere there is (?:more|one|none|nothing|any)\b": "if there is …",
    r"\bwhoever\b": "anyone who, users who",
    r"\bthereby\b": "which …; or start a new sentence",
    r"\bwhence\b": "from which; so",
    r"\bgo(?:es)? on with\b": "continue, resume",
    r"\b(?:is|are) (?:it|this|an?|the)(?: \w+)? whole\b": "is … intact",
    r"\bby (?:itself|themselves) alone\b": "alone; by itself",
    r"\bas it stands\b": "unchanged, as given",
    r"\bmakes? no sense\b": "is invalid",
    r"\bbut for\b": "except for",
    r"\bis no(?:t)? (?:judged|spoken of)\b": "is not checked",
    r"\bin each other\b": "nested",
    r"\bsame to the (?:bit|byte)\b": "the same, bit for bit",
    r"\bfor such reasons\b": "for similar reasons",
    r"\bsomebody\b": "name who does it, or use the passive",
    r"\bone (?!of\b)\w+ a (?:rank|pair|file|mesh|axis|array|chunk|tensor|byte|row|step)\b": "one … per …",
}

#: Files and folders below ``workbench/`` whose string literals are checked.
SOURCES = (
    "__init__.py",
    "checkpoint.py",
    "errors.py",
    "notebook.py",
    "tensor.py",
    "analysis",
    "cli",
    "core",
    "dcp",
    "echo",
    "export",
    "formats",
    "load",
    "memory",
    "names",
    "runs",
    "views",
    "app",
    "doctor",
)
#: Patterns of :data:`BANNED` that code needs, with the reason.
NOT_IN_SOURCES: dict[str, str] = {}

#: First words of docstrings that begin with a noun, a pronoun, an adjective, a conjunction …
_NOUNS = """
A About All An Any As At Both By Class Each Element Equal Every Everything File First Folder For From Global Half How
Identity If In Index Its It Largest Last Local Median Memory Next No None Nothing Of Offset One Other Own Per Position
Regular Same Shape Size Smallest Some Several That The These They This Those Three To True Two What When Where Whether
Which Who Why With Without
"""
#: A word that may be an imperative verb. Plurals and third persons ("Names of …", "Returns …") end in a single "s".
_VERB = re.compile(rf"(?!Number of\b|(?:{'|'.join(_NOUNS.split())})\b)[A-Z][a-z]*(?:[^s\W]|ss)\b")

_FENCE = re.compile(r"^ *```.*?^ *```[ \t]*$", re.MULTILINE | re.DOTALL)
_INDENTED = re.compile(r"(?:\A|(?<=\n\n))(?:(?: {4}|\t).*\n+)+")
_CODE = re.compile(r"(`+)(?!`).+?(?<!`)\1(?!`)", re.DOTALL)
_LINK = re.compile(r"(?<=\])\([^)]*\)")


def paths() -> list[Path]:
    found = sorted(path for pattern in PATHS for path in ROOT.glob(pattern))
    return [path for path in found if path.relative_to(ROOT).as_posix() not in GENERATED]


def blank(match: re.Match[str]) -> str:
    """As many lines, without their text: line numbers stay."""
    return "\n" * match[0].count("\n") or "·"


def prose(text: str) -> str:
    """Markdown without its code and without the targets of its links."""
    for pattern in (_FENCE, _INDENTED, _CODE, _LINK):
        text = pattern.sub(blank, text)
    return text


def texts(path: Path) -> Iterator[tuple[str, str]]:
    """Place (a file, or a notebook's cell) and Markdown."""
    name = path.relative_to(ROOT).as_posix()
    if path.suffix != ".ipynb":
        yield name, path.read_text("utf-8")
        return
    for number, cell in enumerate(json.loads(path.read_text("utf-8"))["cells"]):
        if cell["cell_type"] == "markdown":
            yield f"{name} cell {number}", "".join(cell["source"])


def faults(place: str, text: str) -> list[str]:
    """A line for each banned phrase: where, what, and what to write instead."""
    plain, found = prose(text), []
    for paragraph in re.finditer(r"(?:[^\n]*\S[^\n]*\n?)+", plain):
        first = plain.count("\n", 0, paragraph.start()) + 1
        lines = [line.split() for line in paragraph[0].splitlines()]
        flat = " ".join(" ".join(line) for line in lines)
        ends = list(accumulate(len(" ".join(line)) + 1 for line in lines))
        for phrase, instead in BANNED.items():
            for match in re.finditer(phrase, flat, re.IGNORECASE):
                line = first + bisect_right(ends, match.start())
                found.append(f"{place}:{line}: {match[0]!r}; write: {instead}")
    return found


@pytest.mark.parametrize("path", paths(), ids=lambda path: path.relative_to(ROOT).as_posix())
def test_the_prose_has_no_phrase_that_readers_stumble_over(path: Path) -> None:
    found = [line for place, text in texts(path) for line in faults(place, text)]
    assert not found, "\n" + "\n".join(found)


def test_a_phrase_is_found_with_its_line_and_across_a_line_break() -> None:
    (found,) = faults("page", "# Page\n\nThe key is\nno name.\n")
    assert found.startswith("page:3: 'is no name'; write: is not a …")


def test_code_is_not_prose() -> None:
    page = "```\nit is no name\n```\n\n    it is told\n\nThe output is `4 changes in non-tensor state`.\n"
    assert not faults("page", page)


def test_every_page_is_read_or_written_by_a_program() -> None:
    read = {path.relative_to(ROOT).as_posix() for path in paths()}
    assert {"README.md", "docs/index.md", "notebooks/01_open_and_look.ipynb"} <= read
    for page, program in GENERATED.items():
        assert (ROOT / page).exists() and (ROOT / program).exists()


# ---- sources ---------------------------------------------------------------------------------------------------------


def literals(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Line and text of every string literal of several words (one word is a name); values in f-strings are left out."""
    inside = {id(part) for node in ast.walk(tree) if isinstance(node, ast.JoinedStr) for part in node.values}
    for node in ast.walk(tree):
        if isinstance(node, ast.JoinedStr):
            parts = [part.value if isinstance(part, ast.Constant) else "…" for part in node.values]
            yield node.lineno, "".join(map(str, parts))
        elif isinstance(node, ast.Constant) and id(node) not in inside and len(str(node.value).split()) > 1:
            yield node.lineno, str(node.value)


def no_verbs(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Line and beginning of each function's docstring that is not imperative (PEP 257); properties may be nouns."""
    for node in ast.walk(tree):
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        decorators = [ast.unparse(one) for one in node.decorator_list]
        first = (ast.get_docstring(node) or "Return.").splitlines()[0]
        if not any("property" in name or name.endswith(".setter") for name in decorators) and not _VERB.match(first):
            yield node.lineno, first


def source_faults(place: str, text: str) -> list[str]:
    """A line for each banned phrase in a literal (where it begins, what, and what to write instead), and for each
    docstring of a function that does not begin with a verb.
    """
    phrases = {phrase: instead for phrase, instead in BANNED.items() if phrase not in NOT_IN_SOURCES}
    tree = ast.parse(text)
    found = [
        f"{place}:{line}: {match[0]!r}; write: {instead}"
        for line, literal in literals(tree)
        for phrase, instead in phrases.items()
        for match in re.finditer(phrase, " ".join(literal.split()), re.IGNORECASE)
    ]
    return found + [
        f"{place}:{line}: {first!r}; begin with a verb: Return …, Check …" for line, first in no_verbs(tree)
    ]


@pytest.mark.parametrize("name", SOURCES)
def test_messages_and_docstrings_are_plain_english(name: str) -> None:
    path = ROOT / "workbench" / name
    found = [
        line
        for file in ([path] if path.suffix == ".py" else sorted(path.rglob("*.py")))
        for line in source_faults(file.relative_to(ROOT).as_posix(), file.read_text("utf-8"))
    ]
    assert path.exists() and not found, "\n" + "\n".join(found)


def test_a_phrase_is_found_in_messages_and_docstrings() -> None:
    code = 'def f(x):\n    """Find what is no\n number."""\n    raise ValueError(f"{x} is no " f"name")  # is no word\n'
    (message, docstring) = sorted(source_faults("f.py", code), key=lambda line: line, reverse=True)
    assert message.startswith("f.py:4: 'is no name'") and docstring.startswith("f.py:2: 'is no number'")


@pytest.mark.parametrize(
    "docstring", ["The size.", "Names of files.", "Returns it.", "``(N,)`` sizes.", "|δ| in float32.", "As :func:`f`."]
)
def test_a_docstring_that_does_not_begin_with_a_verb_is_found(docstring: str) -> None:
    code = f'class C:\n    """The class."""\n    {{}}\n    def f(self):\n        """{docstring}"""\n'
    (found,) = source_faults("c.py", code.format("@staticmethod"))
    assert found.startswith("c.py:4: ") and "begin with a verb" in found
    assert not source_faults("c.py", code.format("@property"))


def test_counted_nouns_and_their_verbs_agree():
    assert [plural(n, "chunk", "are") for n in (0, 1, 2000)] == ["0 chunks are", "1 chunk is", "2,000 chunks are"]
    assert [plural(n, "row", "lack") for n in (1, 2)] == ["1 row lacks", "2 rows lack"]
    assert [plural(2, noun) for noun in ("copy", "key", "box", "process")] == [
        "2 copies",
        "2 keys",
        "2 boxes",
        "2 processes",
    ]
