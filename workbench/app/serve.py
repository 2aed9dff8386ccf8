"""``workbench serve``: the dashboard on this machine's loopback address."""

from __future__ import annotations

import ipaddress
import os
import socket
from typing import Any

from workbench.app.jail import Jail
from workbench.errors import UsageError

__all__ = ["serve"]


def serve(
    root: str | os.PathLike[str],
    port: int = 5006,
    address: str = "127.0.0.1",
    show: bool = False,
    *,
    insecure: bool = False,
    **options: Any,
) -> None:
    """Serve ROOT until interrupted; the URL is printed when it is ready. ``/liveness`` answers while it lives.

    Args:
        root: the folder whose checkpoints may be looked at; nothing outside it can be reached.
        port: TCP port, 0 for any free one.
        address: where to listen. Everyone who reaches it can read every checkpoint under ROOT, without a password.
        show: open a browser, where there is one.
        insecure: allow an address beyond loopback.
        options: handed to :func:`panel.serve`, ``prefix`` for one.

    Raises:
        UsageError: no such folder, the port is taken, or an address that others can reach without ``insecure=True``.
    """
    jail = Jail(root)
    if not insecure and not _loopback(address):
        raise UsageError(
            f"address {address!r} can be reached by others, and there is no password; forward the port instead "
            "(ssh -L 5006:127.0.0.1:5006 HOST), or say --insecure (insecure=True)"
        )
    server = start(jail.root, port, address, show, **options)
    try:
        server.start()
        server.io_loop.start()
    except KeyboardInterrupt:
        print()
    finally:
        server.stop()


def start(
    root: str | os.PathLike[str], port: int = 0, address: str = "127.0.0.1", show: bool = False, **options: Any
) -> Any:
    """The server, listening but for its event loop; :func:`serve` and the tests run it."""
    os.environ.pop("BOKEH_RESOURCES", None)  # "cdn" would leave the page blank without a network
    import panel as pn

    from workbench.app.page import create_app

    pn.config.nthreads = None  # widgets of one session are not made for two threads; what takes long is a job
    _check_port(address, port)
    server = pn.serve(
        {"/": lambda: create_app(root)},
        port=port,
        address=address,
        show=False,
        start=False,
        verbose=False,
        liveness=True,
        title="Checkpoint workbench",
        **options,
    )
    url = f"http://{address if ':' not in address else f'[{address}]'}:{server.port}/"
    print(f"Serving {str(root)!r} at {url} (Ctrl-C stops it)", flush=True)
    if show:
        server.io_loop.add_callback(server.show, "/")
    return server


def _check_port(address: str, port: int) -> None:
    """Raise in words where listening would fail: Bokeh's own failure leaves a socket open and names no remedy."""
    try:
        family = socket.getaddrinfo(address, port, type=socket.SOCK_STREAM)[0][0]
        with socket.socket(family, socket.SOCK_STREAM) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind((address, port))
    except OSError as error:
        raise UsageError(
            f"port {port} at {address!r} cannot be listened on: {error.strerror}; choose another with --port"
        ) from None


def _loopback(address: str) -> bool:
    if address == "localhost":
        return True
    try:
        return ipaddress.ip_address(address).is_loopback
    except ValueError:
        return False
