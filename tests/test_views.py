"""What people look at: true, bounded, and harmless whatever a name holds."""

from __future__ import annotations

import re
import shutil
import textwrap
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import save_file

import workbench as wb
from workbench.core.words import Ordinary
from workbench.views import units
from workbench.views.facts import oddities
from workbench.views.html import checkpoint_html, tensor_html
from workbench.views.lines import laid_out, wrap
from workbench.views.names import columns, safe, shorten, shorten_all
from workbench.views.text import SAMPLE, checkpoint_text, tensor_line, tree_lines
from workbench.views.tree import build, walk
from workbench.views.values import values_text

EVIL = [
    "a\x1b[2J.w",
    "bell\a.w",
    "user\u202egpj.exe",
    "<script>alert(1)</script>.w",
    "zero\u200bwidth",
    "q\"u'o&te",
    "",
]
FORBIDDEN = re.compile("[\x00-\x09\x0b-\x1f\x7f-\x9f\u200b-\u200f\u2028-\u202e\u2066-\u2069\ufeff]")


@pytest.fixture
def evil(tmp_path: Path) -> wb.Checkpoint:
    path = tmp_path / "evil.safetensors"
    save_file({name: torch.ones(3) for name in EVIL}, path)
    return wb.open(path)


# ---- names ---------------------------------------------------------------------------------------------------------


@given(st.text(max_size=60))
def test_safe_text_prints_and_keeps_what_prints(text: str) -> None:
    shown = safe(text)
    assert shown.isprintable()
    assert shown == text or not text.isprintable()


def test_safe_names_are_visible_escapes() -> None:
    assert safe("a\x1b[2J\a\u202eb\ud800\U000e0001") == r"a\x1b[2J\x07\u202eb\ud800\U000e0001"


def test_the_names_of_a_column_stay_different() -> None:
    layer = "model.layers.0.self_attn.{}_proj.weight_scale_inv"
    names = [layer.format(one) for one in "qkvo"]
    short = shorten_all(names, [38] * 4)
    assert len({shorten(name, 38) for name in names}) == 1
    assert len(set(short)) == 4 and max(map(len, short)) == 38
    assert shorten_all(["a", "b"], [5, 5]) == ["a", "b"]
    assert shorten_all(["same-name"] * 2, [4, 4])[0] == shorten_all(["same-name"], [4])[0]


@given(st.text(st.characters(min_codepoint=33, max_codepoint=126), max_size=80), st.integers(2, 40))
def test_shorten_keeps_both_ends(text: str, width: int) -> None:
    short = shorten(text, width)
    assert len(short) <= width
    if len(text) <= width:
        assert short == text
    else:
        head, tail = short.split("…", 1) if "…" not in text else ("", "")
        assert text.startswith(head) and text.endswith(tail)


def test_columns_counts_wide_and_combining() -> None:
    assert (columns("abc"), columns("層"), columns("e\u0301")) == (3, 2, 1)


# ---- units ---------------------------------------------------------------------------------------------------------


def test_units() -> None:
    assert [units.nbytes(n) for n in (0, 1023, 1024, 1536, 1 << 40)] == ["0 B", "1,023 B", "1 KiB", "1.5 KiB", "1 TiB"]
    assert [units.count(n) for n in (0, 9999, 1_236_000_123, 999_999)] == ["0", "9,999", "1.24 B", "1.00 M"]
    assert [units.age(s) for s in (-5, 59, 60, 7200, 86400 * 3)] == ["0 s", "59 s", "1 min", "2 h", "3 d"]
    assert [units.dtype(n) for n in ("bfloat16", "float8_e4m3fn", "bool", "qint8")] == [
        "bf16",
        "f8_e4m3fn",
        "bool",
        "qint8",
    ]
    assert [units.percent(1, 0), units.percent(1, 1000), units.percent(1, 2)] == ["0 %", "<1 %", "50 %"]


@given(st.sets(st.integers(0, 60)))
def test_ranges_say_exactly_the_numbers(numbers: set[int]) -> None:
    text = units.ranges(sorted(numbers), most=100)
    said: set[int] = set()
    for part in text.split(",") if text else []:
        found = re.fullmatch(r"(\d+)(?:-(\d+)(?::(\d+))?)?", part)
        assert found is not None
        first, last, step = int(found[1]), int(found[2] or found[1]), int(found[3] or 1)
        said |= set(range(first, last + 1, step))
    assert said == numbers


# ---- tree ----------------------------------------------------------------------------------------------------------


@given(
    st.lists(
        st.tuples(
            st.lists(st.sampled_from(["a", "b", "0", "1", "2", "10", "007", "", "w"]), min_size=1, max_size=5),
            st.integers(1, 3),
        ),
        unique_by=lambda row: ".".join(row[0]),
        max_size=40,
    )
)
def test_tree_counts_every_tensor_once(rows) -> None:
    keys = [".".join(parts) for parts, _ in rows]
    shapes = [(size,) for _, size in rows]
    top = build(keys, shapes, ["float32"] * len(rows), [4 * size for _, size in rows])
    assert sum(node.tensors for node in top) == len(rows)
    assert sum(node.nbytes for node in top) == sum(4 * size for _, size in rows)
    leaves = [node for _, node in walk(top) if node.shape is not None]
    assert sum(leaf.times for leaf in leaves) == len(rows)
    for _, node in walk(top):
        if node.children:
            assert node.tensors == sum(child.tensors for child in node.children)


def test_layers_that_are_alike_fold_and_odd_ones_stay_apart() -> None:
    keys = [f"layers.{i}.{name}" for i in range(4) for name in ("wq.weight", "wo.weight")] + ["norm.weight"]
    shapes = [(8, 8)] * 8 + [(8,)]
    lines = list(tree_lines(build(keys, shapes, ["bfloat16"] * 9, [128] * 8 + [16])))
    assert [line.split() for line in lines] == [
        ["layers.[0-3]", "×4", "1", "KiB", "8", "tensors"],
        ["wq.weight", "×4", "512", "B", "[8,", "8]", "bf16"],
        ["wo.weight", "×4", "512", "B", "[8,", "8]", "bf16"],
        ["norm.weight", "16", "B", "[8]", "bf16"],
    ]
    shapes[2] = (4, 8)  # layer 1's wq
    names = [node.name for _, node in walk(build(keys, shapes, ["bfloat16"] * 9, [128] * 8 + [16]))]
    assert names[:5] == ["layers", "[0,2-3]", "wq.weight", "wo.weight", "1"]


def test_a_name_that_is_also_a_module_keeps_both() -> None:
    top = build(["a", "a.b", "c.d", "c"], [(1,)] * 4, ["bool"] * 4, [1] * 4)
    assert [(depth, node.name) for depth, node in walk(top)] == [
        (0, "a"),
        (1, "(itself)"),
        (1, "b"),
        (0, "c"),
        (1, "d"),
        (1, "(itself)"),
    ]


def test_deep_names_and_many_names_are_no_burden() -> None:
    assert build([".".join("a" * 50_000)], [(1,)], ["bool"], [1])[0].tensors == 1
    keys = [f"m.layers.{i}.experts.{e}.{w}.weight" for i in range(64) for e in range(521) for w in ("a", "b", "c")]
    top = build(keys, [(4, 4)] * len(keys), ["bfloat16"] * len(keys), [32] * len(keys))
    assert [node.name for _, node in walk(top)] == [
        "m.layers.[0-63].experts.[0-520]",
        "a.weight",
        "b.weight",
        "c.weight",
    ]


# ---- a checkpoint at a glance --------------------------------------------------------------------------------------


def test_checkpoint_text_tells_the_facts(samples: Path) -> None:
    ckpt = wb.open(samples / "dcp_fsdp2")
    text = checkpoint_text(ckpt)
    lines = text.splitlines()
    assert 12 <= len(lines) <= 20 and max(map(columns, lines)) <= 100
    params = ckpt.tensors[ckpt.tensors.role == "param"].numel.sum()
    for fact in (
        "dcp checkpoint",
        "step        3",
        "not stored; written by ranks 0–3",
        f"({params:,})",
        "by role",
        "f32",
    ):
        assert fact in text
    assert repr(ckpt) == text


def test_every_sample_has_a_repr_without_torch_types_lost(samples: Path) -> None:
    seen = 0
    for path in sorted(samples.iterdir()):
        if not path.is_dir() or path.name in {"logs", "make", "torch_save", "quantised"}:
            continue
        ckpt = wb.open(path)
        lines = repr(ckpt).splitlines()
        assert 10 <= len(lines) <= 22 and max(map(columns, lines)) <= 100, path.name
        assert len(ckpt._repr_html_()) < 60_000
        for key in ckpt:
            line = tensor_line(ckpt[key])
            assert "\n" not in line and "unreadable" not in line, (path.name, key, line)
            assert len(tensor_html(ckpt[key])) < 20_000
            seen += 1
    assert seen > 400


def test_selection_is_called_one(samples: Path) -> None:
    narrow = wb.open(samples / "dcp_fsdp2").select("norm", role="param")
    assert f"selection   {len(narrow)} of 162 tensors" in repr(narrow)


def test_what_is_odd_is_told(samples: Path) -> None:
    ckpt = wb.open(samples / "dcp_fsdp2")
    position = ckpt.catalog.index["model.lm_head.weight"]
    ckpt.catalog.replica[ckpt.catalog.rows_of(position).start] = 1
    text = repr(ckpt)
    assert "1 tensor with elements that are stored in no chunk: model.lm_head.weight" in text
    assert "1 tensor stored up to 2 times" in text
    copies = next(one for one in oddities(ckpt) if "stored up to" in one)
    assert [isinstance(one, Ordinary) for one in oddities(ckpt)] == [one == copies for one in oddities(ckpt)]


def test_the_choice_of_a_step_is_ordinary_unless_a_newer_one_is_incomplete(samples: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    shutil.copytree(samples / "titan_run", run)
    (note,) = wb.open(run).notes
    assert isinstance(note, Ordinary) and "newest complete" in note
    (run / "step-4" / ".metadata").unlink()
    (note,) = wb.open(run).notes
    assert not isinstance(note, Ordinary) and "incomplete" in note


# ---- a tensor in a line --------------------------------------------------------------------------------------------


def test_tensor_line(tmp_path: Path) -> None:
    nan = torch.arange(100.0)
    nan[3] = float("nan")
    bad = torch.tensor([float("inf"), -float("inf"), 1.0] * 10)
    tensors = {
        "plain": torch.linspace(-1, 1, 1000).reshape(10, 100).bfloat16(),
        "nan": nan,
        "inf": bad,
        "zeros": torch.zeros(12),
        "allnan": torch.full((20,), float("nan")),
        "one": torch.tensor(3.5),
        "few": torch.tensor([1, 2, 4]),
        "empty": torch.empty(0, 3),
        "c": torch.tensor([3 + 4j, 0j]),
    }
    save_file(tensors, tmp_path / "x.safetensors")
    line = {key: tensor_line(t) for key, t in wb.open(tmp_path / "x.safetensors").items()}
    assert line["plain"].startswith("plain [10, 100] bf16 n=1,000 (2 KiB) x∈[-1 ██████████ 1] μ=")
    assert line["nan"].endswith("NaN!") and "99" in line["nan"]
    assert line["inf"].endswith("+Inf! ×10 -Inf! ×10")
    assert line["zeros"].endswith("x=0 all zeros")
    assert line["allnan"].endswith("all NaN!")
    assert line["one"] == "one [] f32 (4 B) x=3.5"
    assert line["few"] == "few [3] i64 n=3 (24 B) x∈[1, 4] μ=2.33 σ=1.25 = [1, 2, 4]"
    assert line["empty"].endswith("n=0 (0 B) empty")
    assert "|x|∈[0, 5]" in line["c"]


def test_a_sampled_line_says_so(tmp_path: Path) -> None:
    save_file({"x": torch.ones(SAMPLE + 1)}, tmp_path / "x.safetensors")
    assert "≈ x=1" in tensor_line(wb.open(tmp_path / "x.safetensors")["x"])
    save_file({"x": torch.zeros(SAMPLE * 3)}, tmp_path / "y.safetensors")
    assert tensor_line(wb.open(tmp_path / "y.safetensors")["x"]).endswith("all zeros in the sample")


def test_unreadable_tensors_say_so_in_the_line(tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    save_file({"x": torch.ones(1000), "y": torch.ones(10)}, path)
    data = path.read_bytes()
    path.write_bytes(data[:-500])
    ckpt = wb.open(path, partial=True)
    lines = [tensor_line(t) for t in ckpt.values()]
    assert any("unreadable: " in line and "partial=True" in line for line in lines)
    assert any("<b>unreadable</b>" in tensor_html(t) for t in ckpt.values())


# ---- values --------------------------------------------------------------------------------------------------------


def test_values_are_elided_like_numpys(tmp_path: Path) -> None:
    value = torch.arange(3 * 50 * 40).reshape(3, 50, 40)
    save_file(
        {"x": value, "s": torch.tensor(7), "f": value[0, :2, :2].to(torch.float8_e5m2)}, tmp_path / "x.safetensors"
    )
    ckpt = wb.open(tmp_path / "x.safetensors")
    with np.printoptions(threshold=1, edgeitems=3):
        assert values_text(ckpt["x"]).split() == np.array2string(value.numpy(), separator=", ").split()
    assert values_text(ckpt["s"]) == "7"
    assert values_text(ckpt["f"]) == "[[ 0,  1],\n [40, 40]]"


# ---- harmless ------------------------------------------------------------------------------------------------------


class _Strict(HTMLParser):
    """Collects tags and checks that they nest."""

    VOID = frozenset({"path"})

    def __init__(self) -> None:
        super().__init__()
        self.stack: list[str] = []
        self.tags: set[str] = set()
        self.text: list[str] = []

    def handle_starttag(self, tag, attrs):
        self.tags.add(tag)
        assert not any(name.startswith("on") for name, _ in attrs)
        if tag not in self.VOID:
            self.stack.append(tag)

    def handle_endtag(self, tag):
        assert self.stack.pop() == tag

    def handle_data(self, data):
        self.text.append(data)


ALLOWED = {"div", "b", "code", "bdi", "table", "tr", "th", "td", "details", "summary", "svg", "path"}


def test_evil_names_are_shown_not_obeyed(evil: wb.Checkpoint) -> None:
    text = repr(evil) + "\n" + "\n".join(repr(t) for t in evil.values())
    assert not FORBIDDEN.search(text) and r"a\x1b[2J" in text and r"\u202e" in text
    for page in [checkpoint_html(evil), *(tensor_html(t) for t in evil.values())]:
        assert not FORBIDDEN.search(page)
        strict = _Strict()
        strict.feed(page)
        assert strict.stack == [] and strict.tags <= ALLOWED


def test_html_keeps_text_and_inherits_colours(samples: Path) -> None:
    ckpt = wb.open(samples / "dcp_fsdp2")
    for page in (checkpoint_html(ckpt), tensor_html(ckpt["model.lm_head.weight"])):
        assert "<script" not in page and "javascript" not in page
        assert not re.search(r"color\s*:|background|#[0-9a-fA-F]{3,6}\b", page.replace("currentColor", ""))
    strict = _Strict()
    strict.feed(checkpoint_html(ckpt))
    assert "lm_head.weight" in "".join(strict.text)


def test_html_size_is_bounded(tmp_path: Path) -> None:
    header = ",".join(
        f'"{"<&>" * 12}{i}.x{i % 977}.{i}w":{{"dtype":"F32","shape":[0],"data_offsets":[0,0]}}' for i in range(30_000)
    )
    data = ("{" + header + "}").encode()
    path = tmp_path / "many.safetensors"
    path.write_bytes(len(data).to_bytes(8, "little") + data)
    page = checkpoint_html(wb.open(path, cache=False))
    assert len(page.encode()) < 60_000
    assert "29,960 more" in page


# ---- names and their numbers ---------------------------------------------------------------------------------------


def test_what_is_left_out_of_a_name_is_not_its_layer() -> None:
    names = [f"model.model.layers.{layer}.self_attn.k_proj.weight" for layer in range(12)]
    for width in (24, 30, 34, 39):
        short = [shorten(name, width) for name in names]
        assert len(set(short)) == 12 and all(len(name) <= width for name in short)
        assert all(re.search(rf"\b{layer}\b", name) for layer, name in enumerate(short)), short
    expert = "model.layers.31.mlp.experts.127.down_proj.weight_scale_inv"
    assert re.findall(r"\d+", shorten(expert, 44)) == ["31", "127"]
    assert shorten(expert, None) == expert


def test_a_long_hostile_name_is_shortened_at_once() -> None:
    assert len(shorten("1." * 100_000, 400)) == 400


@given(st.lists(st.text("ab", min_size=1, max_size=30), max_size=40), st.integers(0, 20), st.integers(1, 4))
def test_lines_are_folded_and_cut_as_textwrap_does(words, indent, most):
    head, text = " " * indent + "h ", " ".join(words)
    how = {"initial_indent": head, "subsequent_indent": " " * len(head)}
    assert wrap(head, text) == (textwrap.wrap(text, 100, **how) or [head.rstrip()])
    cut = textwrap.wrap(text, 100, max_lines=most, placeholder=" …", **how) or [head.rstrip()]
    assert wrap(head, text, most=most) == cut
    with laid_out(40, None):
        assert " ".join(wrap(head, text, most=most)).split() == " ".join(cut).split()
