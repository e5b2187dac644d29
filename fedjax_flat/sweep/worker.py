"""Trains one cell: `python -m fedjax_flat.sweep.worker FOLDER CELL [--data FOLDER] [--parent PID]`.

Ends with an entry in the book: finished, stopped, or failed with what was said. Killed, it leaves
none. A worker whose driver has died saves its state and leaves too; one that finds its run folder
in use waits for such a worker.
"""

import argparse
import json
import os
import pathlib
import signal
import sys
import threading
import time

from fedjax_flat import errors
from fedjax_flat.experiment import config as config_lib
from fedjax_flat.run.loop import train
from fedjax_flat.sweep.book import Book

LOOK = 0.5  # seconds
WAIT = 120


def work(folder: str, name: str, *, data_dir: str | None = None, parent: int = 0) -> int:
    """Trains a cell to its end, or until it is asked to stop; 0 if it says how it ended."""
    book = Book(pathlib.Path(folder))
    config = config_lib.from_json(json.dumps(book.plan()["cells"][name]["config"]))
    over = threading.Event()
    threading.Thread(target=_watch, args=(book, name, parent, over), daemon=True).start()
    until = time.monotonic() + WAIT
    while True:
        try:
            result = train(config, book.run_folder(name), data_dir=data_dir)
            break
        except errors.UsageError as e:
            if "in use" not in str(e) or time.monotonic() > until:
                book.write_entry(name, "failed", why=str(e))
                print(f"fedjax-flat: {e}", file=sys.stderr)
                return 2
            time.sleep(1)
        except errors.DivergedError as e:
            book.write_entry(name, "failed", why=str(e))
            print(f"fedjax-flat: {e}", file=sys.stderr)
            return 3
    over.set()
    done = int(result.state.round)
    if result.stopped_by is None:
        book.write_entry(name, "finished", round=done)
    elif book.path(name, "stop").exists():
        book.write_entry(name, "stopped", round=done)
    return 0


def _watch(book: Book, name: str, parent: int, over: threading.Event) -> None:
    """Sends this process SIGTERM, which saves, when it should stop or nobody waits for it."""
    while not over.wait(LOOK):
        orphan = parent and os.getppid() != parent
        if orphan or book.path(name, "stop").exists():
            os.kill(os.getpid(), signal.SIGTERM)
            return


def main() -> int:
    """The command line of a worker."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder")
    parser.add_argument("cell")
    parser.add_argument("--data")
    parser.add_argument("--parent", type=int, default=0)
    args = parser.parse_args()
    return work(args.folder, args.cell, data_dir=args.data, parent=args.parent)


if __name__ == "__main__":
    sys.exit(main())
