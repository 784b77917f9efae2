"""/docs: the API as a page, made from its OpenAPI description. Without scripts, and from no other host."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from jinja2 import Environment

PAGE = Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True).from_string(
    """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>API of Paged Arena</title>
<link rel="stylesheet" href="/files/css/tokens.css">
<link rel="stylesheet" href="/files/css/frame.css">
</head>
<body>
<main class="docs">
<h1>API of Paged Arena</h1>
<p>Bodies are JSON. Errors are <code>{"error": {"code", "message"}}</code>. A visitor is known by the cookie that
<code>POST /api/notice</code> sets; the admin by a session or by a bearer key.
For programs: <a href="/openapi.json">openapi.json</a>. The engine speaks OpenAI's API on a port of its own.</p>
{% for group, calls in groups %}
<h2>{{ group }}</h2>
{% for call in calls %}
<section>
<h3><code>{{ call.method }} {{ call.path }}</code></h3>
{% if call.summary %}<p>{{ call.summary }}</p>{% endif %}
{% if call.fields %}
<table>
<thead>
<tr><th scope="col">field</th><th scope="col">in</th><th scope="col">type</th><th scope="col">needed</th></tr>
</thead>
<tbody>
{% for field in call.fields %}
<tr><td><code>{{ field.name }}</code></td><td>{{ field.place }}</td><td>{{ field.type }}</td>
<td>{{ "yes" if field.required else "no" }}</td></tr>
{% endfor %}
</tbody>
</table>
{% endif %}
<p>Answers: {{ call.statuses }}</p>
</section>
{% endfor %}
{% endfor %}
</main>
</body>
</html>
"""
)


def api_page(openapi: Mapping[str, Any]) -> str:
    """The page for an OpenAPI 3 document."""
    groups: dict[str, list[dict]] = {}
    for path, methods in openapi["paths"].items():
        for method, operation in methods.items():
            group = (operation.get("tags") or ["visitors"])[0]
            groups.setdefault(group, []).append(
                {
                    "method": method.upper(),
                    "path": path,
                    "summary": operation.get("description") or operation.get("summary"),
                    "fields": list(_fields(operation, openapi)),
                    "statuses": ", ".join(operation["responses"]),
                }
            )
    return PAGE.render(groups=sorted(groups.items(), reverse=True))


def _fields(operation: Mapping[str, Any], openapi: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    for each in operation.get("parameters", ()):
        yield {
            "name": each["name"],
            "place": each["in"],
            "type": _type(each["schema"]),
            "required": each.get("required", False),
        }
    for content in operation.get("requestBody", {}).get("content", {}).values():
        schema = content["schema"]
        if "$ref" in schema:
            schema = openapi["components"]["schemas"][schema["$ref"].rsplit("/", 1)[1]]
        for name, each in schema.get("properties", {}).items():
            yield {"name": name, "place": "body", "type": _type(each), "required": name in schema.get("required", ())}


def _type(schema: Mapping[str, Any]) -> str:
    options = schema.get("anyOf") or [schema]
    return " or ".join(each.get("type", "anything") for each in options)
