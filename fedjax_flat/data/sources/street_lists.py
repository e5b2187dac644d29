"""Lists of clients and their pictures as FedDrive and LADD write them.

    FOLDER/*.json: {user_data: {client: {x: [pictures], y: [labels]}}, ...}

Paths are below a folder of pictures and one of labels. A list without y is of pictures without
labels, as LADD's of CrossCity are.
"""

import json
import pathlib
from collections.abc import Callable

from fedjax_flat import errors
from fedjax_flat.data.sources.streets import Scene


def listed(
    name: str, folder: pathlib.Path, images: pathlib.Path, labels: pathlib.Path,
    domain: Callable[[str, str], str], *, unlabelled: bool = False,
) -> list[Scene]:
    """The pictures of a folder's lists; an error names the file and the client.

    `domain` says of which place a client's picture is; `unlabelled` takes lists without y.
    """
    tables = sorted(folder.glob("*.json"))
    if not tables:
        raise errors.UsageError(
            f"{name}: {folder} has no *.json: put the lists of FedDrive or LADD there."
        )
    scenes = []
    for table in tables:
        try:
            users = json.loads(table.read_text())["user_data"]
            for user, own in users.items():
                theirs = [None] * len(own["x"]) if unlabelled and "y" not in own else own["y"]
                for x, y in zip(own["x"], theirs, strict=True):
                    scenes.append(Scene(images / x, y and labels / y, domain(user, x), user))
                    if not scenes[-1].image.is_file():
                        raise errors.UsageError(
                            f"{table}, client {user}: no picture {images / x}. Put it there, or "
                            "take it out of the list."
                        )
        except (AttributeError, IndexError, KeyError, TypeError) as e:
            raise _malformed(table, e) from e
        except ValueError as e:
            raise e if isinstance(e, errors.UsageError) else _malformed(table, e) from e
    return scenes


def _malformed(table: pathlib.Path, error: Exception) -> errors.UsageError:
    return errors.UsageError(
        f"{table}: not as FedDrive writes it ({type(error).__name__}: {error}); expected "
        "user_data: {client: {x: [pictures], y: [labels]}}, as many of both."
    )
