"""What becomes of a session when its page is closed, without a browser: Bokeh's own client holds the websocket."""

from __future__ import annotations

import asyncio
import gc
import shutil
import threading
import time
import weakref
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import pytest
from bokeh.client import pull_session
from serving import serving
from visitor import Visitor

from workbench.app.page import Workbench
from workbench.app.registry import shared

#: s that a page's end is waited for. Bokeh's own clocks would let a session go after 15 to 32 s.
SOON = 10


@contextmanager
def page(url: str) -> Iterator[None]:
    """A page held open by a thread of its own: an event loop of the browser tests may be running in this one."""
    with ThreadPoolExecutor(1) as own:
        session = own.submit(pull_session, url=url).result()
        try:
            yield
        finally:
            own.submit(session.close).result()


@pytest.fixture
def made(monkeypatch):
    """The sessions' workbenches, in the order in which they were made."""
    found = []
    init = Workbench.__init__

    def noted(self, *args, **kwargs):
        init(self, *args, **kwargs)
        found.append(self)

    monkeypatch.setattr(Workbench, "__init__", noted)
    return found


def test_the_jobs_of_a_closed_page_end_and_its_checkpoint_is_closed(tmp_path, samples, made):
    shutil.copytree(samples / "hf_llama_tied_fp32", tmp_path / "a")
    begun, ended = threading.Event(), threading.Event()

    def work(progress):
        try:
            begun.set()
            until = time.monotonic() + 6 * SOON
            while time.monotonic() < until:
                progress(0.5)
                time.sleep(0.01)
        finally:
            ended.set()

    before = set(shared._entries)
    with serving(tmp_path) as url:
        with page(url):
            (workbench,) = made
            workbench.state.show("a")
            assert workbench.state.wait(SOON)
            workbench.picker.job.start(work)
            assert begun.wait(SOON) and not ended.is_set()
            assert set(shared._entries) > before
        assert ended.wait(SOON)
        until = time.monotonic() + SOON
        while set(shared._entries) > before and time.monotonic() < until:
            time.sleep(0.02)
        assert set(shared._entries) == before


def test_a_page_that_stays_open_keeps_its_session(tmp_path, made):
    with serving(tmp_path) as url, page(url):
        with page(url):
            first, second = made
            second.picker.job.start(lambda progress: None)
        until = time.monotonic() + SOON
        while not second.state._closed and time.monotonic() < until:
            time.sleep(0.02)
        assert second.state._closed and not first.state._closed


def test_nothing_of_a_closed_page_stays_in_memory(tmp_path, samples, made):
    shutil.copytree(samples / "dcp_fsdp2", tmp_path / "a")
    with serving(tmp_path) as url:
        for _ in range(2):
            with page(url):
                workbench = made.pop()
                workbench.state.show("a")
                assert workbench.state.wait(SOON)
                alive = weakref.ref(workbench)
                del workbench
            until = time.monotonic() + SOON
            while alive() is not None and time.monotonic() < until:
                time.sleep(0.05)
                gc.collect()
            assert alive() is None


def test_nothing_of_a_page_with_pictures_that_can_be_tapped_stays_in_memory(tmp_path, samples, made):
    """HoloViews keeps them until they are cleaned up, which Panel 1.9.4 does not do when a session ends."""
    shutil.copytree(samples / "dcp_fsdp2", tmp_path / "a")

    async def look(url):
        visitor = await Visitor.come(url, ckpt="a", tab="layout")
        (workbench,) = made
        until = time.monotonic() + SOON
        while "layout" not in workbench.made or workbench.made["layout"].view is None:
            assert time.monotonic() < until
            await asyncio.sleep(0.05)
        alive = weakref.ref(workbench)
        made.clear()
        del workbench
        await visitor.leave()
        return alive

    with serving(tmp_path) as url, ThreadPoolExecutor(1) as own:
        alive = own.submit(lambda: asyncio.run(look(url))).result()
        until = time.monotonic() + SOON
        while alive() is not None and time.monotonic() < until:
            time.sleep(0.05)
            gc.collect()
        assert alive() is None
