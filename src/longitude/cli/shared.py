"""What verbs share: exit codes, the console of progress, JSON for machines."""

DONE, FAILURES, WRONG_USE, INTERRUPTED = 0, 1, 2, 130


def print_json(value) -> None:
    from json import dumps, loads

    rows = loads(value.to_json(orient="records")) if hasattr(value, "to_json") else value
    print(dumps(rows, indent=1, ensure_ascii=False))


def stderr_console():
    from rich.console import Console

    return Console(stderr=True, soft_wrap=True)
