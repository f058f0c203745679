"""Children that can be interrupted, however the tests were started."""

import signal


def listen() -> None:
    """For `preexec_fn`: a job started in the background of a shell ignores SIGINT, and so would every child of it."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)
