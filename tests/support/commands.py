"""Run a command of kvarena in this process."""

from __future__ import annotations

from kvarena.experiments.cli import app
from typer.testing import CliRunner, Result


def invoke(*arguments: object) -> Result:
    """The command's result. A ValueError is passed on, as the entry point prints it; anything else must not be."""
    result = CliRunner().invoke(app, [str(argument) for argument in arguments])
    if isinstance(result.exception, ValueError):
        raise result.exception
    if result.exit_code and result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result
