"""What mkdocs asks while it builds: pages made of the code, and pages that mkdocs.yml forgot."""

import pathlib
import re
import sys

from mkdocs.structure.files import File

HERE = pathlib.Path(__file__).parent
sys.path.insert(0, str(HERE))

import made  # noqa: E402

_LINK = re.compile(r"(?<!!)\[([^\]]+)\]\((\.\./[^)]+|results/[^)]+)\)")


def on_config(config):
    """The parts of the menu that the code decides."""
    config.nav += [
        {"Methods": ["methods/index.md", *made.method_paths(), "methods.md"]},
        {"Reference": made.reference_paths()},
    ]
    named = set(_paths(config.nav))
    rest = [p.name for p in sorted(pathlib.Path(config.docs_dir).glob("*.md"))
            if p.name not in named]
    if rest:  # pages that are new
        config.nav.insert(3, {"More": rest})
    return config


def on_files(files, config):
    """The generated pages."""
    for path, text in made.pages():
        files.append(File.generated(config, path, content=text))
    files.append(File.generated(config, "style.css", content=(HERE / "style.css").read_text()))
    return files


def on_page_markdown(text, page, config, files):
    """Links to files of the repository, which the site has not, become their paths."""
    del config, files
    if "/" in page.file.src_uri:  # made here
        return text
    return _LINK.sub(lambda m: f"`{m[2].removeprefix('../')}`", text)


def _paths(nav):
    for entry in nav:
        if isinstance(entry, str):
            yield entry
        else:
            for part in entry.values():
                yield from _paths([part] if isinstance(part, str) else part)
