"""``workbench serve``: the dashboard, by default on this machine's loopback address.

::

    browser ──► 127.0.0.1:5006/            reachable only from this machine
    browser ──► proxy/wb/ ──► 127.0.0.1    --prefix wb --allow-websocket-origin proxy
    browser ──► 0.0.0.0:5006/              --auth basic | github …, or --insecure
"""

from __future__ import annotations

import ipaddress
import os
import re
import socket
from collections.abc import Sequence
from concurrent.futures import Executor
from copy import copy
from dataclasses import dataclass, replace
from typing import Any

from workbench.app.jail import BucketJail, jail_of
from workbench.app.outlet import Outlet
from workbench.core.place import Place
from workbench.core.remote.url import current_options, keep_options
from workbench.errors import UsageError, WorkbenchError
from workbench.formats import FORMATS

BUNDLES = 8  #: maximum cached bundles of scripts and style sheets: by prefix, and by loaded classes
CHECK = 500  #: milliseconds between two checks for sessions whose page was closed


@dataclass(frozen=True)
class Serving:
    """The options of a server, besides its ROOT.

    Attributes:
        port: TCP port, 0 for any free one.
        address: the address to listen on; a name or an IPv4 address.
        exports: the folder inside ROOT that exports may be written to; ``None`` to forbid writing.
        auth: ``basic``, an OAuth provider of Panel, or ``None`` for no sign-in.
        user: the user name for ``basic``.
        password_file: a file whose first line is the password; by default ``WORKBENCH_PASSWORD`` is used.
        users: with OAuth, the users who have access.
        insecure: allow an address beyond loopback without a sign-in.
        prefix: the path under which a reverse proxy serves it: ``wb`` for ``https://host/wb/``.
        origins: ``HOST[:PORT]`` as in the browser's address bar: further names of the server, besides its address and
            loopback; pages from there may connect to it.
        certificate, key: PEM files; with them, the server uses TLS.
        executor: its workers read the checkpoints to verify, compare, examine or export; ``None`` for this process.
        watch: checks to run on each step under ROOT, in the background: ``verify``, ``deep``, ``doctor``.
    """

    port: int = 5006
    address: str = "127.0.0.1"
    exports: str | None = None
    auth: str | None = None
    user: str = "workbench"
    password_file: str | None = None
    users: Sequence[str] = ()
    insecure: bool = False
    prefix: str = ""
    origins: Sequence[str] = ()
    certificate: str | None = None
    key: str | None = None
    executor: Executor | None = None
    watch: Sequence[str] = ()


def serve(root: str | os.PathLike[str], *, show: bool = False, **options: Any) -> None:
    """Serve ROOT until interrupted. Prints the URL when ready; ``/liveness`` answers while the server runs.

    Args:
        root: the folder, or the URL of a prefix in a store, whose checkpoints are served; nothing outside it can be
            reached.
        show: open a browser, if available.
        options: those of :class:`Serving`; others are passed to :func:`panel.serve`.

    Raises:
        OpenError: a URL cannot be listed.
        UsageError: the folder does not exist, the port is taken, the options conflict, or others can reach the address
            and neither ``auth`` nor ``insecure=True`` is given.
    """
    from workbench.app.jobs import end_all

    server = start(root, show=show, **{"port": 5006, **options})
    end_all(False)
    try:
        server.start()
        server.io_loop.start()
    except KeyboardInterrupt:
        print()
    finally:
        if server.watching is not None:
            server.watching.stop()
        end_all()
        server.stop()


def start(root: str | os.PathLike[str], port: int = 0, *, show: bool = False, **options: Any) -> Any:
    """Return the listening server; the caller runs its event loop, and stops its ``watching``, if that is not ``None``.
    Raises as :func:`serve`."""
    ours = {name: options.pop(name) for name in Serving.__dataclass_fields__ if name in options}
    how = Serving(port=port, **ours)
    jail = jail_of(root)
    if isinstance(jail, BucketJail):
        keep_options(current_options())
        _ = Place(jail.root).files  # its faults are reported here rather than on every page
    outlet = Outlet(jail, how.exports)
    prefix = _prefix(how.prefix)
    _refuse_ipv6(how.address)
    _check_origins(how)
    if not how.insecure and how.auth is None and not _loopback(how.address):
        raise UsageError(
            f"address {how.address!r} can be reached by others without a password; forward the port instead "
            "(ssh -L 5006:127.0.0.1:5006 HOST), require one (--auth basic), or allow it with --insecure (insecure=True)"
        )
    if (how.certificate is None) != (how.key is None):
        raise UsageError("TLS needs both --certificate and --key")
    os.environ.pop("BOKEH_RESOURCES", None)  # with "cdn", the page would be blank without a network
    # Every page needs these. Two threads that begin to import pandas at the same time can wait for each other for good
    # (_DeadlockError in CPython 3.11's importlib, and then a lock that nobody releases); here, there is one thread.
    import pandas  # noqa: F401
    import panel as pn

    from workbench.app.access import Access, options_of
    from workbench.app.guard import Guard
    from workbench.app.jobs import scan_on
    from workbench.app.page import create_app

    scan_on(how.executor)
    _lighten()
    _quieten()
    access = None if how.auth is None else Access.of(how.auth, how.user, how.password_file, how.users)
    if access is not None:
        options |= options_of(access)
    if how.certificate is not None:
        options |= {"ssl_certfile": how.certificate, "ssl_keyfile": how.key}
    pn.config.nthreads = None  # the widgets of a session are not thread-safe; long work runs as a job
    how = replace(how, port=_free_port(how.address, how.port))
    folder = outlet.folder if outlet.open else None
    server = pn.serve(
        {"/": lambda: create_app(jail.root, exports=folder, access=access)},
        port=how.port,
        address=how.address,
        prefix=prefix,
        websocket_origin=sorted({*how.origins, *(f"{name}:{how.port}" for name in _names(how))}),
        show=False,
        start=False,
        verbose=False,
        liveness=True,
        title="Checkpoint workbench",
        **{"check_unused_sessions_milliseconds": CHECK, **options},
    )
    http = server._http  # no request has been served yet: the event loop is not running
    http.request_callback = Guard(http.request_callback, [*_names(how), *map(_host, how.origins)], prefix)
    scheme = "http" if how.certificate is None else "https"
    print(f"Serving {str(root)!r} at {scheme}://{how.address}:{server.port}{prefix}/ (Ctrl-C stops it)", flush=True)
    if how.auth is not None and how.certificate is None and not _loopback(how.address):
        print("note: the password is sent unencrypted; use --certificate and --key, or put a TLS proxy in front")
    if outlet.open:
        print(f"Exports may be written to {outlet}", flush=True)
    server.watching = None
    list(FORMATS.values())  # imports the readers
    if not isinstance(jail, BucketJail):  # there, a listing costs requests
        from workbench.app.home import look_ahead

        look_ahead(jail)
    if how.watch:
        from workbench.app.watching import Watching

        server.watching = Watching(jail.root, how.watch)
        server.watching.start()
    if show:
        server.io_loop.add_callback(server.show, "/")
    return server


def _lighten() -> None:
    """Make this process's pages share their common parts, and fetch less.

    panel-material-ui 0.16.6 (``base.py``, ``FONT_CSS``) adds ``material-icons.css``, which declares the fonts of its
    other style sheet again, without their ranges of characters: a browser fetches twelve of them, one after the other,
    until one has the letters that it needs. Panel 1.9.4 (``io/resources.py``) asks every class of components for its
    scripts and style sheets whenever a page is requested: a quarter of the time until the page's HTML is there.
    """
    from panel.io import server
    from panel_material_ui.base import FONT_CSS

    FONT_CSS.clear()
    server.bundle_resources = _bundle


def _quieten() -> None:
    """Leave out two reports of Bokeh (3.9) about ordinary events: a browser that sends the changes of a figure names
    models that the server knows (``core/serialization.py``), and a page was closed while something was being sent to it
    (``server/views/ws.py``)."""
    import logging
    import warnings

    from bokeh.util.warnings import BokehUserWarning

    warnings.filterwarnings("ignore", "reference already known", BokehUserWarning)
    logging.getLogger("bokeh.server.views.ws").addFilter(_not_about_closing)


def _not_about_closing(record: Any) -> bool:
    return not str(record.msg).startswith("Failed sending message")


def _bundle(roots: Any, resources: Any) -> Any:
    """Return Panel's bundle of scripts and style sheets, rendered once while no component's class is added."""
    import panel as pn
    from bokeh.model import Model
    from panel.io.resources import bundle_resources

    config = pn.config
    key = (
        resources.mode,
        resources.root_url,
        pn.state.base_url,
        pn.state.rel_path,
        config.design,
        config.theme,
        len(Model.model_class_reverse_map),
        *map(tuple, (pn.state._extensions or (), config.css_files, config.raw_css)),
    )
    if key not in _bundles:
        while len(_bundles) >= BUNDLES:
            _bundles.pop(next(iter(_bundles)))
        kept = bundle_resources(roots, resources)
        scripts, sheets = kept
        kept._render_js, kept._render_css = (lambda: scripts), (lambda: sheets)
        _bundles[key] = kept
    bundle = copy(_bundles[key])
    bundle.js_raw = [*bundle.js_raw]  # to which a page embedded in another (autoload.js) adds its own
    return bundle


_bundles: dict[Any, Any] = {}


def _prefix(text: str) -> str:
    """Return ``/wb`` for ``wb``, ``/wb`` or ``/wb/``; empty for none."""
    bare = text.strip("/")
    if (bare and not re.fullmatch(r"[A-Za-z0-9._~-]+(/[A-Za-z0-9._~-]+)*", bare)) or ".." in bare.split("/"):
        raise UsageError(f"prefix {text!r} is not a path of letters, digits, '-', '_', '.', '~' and '/'")
    return f"/{bare}" if bare else ""


def _check_origins(how: Serving) -> None:
    for origin in how.origins:
        if not re.fullmatch(r"[A-Za-z0-9.*_-]+(:(\d{1,5}|\*))?", origin):
            raise UsageError(f"origin {origin!r} is not HOST or HOST:PORT, for example wb.example.org or 10.0.0.5:5006")
        if origin.startswith("*") and how.auth is None and not how.insecure:
            raise UsageError("origin '*' lets any page in the browser read the checkpoints; name the hosts")


def _names(how: Serving) -> list[str]:
    """Return the default names of the server: loopback, and the address that it listens on."""
    names = ["localhost", "127.0.0.1", how.address or "0.0.0.0"]
    if how.address in ("0.0.0.0", ""):
        names += [socket.gethostname(), socket.getfqdn()]
    return [name.lower() for name in names]


def _host(origin: str) -> str:
    return origin.partition(":")[0]


def _refuse_ipv6(address: str) -> None:
    """Refuse IPv6: Bokeh 3.9 does not accept such origins, and Panel 1.9.4 fails on every page requested from one."""
    try:
        version = ipaddress.ip_address(address.strip("[]")).version
    except ValueError:
        return
    if version == 6:
        raise UsageError(
            f"address {address!r} is an IPv6 address, which is not supported; use localhost or 127.0.0.1 for "
            "this machine only, or 0.0.0.0 for all of its IPv4 addresses"
        )


def _free_port(address: str, port: int) -> int:
    """Return the port, or a free one for 0: the list of origins needs its number before the server listens.

    Raises a readable error if listening would fail: Bokeh's own failure leaves a socket open and names no remedy.
    """
    try:
        family = socket.getaddrinfo(address, port, type=socket.SOCK_STREAM)[0][0]
    except OSError as error:
        raise UsageError(f"{address!r} is not an address to listen on: {error.strerror}; give another") from None
    try:
        with socket.socket(family, socket.SOCK_STREAM) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind((address, port))
            return int(probe.getsockname()[1])
    except OSError as error:
        raise WorkbenchError(
            f"cannot listen on port {port} at {address!r}: {error.strerror}; choose another with --port"
        ) from None


def _loopback(address: str) -> bool:
    if address == "localhost":
        return True
    try:
        return ipaddress.ip_address(address).is_loopback
    except ValueError:
        return False
