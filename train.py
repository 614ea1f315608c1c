"""The door for `torchrun train.py --job.config_file CONFIG [--section.key value ...]`."""

if __name__ == "__main__":
    # not above: processes that tokenise read this file too, and need no torch
    from meshwright.imports import uncollected
    from meshwright.launch.process import Requests
    from meshwright.log import busy, log_to_console

    log_to_console()
    with Requests("exit") as requests:
        with busy("loading torch"), uncollected():
            from meshwright.main import main
        main(requests)
