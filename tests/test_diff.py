"""Diffs against what was planted: structure, values, evidence without payload, objects; text, JSON and exit codes."""

from __future__ import annotations

import json
import math
import os
import re
import shutil
from argparse import Namespace
from html.parser import HTMLParser

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file
from test_namemap import HIDDEN, hf_weights

import workbench as wb
from workbench import errors
from workbench.analysis import diff as diff_module
from workbench.analysis import manifest
from workbench.analysis.compare import Compare
from workbench.analysis.diff import diff
from workbench.analysis.diff_objects import object_changes
from workbench.analysis.name_map import name_map
from workbench.cli import diff as cli_diff
from workbench.core.pickles.standins import PickledDict, opaque_class
from workbench.views.diff import diff_lines, tensor_text

KINDS = ["safetensors", "torch_save", "dcp"]


def weights(seed=0):
    generator = torch.Generator().manual_seed(seed)
    found = {f"layers.{n}.w": torch.randn(48, 40, generator=generator) for n in range(3)}
    found["norm"] = torch.rand(40, generator=generator)
    found["embed"] = torch.randn(64, 16, generator=generator).to(torch.bfloat16)
    return found


def write(path, state, kind="safetensors", **objects):
    if kind == "safetensors":
        path.mkdir(parents=True)
        save_file({key: value.contiguous() for key, value in state.items()}, str(path / "model.safetensors"))
        return path
    if kind == "torch_save":
        path.parent.mkdir(parents=True, exist_ok=True)
        torch.save({**state, **objects}, path.with_suffix(".pt"))
        return path.with_suffix(".pt")
    dcp.save({**state, **objects}, checkpoint_id=str(path), no_dist=True)
    return path


def moved(state, key="layers.1.w", scale=1e-3):
    other = {name: value.clone() for name, value in state.items()}
    other[key] += scale
    return other


# ---- structure ----


@pytest.mark.parametrize("first", KINDS)
@pytest.mark.parametrize("second", KINDS)
def test_the_same_state_in_another_format_is_no_difference(tmp_path, first, second):
    state = weights()
    found = diff(write(tmp_path / "a", state, first), write(tmp_path / "b", state, second))
    assert found.same and found.exit_code == 0 and found.summary["equal"] == len(state)
    assert "no difference" in repr(found)


@pytest.mark.parametrize("name", ["dcp_fsdp2", "dcp_tp2_fsdp2_vocab515", "dcp_hsdp_2x2", "hf_llama_bf16_sharded"])
def test_a_sharded_checkpoint_equals_its_truth_in_one_file(samples, name):
    found = diff(samples / name, samples.parent / "tests/truth" / f"{name}.safetensors")
    assert found.summary["changed"] == found.summary["type"] == found.summary["shape"] == 0
    assert found.count("unread") == 0 and found.summary["equal"] == len(found.rows) > 20
    assert not found.added and found.summary["moved"] > 0


def test_added_removed_renamed_and_what_cannot_be_told(tmp_path):
    state = weights()
    other = dict(state)
    other["head"] = other.pop("embed")  # renamed
    del other["norm"]
    other["extra"] = torch.zeros(5)
    twins = {"t1": torch.arange(50.0), "t2": torch.arange(50.0)}
    a = write(tmp_path / "a", {**state, **twins})
    b = write(tmp_path / "b", {**other, "t3": torch.arange(50.0)})
    found = diff(a, b)
    assert set(found.added) == {"extra", "t3"} and set(found.removed) == {"norm", "t1", "t2"}
    assert [(row.key_a, row.key_b) for row in found.rows if row.by == "fingerprint"] == [("embed", "head")]
    assert any("'t1'" in note and "'t3'" in note and "ambiguous" in note for note in found.notes)
    assert found.exit_code == 1 and found.summary["renamed"] == 1 and found.count("equal") == 4


def test_another_type_and_another_shape_are_told_with_what_can_be_compared(tmp_path):
    state = weights()
    other = {**state, "layers.0.w": state["layers.0.w"].to(torch.bfloat16), "norm": state["norm"].reshape(5, 8)}
    found = diff(write(tmp_path / "a", state), write(tmp_path / "b", other))
    kind, shape = found.tensor("layers.0.w"), found.tensor("norm")
    assert kind.status == "type" and kind.comparison.rounded == 48 * 40 and kind.comparison.changed > 0
    want = (state["layers.0.w"].double() - other["layers.0.w"].double()).norm()
    assert kind.comparison.l2 == pytest.approx(float(want))
    assert shape.status == "shape" and shape.comparison is None
    assert found.summary["type"] == found.summary["shape"] == 1 and found.count("equal") == 3


def test_other_cuts_and_other_files_are_told_as_such(tmp_path):
    state = weights()
    a = write(tmp_path / "a", state)
    b = tmp_path / "b"
    b.mkdir()
    save_file({"embed": state["embed"]}, str(b / "other.safetensors"))
    save_file({key: value for key, value in state.items() if key != "embed"}, str(b / "model.safetensors"))
    found = diff(a, b)
    assert found.same and {row.key_b: row.moved for row in found.rows if row.moved} == {"embed": "file"}


def test_tensors_meet_by_parameter_and_role_where_keys_differ(samples, tmp_path):
    found = diff(samples / "titan_run/step-2", samples / "titan_run/step-4")
    assert all(row.by == "key" for row in found.rows)
    state = weights()
    torch.save({"model": state, "step": 3}, tmp_path / "a.pt")
    rows = diff(tmp_path / "a.pt", write(tmp_path / "b", state)).rows
    assert {(row.key_a, row.by) for row in rows} == {(f"model.{key}", "fqn and role") for key in state}
    assert all(row.status == "equal" for row in rows)


def test_fused_weights_are_compared_through_a_name_map(tmp_path):
    from test_namemap import megatron_weights

    hf = hf_weights()
    (tmp_path / "a").mkdir()
    config = {
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 3,
        "vocab_size": 21,
        "hidden_size": HIDDEN,
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
    }
    (tmp_path / "a" / "config.json").write_text(json.dumps(config))
    save_file(hf, str(tmp_path / "a" / "model.safetensors"))
    other = megatron_weights(hf, "local")
    key = "decoder.layers.1.self_attention.linear_qkv.weight"
    other[key] = other[key].clone()
    other[key][3, 2] += 1
    b = write(tmp_path / "b", {name: value.contiguous() for name, value in other.items()})
    left, right = wb.open(tmp_path / "a"), wb.open(b)
    mapped = name_map(left, right)
    if not mapped.targets:
        pytest.skip("the name map needs the geometry, which this pair does not hold")
    for found in (diff(left, right), diff(left, right, names=mapped)):
        rows = {row.key_b: row for row in found.rows}
        assert rows[key].by == "name map" and len(rows[key].keys_a) == 3
        assert rows[key].comparison.changed == 1 and rows[key].comparison.max_at == (3, 2)
        assert rows["decoder.layers.0.self_attention.linear_qkv.weight"].status == "equal"


# ---- values ----


def test_numbers_of_a_row_are_torchs(tmp_path):
    state = weights()
    other = moved(state)
    other["layers.1.w"][7, 9] += 3
    found = diff(write(tmp_path / "a", state), write(tmp_path / "b", other))
    assert [row.key_b for row in found.changed_rows] == ["layers.1.w"] and found.count("equal") == 4
    row = found.tensors.iloc[0]
    x, y = state["layers.1.w"].double(), other["layers.1.w"].double()
    assert row["key_b"] == "layers.1.w" and row["at"] == (7, 9) and row["changed"] == int((x != y).sum())
    assert row["max_abs"] == pytest.approx(float((y - x).abs().max()))
    assert row["rel_l2"] == pytest.approx(float((y - x).norm() / x.norm()))
    assert row["cosine"] == pytest.approx(float(torch.nn.functional.cosine_similarity(x.ravel(), y.ravel(), dim=0)))
    assert found.tensors["status"].tolist().count("equal") == 4 and len(found.tensors) == 5


def test_rows_come_biggest_relative_change_first_and_new_nan_before_all(tmp_path):
    state = weights()
    other = {key: value.clone() for key, value in state.items()}
    other["layers.0.w"] *= 1.5
    other["layers.1.w"] *= 1.1
    other["layers.2.w"][0, 0] = math.nan
    found = diff(write(tmp_path / "a", state), write(tmp_path / "b", other))
    assert [row.key_b for row in found.changed_rows] == ["layers.2.w", "layers.0.w", "layers.1.w"]
    assert found.tensor("layers.2.w").comparison.nan_new == 1 and "NaN!" in repr(found)


def test_a_pattern_is_named_on_a_changed_tensor(tmp_path):
    state = weights()
    other = {**state, "layers.0.w": torch.cat([state["layers.0.w"][24:], state["layers.0.w"][:24]])}
    found = diff(write(tmp_path / "a", state), write(tmp_path / "b", other))
    row = found.tensor("layers.0.w")
    assert row.pattern is not None and row.pattern.sentence in " ".join(repr(found).split())
    assert diff(tmp_path / "a", tmp_path / "b", patterns=False).tensor("layers.0.w").pattern is None


def test_patterns_are_bounded_and_what_is_left_out_is_told(tmp_path, monkeypatch):
    state = weights()
    other = {key: value + 1 for key, value in state.items()}
    monkeypatch.setattr(diff_module, "PATTERN_TENSORS", 2)
    found = diff(write(tmp_path / "a", state), write(tmp_path / "b", other))
    assert "3 of 5 changed tensors" in found.not_checked["patterns"]


@pytest.mark.parametrize("name", ["paddlenlp_legacy", "megatron_dp_reshardable"])
def test_replicas_of_one_checkpoint_are_compared(samples, name):
    ckpt = wb.open(samples / name)
    found = diff(ckpt, ckpt, replicas=(0, 1))
    assert found.same and found.count("equal") > 10 and "replicas" in found.checked


def test_a_copy_that_differs_is_found(tmp_path):
    from workbench.core.build import CatalogBuilder
    from workbench.core.dtypes import by_name
    from workbench.core.place import Place

    ckpt = wb.open(write(tmp_path / "a", {"w": torch.zeros(4)}))
    (tmp_path / "a" / "copies").write_bytes(np.arange(8, dtype=np.float32).tobytes())
    builder = CatalogBuilder("test", Place(tmp_path / "a"))
    builder.tensor("w", by_name("float32"), (4,))
    builder.tensor("once", by_name("float32"), (2,))
    for start in (0, 16):
        builder.chunk("w", (0,), (4,), "copies", start, start + 16)
    builder.chunk("once", (0,), (2,), "copies", 0, 8)
    builder.file("copies")
    catalog = builder.build()
    from workbench.core.storage import SourcePool

    ckpt._pool = SourcePool(Place(tmp_path / "a"), catalog.files, catalog.file_stats)
    made = ckpt.derive(catalog)
    found = diff(made, made, replicas=(0, 1))
    assert [row.key_b for row in found.rows] == ["w"] and found.rows[0].comparison.changed == 4
    assert "1 of 2 tensors" in found.checked["replicas"]


def test_what_cannot_be_read_is_a_row_and_the_rest_is_compared(tmp_path):
    state = weights()
    a, b = write(tmp_path / "a", state), write(tmp_path / "b", moved(state))
    path = b / "model.safetensors"
    blob = path.read_bytes()
    path.write_bytes(blob[:-700])
    with pytest.raises(errors.OpenError):
        diff(a, b)
    found = diff(a, wb.open(b, partial=True))
    unread = [row for row in found.rows if row.status == "unread"]
    assert unread and found.exit_code == 1 and found.count("equal") + found.count("changed") + len(unread) == 5
    assert all("truncated" in row.why for row in unread) and "not compared" in repr(found)


def test_a_pattern_that_could_not_be_searched_for_is_told(tmp_path):
    a = write(tmp_path / "a", {"w": torch.arange(600.0).reshape(20, 30)})
    b = write(tmp_path / "b", {"w": torch.arange(600.0).reshape(30, 20)})
    path = b / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])
    found = diff(a, wb.open(b, partial=True))
    assert found.tensor("w").status == "shape" and found.tensor("w").pattern is None
    assert "truncated" in found.not_checked["pattern of tensor 'w'"]


def test_progress_rises_to_one_and_can_stop_the_diff(tmp_path):
    a, b = write(tmp_path / "a", weights()), write(tmp_path / "b", moved(weights()))
    told = []
    diff(a, b, progress=told.append)
    assert told == sorted(told) and told[-1] == 1.0

    class Stop(Exception):
        pass

    def stop(share):
        raise Stop

    with pytest.raises(Stop):
        diff(a, b, progress=stop)


# ---- without payload ----


def test_stored_crcs_name_exactly_the_chunks_that_a_full_diff_names(tmp_path):
    state = {f"t{n}": torch.randn(60, 30) for n in range(20)}
    other = {key: value.clone() for key, value in state.items()}
    for n in (3, 4, 11):
        other[f"t{n}"][n, 0] += 1
    a, b = write(tmp_path / "a", state, "dcp", step=1), write(tmp_path / "b", other, "dcp", step=2)
    full, quick = diff(a, b), diff(a, b, values=False)
    columns = ["key", "offsets", "sizes", "file"]
    assert quick.chunks[columns].values.tolist() == full.chunks[columns].values.tolist()
    assert quick.chunks["key"].tolist() == ["t3", "t4", "t11"] and quick.chunks["changed"].isna().all()
    assert {row.source for row in quick.rows} == {"stored CRC-32"} and quick.summary["equal"] == 17
    assert "evidence of what was written" in quick.checked["stored CRC-32"] and "values" in quick.not_checked
    assert [change.path for change in quick.objects] == ["step"]


@pytest.mark.parametrize("name", ["titan_run/step-2", "dcp_fsdp2", "dcp_tp2_fsdp2_vocab515"])
def test_crcs_of_sharded_saves_agree_with_a_full_diff(samples, tmp_path, name):
    shutil.copytree(samples / name, tmp_path / "b")
    assert diff(samples / name, tmp_path / "b", values=False).same
    if name.startswith("titan"):
        other = samples / "titan_run/step-4"
        full, quick = diff(samples / name, other, patterns=False), diff(samples / name, other, values=False)
        columns = ["key", "offsets", "sizes", "file"]
        assert quick.chunks[columns].values.tolist() == full.chunks[columns].values.tolist()


def test_no_payload_is_read_without_values(tmp_path, monkeypatch):
    a, b = write(tmp_path / "a", weights(), "dcp"), write(tmp_path / "b", moved(weights()), "dcp")

    def fold(self, state, piece):
        raise AssertionError("a payload was read")

    monkeypatch.setattr(Compare, "fold", fold)
    assert diff(a, b, values=False).summary["changed"] == 1


def test_without_evidence_a_pair_is_unknown_and_that_is_no_clean_bill(tmp_path):
    a, b = write(tmp_path / "a", weights()), write(tmp_path / "b", weights())
    found = diff(a, b, values=False)
    assert found.count("unknown") == 5 and found.same and found.exit_code == 1
    assert "unknown (not read)" in repr(found) and "no difference" not in repr(found)
    assert diff(a, b, values=False, evidence="none").count("unknown") == 5


def test_manifests_say_what_changed_in_formats_without_checksums(tmp_path):
    a, b = write(tmp_path / "a", weights()), write(tmp_path / "b", moved(weights()))
    for path in (a, b):
        manifest.write(wb.open(path))
    found = diff(a, b, values=False)
    assert [row.key_b for row in found.changed_rows] == ["layers.1.w"] and found.count("equal") == 4
    assert {row.source for row in found.rows} == {"manifest"} and "when the manifests were written" in repr(found)


def test_one_file_under_two_names_is_equal_without_reading(tmp_path):
    a = write(tmp_path / "a", weights())
    (tmp_path / "b").mkdir()
    os.link(a / "model.safetensors", tmp_path / "b" / "model.safetensors")
    found = diff(a, tmp_path / "b", values=False)
    assert found.exit_code == 0 and {row.source for row in found.rows} == {"one file"}


def test_trusted_evidence_spares_reading_and_is_named(tmp_path):
    state = weights()
    a, b = write(tmp_path / "a", state, "dcp"), write(tmp_path / "b", moved(state), "dcp")
    data = next(b.glob("*.distcp"))
    row = wb.open(b).catalog
    blob = bytearray(data.read_bytes())
    t = row.index["layers.0.w"]
    at = int(row.start[row.rows_of(t)][0])
    payload = blob.find(state["layers.0.w"].numpy().tobytes(), at)
    blob[payload + 5] ^= 1  # flipped after the save: what was written is equal, what is there is not
    data.write_bytes(blob)
    trusted, full = diff(a, b, evidence="trust"), diff(a, b)
    assert [row.key_b for row in trusted.changed_rows] == ["layers.1.w"]
    assert trusted.tensor("layers.0.w").source == "stored CRC-32" and "(by stored CRC-32)" in repr(trusted)
    assert trusted.tensor("layers.1.w").comparison.changed > 1000
    assert {row.key_b for row in full.changed_rows} == {"layers.0.w", "layers.1.w"}
    with pytest.raises(errors.UsageError, match="evidence"):
        diff(a, b, evidence="hope")


# ---- objects ----


def texts(a, b):
    return {change.path: change.text for change in object_changes(a, b)}


def test_objects_are_told_path_by_path():
    a = {"step": 1, "args": {"lr": 0.1, "betas": [0.9, 0.99], "old": "x"}, "same": {"x": [1, {"y": 2}]}}
    b = {"step": 2, "args": {"lr": 0.2, "betas": [0.9, 0.95], "new": None}, "same": {"x": [1, {"y": 2}]}, "more": 3}
    assert texts(a, b) == {
        "step": "1 → 2",
        "args.lr": "0.1 → 0.2",
        "args.betas[1]": "0.99 → 0.95",
        "args.old": "only in a: 'x'",
        "args.new": "only in b: None",
        "more": "only in b: 3",
    }


def test_how_files_are_laid_out_is_no_object():
    one = {
        "__metadata__": {"x.safetensors": {"format": "pt", "author": "me"}},
        "m.safetensors.index": {"total_size": 1},
    }
    two = {"__metadata__": {"y.safetensors": {"author": "me"}, "z.safetensors": {}}}
    assert texts(one, two) == {} and texts({}, {"__metadata__": {"x": {"format": "pt"}}}) == {}
    two["__metadata__"]["z.safetensors"]["author"] = "you"
    assert texts(one, two) == {"__metadata__.author": "'me' → 'you'"}


def test_generator_states_are_counted_never_shown():
    state = torch.get_rng_state()
    other = state.clone()
    other[10:20] += 1
    found = texts({"rng": state, "raw": b"abcd"}, {"rng": other, "raw": b"abxy"})
    assert found == {"rng": f"differs in 10 of {len(state):,} bytes", "raw": "differs in 2 of 4 bytes"}


def test_values_that_look_alike_are_told_apart_and_equal_ones_are_not():
    nan = float("nan")
    assert texts({"a": nan, "b": 1, "c": (1, 2)}, {"a": nan, "b": 1, "c": (1, 2)}) == {}
    found = texts({"a": 1, "b": (1, 2), "t": torch.zeros(3)}, {"a": 1.0, "b": [1, 2], "t": torch.zeros(3, 1)})
    assert found["a"] == "1 → 1.0" and found["b"] == "(1, 2) → [1, 2]" and "float32[3] → float32[3, 1]" in found["t"]
    found = texts({"n": np.arange(5), "t": torch.tensor(1.5)}, {"n": np.arange(5)[::-1].copy(), "t": torch.tensor(2.5)})
    assert found == {"n": "int64[5] differs in 4 of 5 elements", "t": "1.5 → 2.5"}


def test_opaque_things_and_cycles_end():
    kind = opaque_class("lib", "Config")
    one, two, three = kind(), kind(), kind()
    one.__setstate__({"width": 3})
    two.__setstate__({"width": 4})
    three.__setstate__({"width": 3})
    assert texts({"c": one}, {"c": two}) == {"c.width": "3 → 4"} and texts({"c": one}, {"c": three}) == {}
    a, b = [1], [1]
    a.append(a)
    b.append(b)
    assert texts({"loop": a}, {"loop": b}) == {}
    bag = PickledDict("collections.OrderedDict", {"x": 1})
    assert texts({"o": bag}, {"o": {"x": 2}}) == {"o.x": "1 → 2"}
    deep, other = 1, 2
    for _ in range(500):
        deep, other = [deep], [other]
    (change,) = object_changes({"d": deep}, {"d": other})
    assert change.kind == "unlooked"


def test_long_lists_are_counted_after_the_first():
    found = object_changes({"l": list(range(100))}, {"l": list(range(1, 101))})
    assert found[0].text.startswith("differs in 100 of 100 entries") and len(found) == 3


def test_an_object_that_cannot_be_decoded_is_told():
    class Broken(dict):
        def __getitem__(self, key):
            raise errors.CorruptError("damaged")

    found = object_changes({"x": 1, "y": 2}, Broken({"x": 1}))
    assert [(change.path, change.kind) for change in found] == [("x", "unreadable"), ("y", "removed")]


# ---- pictures and the command ----


class _Html(HTMLParser):
    def __init__(self):
        super().__init__()
        self.open = []

    def handle_starttag(self, tag, attrs):
        if tag not in ("br",):
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag


def test_text_fits_a_hundred_columns_and_html_is_whole(samples):
    for a, b in (("titan_run/step-2", "titan_run/step-4"), ("dcp_fsdp2", "dcp_hsdp_2x2")):
        found = diff(samples / a, samples / b)
        for line in diff_lines(found):
            assert len(line) <= 100, line
        assert len(repr(found).splitlines()) < 90
        parser = _Html()
        parser.feed(found._repr_html_())
        assert parser.open == []
        for row in found.rows[:5]:
            assert row.key_b.rsplit(".", 1)[-1] in repr(row)


def test_names_of_a_stranger_are_harmless(tmp_path):
    name = "w\x1b[2J\u202e<script>"
    a, b = write(tmp_path / "a", {name: torch.zeros(3)}), write(tmp_path / "b", {name: torch.ones(3)})
    found = diff(a, b)
    assert "\x1b" not in repr(found) and "\u202e" not in repr(found) and "<script>" not in found._repr_html_()
    assert "\x1b" not in tensor_text(found.rows[0])


def options(a, b, **more):
    common = {"json": False, "format": None, "no_cache": True, "io": "mmap", "partial": False}
    own = {"pattern": [], "role": None, "no_values": False, "evidence": "auto", "all": False, "threads": None}
    own |= {"detail": None, "replicas": None}
    own |= {"detail": None, "replicas": None}
    return Namespace(a=str(a), b=str(b), workers=None, dask=None, **{**common, **own, **more})


def test_the_command_exits_with_what_it_found(tmp_path, capsys):
    state = weights()
    a, b = write(tmp_path / "a", state), write(tmp_path / "b", moved(state))
    assert cli_diff.diff(options(a, a)) == 0
    assert "no difference: 5 tensors equal" in capsys.readouterr().out
    assert cli_diff.diff(options(a, b)) == 1
    assert "layers.1.w" in capsys.readouterr().out
    assert cli_diff.diff(options(a, b, pattern=["norm"])) == 0
    assert cli_diff.diff(options(a, b, detail="layers.1.w")) == 1
    assert "max |Δ|" in capsys.readouterr().out
    (b / "model.safetensors").write_bytes((b / "model.safetensors").read_bytes()[:-700])
    assert cli_diff.diff(options(a, b, partial=True)) == 3
    with pytest.raises(errors.OpenError):
        cli_diff.diff(options(a, b))
    with pytest.raises(errors.UsageError):
        cli_diff.diff(options(a, a, pattern=["("]))


def test_json_is_one_document_of_plain_values(tmp_path, capsys):
    state = weights()
    other = moved(state)
    other["norm"] = torch.zeros(40)
    other["layers.0.w"] = torch.full((48, 40), math.inf)
    a, b = write(tmp_path / "a", state), write(tmp_path / "b", other)
    assert cli_diff.diff(options(a, b, json=True)) == 1
    got = json.loads(capsys.readouterr().out)
    assert got["summary"]["changed"] == 3 and not got["same"]
    rows = {row["key_b"]: row for row in got["tensors"]}
    assert rows["norm"]["cosine"] is None and rows["layers.1.w"]["chunks"][0]["sizes"] == [48, 40]
    assert set(rows["layers.1.w"]) >= {"rel_l2", "ulp_max", "bands", "pattern"}
    detail = diff(a, b).tensor("layers.1.w").to_dict(detail=True)
    assert sum(detail["ulps"]) == 48 * 40 and detail["tail"][-1][1] <= 1


def test_a_key_of_no_pair_is_said_to_be_where_it_is(tmp_path):
    a, b = write(tmp_path / "a", weights()), write(tmp_path / "b", {**weights(), "more": torch.zeros(2)})
    found = diff(a, b)
    with pytest.raises(errors.TensorNotFoundError, match=re.escape("'more' is only in b")):
        found.tensor("more")
    with pytest.raises(errors.TensorNotFoundError, match="either side"):
        found.tensor("nothing")


def test_sets_say_what_one_side_has_and_the_other_has_not():
    def told(a, b):
        return [change.text for change in object_changes({"s": a}, {"s": b})]

    assert told({1, 2, "x"}, {2, 3}) == ["only in a: 'x', 1; only in b: 3"]
    assert told(frozenset("ab"), frozenset("a")) == ["only in a: 'b'"]
    assert told(set(range(10)), set()) == ["only in a: 0, 1, 2, 3, 4, 5 and 4 more"]
    assert told({1}, {1}) == [] and told({1}, frozenset({1})) == ["<set of 1> → <frozenset of 1>"]


def test_sides_without_tensors_are_said_to_have_none(tmp_path):
    for name, value in (("a", {"n": 1}), ("b", {"n": 1}), ("c", {"n": 2})):
        torch.save(value, tmp_path / f"{name}.pt")
    a, b, c = (tmp_path / f"{name}.pt" for name in "abc")
    assert (
        "no difference: no tensors on either side" in repr(diff(a, b)) and "1 object" in diff(a, b).checked["objects"]
    )
    assert "0 tensors" not in repr(diff(a, c)) and "1 changed in objects" in repr(diff(a, c))
