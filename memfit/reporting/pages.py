"""Renders HTML pages: templates with escaped values, the charts' code, and a content security policy that forbids all else.

Every value goes through jinja2's autoescape. A page's own policy forbids requests, and all scripts except the two written here.
"""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from memfit.reporting.words import printable

if TYPE_CHECKING:
    from jinja2 import Environment


def rendered(template: str, **values: Any) -> str:
    """Render a whole page, with the code of its charts inside."""
    from markupsafe import Markup
    from plotly.offline import get_plotlyjs

    templates = environment()
    scripts = [get_plotlyjs(), templates.get_template("report.js.jinja").render()]
    marked = [Markup(script) for script in scripts]
    return templates.get_template(template).render(**values, scripts=marked, policy=_policy(scripts))


def environment() -> Environment:
    """Return the jinja2 environment of this folder's templates; it escapes values and makes strings printable."""
    from jinja2 import Environment, FileSystemLoader, StrictUndefined

    return Environment(
        loader=FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        finalize=lambda value: printable(value) if type(value) is str else value,
    )


def _policy(scripts: Sequence[str]) -> str:
    """The content security policy: no requests, and no scripts except these."""
    digests = (base64.b64encode(hashlib.sha256(script.encode()).digest()).decode() for script in scripts)
    hashes = " ".join(f"'sha256-{digest}'" for digest in digests)
    return f"default-src 'none'; script-src {hashes}; style-src 'unsafe-inline'; img-src data: blob:"
