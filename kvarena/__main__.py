"""Starts the command line: `python -m kvarena`, and the `kvarena` script."""


def main() -> None:
    from kvarena.experiments.cli import run

    run()


if __name__ == "__main__":
    main()
