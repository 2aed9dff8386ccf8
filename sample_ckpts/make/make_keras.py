"""Keras files by keras 3.15.1 (torch backend) and h5py 3.16.0.

``keras/net.keras``: a Sequential of one Dense layer, not compiled; an optimizer would need 4 KB more.
``tests/fixtures/keras.zip``: larger ones, which shrink to a tenth in it, beside their truth:

    net.keras, net.h5     one Functional model: Dense, BatchNormalization, a nested Sequential, bfloat16, attention,
                          LSTM; AdamW after two steps
    old.h5, new.h5        h5py, libver earliest and latest: every layout, filter and type that is read
    holes.h5              chunks and a data set that were never written
    NAME.safetensors      every data set, as h5py reads it
    variables.json        path in net.keras → path of the variable, by Keras

Needs ``pip install keras==3.15.1 h5py==3.16.0``.
"""

from __future__ import annotations

import io
import json
import os
import zipfile
from pathlib import Path

os.environ["KERAS_BACKEND"] = "torch"

import h5py
import keras
import numpy as np
import torch
from common import SAMPLES, publish, write_truth
from keras import layers
from safetensors.torch import save

FIXTURES = SAMPLES.parent / "tests" / "fixtures" / "keras.zip"
WEIGHTS = "model.weights.h5"


def small() -> None:
    model = keras.Sequential([layers.Dense(7, name="fc")], name="net")
    model.build((None, 5))
    Path("keras").mkdir(exist_ok=True)
    model.save("keras/net.keras")
    kernel, bias = (torch.from_numpy(one) for one in model.get_weights())
    write_truth("keras/net.keras", {"layers/dense/vars/0": kernel, "layers/dense/vars/1": bias})


def net() -> keras.Model:
    given = keras.Input((6, 8), name="x")
    h = layers.Dense(8, activation="relu", name="fc1")(given)
    h = layers.MultiHeadAttention(2, 4, name="attn")(h, h)
    h = layers.BatchNormalization(name="norm")(h)
    h = layers.Dense(4, name="fc2", use_bias=False)(h)
    h = keras.Sequential([layers.Input((6, 4)), layers.Dense(3, name="inner")], name="enc")(h)
    h = layers.LSTM(3, name="rnn")(layers.Dropout(0.1)(h))
    model = keras.Model(given, layers.Dense(2, name="head", dtype="bfloat16")(h), name="net")
    model.compile(optimizer=keras.optimizers.AdamW(1e-3), loss="mse")
    rng = np.random.default_rng(0)
    x, y = rng.standard_normal((16, 6, 8), np.float32), rng.standard_normal((16, 2), np.float32)
    model.fit(x, y, epochs=2, batch_size=16, verbose=0)
    return model


def kinds(path: str, version: str) -> None:
    rng = np.random.default_rng(1)
    values = rng.standard_normal((11, 6), np.float32)
    with h5py.File(path, "w", libver=version) as file:
        plain = file.create_group("plain")
        for name in ("<f8", ">f4", ">i2", "<u8", "i1", "<c8", "?"):
            plain[name.strip("<>?") or "bool"] = rng.integers(0, 2, (3, 5)).astype(name)
        plain["scalar"] = np.int64(-7)
        plain["bits"] = rng.integers(0, 99, 6, np.uint16).view("V2")
        plain["text"] = ["ab", "ä"]
        chunked = file.create_group("chunked")
        for shuffle in (False, True):
            for gzip in (None, "gzip"):
                for fletcher in (False, True):
                    name = f"{'s' * shuffle}{'g' * bool(gzip)}{'f' * fletcher}" or "raw"
                    how = {"shuffle": shuffle, "compression": gzip, "fletcher32": fletcher}
                    chunked.create_dataset(name, data=values, chunks=(4, 5), **how)
        more = file.create_group("more")
        if version == "latest":
            more.create_dataset("open", data=values, chunks=(4, 5), maxshape=(None, None), compression="gzip")
            for number in range(12):
                more.attrs[f"a{number}"] = number
        more.create_dataset("big", data=values.astype(">f4"), chunks=(4, 5), shuffle=True, compression="gzip")
        more.create_dataset("one", data=values, chunks=(11, 6), compression="gzip")
        more.create_dataset("empty", (0, 3), "f4")
        create = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
        create.set_layout(h5py.h5d.COMPACT)
        space = h5py.h5s.create_simple((3, 2))
        made = h5py.h5d.create(more.id, b"compact", h5py.h5t.IEEE_F32LE, space, create)
        h5py.Dataset(made)[...] = values[:3, :2]
        if version == "earliest":
            many = file.create_group("many")
            for number in range(60):
                many[f"w{number}"] = np.float32(number)
            long = more.create_dataset("long", (900,), "i2", chunks=(1,))
            long[...] = np.arange(900)
        else:
            long = more.create_dataset("long", (1500,), "i2", chunks=(1,))  # a fixed array in pages
            long[...] = np.arange(1500)
            many = file.create_group("many")
            for number in range(60):
                many[f"w{number}"] = np.int8(number)


def holes() -> None:
    with h5py.File("holes.h5", "w", libver="latest") as file:
        file.create_dataset("hole", (8, 4), "f4", chunks=(4, 4))[4:] = 1
        file.create_dataset("never", (2, 2), "f4")
        pages = file.create_dataset("pages", (2500,), "i2", chunks=(1,))  # the second of three is not written
        pages[:900], pages[2100:] = np.arange(900), np.arange(400)


def truth(file: h5py.File) -> bytes:
    """Every data set that h5py reads as numbers."""
    found: dict[str, torch.Tensor] = {}

    def visit(path: str, one: object) -> None:
        if not isinstance(one, h5py.Dataset) or one.dtype.kind == "O":
            return
        value = np.ascontiguousarray(one[...].astype(one.dtype.newbyteorder("="))).reshape(one.shape)
        if value.dtype.kind == "V":
            value = value.view(np.int16).reshape(one.shape)
        as_torch = torch.from_numpy(value)
        found[path] = as_torch.view(torch.bfloat16) if one.attrs.get("dtype") == "bfloat16" else as_torch

    file.visititems(visit)
    return save(found)


def variables(model: keras.Model, file: h5py.File) -> dict[str, str]:
    """Paths of variables by path in the file, where their values are of one variable only."""
    found = {f"optimizer/vars/{number}": one.path for number, one in enumerate(model.optimizer.variables)}
    stored: dict[str, np.ndarray] = {}
    file["layers"].visititems(
        lambda path, one: stored.update({f"layers/{path}": one}) if hasattr(one, "shape") else None
    )
    for path, one in stored.items():
        bits = one[...].tobytes()
        same = [v.path for v in model.variables if raw(v) == bits]
        if len(same) == 1 and path.startswith("layers/"):
            found[path] = same[0]
    return found


def raw(variable: keras.Variable) -> bytes:
    value = variable.value.detach().cpu().contiguous()
    return value.reshape(-1).view(torch.uint8).numpy().tobytes()


def fixtures() -> None:
    model = net()
    model.save("net.keras")
    model.save("net.h5")
    kinds("old.h5", "earliest")
    kinds("new.h5", "latest")
    holes()
    FIXTURES.parent.mkdir(exist_ok=True)
    with zipfile.ZipFile(FIXTURES, "w", zipfile.ZIP_DEFLATED, compresslevel=9) as archive:
        for name in ("net.keras", "net.h5", "old.h5", "new.h5"):
            data = Path(name).read_bytes()
            archive.writestr(name, data)
            inner = zipfile.ZipFile(name).read(WEIGHTS) if name.endswith(".keras") else data
            with h5py.File(io.BytesIO(inner)) as file:
                archive.writestr(f"{name}.safetensors", truth(file))
                if name == "net.keras":
                    archive.writestr("variables.json", json.dumps(variables(model, file)))
        archive.write("holes.h5")


if __name__ == "__main__":
    with publish("keras"):
        keras.utils.set_random_seed(0)
        small()
        fixtures()
