"""The door for `torchrun train.py --job.config_file CONFIG [--section.key value ...]`."""

import signal

if __name__ == "__main__":
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)  # Ctrl-C: no traceback of an import
    from meshwright.train.__main__ import start

    start()
