"""The door for `torchrun train.py --job.config_file CONFIG [--section.key value ...]`."""

if __name__ == "__main__":
    # not above: processes that tokenise read this file too, and need no torch
    from meshwright.system.log import busy, log_to_console
    from meshwright.system.modules import uncollected
    from meshwright.system.processes import Requests

    log_to_console()
    with Requests("exit") as requests:
        with busy("loading torch"), uncollected():
            from meshwright.train.main import main
        main(requests)
