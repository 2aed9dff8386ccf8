"""The public interface against its contract, ``docs/api.md``, and what the contract promises of every result."""

from __future__ import annotations

import ast
import inspect
import json
import os
import pickle
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, Dataset

import workbench as wb

PAGE = (Path(__file__).resolve().parents[1] / "docs" / "api.md").read_text("utf-8")
BLOCKS = "".join(re.findall(r"```text\n(.*?)```", PAGE, re.S))
LINES = [line for line in re.sub(r"\n {4}", " ", BLOCKS).replace("( ", "(").splitlines() if line]
CALLS = [line for line in LINES if "(" in line]
ATTRIBUTES = [line for line in LINES if "(" not in line]


def found(name: str) -> Any:
    """``Checkpoint.step`` → what the class holds under that name."""
    owner, _, attribute = name.rpartition(".")
    return inspect.getattr_static(getattr(wb, owner), attribute) if owner else getattr(wb, attribute)


def owner_of(name: str) -> Any:
    """``Checkpoint.step`` → the class, ``dcp.Writer`` → the module."""
    owner = name.rpartition(".")[0]
    return getattr(wb, owner) if owner else wb


def parameters(name: str) -> list[tuple[str, str, str]]:
    """Name, kind and default of each parameter, ``self`` and ``cls`` left out."""
    value = found(name)
    bound = "." in name and not isinstance(value, staticmethod) and not inspect.ismodule(owner_of(name))
    function = getattr(value, "__func__", value)
    signature = list(inspect.signature(function).parameters.values())
    return [(p.name, p.kind.name, "" if p.default is p.empty else repr(p.default)) for p in signature[bound:]]


def promised(line: str) -> list[tuple[str, str, str]]:
    """The same, of a line of the contract."""
    head = line.replace(".", "_", line.split("(")[0].count("."))
    (function,) = ast.parse(f"def {head}: ...").body
    assert isinstance(function, ast.FunctionDef)
    rows, given = [], function.args
    plain = [*given.posonlyargs, *given.args]
    defaults = [None] * (len(plain) - len(given.defaults)) + list(given.defaults)
    for arg, default in zip(plain, defaults, strict=True):
        rows.append((arg.arg, "POSITIONAL_OR_KEYWORD", "" if default is None else repr(ast.literal_eval(default))))
    if given.vararg:
        rows.append((given.vararg.arg, "VAR_POSITIONAL", ""))
    for arg, default in zip(given.kwonlyargs, given.kw_defaults, strict=True):
        rows.append((arg.arg, "KEYWORD_ONLY", "" if default is None else repr(ast.literal_eval(default))))
    if given.kwarg:
        rows.append((given.kwarg.arg, "VAR_KEYWORD", ""))
    return rows


@pytest.mark.parametrize("line", CALLS, ids=lambda line: line.split("(")[0])
def test_a_signature_is_as_promised(line: str) -> None:
    assert parameters(line.split("(")[0]) == promised(line)


@pytest.mark.parametrize("name", ATTRIBUTES)
def test_an_attribute_is_there(name: str) -> None:
    owner, _, attribute = name.rpartition(".")
    kept = getattr(wb, owner)
    if not hasattr(kept, attribute):  # set by ``__init__``, or a field without a default
        fields = {field for base in kept.__mro__ for field in getattr(base, "__annotations__", {})}
        assert attribute in fields or f"self.{attribute}" in inspect.getsource(kept)
    else:
        assert not inspect.isfunction(inspect.getattr_static(kept, attribute)), f"{name} is a method"


def test_nothing_public_is_missing_from_the_contract() -> None:
    listed = {line.split("(")[0] for line in LINES}
    for name in wb.__all__:
        value = getattr(wb, name)
        if name == "errors":
            continue
        if inspect.ismodule(value):
            assert {f"{name}.{inner}" for inner in value.__all__} <= listed
            continue
        if not inspect.isclass(value):
            assert name in listed
            continue
        own = {n for base in value.__mro__ if base.__module__.startswith("workbench") for n in vars(base)}
        missing = {f"{name}.{n}" for n in own if not n.startswith("_")} - listed
        assert not missing, f"docs/api.md does not list {sorted(missing)}"


@pytest.mark.parametrize("name", [line.split("(")[0] for line in CALLS] + [n for n in wb.__all__ if n != "errors"])
def test_a_docstring_begins_with_a_sentence(name: str) -> None:
    value = found(name)
    text = inspect.getdoc(getattr(value, "__func__", value)) or ""
    first = text.split("\n\n")[0].strip()
    assert first and first[0].isupper() | (first[0] in "`:") and first[-1] in ".:", f"{name}: {first!r}"


# ---- what the contract says of tensors and selections ---------------------------------------------------------------


def test_a_tensor_has_the_names_of_torch(samples: Path) -> None:
    ckpt = wb.open(samples / "dcp_fsdp2")
    tensor = next(ckpt[key] for key in ckpt if ckpt[key].ndim == 2)
    whole = tensor.torch()
    assert tensor.numel() == whole.numel() and tensor.ndim == whole.ndim and tensor.shape == tuple(whole.shape)
    assert tensor.nbytes == whole.nbytes and tensor.num_replicas == 1
    moved = tensor.to("cpu")
    assert torch.equal(moved, whole) and moved.device.type == "cpu"
    assert tensor.to("meta").device.type == "meta"


def test_groups_of_roles_divide_a_checkpoint(samples: Path) -> None:
    ckpt = wb.open(samples / "dcp_fsdp2")
    model, optimizer = ckpt.model, ckpt.optimizer
    assert set(model.roles) <= {"param", "buffer"} and len(model) and not set(model) & set(optimizer)
    assert {"exp_avg", "exp_avg_sq"} <= set(optimizer.roles) and "param" not in optimizer.roles
    assert list(ckpt.select(role="model")) == list(model) and list(ckpt.select(role="optimizer")) == list(optimizer)
    assert list(ckpt.select(role="all")) == list(ckpt)
    assert not len(wb.open(samples / "dcp_fsdp2").model.optimizer)


def test_an_unknown_role_lists_those_present(samples: Path, tmp_path: Path) -> None:
    ckpt = wb.open(samples / "dcp_fsdp2")
    for call in (
        lambda: ckpt.select(role="expavg"),
        lambda: ckpt.to_device("cpu", role="expavg"),
        lambda: wb.export(ckpt, tmp_path / "out", role="expavg"),
    ):
        with pytest.raises(
            wb.errors.UsageError, match=r"no tensor has the role 'expavg'.*exp_avg_sq.*model, optimizer"
        ) as caught:
            call()
        assert "did you mean 'exp_avg'" in str(caught.value)
    assert not (tmp_path / "out").exists()


# ---- results --------------------------------------------------------------------------------------------------------


def listed(value: Any) -> Any:
    """Tuples as the lists that JSON makes of them; names of any other type stay, and are found."""
    if isinstance(value, dict):
        return {name: listed(inner) for name, inner in value.items()}
    return [listed(inner) for inner in value] if isinstance(value, (list, tuple)) else value


def test_every_result_is_json(samples: Path, tmp_path: Path) -> None:
    before, after = samples / "titan_run" / "step-2", samples / "titan_run" / "step-4"
    a, b = wb.open(before), wb.open(after)
    whole = {key: torch.empty_like(a.model[key].torch()) for key in a.model}
    results = {
        "verify": wb.verify(a),
        "diff": wb.diff(a, b),
        "doctor": wb.doctor(before, after),
        "layout": wb.layout(a),
        "plan": wb.plan_memory(a, gpus=2, memory_gb=80),
        "map": wb.name_map(a, b),
        "export": wb.export(a, tmp_path / "out"),
        "load": wb.load(whole, before, strict=False),
        "echo": wb.echo(torch.nn.Linear(2, 2), path=tmp_path / "echo"),
    }
    for name, result in results.items():
        told = result.to_dict()
        assert isinstance(told, dict) and json.loads(json.dumps(told, allow_nan=False)) == listed(told), name


def test_a_report_is_the_sequence_of_its_findings(samples: Path, tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes(
        (samples / "hf_llama_tied_fp32" / "model-00001-of-00004.safetensors").read_bytes()[:-8]
    )
    report = wb.verify(tmp_path / "model.safetensors")
    assert len(report) == len(list(report)) == len(report.findings) == len(report.to_dict()["findings"]) >= 1
    assert [one.rule for one in report] == list(report.findings["rule"]) and report[
        0
    ].severity == report.worst == "error"


# ---- processes ------------------------------------------------------------------------------------------------------


class Rows(Dataset[torch.Tensor]):
    """Rows of a stored tensor, as a data loader's workers read them."""

    def __init__(self, tensor: wb.LazyTensor) -> None:
        self.tensor = tensor

    def __len__(self) -> int:
        return self.tensor.shape[0]

    def __getitem__(self, at: int) -> torch.Tensor:
        return self.tensor[at]


@pytest.mark.parametrize("start", ["fork", "spawn"])
def test_workers_of_a_data_loader_read(samples: Path, start: str) -> None:
    ckpt = wb.open(samples / "dcp_fsdp2")
    tensor = next(ckpt[key] for key in ckpt if ckpt[key].ndim == 2)
    whole = tensor.torch()  # files are open before the workers start
    loader = DataLoader(Rows(tensor), batch_size=8, num_workers=2, multiprocessing_context=start)
    assert torch.equal(torch.cat(list(loader)), whole)
    assert torch.equal(tensor.torch(), whole)


def test_a_pickle_holds_where_and_not_what(samples: Path) -> None:
    ckpt = wb.open(samples / "dcp_fsdp2")
    tensor = max((ckpt[key] for key in ckpt), key=lambda one: one.nbytes)
    whole = tensor.torch()
    content = whole.numpy().tobytes()[:64]
    for one in (tensor, ckpt):
        data = pickle.dumps(one)
        assert content not in data and os.path.realpath(ckpt.path).encode() in data
    assert torch.equal(pickle.loads(pickle.dumps(tensor)).torch(), whole)
    same = pickle.loads(pickle.dumps(ckpt))
    assert list(same) == list(ckpt) and same.step == ckpt.step and same.format == ckpt.format
