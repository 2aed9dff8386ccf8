"""``workbench serve``; its options are those of :func:`workbench.app.serve.serve`."""

from __future__ import annotations

import argparse

from workbench.cli.workers import workers


def serve(options: argparse.Namespace) -> None:
    """Run the dashboard until it is interrupted."""
    from workbench.app.serve import serve as run

    with workers(options) as executor:
        run(
            options.root,
            port=options.port,
            address=options.address,
            show=options.show,
            insecure=options.insecure,
            exports=options.allow_export,
            auth=options.auth,
            user=options.user,
            password_file=options.password_file,
            users=options.allow_user,
            prefix=options.prefix,
            origins=options.allow_websocket_origin,
            certificate=options.certificate,
            key=options.key,
            executor=executor,
            watch=options.watch,
        )
