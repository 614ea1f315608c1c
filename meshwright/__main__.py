"""The command `meshwright`, and `python -m meshwright`."""

import signal


def start() -> None:
    """Run the command of the command line. Ctrl-C while it is imported ends it without a word."""
    usual = signal.getsignal(signal.SIGINT)
    if usual is signal.default_int_handler:  # an import may make another error of its exception
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    # not at the top: it takes the 0.06 s that are meant
    from meshwright.commands.main import main

    signal.signal(signal.SIGINT, usual)
    main()


if __name__ == "__main__":
    start()
