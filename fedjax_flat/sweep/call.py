"""What other machines and processes call to train a cell; it imports nothing heavy."""

import os
import subprocess


def call(argv: list[str], log: str) -> int:
    """Runs a cell's worker, which saves and leaves when the process that called this dies."""
    with open(log, "ab") as file:
        return subprocess.run(
            [*argv, "--parent", str(os.getpid())], stdin=subprocess.DEVNULL, stdout=file,
            stderr=file, check=False,
        ).returncode
