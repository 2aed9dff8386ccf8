"""NeMo's archives: a torch.save file and a DCP folder inside a tar file, read in place; against torch and tarfile."""

from __future__ import annotations

import io
import random
import tarfile
from pathlib import Path

import pytest
import torch

import workbench as wb
from tests.reader_suite import check_reader, raw, refused
from workbench.core.disk import Disk
from workbench.core.place import Place
from workbench.core.tarfiles import TarFiles, read_members
from workbench.errors import CorruptError, TruncatedError, UnsafeError, UnsupportedFormatError, WorkbenchError

KINDS = {"ustar": tarfile.USTAR_FORMAT, "gnu": tarfile.GNU_FORMAT, "pax": tarfile.PAX_FORMAT}


def state() -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    return {"model.w": torch.randn(6, 4), "model.b": torch.randn(4).bfloat16()}


def packed(path: Path, files: dict[str, bytes], kind: str = "ustar", mode: str = "w") -> Path:
    with tarfile.open(path, mode, format=KINDS[kind]) as archive:  # type: ignore[call-overload]
        for name, data in files.items():
            info = tarfile.TarInfo(name)
            info.size = len(data)
            archive.addfile(info, io.BytesIO(data))
    return path


def saved(value: object) -> bytes:
    held = io.BytesIO()
    torch.save(value, held)
    return held.getvalue()


@pytest.mark.parametrize("kind", KINDS)
def test_a_torch_file_in_an_archive_is_read_in_place(tmp_path: Path, kind: str) -> None:
    long = "x" * (150 if kind != "ustar" else 60)
    weights = saved(state() | {"note": "kept"})
    files = {"./model_config.yaml": b"a: 1\n", f"./{long}.model": bytes(700), "./model_weights.ckpt": weights}
    path = packed(tmp_path / "m.nemo", files, kind)
    ckpt = check_reader(path, state())
    assert ckpt.format == "nemo" and {**ckpt.objects} == {"note": "kept", "model_config.yaml": "a: 1\n"}
    row = ckpt["model.w"].chunks.iloc[0]
    assert path.read_bytes()[row["start"] : row["stop"]] == raw(state()["model.w"])
    assert wb.verify(ckpt, deep=True).exit_code == 0
    assert wb.discover(tmp_path)["format"].tolist() == ["nemo"]


def test_a_distributed_checkpoint_in_an_archive_is_read_in_place(tmp_path: Path, samples: Path) -> None:
    folder = samples / "dcp_fsdp2"
    files = {f"./model_weights/{one.name}": one.read_bytes() for one in sorted(folder.iterdir())}
    path = packed(tmp_path / "m.nemo", files)
    want = wb.open(folder)
    names = [key for key in want if key.startswith("model.")][:8]
    ckpt = check_reader(path, {key: want[key].torch() for key in names}, rest=True)
    assert list(ckpt) == list(want) and list(ckpt.objects) == list(want.objects)
    assert repr(next(iter(ckpt.objects.values()))) == repr(next(iter(want.objects.values())))
    del files["./model_weights/__1_0.distcp"]
    refused(WorkbenchError, packed(tmp_path / "m.nemo", files), "__1_0.distcp")


def test_folders_of_an_archive_are_listed_as_those_of_a_disk(tmp_path: Path) -> None:
    files = {"./a": b"1", "./b/c": b"22", "./b/d/e": b"333", "b//f": b"", "g/h": b""}
    path = packed(tmp_path / "m.tar", files)
    with tarfile.open(path) as archive:
        archive.extractall(tmp_path / "out", filter="data")
    place = Place(path)
    tar, disk = TarFiles(place, "m.tar", read_members(place.window("m.tar"), "m.tar")), Disk(str(tmp_path / "out"))
    for folder in ("", "b", "b/d", "g"):
        here, there = (tar.sub(folder), disk.sub(folder)) if folder else (tar, disk)
        sizes = [{name: stat.size for name, stat in one.listing()[0].items()} for one in (here, there)]
        assert sizes[0] == sizes[1] and sorted(here.listing()[1]) == sorted(there.listing()[1])
    assert tar.exists("b/d") and tar.exists("b/d/e") and not tar.exists("b/x")


def test_what_cannot_be_read_in_place_is_refused(tmp_path: Path) -> None:
    weights = {"./model_weights.ckpt": saved(state())}
    refused(UnsupportedFormatError, packed(tmp_path / "a.nemo", weights, mode="w:gz"), "unpack it (tar -xzf)")
    ranks = {f"./mp_rank_0{rank}/model_weights.ckpt": saved(state()) for rank in range(2)}
    refused(UnsupportedFormatError, packed(tmp_path / "b.nemo", ranks), "weights of 2 ranks")
    refused(UnsupportedFormatError, packed(tmp_path / "c.nemo", {"a.yaml": b""}), "no model_weights")


def test_a_hostile_archive_is_refused(tmp_path: Path) -> None:
    weights = saved(state())
    path = packed(tmp_path / "m.nemo", {"./../model_weights.ckpt": weights})
    refused(UnsafeError, path, "leaves the archive")
    refused(UnsafeError, packed(path, {"/model_weights.ckpt": weights}), "leaves the archive")
    refused(UnsafeError, packed(path, {"a/" * 20_000 + "b": b""}, "pax"), "20,001 nested folders")
    packed(path, {"model_weights.ckpt": weights, "./model_weights.ckpt": weights})
    refused(CorruptError, path, "occurs twice")
    whole = packed(path, {"model_weights.ckpt": weights}).read_bytes()
    path.write_bytes(whole[:1000])
    refused(TruncatedError, path, "bytes beyond the end")
    path.write_bytes(whole[: 512 + -(-len(weights) // 512) * 512])
    refused(TruncatedError, path, "without an end mark")
    path.write_bytes(b"n" + whole[1:])
    refused(CorruptError, path, "sum of a header")
    with tarfile.open(path, "w") as archive:
        link = tarfile.TarInfo("model_weights.ckpt")
        link.type, link.linkname = tarfile.SYMTYPE, "/etc/passwd"
        archive.addfile(link)
    refused(UnsupportedFormatError, path, "no model_weights")


def test_random_damage_ends_in_one_of_our_errors(tmp_path: Path) -> None:
    chance, path = random.Random(0), tmp_path / "m.nemo"
    whole = packed(path, {"a.yaml": b"x", "model_weights.ckpt": saved(state())}, "pax").read_bytes()
    for _ in range(100):
        data = bytearray(whole[: chance.randrange(300, len(whole))] if chance.random() < 0.3 else whole)
        for _ in range(chance.randrange(1, 4)):
            data[chance.randrange(len(data))] = chance.randrange(256)
        path.write_bytes(data)
        try:
            wb.open(path, cache=False).state_dict()
        except WorkbenchError as error:
            assert "\n" not in str(error)
