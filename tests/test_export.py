"""Exports of the samples, opened by safetensors, torch and transformers; refusals; kills in the middle."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

import workbench as wb
from tests.reader_suite import same_bits
from workbench import errors
from workbench.analysis import manifest as manifests
from workbench.analysis.manifest_check import check
from workbench.analysis.manifest_file import INSIDE
from workbench.core.fingerprint import tensor_fingerprints
from workbench.core.words import plural
from workbench.export import export as module
from workbench.export.atomic import syscalls
from workbench.export.export import export
from workbench.export.moving import engine
from workbench.export.selection import choose
from workbench.export.writers.plain import plain
from workbench.views.export import export_text

ROOT = Path(__file__).resolve().parents[1]
TRUTHS = sorted(path.stem for path in (ROOT / "tests" / "truth").glob("*.safetensors"))


def load(path: Path, format: str) -> dict[str, torch.Tensor]:
    """What the owning library reads."""
    if format == "torch":
        return torch.load(path, weights_only=True)
    if path.is_file():
        return load_file(path)
    index = path / "model.safetensors.index.json"
    names = (
        sorted(set(json.loads(index.read_text())["weight_map"].values())) if index.exists() else ["model.safetensors"]
    )
    found = {}
    for name in names:
        found |= load_file(path / name)
    assert {p.name for p in path.glob("*.safetensors")} == set(names)
    return found


def key_of(ckpt: wb.Checkpoint, name: str) -> str:
    """Truths of merged ranks name tensors by role and parameter."""
    role, _, fqn = name.partition(".")
    return name if name in ckpt else ckpt.param(fqn, {"fp32_param": "master"}.get(role, role)).key


@pytest.mark.parametrize("format", ["safetensors", "one", "torch"])
@pytest.mark.parametrize("name", TRUTHS)
def test_every_tensor_of_every_format_is_the_truth(samples, tmp_path, name, format):
    truth = load_file(samples.parent / "tests/truth" / f"{name}.safetensors")
    target = tmp_path / {"safetensors": "folder", "one": "one.safetensors", "torch": "one.pt"}[format]
    kind = "torch" if format == "torch" else "safetensors"
    with wb.open(samples / name) as ckpt:
        size = "100KB" if format == "safetensors" else None
        report = export(ckpt, target, kind, role=None, max_shard_size=size, verify=True)
        keys, objects = list(ckpt), list(ckpt.objects)
        values = {one: ckpt.objects[one] for one in report.carried}
        keys_of = {want: key_of(ckpt, want) for want in truth}
        read = ckpt.state_dict()
    assert report.identical and report.verified and not report.casts
    assert [one.key for one in report.tensors] == keys
    files = {name.removesuffix(".json") for name in report.copied}  # of a model, copied as they are
    stored = {"__metadata__", "model.safetensors.index", "save_log"}  # how the source is stored
    assert {*report.carried, *report.left_out} == set(objects) - files - stored
    got = load(target, kind)
    assert set(got) == {*keys, *report.carried}
    for one in report.carried:
        assert kind == "torch" and got[one] == plain(values[one]), one
    direct = {key: want for key, want in truth.items() if keys_of[key] in got}
    assert len(direct) > 0.7 * len(truth)  # the rest are views of what is stored: Megatron's stacks and fused norms
    for key, want in direct.items():
        same_bits(got[keys_of[key]], want, key)
    for key, want in read.items():
        same_bits(got[key], want, key)
    files = [one for one in target.iterdir() if one.name != INSIDE] if target.is_dir() else [target]
    assert sum(file.stat().st_size for file in files) == report.nbytes
    assert os.listdir(tmp_path) == [target.name]


@pytest.fixture
def small(tmp_path):
    """A checkpoint of a few kinds of tensors, in its own folder, and its tensors."""
    torch.manual_seed(3)
    tensors = {
        "model.a.weight": torch.randn(40, 50),
        "model.a.bias": torch.randn(40, dtype=torch.float16),
        "model.b.running_mean": torch.randn(4, dtype=torch.float64),
        "model.b.ids": torch.arange(9),
        "optim.state.a.weight.exp_avg": torch.randn(40, 50),
    }
    folder = tmp_path / "source"
    folder.mkdir()
    save_file(tensors, folder / "model.safetensors")
    return wb.open(folder), tensors


#: Parameters, buffers, scales and adapters of each sample, counted in what its framework wrote.
MODELS = {
    "bytecheckpoint_fsdp1_flat/global_step_3": 39,
    "dcp_fsdp2": 39,
    "dcp_hsdp_2x2": 21,
    "dcp_single_odd": 15,
    "dcp_tp2_fsdp2_vocab515": 21,
    "deepspeed_zero1/global_step4": 55,
    "hf_deepseek_fp8_block": 35,
    "hf_llama_bf16_sharded": 39,
    "hf_llama_tied_fp32": 38,
    "hf_peft_lora": 16,
    "loss_spike/step-240-echo.pt": 20,
    "loss_spike/step-240.pt": 20,
    "loss_spike/step-245.pt": 20,
    "megatron_dp_reshardable": 31,
    "paddle_dist": 6,
    "paddle_save": 29,
    "paddlenlp_legacy": 39,
    "titan_run/step-2": 21,
    "titan_run/step-4": 21,
    "torch_save/ckpt.pt": 21,
    "torch_save/ckpt_legacy.pt": 21,
    "torch_save/odd.pt": 28,
    "trainer_run/checkpoint-3": 20,
    "trainer_run/checkpoint-6": 20,
    "gguf": 33,
    "gguf/split": 4,
    "quantised/bnb_int8": 4,
    "quantised/bnb_nf4": 5,
    "quantised/ct_int8_channel": 3,
    "quantised/ct_nvfp4": 4,
    "quantised/ct_pack_int4_g32": 4,
    "quantised/mlx_q4_g64": 4,
    "quantised/torchao_fp8": 3,
    "torch_checkpointing/step-3": 12,
    "torch_checkpointing/single": 2,
    "zarr/orbax": 3,
    "orbax/2": 3,
    "keras/net.keras": 2,
}


@pytest.mark.parametrize("name", MODELS)
def test_the_model_of_every_sample_is_its_parameters_and_buffers(name, tmp_path):
    ckpt = wb.open(ROOT / "sample_ckpts" / name)
    selected = choose(ckpt, role="model").names
    loaded = {"param", "buffer", "scale", "lora_A", "lora_B"}
    assert len(selected) == MODELS[name]
    facts = ("weight_shape", "weight_format")  # of no role: what a quantised weight needs besides its numbers
    named = {key for key in selected if not key.endswith(facts)}
    assert named == {key for key, role in zip(ckpt, ckpt.roles, strict=True) if role in loaded}


def test_the_samples_counted_are_all_samples():
    found = wb.discover(ROOT / "sample_ckpts")["path"]
    assert set(MODELS) == {path for path in found if not path.startswith("logs/")}


def test_an_export_of_a_paddlenlp_model_has_no_powers_of_beta(tmp_path):
    source = ROOT / "sample_ckpts" / "paddlenlp_legacy"
    wb.export(wb.open(source), tmp_path / "out")
    stored = load(tmp_path / "out", "safetensors")
    assert len(stored) == 39 and not [key for key in stored if "beta" in key or "moment" in key]


def test_state_that_no_table_lists_is_not_the_models(tmp_path):
    torch.save(
        {
            "model": {"a.weight": torch.ones(2), "a._extra_state": torch.ones(1), "a.weight_shape": torch.ones(2)},
            "optim": {"state": {"a.weight": {"preconditioner": torch.ones(2), "exp_avg": torch.ones(2)}}},
        },
        tmp_path / "x.pt",
    )
    ckpt = wb.open(tmp_path / "x.pt")
    assert ckpt["optim.state.a.weight.preconditioner"].fqn == "a.weight"
    assert set(choose(ckpt).names) == {"model.a.weight", "model.a._extra_state", "model.a.weight_shape"}


def test_what_is_selected_and_how_it_is_called(small, tmp_path):
    ckpt, tensors = small
    model = [key for key in tensors if key.startswith("model.")]
    assert {one.key for one in export(ckpt, tmp_path / "1").tensors} == set(model)
    assert {one.key for one in export(ckpt, tmp_path / "2", role=None).tensors} == set(tensors)
    assert {one.key for one in export(ckpt, tmp_path / "3", role="exp_avg").tensors} == {"optim.state.a.weight.exp_avg"}
    export(ckpt, tmp_path / "4", select=[r"a\.w", "bias$"], rename={"model.a.bias": "β"})
    assert set(load(tmp_path / "4", "safetensors")) == {"model.a.weight", "β"}
    export(ckpt, tmp_path / "5", rename=lambda key: key.removeprefix("model."))
    assert set(load(tmp_path / "5", "safetensors")) == {key[6:] for key in model}
    export(ckpt, tmp_path / "6", rename="fqn")
    assert set(load(tmp_path / "6", "safetensors")) == {ckpt[key].fqn for key in model}
    narrow = export(ckpt.select("bias"), tmp_path / "7.pt", "torch")
    assert [one.key for one in narrow.tensors] == ["model.a.bias"]
    same_bits(load(tmp_path / "7.pt", "torch")["model.a.bias"], tensors["model.a.bias"], "bias")


@pytest.mark.parametrize(
    ("name", "format"),
    [("x.safetensors", "safetensors"), ("x.pt", "torch"), ("x.pth", "torch"), ("x.bin", "torch"), ("x-1.5", None)],
)
def test_the_name_of_the_target_decides_what_is_written(small, tmp_path, name, format):
    ckpt, _ = small
    report = export(ckpt, tmp_path / name)
    assert report.format == (format or "safetensors") and (tmp_path / name).is_dir() == (format is None)
    assert wb.open(tmp_path / name)["model.a.bias"].shape == ckpt["model.a.bias"].shape


def test_a_type_that_only_torch_has_is_sent_there(tmp_path):
    tensors = {"model.w": torch.ones(3, dtype=torch.complex128)}
    torch.save(tensors, tmp_path / "source.pt")
    with pytest.raises(errors.UnsupportedFormatError, match=r"no element type complex128; .*\(--to torch\)"):
        export(tmp_path / "source.pt", tmp_path / "out")
    export(tmp_path / "source.pt", tmp_path / "out.pt")
    assert torch.equal(torch.load(tmp_path / "out.pt")["model.w"], tensors["model.w"])


def test_tensors_of_the_source_that_are_not_written_are_listed(small, tmp_path):
    ckpt, tensors = small
    state = [key for key in tensors if not key.startswith("model.")]
    report = export(ckpt, tmp_path / "model")
    assert sorted(report.unselected) == sorted(state) != []
    assert str(report).endswith(f"bit-identical to the source; {plural(len(state), 'tensor')} of the source left out")
    assert f"  left out  {plural(len(state), 'tensor')}: {report.unselected[0]}" in export_text(report)
    whole = export(ckpt, tmp_path / "all", role="all")
    assert whole.unselected == () and str(whole).endswith("bit-identical to the source")
    assert "left out" not in export_text(whole)


@pytest.mark.parametrize("dtype", ["bf16", torch.float16, "fp32"])
def test_casts_are_torchs_and_their_cost_is_told(small, tmp_path, dtype):
    ckpt, tensors = small
    wanted = {"bf16": torch.bfloat16, "fp32": torch.float32}.get(dtype, dtype)
    report = export(ckpt, tmp_path / "out", dtype=dtype, role=None, verify=True)
    got = load(tmp_path / "out", "safetensors")
    assert not report.identical and "rounding changed" in str(report)
    for one in report.tensors:
        old = tensors[one.key]
        new = old.to(wanted) if old.is_floating_point() else old
        same_bits(got[one.key], new, one.key)
        gaps = (new.double() - old.double()).abs()
        assert (one.changed, one.max_abs) == (int((gaps > 0).sum()), float(gaps.max()))
        assert (one.source == one.target) == (old.dtype == new.dtype)


def test_a_dry_run_refuses_the_same_and_writes_nothing(small, tmp_path):
    ckpt, _ = small
    report = export(ckpt, tmp_path / "out", dry_run=True, max_shard_size=8000)
    assert os.listdir(tmp_path) == ["source"] and not report.identical and str(report).startswith("would write")
    real = export(ckpt, tmp_path / "out", max_shard_size=8000)
    assert (report.files, report.read_nbytes, report.nbytes) == (real.files, real.read_nbytes, real.nbytes)
    assert [(one.key, one.file, one.nbytes) for one in report.tensors] == [
        (one.key, one.file, one.nbytes) for one in real.tensors
    ]
    assert json.loads(json.dumps(real.to_dict()))["identical"] is True
    with pytest.raises(errors.WriteError, match="exists"):
        export(ckpt, tmp_path / "out", dry_run=True)


def test_what_cannot_be_is_refused_and_leaves_nothing(small, tmp_path, monkeypatch):
    ckpt, _ = small
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.tex").write_text("x")
    out = tmp_path / "out"
    refused = [
        (errors.UsageError, "choose safetensors, torch", {"format": "gguf"}),
        (errors.UsageError, "casting to float64 .* choose bfloat16", {"dtype": "float64"}),
        (errors.UsageError, "casting to 'half a byte' .* choose bfloat16", {"dtype": "half a byte"}),
        (errors.UsageError, r"'x\.npz': \.npz files cannot be written; .* NAME\.pt", {"dest": tmp_path / "x.npz"}),
        (errors.UsageError, r"'x\.pt' .* format torch, not of dcp", {"dest": tmp_path / "x.pt", "format": "dcp"}),
        (errors.UsageError, r"'x\.pt' .*, not of safet", {"dest": tmp_path / "x.pt", "format": "safetensors"}),
        (errors.UsageError, r"not of torch", {"dest": tmp_path / "x.safetensors", "format": "torch"}),
        (errors.UsageError, "is a folder with a file for each rank", {"dest": tmp_path / "x.pt", "mesh": "tp=2"}),
        (errors.UsageError, "no tensor is selected", {"select": "nothing"}),
        (errors.UsageError, "regular expression", {"select": "("}),
        (errors.UsageError, "two tensors would be named", {"rename": lambda key: "one"}),
        (errors.UsageError, "choose 'hf' or 'fqn'", {"rename": "cat"}),
        (errors.UsageError, "no known naming convention", {"rename": "hf"}),
        (errors.UsageError, "max_shard_size", {"max_shard_size": "5 gold bars"}),
        (errors.UsageError, "leave it out", {"max_shard_size": 5000, "mesh": "tp=2"}),
        (errors.UsageError, "leave it out", {"max_shard_size": 5000, "format": "dcp"}),
        (errors.UsageError, "is, or contains", {"dest": ckpt.path, "overwrite": True}),
        (errors.UsageError, "is, or contains", {"dest": tmp_path, "overwrite": True}),
        (errors.WriteError, "does not exist", {"dest": tmp_path / "no" / "out"}),
        (errors.WriteError, "is not a checkpoint", {"dest": tmp_path / "mine", "overwrite": True}),
        (errors.WriteError, "exists", {"dest": tmp_path / "mine"}),
    ]
    for kind, words, options in refused:
        with pytest.raises(kind, match=words):
            export(ckpt, **{"dest": out} | options)
    full = os.statvfs_result((4096, 4096, 100, 10, 10, 0, 0, 0, 0, 255))
    monkeypatch.setattr(os, "statvfs", lambda path: full)
    with pytest.raises(errors.WriteError, match="not enough space"):
        export(ckpt, out)
    assert sorted(os.listdir(tmp_path)) == ["mine", "source"] and os.listdir(tmp_path / "mine") == ["thesis.tex"]


def test_overwriting_takes_no_folder_away_that_is_not_of_the_checkpoint(small, tmp_path):
    ckpt, out = small[0] if isinstance(small, tuple) else small, tmp_path / "out"
    export(ckpt, out, select="bias")
    before = (out / "model.safetensors").read_bytes()
    (out / "empty").mkdir()
    export(ckpt, out, select="bias", overwrite=True)
    (out / "checkpoint-100").mkdir()
    (out / "checkpoint-100" / "notes.txt").write_text("mine")
    with pytest.raises(errors.WriteError, match="contains the folder 'checkpoint-100'"):
        export(ckpt, out, select="weight", overwrite=True)
    assert (out / "checkpoint-100" / "notes.txt").read_text() == "mine"
    assert (out / "model.safetensors").read_bytes() == before


def test_overwriting_replaces_all_of_it(small, tmp_path):
    ckpt, _ = small
    export(ckpt, tmp_path / "out", max_shard_size=3000)
    assert len(os.listdir(tmp_path / "out")) > 2
    export(ckpt, tmp_path / "out", select="bias", overwrite=True)
    assert sorted(os.listdir(tmp_path / "out")) == [INSIDE, "model.safetensors"]
    export(ckpt, tmp_path / "x.pt", "torch")
    export(ckpt, tmp_path / "x.pt", "torch", select="bias", overwrite=True)
    assert list(load(tmp_path / "x.pt", "torch")) == ["model.a.bias"]


def test_small_files_of_the_model_pass_through(samples, tmp_path):
    with wb.open(samples / "hf_llama_bf16_sharded") as ckpt:
        plain = export(ckpt, tmp_path / "plain")
        cast = export(ckpt, tmp_path / "cast", dtype="fp32")
    assert set(plain.copied) == set(cast.copied) == {"config.json", "generation_config.json"}
    source = samples / "hf_llama_bf16_sharded"
    for name in plain.copied:
        assert (tmp_path / "plain" / name).read_bytes() == (source / name).read_bytes()
    old, new = (json.loads((folder / "config.json").read_text()) for folder in (source, tmp_path / "cast"))
    key = "dtype" if "dtype" in old else "torch_dtype"
    assert (old[key], new.pop(key)) == ("bfloat16", "float32") and cast.notes
    old.pop(key)
    assert new == old


def test_transformers_loads_an_export_of_another_format(samples, tmp_path):
    from transformers import AutoModelForCausalLM

    with wb.open(samples / "hf_llama_bf16_sharded") as ckpt:
        export(ckpt, tmp_path / "out", max_shard_size="60KB")
    mine = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    theirs = AutoModelForCausalLM.from_pretrained(samples / "hf_llama_bf16_sharded")
    for (name, a), (other, b) in zip(mine.state_dict().items(), theirs.state_dict().items(), strict=True):
        assert name == other
        same_bits(a, b, name)


@pytest.mark.parametrize("format", ["safetensors", "torch"])
def test_verifying_finds_a_disk_that_lies(small, tmp_path, monkeypatch, format):
    ckpt, _ = small
    real = os.pwrite

    def lying(fd, data, at):
        if len(data) == 8000:
            data = bytearray(data)
            data[4321] ^= 1
        return real(fd, data, at)

    monkeypatch.setattr(os, "pwrite", lying)
    with pytest.raises(errors.CorruptError, match=r"'model\.a\.weight'"):
        export(ckpt, tmp_path / "out", format, verify=True)
    assert os.listdir(tmp_path) == ["source"]


@pytest.mark.parametrize("call", ["pwrite", "fsync", "open", "mkdir", "ftruncate"])
@pytest.mark.parametrize("code", [28, 5], ids=["ENOSPC", "EIO"])
def test_every_call_may_fail_in_the_middle(small, tmp_path, monkeypatch, call, code):
    """Each call of a real export fails in turn; what is visible is the old export or the new one, whole."""
    ckpt, tensors = small
    target = tmp_path / "out"
    export(ckpt, target, select="bias")
    old = set(load(target, "safetensors"))
    monkeypatch.setattr(syscalls, "_libc", lambda name: None)  # the long way round
    real, failed = getattr(os, call), 0
    for which in range(60):
        hits = 0

        def failing(*args, which=which, **named):
            nonlocal hits
            if call == "open" and str(tmp_path / "source") in str(args[0]):
                return real(*args, **named)
            hits += 1
            if hits == which + 1:
                raise OSError(code, os.strerror(code))
            return real(*args, **named)

        with monkeypatch.context() as patch:
            patch.setattr(os, call, failing)
            try:
                export(ckpt, target, role=None, max_shard_size=9000, overwrite=True, threads=1)
            except errors.WriteError as error:
                failed += 1
                assert os.strerror(code) in str(error)
        got = load(target, "safetensors")
        assert set(got) in (old, set(tensors))
        for key, value in got.items():
            same_bits(value, tensors[key], key)
        if hits <= which:
            break
        export(ckpt, target, select="bias", overwrite=True)
        assert sorted(os.listdir(tmp_path)) == ["out", "source"]
    assert failed and hits <= which


def test_cancelling_leaves_nothing(small, tmp_path):
    ckpt, _ = small

    def stop(share):
        raise RuntimeError("cancelled")

    with pytest.raises(RuntimeError, match="cancelled"):
        export(ckpt, tmp_path / "out", progress=stop)
    assert os.listdir(tmp_path) == ["source"]


def test_a_source_that_is_damaged_meanwhile_leaves_nothing(small, tmp_path, monkeypatch):
    ckpt, _ = small
    real = module.staging

    def shortening(*args, **named):
        os.truncate(tmp_path / "source" / "model.safetensors", 500)
        return real(*args, **named)

    monkeypatch.setattr(module, "staging", shortening)
    with pytest.raises(errors.OpenError, match=r"model\.safetensors"):
        export(ckpt, tmp_path / "out")
    assert os.listdir(tmp_path) == ["source"]


def test_a_run_of_many_files_is_read_file_by_file(tmp_path, monkeypatch):
    """More source files than are kept open, and read in their own order."""
    monkeypatch.setattr(engine, "MANY_FILES", 3)
    tensors, weights = {}, {}
    (tmp_path / "source").mkdir()
    for number in range(9):
        part = {f"{letter}{number}": torch.randn(100, number + 1) for letter in "ab"}
        save_file(part, tmp_path / "source" / f"model-{number + 1:05d}-of-00009.safetensors")
        weights |= dict.fromkeys(part, f"model-{number + 1:05d}-of-00009.safetensors")
        tensors |= part
    (tmp_path / "source" / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weights}))
    with wb.open(tmp_path / "source") as ckpt:
        export(ckpt, tmp_path / "out", max_shard_size=5000)
    got = load(tmp_path / "out", "safetensors")
    assert set(got) == set(tensors)
    for key, value in got.items():
        same_bits(value, tensors[key], key)


def test_memory_stays_small(tmp_path):
    """Anonymous memory, with a tensor that is larger than the bound would allow."""
    code = """
import sys, numpy as np, workbench as wb
from workbench.export.export import export
from workbench.export.selection import choose
from workbench.export.writers.plain import plain
def anon():
    with open('/proc/self/status') as f:
        return next(int(line.split()[1]) for line in f if line.startswith('RssAnon')) / 1024
ckpt = wb.open(sys.argv[1])
base, most = anon(), 0
def progress(share):
    global most
    most = max(most, anon() - base)
for n, options in enumerate(({}, {'dtype': 'bf16'})):
    export(ckpt, sys.argv[2] + str(n), progress=progress, **options)
print(most)
"""
    header = {"t": {"dtype": "F32", "shape": [4096, 20480], "data_offsets": [0, 4096 * 20480 * 4]}}
    text = json.dumps(header).encode()
    with open(tmp_path / "model.safetensors", "wb") as handle:
        handle.write(len(text).to_bytes(8, "little") + text)
        handle.truncate(8 + len(text) + 4096 * 20480 * 4)
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path / "model.safetensors"), str(tmp_path / "out")],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    assert float(done.stdout) < 64, done.stdout
    assert np.fromfile(tmp_path / "out1" / "model.safetensors", np.uint8)[4096:].max() == 0


# torch 2.13 announces the end of its quantised types; files that hold them stay
@pytest.mark.filterwarnings("ignore:torch.quantize_per", "ignore:.*quantized", "ignore:TypedStorage")
def test_quantised_tensors_are_not_written_without_their_scale(tmp_path):
    one = torch.quantize_per_tensor(torch.randn(3, 4), 0.1, 3, torch.qint8)
    two = torch.quantize_per_channel(torch.randn(4, 8), torch.ones(4), torch.zeros(4), 0, torch.qint8)
    torch.save({"q": one, "m": {"c": two}, "w": torch.ones(2)}, tmp_path / "x.pt")
    ckpt = wb.open(tmp_path / "x.pt")
    for how in ({}, {"format": "torch"}, {"format": "dcp", "objects": False}, {"role": "all"}, {"dry_run": True}):
        with pytest.raises(errors.UnsupportedFormatError, match=r"'q.int_repr' and 1 more: .*dequantize") as told:
            export(ckpt, tmp_path / "out", **how)
        assert ("objects=True" in str(told.value)) == ("format" in how)
    assert not (tmp_path / "out").exists()
    report = export(ckpt, tmp_path / "kept.pt", "torch", objects=True)
    assert report.carried == ("q", "m") and wb.open(tmp_path / "kept.pt").objects["q"]["scale"] == 0.1
    assert export(ckpt, tmp_path / "some", select="^w$").identical
    (tmp_path / "folder").mkdir()
    torch.save({"q": one}, tmp_path / "folder/pytorch_model.bin")
    with pytest.raises(errors.UnsupportedFormatError, match="quantised torch dtype"):
        export(wb.open(tmp_path / "folder"), tmp_path / "out", "torch", objects=True)


@pytest.mark.filterwarnings("ignore:Sparse ")
def test_sparse_tensors_are_not_written_without_their_shape(tmp_path):
    """Neither indices nor values say how many rows and columns there are behind the last element."""
    one = torch.sparse_coo_tensor(torch.tensor([[0, 1], [2, 0]]), torch.ones(2), (4, 9), check_invariants=True)
    torch.save({"a": one, "m": {"b": torch.eye(3, 6).to_sparse_csr()}, "w": torch.ones(2)}, tmp_path / "x.pt")
    ckpt = wb.open(tmp_path / "x.pt")
    for how in ({}, {"format": "torch"}, {"format": "dcp", "objects": False}):
        with pytest.raises(errors.UnsupportedFormatError, match=r"'a.indices' and 4 more: .*to_dense") as told:
            export(ckpt, tmp_path / "out", **how)
        assert ("objects=True" in str(told.value)) == ("format" in how)
    assert not (tmp_path / "out").exists() and export(ckpt, tmp_path / "some", select="^w$").identical
    for format in ("torch", "dcp", "torch_dist", "bytecheckpoint"):
        assert export(ckpt, tmp_path / format, format, objects=True).identical
    kept = wb.open(tmp_path / "torch")
    assert kept.objects["a"]["shape"] == (4, 9) and kept.objects["m"]["b"]["shape"] == (3, 6)
    assert wb.open(tmp_path / "dcp").objects["m.b.shape"] == (3, 6)
    (tmp_path / "folder").mkdir()
    torch.save({"a": one}, tmp_path / "folder/pytorch_model.bin")
    with pytest.raises(errors.UnsupportedFormatError, match="sparse tensor"):
        export(wb.open(tmp_path / "folder"), tmp_path / "out", "torch", objects=True)


def test_the_manifest_is_made_of_what_was_hashed_on_the_way(tmp_path, monkeypatch):
    tensors = {"a": torch.randn(1100, 2000), "b": torch.randn(7).bfloat16(), "c": torch.tensor(1.0)}
    save_file(tensors, tmp_path / "x.safetensors")
    read = []
    real = manifests.file_digests

    def counting(place, blocks, **how):
        read.extend((one.file, int((one.stops - one.starts).sum())) for one in blocks)
        return real(place, blocks, **how)

    monkeypatch.setattr(manifests, "file_digests", counting)
    with wb.open(tmp_path / "x.safetensors") as ckpt:
        export(ckpt, tmp_path / "out")
        told = {ckpt.catalog.keys[t]: one.hex for t, one in tensor_fingerprints(ckpt.payloads)}
    assert [(name, size < 1000) for name, size in read] == [("model.safetensors", True)]  # its header
    made = manifests.load(tmp_path / "out")
    assert {key: entry.fingerprint for key, entry in made.tensors.items()} == told
    assert not len(check(tmp_path / "out", made).findings)
    file = tmp_path / "out" / "model.safetensors"
    raw = bytearray(file.read_bytes())
    raw[-5_000_000] ^= 4
    file.write_bytes(raw)
    found = check(tmp_path / "out", made).findings
    assert len(found) == 1 and "'a'" in found.message[0]


def test_tied_tensors_that_become_separate_are_noted(tmp_path):
    weight = torch.randn(4, 3)
    state = {"embed.weight": weight, "head.weight": weight, "row": weight[1], "other": torch.zeros(3)}
    torch.save(state, tmp_path / "tied.pt")
    report = export(tmp_path / "tied.pt", tmp_path / "out.pt")
    assert [note for note in report.notes if "storage" in note] == [
        "'embed.weight' and 'head.weight' share one storage in the source, and are separate in the target; "
        "tie them again after loading"
    ]
    assert not export(tmp_path / "tied.pt", tmp_path / "one.pt", select="head|other").notes
