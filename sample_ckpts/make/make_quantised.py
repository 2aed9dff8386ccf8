"""One projection of each quantised model, cut out of what the owning library wrote: ``make_quantised.py FOLDER``.

``FOLDER/<name>/model`` is a Llama of one layer that compressed-tensors 0.20, bitsandbytes 0.50, torchao 0.18 or mlx
0.32 quantised and saved; ``FOLDER/<name>/truth.safetensors`` is what the same library dequantises it to. Bytes, types
and ``__metadata__`` of the tensors kept are unchanged.
"""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path

from common import publish, write_truth
from safetensors import safe_open
from safetensors.torch import save_file

NAMES = (
    "bnb_int8", "bnb_nf4", "ct_int8_channel", "ct_nvfp4", "ct_pack_int4_g32", "mlx_q4_g64",
    "torchao_fp8",
)  # fmt: skip
KEPT = ("model.layers.0.self_attn.k_proj.", "model.layers.0.input_layernorm.")


def cut(source: Path, name: str) -> None:
    target = Path("quantised") / name
    target.mkdir(parents=True)
    with safe_open(source / name / "model" / "model.safetensors", "pt") as file:
        told = (file.metadata() or {}).items()
        tensors, metadata = kept(file), {k: v for k, v in told if "." not in k or k.startswith(KEPT)}
    save_file(tensors, target / "model.safetensors", metadata)
    shutil.copyfile(source / name / "model" / "config.json", target / "config.json")
    with safe_open(source / name / "truth.safetensors", "pt") as file:
        write_truth(f"quantised/{name}", kept(file))


def kept(file) -> dict:
    return {key: file.get_tensor(key) for key in file.keys() if key.startswith(KEPT)}  # noqa: SIM118


if __name__ == "__main__":
    originals = Path(sys.argv[1]).absolute()
    with publish("quantised"):
        for name in NAMES:
            cut(originals, name)
        for path in Path("quantised").rglob("config.json"):
            document = json.loads(path.read_text())
            document.pop("_name_or_path", None)
            path.write_text(json.dumps(document, indent=1))
            path.chmod(0o644)
