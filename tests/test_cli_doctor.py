"""``workbench doctor``: from a folder to a cause, its exit codes, its page, and how it ends when the input is bad."""

from __future__ import annotations

import json
import os
import re
import shutil
from pathlib import Path

import pytest

from tests import lab
from tests.test_cli import ESCAPES, run
from tests.test_lab import SMALL
from workbench.cli import main
from workbench.views.doctor import SCREEN

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


@pytest.fixture(scope="module")
def dropped() -> lab.Case:
    return lab.case("f01_drop_opt", SMALL, "dcp", k=1)


@pytest.fixture
def call(capsys: pytest.CaptureFixture[str]):
    """The command in this process: exit code, stdout, stderr."""

    def invoke(*words: object) -> tuple[int, str, str]:
        code = main([str(word) for word in words])
        out, err = capsys.readouterr()
        return code, out, err

    return invoke


@pytest.fixture
def two(dropped: lab.Case, tmp_path: Path) -> Path:
    """A folder with two checkpoints, as a run leaves it."""
    for path, step in ((dropped.before, 60), (dropped.after, 61)):
        assert path is not None
        shutil.copytree(path, tmp_path / "run" / f"step-{step}")
    return tmp_path / "run"


def test_a_folder_with_two_checkpoints_leads_to_the_cause(call, two) -> None:
    code, out, _ = call("doctor", two)
    lines = out.splitlines()
    assert code == 1 and lines[0].startswith("RESUME DOCTOR") and len(lines) <= SCREEN
    assert re.search(r"dcp, step 60 → step 61", lines[0])
    assert re.search(r"before +.*step-60", lines[1]) and re.search(r"after +.*step-61", lines[2])
    assert re.match(r"WARN +.*optimizer", lines[3]) and "ERROR" not in out
    assert "set_optimizer_state_dict" in out  # the remedy of that framework
    assert "20 of 20 of the optimizer's counters went from 60 to 1" in " ".join(out.split())
    assert "20 of 20 masters" in out and "40 of 40 moments" in out  # what was compared
    assert "step 60 is the earliest checkpoint, with none before it to compare" in " ".join(out.split())
    assert "Last good" not in out and "since the resume" not in out  # neither is known
    assert "between the checkpoints: " in out


def test_the_echo_needs_no_later_checkpoint(call, dropped) -> None:
    code, out, _ = call("doctor", dropped.before, "--echo", dropped.echo)
    assert code == 1 and re.search(r"^WARN +.*optimizer", out, re.M)
    assert re.search(r"weights: 20 of 20 weights \(73,968 elements\) are equal", " ".join(out.split()))


def test_a_healthy_resume_ends_in_0(call) -> None:
    case = lab.case("h0_exact", SMALL, "dcp", k=20)
    code, out, _ = call("doctor", case.before, case.after, "--echo", case.echo)
    assert code == 0 and not re.search(r"^(ERROR|WARN)\b", out, re.M)
    assert "20 of 20 weights, 20 of 20 masters, 40 of 40 moments" in " ".join(out.split())


def test_what_cannot_be_meant_ends_in_2(call) -> None:
    case = lab.case("f03_drop_v", SMALL, "dcp", k=1)
    code, out, _ = call("doctor", case.before, case.after)
    assert code == 2 and re.search(r"^ERROR +.*exp_avg_sq", out, re.M)


def test_a_change_on_purpose_ends_in_1(call) -> None:
    case = lab.case("h4_lower_lr", SMALL, "dcp", k=1)
    code, out, _ = call("doctor", case.before, case.after)
    assert code == 1 and "ERROR" not in out and "WARN" in out


def test_json_is_one_document_and_says_what_the_text_says(call, dropped) -> None:
    code, out, _ = call("doctor", dropped.before, dropped.after, "--json")
    assert code == 1 and out.isascii() and out.count("\n") == 1
    found = json.loads(out, parse_constant=lambda name: pytest.fail(f"{name} is no JSON"))
    assert {"subject", "findings", "checked", "not_checked", "verdict", "causes", "ruled_out"} <= found.keys()
    _, text, _ = call("doctor", dropped.before, dropped.after)
    first = found["causes"][0]
    assert (
        first["cause"] == "B1"
        and first["title"] in found["verdict"]
        and first["question"].lower() in found["verdict"].lower()
    )
    assert f"{first['severity'].upper()}   {first['title']}" in text and first["question"].lower() in text.lower()


def test_shallow_reads_no_values(call, dropped) -> None:
    code, out, _ = call("doctor", dropped.before, dropped.after, "--shallow")
    assert code == 1 and re.search(r"^WARN +.*optimizer", out, re.M)
    assert "of the optimizer's counters went from 60 to 1" in " ".join(out.split()) and "exp_avg" not in out
    _, out, _ = call("doctor", dropped.before, dropped.after, "--shallow", "--json")
    found = json.loads(out)
    assert {"P01"} <= {one["rule"] for one in found["findings"]} and "P03" not in found["checked"]
    assert "deep=False" in found["not_checked"]["values"]


def test_all_is_more_than_a_screen(call, dropped) -> None:
    _, screen, _ = call("doctor", dropped.before, dropped.after)
    _, everything, _ = call("doctor", dropped.before, dropped.after, "--all")
    assert len(everything.splitlines()) > len(screen.splitlines()) and not re.search(r"… \d|also ", everything)


def test_what_the_user_says_is_used(call, dropped) -> None:
    betas, rates = (0.5, 0.6), ("--lr", 0.5, "--weight-decay", 0.25)
    _, out, _ = call("doctor", dropped.before, dropped.after, "--betas", *betas, *rates, "--json")
    facts = json.loads(out)["facts"]["after"]
    told = {name: facts[name]["value"] if isinstance(facts[name], dict) else facts[name][0] for name in facts}
    assert (list(told["betas"]), told["lr"], told["weight_decay"]) == ([0.5, 0.6], 0.5, 0.25)


def test_the_page_stands_alone(call, dropped, tmp_path) -> None:
    page = tmp_path / "page.html"
    code, out, err = call("doctor", dropped.before, dropped.after, "--echo", dropped.echo, "--html", page)
    assert code == 1 and out.startswith("RESUME DOCTOR") and err == f"note: wrote {str(page)!r}\n"
    text = page.read_text("utf-8")
    assert text.startswith("<!DOCTYPE html>") and "Did the moments evolve" in text and "VERDICT" not in text
    markup = re.sub(r"<script.*?</script>", "", text, flags=re.S)
    assert not re.search(r"\b(src|href)=", markup) and list(tmp_path.iterdir()) == [page]


# ---- bad input -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "words, told",
    [
        (["--betas", "0.9", "1.5"], "--betas 1.5"),
        (["--lr", "-1"], "--lr -1"),
        (["--weight-decay", "nan"], "--weight-decay nan"),
        (["--lr", "x"], "invalid float value"),
        (["--threads", "0"], "is not a positive number"),
    ],
)
def test_wrong_usage_is_64_in_one_line(call, dropped, words, told) -> None:
    code, out, err = call("doctor", dropped.before, *words)
    assert code == 64 and out == "" and told in err and err.count("\n") == 1


def test_what_cannot_be_opened_is_3_in_one_line(call, dropped, tmp_path) -> None:
    for words in ((tmp_path / "nothing",), (dropped.before, tmp_path / "nothing\x1b[2J")):
        code, out, err = call("doctor", *words)
        assert code == 3 and out == "" and err.count("\n") == 1 and not ESCAPES.search(err.strip())


def test_a_page_that_cannot_be_written_is_refused_before_anything_is_read(call, dropped, tmp_path) -> None:
    other = tmp_path / "other.pt"
    other.write_bytes(b"mine")
    for page in (tmp_path / "no" / "page.html", tmp_path, other, Path(os.devnull)):
        code, out, err = call("doctor", dropped.before, "--html", page)
        assert code == 3 and out == "" and "--html" in err
    assert other.read_bytes() == b"mine" and not Path(os.devnull).is_file()


def test_a_damaged_later_checkpoint_is_a_finding(call, dropped, tmp_path) -> None:
    broken = tmp_path / "step-61"
    shutil.copytree(dropped.after, broken)
    file = next(broken.rglob("*.distcp"))
    os.truncate(file, file.stat().st_size // 2)
    code, out, err = call("doctor", dropped.before, broken)
    assert code == 2 and "ERROR" in out and "Traceback" not in err


def test_names_are_harmless(call, dropped, tmp_path) -> None:
    evil = tmp_path / "step-60\x1b[2J\u202e"
    shutil.copytree(dropped.before, evil)
    _, out, err = call("doctor", evil, "--shallow")
    assert not ESCAPES.search(out.replace("\n", "")) and not ESCAPES.search(err.replace("\n", ""))


def test_in_a_process_of_its_own_nothing_heavy_is_drawn(dropped) -> None:
    done = run("doctor", dropped.before, dropped.after)
    assert done.returncode == 1 and done.stdout.startswith("RESUME DOCTOR") and done.stderr == ""
