"""The OpenAPI document as an HTML page without scripts or external resources."""

from __future__ import annotations

import json
import re
from html import escape
from typing import Any

__all__ = ["PAGE_HEADERS", "openapi_page"]

PAGE_HEADERS = {
    "content-security-policy": "default-src 'none'; style-src 'unsafe-inline'; base-uri 'none'; "
    "form-action 'none'; frame-ancestors 'none'",
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
}

_STYLE = """
body { font: 16px/1.5 system-ui, sans-serif; max-width: 60rem; margin: 2rem auto; padding: 0 1rem;
  color: #1c2128; background: #fff; }
h2 { margin-top: 2.5rem; } h3 { margin: 0; font-size: 1rem; }
code, pre { font: 13px/1.45 ui-monospace, monospace; }
pre { background: #f4f5f7; padding: 1rem; overflow: auto; border-radius: 6px; }
details { border: 1px solid #d8dce2; border-radius: 6px; margin: .5rem 0; padding: .5rem 1rem; }
summary { cursor: pointer; } table { border-collapse: collapse; width: 100%; margin: .5rem 0; }
td { border-top: 1px solid #e4e7eb; padding: .3rem .6rem .3rem 0; vertical-align: top; }
.method { display: inline-block; width: 4.8rem; font-weight: 700; }
:not(pre) > code { background: #f4f5f7; padding: .1em .3em; border-radius: 4px;
  overflow-wrap: anywhere; }
@media (prefers-color-scheme: dark) { body { color: #e3e6ea; background: #14171b; }
  pre, :not(pre) > code { background: #1d2126; } details, td { border-color: #343a42; }
  a { color: #7fb2ff; } }
"""

_Document = dict[str, Any]  # Any: JSON


def openapi_page(document: _Document) -> bytes:
    """Return the HTML page of an OpenAPI document."""
    operations = [
        (path, method, operation)
        for path, methods in document["paths"].items()
        for method, operation in methods.items()
    ]
    tags = dict.fromkeys(operation["tags"][0] for _, _, operation in operations)
    parts = [
        f"<section><h2>{escape(tag)}</h2>"
        + "".join(
            _operation(path, method, operation)
            for path, method, operation in operations
            if operation["tags"][0] == tag
        )
        + "</section>"
        for tag in tags
    ]
    info = document["info"]
    schemas = "".join(_schema(name, one) for name, one in document["components"]["schemas"].items())
    title = f"{escape(info['title'])} {escape(info['version'])}"
    page = (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{title}</title><style>{_STYLE}</style></head><body><h1>{title}</h1>"
        f"<p>{_text(info['description'])}</p>"
        '<p><a href="./">Chat</a> | <a href="openapi.json">openapi.json</a></p>'
        f"{''.join(parts)}<section><h2>Schemas</h2>{schemas}</section></body></html>"
    )
    return page.encode()


def _operation(path: str, method: str, operation: _Document) -> str:
    body = operation.get("requestBody")
    rows = [
        f"<tr><td><code>{escape(status)}</code></td><td>{_text(response['description'])}</td>"
        f"<td>{_contents(response.get('content', {}))}</td></tr>"
        for status, response in operation["responses"].items()
    ]
    parameters = "".join(
        f"<p>{escape(one['in'].capitalize())} <code>{escape(one['name'])}</code>: "
        f"{_text(one['description'])}</p>"
        for one in operation.get("parameters", ())
        if "description" in one
    )
    request = "" if body is None else f"<p>Request body: {_contents(body['content'])}</p>"
    return (
        f'<details><summary><span class="method">{escape(method.upper())}</span> '
        f"<code>{escape(path)}</code> {_text(operation['summary'])}</summary>"
        f"{parameters}{request}<table>{''.join(rows)}</table></details>"
    )


def _text(text: str) -> str:
    """Return a text as HTML; its code stands between backticks."""
    return re.sub("`([^`]+)`", r"<code>\1</code>", escape(text))


def _contents(content: _Document) -> str:
    return ", ".join(
        _link(one["schema"]["$ref"].rpartition("/")[2])
        if "$ref" in one["schema"]
        else f"<code>{escape(media_type)}</code>"
        for media_type, one in content.items()
    )


def _link(name: str) -> str:
    return f'<a href="#{escape(name)}"><code>{escape(name)}</code></a>'


def _schema(name: str, schema: _Document) -> str:
    text = json.dumps(schema, indent=2, ensure_ascii=False)
    return (
        f'<details id="{escape(name)}"><summary><code>{escape(name)}</code> '
        f"{_text(schema.get('description', ''))}</summary><pre>{escape(text)}</pre></details>"
    )
