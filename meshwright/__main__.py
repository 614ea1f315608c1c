"""The command `meshwright`, and `python -m meshwright`."""

import signal

import meshwright


def start() -> None:
    """Run the command of the command line. Ctrl-C while it is imported ends it without a word; then
    a terminal that closes and SIGTERM end it as Ctrl-C does: unfinished files are removed."""
    meshwright.exit_unless_linux()
    usual = signal.getsignal(signal.SIGINT)
    if usual is signal.default_int_handler:  # an import may make a different error of its exception
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    # not at the top: it takes the 0.06 s that are meant
    from meshwright.commands.main import main

    signal.signal(signal.SIGINT, usual)
    for number in (signal.SIGHUP, signal.SIGTERM):
        if signal.getsignal(number) is signal.SIG_DFL:  # not under nohup
            signal.signal(number, signal.default_int_handler)
    main()


if __name__ == "__main__":
    start()
