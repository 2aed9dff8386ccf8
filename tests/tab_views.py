"""A link to each page and tab of the dashboard with something to see, for screenshots and the accessibility check."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING
from urllib.parse import urlencode

if TYPE_CHECKING:
    from playwright.sync_api import Page

__all__ = ["SIZES", "THEMES", "VIEWS", "View", "visit"]

SIZES = ((1440, 900), (800, 900))
THEMES = ("light", "dark")
SETTLE = 1_500  #: ms; plots fade in, and what app/aria.py adds is there


@dataclass(frozen=True)
class View:
    """A tab: what its link says, a button to press where it has one, and a text that is there when it is done."""

    query: dict[str, str]
    done: str
    press: str = ""


VIEWS = {
    "home": View({}, "1 step after a resume from step 240"),
    "run": View({"run": "loss_spike", "heat": "update"}, "All signs, pictures and what was not checked"),
    "overview": View({"ckpt": "titan_run/step-4"}, "Bytes by role"),
    "tensors": View({"ckpt": "titan_run/step-4", "tensor": "layers.1.feed_forward.w2.weight"}, "Most extreme elements"),
    "layout": View(
        {"ckpt": "dcp_tp2_fsdp2_vocab515", "tensor": "model.tok_embeddings.weight", "view": "tensor"},
        "[515, 32] of f32",
    ),
    "integrity": View({"ckpt": "hf_llama_bf16_sharded"}, "Not checked", "Verify"),
    "diff": View(
        {"ckpt": "titan_run/step-2", "b": "titan_run/step-4", "tensor": "layers.1.feed_forward.w2.weight"},
        "Values before and after",
    ),
    "doctor": View(
        {"ckpt": "loss_spike/step-240.pt", "b": "loss_spike/step-245.pt", "echo": "loss_spike/step-240-echo.pt"},
        "The fp32 master weights do not match the weights",
    ),
    "export": View({"ckpt": "dcp_fsdp2", "mesh": "tp=2,pp=2"}, "model-rank-00000-of-00004.safetensors"),
}


def visit(page: Page, url: str, tab: str) -> None:
    """Open a tab and wait until what it shows is there."""
    view = VIEWS[tab]
    of_checkpoint = "ckpt" in view.query
    page.goto(f"{url}?{urlencode(view.query | ({'tab': tab} if of_checkpoint else {}))}")
    page.locator("#first").wait_for(state="detached")  # what the page shows until it is live
    if of_checkpoint:
        page.get_by_role("tab", selected=True).wait_for()
    if view.press:
        page.get_by_role("button", name=view.press, exact=True).first.click()
    page.get_by_text(view.done).first.wait_for()
    page.wait_for_timeout(SETTLE)
