"""`kvarena verify`: are the allocators still the upstreams', and does a result folder add up?"""

from __future__ import annotations

import typer

verify_app = typer.Typer(
    name="verify",
    help="Compare decisions with the real packages, and results with their rows.",
    no_args_is_help=True,
)


@verify_app.callback()
def main() -> None:
    """Compare decisions with the real packages, and results with their rows."""
